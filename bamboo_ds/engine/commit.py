"""Carries votes to a decision, and the results of an evaluation to all workers.

A `Committer` is how the workers come to one answer. In a fixed job they exchange their votes and each tallies them
(`ExchangeCommitter`). In a cluster each pipeline's spokesman writes one ballot to the store and the coordinator writes
the one outcome (`StoreCommitter`): only so a death in the middle leaves no two workers with different answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from bamboo_ds.comm import Network
from bamboo_ds.errors import NonFiniteLossError, ScheduleError
from bamboo_ds.plan import Decision, Plan, Vote, codec, tally
from bamboo_ds.plan.commit import Ballot, Outcome


class Committer(Protocol):
    """Brings all workers to one answer; each is a *round*, and rounds are numbered alike on all workers."""

    def decide(self, votes: Sequence[Vote], *, loss_scale: float) -> Decision:
        """Cast the votes of this worker's stages, wait for those of the others and return the decision."""
        ...

    def share(self, row: str, *, boundary: bool = False) -> list[str]:
        """Return the rows of all workers, in some order that all see alike; a worker that has none gives an empty one.

        Empty rows are left out.

        Args:
            row: of this worker.
            boundary: whether another epoch may begin with the answer; see `Ballot`.
        """
        ...

    def decided(self) -> bool:
        """Return whether the answer of the running round is there although this worker has not taken it yet."""
        ...

    def follow(self, network: Network) -> None:
        """Ask the workers of another network, in the round after the last decided one: a new epoch has begun."""
        ...


class ExchangeCommitter:
    """Every worker sees every vote in one exchange, and tallies them itself.

    Args:
        network: whose world is asked.
    """

    def __init__(self, network: Network) -> None:
        self._network = network

    def follow(self, network: Network) -> None:
        """Ask the workers of another network from now on."""
        self._network = network

    def decide(self, votes: Sequence[Vote], *, loss_scale: float = 1.0) -> Decision:
        """Exchange votes and tally.

        Raises:
            NonFiniteLossError: on every worker alike.
            PeerLostError: a worker does not vote.
        """
        ballots = [codec.decode(Ballot, row) for row in self._network.world.gather_bytes(_ballot(votes, loss_scale))]
        cast = [vote for ballot in ballots for vote in ballot.votes]
        if len(steps := {vote.step for vote in cast}) > 1:
            raise ScheduleError(f"workers vote on different steps: {sorted(steps)}")
        return tally(cast, loss_scale=loss_scale)

    def share(self, row: str, *, boundary: bool = False) -> list[str]:
        """Exchange rows."""
        return [other.decode() for other in self._network.world.gather_bytes(row.encode()) if other]

    def decided(self) -> bool:
        """Return False: an exchange has no answer before its end."""
        return False


class Polling(Protocol):
    """The part of a cluster's member that a commit needs."""

    def vote(self, engine: int, number: int, pipeline: int, ballot: Ballot, *, plan: Plan) -> None:
        """Write the ballot of a pipeline."""
        ...

    def await_outcome(self, engine: int, number: int, plan: Plan) -> Outcome:
        """Wait for the coordinator's outcome; raises when the plan changes first."""
        ...

    def outcome(self, engine: int, number: int) -> Outcome | None:
        """Return the outcome if it is there."""
        ...

    def newest_outcome(self, engine: int) -> int:
        """Return the number of the last commit that has one; -1 if there is none."""
        ...


class StoreCommitter:
    """Each pipeline gathers its votes, its first worker writes them to the store, the coordinator answers.

    Args:
        network: whose pipeline group gathers; it knows the plan.
        polls: this worker's seat in the cluster.
        engine: number of the engine in its script.
    """

    def __init__(self, network: Network, polls: Polling, *, engine: int) -> None:
        self._network, self._polls, self._engine, self._number = network, polls, engine, 0

    def follow(self, network: Network) -> None:
        """Gather among the workers of another network, and count on where the cluster is."""
        self._network, self._number = network, self._polls.newest_outcome(self._engine) + 1

    def decide(self, votes: Sequence[Vote], *, loss_scale: float = 1.0) -> Decision:
        """Vote and wait.

        Raises:
            NonFiniteLossError: on every worker alike.
            PlanChangedError: the plan was replaced before the coordinator had decided: vote again under the new one.
        """
        outcome = self._outcome(Ballot(votes=tuple(votes), loss_scale=loss_scale))
        if outcome.decision is None:
            raise NonFiniteLossError(outcome.refusal)
        return outcome.decision

    def share(self, row: str, *, boundary: bool = False) -> list[str]:
        """Hand in a row and wait for those of all.

        Raises:
            PlanChangedError: as for `decide`.
        """
        return list(self._outcome(Ballot(votes=(), rows=(row,) if row else (), boundary=boundary)).rows)

    def decided(self) -> bool:
        """Return whether the coordinator has answered."""
        return self._polls.outcome(self._engine, self._number) is not None

    def _outcome(self, ballot: Ballot) -> Outcome:
        outcome = self._polls.outcome(self._engine, self._number)
        if outcome is None:
            self._cast(ballot)
            outcome = self._polls.await_outcome(self._engine, self._number, self._network.plan)
        self._number += 1
        return outcome

    def _cast(self, ballot: Ballot) -> None:
        group = self._network.pipeline
        ballots = [ballot]
        if group is not None:
            ballots = [codec.decode(Ballot, row) for row in group.gather_bytes(codec.encode(ballot))]
        if group is None or group.rank == 0:
            whole = Ballot(
                votes=tuple(vote for one in ballots for vote in one.votes),
                loss_scale=ballot.loss_scale,
                rows=tuple(row for one in ballots for row in one.rows),
                boundary=ballot.boundary,
            )
            self._polls.vote(self._engine, self._number, self._network.pipeline_id, whole, plan=self._network.plan)


def _ballot(votes: Sequence[Vote], loss_scale: float) -> bytes:
    return codec.encode(Ballot(votes=tuple(votes), loss_scale=loss_scale))

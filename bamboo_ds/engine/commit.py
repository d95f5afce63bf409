"""Carries votes to a decision.

A `Committer` is how the workers of a step come to one `Decision`. Here they exchange their votes and each tallies
them; a coordinator that reads votes from a store and writes the decision takes its place without the engine noticing.
"""

from __future__ import annotations

from typing import Protocol

from bamboo_ds.comm import Group
from bamboo_ds.errors import ScheduleError
from bamboo_ds.plan import Decision, Vote, codec, tally


class Committer(Protocol):
    """Turns this worker's vote into the decision that all workers hold."""

    def decide(self, vote: Vote, *, loss_scale: float) -> Decision:
        """Wait for the votes of the others and return the decision."""
        ...


class ExchangeCommitter:
    """Every worker sees every vote in one exchange, and tallies them itself.

    Args:
        world: the group of all workers.
    """

    def __init__(self, world: Group) -> None:
        self._world = world

    def decide(self, vote: Vote, *, loss_scale: float = 1.0) -> Decision:
        """Exchange votes and tally.

        Raises:
            NonFiniteLossError: on every worker alike.
            PeerLostError: a worker does not vote.
        """
        votes = [codec.decode(Vote, row) for row in self._world.gather_bytes(codec.encode(vote))]
        steps = {other.step for other in votes}
        if steps != {vote.step}:
            raise ScheduleError(f"workers vote on different steps: {sorted(steps)}")
        return tally(votes, loss_scale=loss_scale)

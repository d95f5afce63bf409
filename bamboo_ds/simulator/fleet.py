"""The nodes of a job and its plan, in pretend time. Every decision is `plan.policy.decide`'s.

The simulator asks a `Fleet` what an event leads to, and hears only what costs time: which stages changed hands, how
many bytes a worker must receive. `PolicyFleet` keeps a cluster and a plan as the coordinator does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from bamboo_ds.plan.cluster import Bounds, Cluster, Node, Shape
from bamboo_ds.plan.failover import takeovers
from bamboo_ds.plan.membership import Cause, Loss
from bamboo_ds.plan.moving import moving
from bamboo_ds.plan.plan import NOBODY, Plan
from bamboo_ds.plan.policy import Action, Boundary, Event, Joined, Lost, PlanDecision, decide
from bamboo_ds.plan.reshape import Costs
from bamboo_ds.plan.roster import StartRule, close_roster
from bamboo_ds.simulator.trace import NodeEvent

__all__ = ["Change", "Fleet", "Hit", "PolicyFleet", "Step", "unreported"]


@dataclass(frozen=True, slots=True)
class Hit:
    """A stage that changes hands in the running step.

    Attributes:
        pipeline: of the stage.
        stage: of the victim.
    """

    pipeline: int
    stage: int


@dataclass(frozen=True, slots=True)
class Change:
    """What an event led to.

    Attributes:
        action: what was decided.
        hits: of a failover.
        moved_bytes: of a new epoch: the most that a worker must receive.
        by_lease: of a loss: whether nothing is known of it until a lease ends.
    """

    action: Action
    hits: tuple[Hit, ...] = ()
    moved_bytes: int = 0
    by_lease: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """What the time of a step depends on.

    Attributes:
        shape: of the plan.
        merged: by pipeline, in which a worker owns two stages: the home stage of each stage's owner.
    """

    shape: Shape
    merged: Mapping[int, tuple[int, ...]]


class Fleet(Protocol):
    """The nodes of a job and its plan."""

    @property
    def step(self) -> Step | None:
        """The current plan; None while nobody can train."""
        ...

    @property
    def coordinator(self) -> str | None:
        """The node that coordinates: the candidate who came first."""
        ...

    def unplaced(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """Return those of some nodes that have no stage in the current plan; none before the first."""
        ...

    def begin(self, *, waited_seconds: float) -> Change:
        """Begin the job if those who are ready may; they have waited so long for others."""
        ...

    def join(self, nodes: Sequence[NodeEvent]) -> Change:
        """Let nodes become ready."""
        ...

    def lose(self, nodes: Iterable[str], *, settled: bool) -> Change:
        """Lose nodes at once; `settled` says whether the epoch has committed a step."""
        ...

    def boundary(self, *, step_seconds: float | None) -> Change:
        """Decide when no step runs. The last whole step took so long."""
        ...


class PolicyFleet:
    """A cluster and a plan, as the coordinator has them.

    Args:
        bounds: of the job.
        rule: when the job begins.
        costs: of a new epoch, for the policy.
        record: whether to keep `decisions`.

    Attributes:
        decisions: all that led to a new plan, in order.
    """

    def __init__(self, bounds: Bounds, *, rule: StartRule, costs: Costs, record: bool = False) -> None:
        self._bounds, self._rule, self._costs, self._record = bounds, rule, costs, record
        self._nodes: dict[str, Node] = {}
        self._made = 0
        self.plan: Plan | None = None
        self.decisions: list[PlanDecision] = []

    @property
    def step(self) -> Step | None:
        """The current plan; None while nobody can train."""
        plan = self.plan
        if plan is None or plan.aborted:
            return None
        merged = {
            pipeline: plan.owner_stages(pipeline)
            for pipeline, (owners, homes) in enumerate(zip(plan.owners, plan.homes, strict=True))
            if owners != homes
        }
        return Step(Shape(plan.num_stages, plan.num_pipelines), merged)

    @property
    def coordinator(self) -> str | None:
        """The node that coordinates."""
        return next(iter(self._nodes), None)

    def unplaced(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """Return those of some nodes that have no stage."""
        if self.plan is None:
            return ()
        placed = {owner for row in self.plan.owners for owner in row}
        return tuple(node for node in nodes if placed.isdisjoint(self._nodes[node].workers))

    def begin(self, *, waited_seconds: float) -> Change:
        """Begin the job if those who are ready may."""
        ready = [worker.id for worker in Cluster(self._bounds, tuple(self._nodes.values())).workers]
        roster = close_roster(self._rule, ready=ready, waited_seconds=waited_seconds)
        return Change(Action.WAIT) if roster is None else self._decide(Joined(roster.workers))

    def join(self, nodes: Sequence[NodeEvent]) -> Change:
        """Let nodes become ready, each with one worker."""
        workers = []
        for node in nodes:
            self._nodes[node.node] = Node(node.node, node.zone, workers=(self._made,))
            workers.append(self._made)
            self._made += 1
        return Change(Action.WAIT) if self.plan is None else self._decide(Joined(tuple(workers)))

    def lose(self, nodes: Iterable[str], *, settled: bool) -> Change:
        """Lose nodes at once."""
        coordinator = self.coordinator
        lost = [worker for node in nodes for worker in self._nodes.pop(node).workers]
        plan = self.plan
        if plan is None:
            return Change(Action.WAIT)
        losses = tuple(
            Loss(worker, Cause.LEASE, f"worker {worker} is gone") for worker in lost if worker in plan.workers
        )
        change = self._decide(Lost(losses, settled=settled)) if losses else Change(Action.KEEP)
        by_lease = coordinator not in self._nodes or unreported(plan, lost, redundancy=self._bounds.redundancy)
        return replace(change, by_lease=by_lease)

    def boundary(self, *, step_seconds: float | None) -> Change:
        """Decide when no step runs."""
        return self._decide(Boundary(replace(self._costs, step_seconds=step_seconds)))

    def _decide(self, event: Event) -> Change:
        before = self.plan
        decision = decide(Cluster(self._bounds, tuple(self._nodes.values())), before, event)
        if decision.plan is None:
            return Change(decision.action)
        self.plan = decision.plan
        if self._record:
            self.decisions.append(decision)
        if before is None:
            return Change(decision.action)
        if decision.action in (Action.FAILOVER, Action.ABORT):
            return Change(decision.action, hits=_hits(before, decision.plan))
        return Change(decision.action, moved_bytes=_moved(before, decision.plan, self._bounds))


def unreported(plan: Plan, lost: Collection[int], *, redundancy: bool) -> bool:
    """Return whether some of those who are lost at once have no two live neighbours in their pipeline to report it."""
    owners = {owner for row in plan.owners for owner in row} - {NOBODY}
    around = (plan.neighbours(worker, redundancy=redundancy) for worker in owners.intersection(lost))
    return any(len(set(neighbours).difference(lost)) < 2 for neighbours in around)


def _hits(before: Plan, after: Plan) -> tuple[Hit, ...]:
    return tuple(
        Hit(takeover.place.pipeline, takeover.place.stage)
        for takeover in takeovers(before, after)
        if takeover.shadow != NOBODY
    )


def _moved(before: Plan, after: Plan, bounds: Bounds) -> int:
    """Return the most bytes that a worker must receive, as the policy counts them."""
    table = moving(before, num_stages=after.num_stages, bounds=bounds)
    return max(table.row(worker)[stage] for owners in after.owners for stage, worker in enumerate(owners))

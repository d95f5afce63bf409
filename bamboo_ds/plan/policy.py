"""What to do about an event: the one place that decides a plan, for the coordinator and for the simulator.

`decide` is pure: the same cluster, plan and event give the same decision, so a coordinator that dies in the middle is
replaced by one that goes on as it would have. Plans grow in number and never change in place.

::

    (none) --START--> running --FAILOVER--> running, a worker owns two stages
                       |   |                   |  |
                       |   +--- RECONFIGURE ---|--+-----------------------------------> running, next epoch
                       |                       |                                             |
                       +-------- ABORT --------+--> aborted: nobody trains --RECONFIGURE, RESTORE
                                                        |      ^
                                                        +-WAIT-+

A new epoch is unsettled until its first round is decided: only then does everyone hold the layers that its plan gives
them. Until then a loss can not be failed over; it aborts, and the boundary after it makes yet another epoch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

from bamboo_ds.plan.cluster import Bounds, Cluster, Shape, Worker
from bamboo_ds.plan.failover import fail_over, takeovers
from bamboo_ds.plan.membership import Loss
from bamboo_ds.plan.moving import moving
from bamboo_ds.plan.placement import arrange
from bamboo_ds.plan.plan import NOBODY, Plan
from bamboo_ds.plan.reshape import Costs, weigh


@dataclass(frozen=True, slots=True)
class Joined:
    """Workers have registered (those of a node, at once); they are in the cluster."""

    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Launched:
    """A launcher has placed the workers already: the first plan is given."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Lost:
    """Workers are confirmed as lost, at once (a node, a zone).

    One with a stage may still be in the cluster: the plan remembers that it is dead. A standby that ended must be off
    its node's list, as its agent sees to: no plan changes for it, so no plan remembers it.

    Attributes:
        losses: who is lost, and why.
        settled: whether a round of this epoch is decided, so that all workers hold the layers that the plan gives them.
    """

    losses: tuple[Loss, ...]
    settled: bool = field(default=True, kw_only=True)


@dataclass(frozen=True, slots=True)
class Boundary:
    """No step runs: it has committed, or everyone alive has dropped its work.

    Attributes:
        costs: of a new epoch, for a plan that could go on.
        leaving: workers whose node will be taken away: they live, and get no new work.
    """

    costs: Costs = field(default_factory=Costs)
    leaving: frozenset[int] = frozenset()


Event = Joined | Launched | Lost | Boundary


class Action(str, Enum):
    """What is decided. All but KEEP, STANDBY and WAIT come with a new plan."""

    KEEP = "keep"
    """Nothing changes."""
    STANDBY = "standby"
    """The worker that joined has no stage yet: it warms up and waits."""
    WAIT = "wait"
    """Too few workers for a plan: those there keep their state in memory."""
    START = "start"
    """The job's first plan."""
    FAILOVER = "failover"
    """Shadows own the stages of the lost; the step goes on."""
    ABORT = "abort"
    """Some stage has no owner, or may not have its layers: all drop the step's work and keep the weights before it."""
    RECONFIGURE = "reconfigure"
    """A new epoch, whose layers come from live holders."""
    RESTORE = "restore"
    """A new epoch, whose layers come from the last checkpoint: nobody alive should hold some stage. That is what the
    plans let expect; the workers, who tell one another what they hold, know."""


@dataclass(frozen=True, slots=True)
class PlanDecision:
    """What follows from an event.

    Attributes:
        action: what to do.
        reason: why, for people; the values that decided are in it.
        plan: what to write, numbered above the plan before; None when the plan does not change.
    """

    action: Action
    reason: str
    plan: Plan | None = None


def decide(cluster: Cluster, plan: Plan | None, event: Event) -> PlanDecision:
    """Return what follows from an event.

    Args:
        cluster: the nodes whose lease lives, and the bounds of the job. Before the first plan, of the workers that
            begin only.
        plan: the current plan; None before the first.
        event: what happened.
    """
    if plan is None:
        return _first(cluster, event)
    if isinstance(event, Joined):
        return _join(plan, event.workers)
    if isinstance(event, Lost):
        return _lose(cluster, plan, event)
    if isinstance(event, Boundary):
        return _restart(cluster, plan) if plan.aborted else _reshape(cluster, plan, event)
    return PlanDecision(Action.KEEP, f"the plan {_number(plan)} stands")


def unheld_stages(plan: Plan, *, alive: Iterable[int], redundancy: bool) -> tuple[int, ...]:
    """Return the stages whose layers no live worker has, in any pipeline: only a checkpoint can give them back."""
    living = set(alive)
    return tuple(
        stage
        for stage in range(plan.num_stages)
        if living.isdisjoint(plan.holders(frozenset({stage}), redundancy=redundancy))
    )


def _first(cluster: Cluster, event: Event) -> PlanDecision:
    """Decide before the first plan: who begins is settled (`plan.roster`), so start as soon as they make a plan."""
    bounds, lost = cluster.bounds, event.losses if isinstance(event, Lost) else ()
    live = cluster.live(frozenset(loss.worker for loss in lost))
    if isinstance(event, Launched):
        return _as_launched(event.plan, live, bounds)
    shape = bounds.shape(len(live))
    if shape is None:
        return PlanDecision(Action.WAIT, _too_few(bounds, live))
    cause = f"{len(live)} workers are there"
    parts = bounds.model.parts(shape.num_stages)
    plan = Plan(owners=arrange(live, shape=shape), cause=cause, parts=parts)
    return PlanDecision(Action.START, f"{cause}: {shape}", plan)


def _as_launched(plan: Plan, live: tuple[Worker, ...], bounds: Bounds) -> PlanDecision:
    missing = sorted(set(plan.workers) - {worker.id for worker in live})
    if missing:
        return PlanDecision(Action.WAIT, f"worker(s) {_listed(missing)} of the launcher's plan are not there")
    cause = f"the launcher has placed {len(plan.workers)} workers"
    shape = f"{plan.num_stages} stages x {plan.num_pipelines} pipelines"
    parts = plan.parts or bounds.model.parts(plan.num_stages)
    return PlanDecision(Action.START, f"{cause}: {shape}", replace(plan, cause=cause, parts=parts))


def _join(plan: Plan, workers: tuple[int, ...]) -> PlanDecision:
    new = [worker for worker in workers if worker not in plan.dead and worker not in plan.workers]
    if new:
        return PlanDecision(Action.STANDBY, f"worker(s) {_listed(new)} joined and have no stage yet")
    dead = [worker for worker in workers if worker in plan.dead]
    if dead:
        return PlanDecision(Action.KEEP, f"worker(s) {_listed(dead)} were declared dead: only new ids may join")
    return PlanDecision(Action.KEEP, f"worker(s) {_listed(workers)} have their stages")


def _lose(cluster: Cluster, plan: Plan, event: Lost) -> PlanDecision:
    losses = event.losses
    victims = [loss for loss in losses if any(loss.worker in owners for owners in plan.owners)]
    if not victims:
        return PlanDecision(Action.KEEP, f"no stage was lost with worker(s) {_listed(loss.worker for loss in losses)}")
    cause = "; ".join(loss.reason for loss in victims)
    after = fail_over(plan, [loss.worker for loss in losses], redundancy=cluster.bounds.redundancy, cause=cause)
    reason = f"{cause}: {_handed_over(plan, after)}"
    if not event.settled:
        after = replace(after, aborted=True)
        reason += "; the epoch had just begun, and not all may have the layers that it gave them"
    return PlanDecision(Action.ABORT if after.aborted else Action.FAILOVER, reason, after)


def _reshape(cluster: Cluster, plan: Plan, event: Boundary) -> PlanDecision:
    """Decide whether a plan that could go on is replaced, now that a step has committed."""
    bounds, live = cluster.bounds, cluster.live(plan.dead)
    missing = sorted(set(plan.workers) - {worker.id for worker in live})
    if missing:
        return PlanDecision(Action.KEEP, f"worker(s) {_listed(missing)} are not there any more: that is decided first")
    staying = tuple(worker for worker in live if worker.id not in event.leaving)
    warned = sorted(event.leaving.intersection(plan.workers))
    present = Shape(plan.num_stages, plan.num_pipelines)
    if warned and bounds.shape(len(staying)) == present:
        # Standbys can take all of it, from workers that still live: nothing is lost and nothing computed again.
        cause = f"the node(s) of worker(s) {_listed(warned)} will be taken away, and standbys take their place"
        return _next_epoch(cluster, plan, shape=present, cause=cause, workers=staying)
    usable = tuple(worker for worker in live if worker.id not in event.leaving or worker.id in warned)
    shape = bounds.shape(len(usable))
    if shape is None:
        return PlanDecision(Action.KEEP, f"the plan {_number(plan)} goes on: {_too_few(bounds, usable)}")
    judgement = weigh(plan, shape=shape, bounds=bounds, costs=event.costs, workers=len(usable))
    if not judgement.reshape:
        return PlanDecision(Action.KEEP, judgement.reason)
    return _next_epoch(cluster, plan, shape=shape, cause=judgement.reason, workers=usable)


def _restart(cluster: Cluster, plan: Plan) -> PlanDecision:
    """Decide how an aborted job goes on."""
    bounds, live = cluster.bounds, cluster.live(plan.dead)
    shape = bounds.shape(len(live))
    if shape is None:
        return PlanDecision(Action.WAIT, _too_few(bounds, live))
    return _next_epoch(cluster, plan, shape=shape, cause=f"the plan {_number(plan)} was aborted ({plan.cause})")


def _next_epoch(
    cluster: Cluster, plan: Plan, *, shape: Shape, cause: str, workers: tuple[Worker, ...] | None = None
) -> PlanDecision:
    """Return the plan of a shape that moves least, of some workers or of all, and whether its layers are all there."""
    bounds, live = cluster.bounds, cluster.live(plan.dead)
    unheld = unheld_stages(plan, alive=(worker.id for worker in live), redundancy=bounds.redundancy)
    if unheld:
        cause += f"; nobody alive holds stage(s) {_listed(unheld)}"
    after = Plan(
        owners=arrange(
            live if workers is None else workers,
            shape=shape,
            keep=moving(plan, num_stages=shape.num_stages, bounds=bounds),
        ),
        epoch=plan.epoch + 1,
        # Whoever had a stage and is not there any more must not come back with it.
        dead=plan.dead.union(plan.workers) - {worker.id for worker in live},
        from_checkpoint=bool(unheld),
        cause=cause,
        parts=bounds.model.parts(shape.num_stages),
    )
    return PlanDecision(Action.RESTORE if unheld else Action.RECONFIGURE, f"{cause}: {shape}", after)


def _number(plan: Plan) -> str:
    return f"{plan.epoch}.{plan.version}"


def _listed(ids: Iterable[int]) -> str:
    return ", ".join(map(str, ids))


def _too_few(bounds: Bounds, live: tuple[Worker, ...]) -> str:
    return f"{len(live)} worker(s) are there, and min_stages = {bounds.min_stages}: waiting for nodes"


def _handed_over(before: Plan, after: Plan) -> str:
    """Say who takes what, and what is lost."""
    parts = []
    for takeover in takeovers(before, after):
        place = f"stage {takeover.place.stage} of pipeline {takeover.place.pipeline}"
        lost = takeover.shadow == NOBODY
        parts.append(f"{place} is lost" if lost else f"worker {takeover.shadow} takes over {place}")
    return ", ".join(parts)

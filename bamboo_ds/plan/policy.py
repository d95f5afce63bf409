"""What to do about an event: the one place that decides a plan, for the coordinator and for the simulator.

`decide` is pure: the same cluster, plan and event give the same decision, so a coordinator that dies in the middle is
replaced by one that goes on as it would have. Plans grow in number and never change in place.

::

    (none) --START--> running --FAILOVER--> running, a worker owns two stages
                         |                     |
                         +------- ABORT -------+--> aborted: nobody trains --RECONFIGURE, RESTORE--> running,
                                                        |      ^                                    next epoch
                                                        +-WAIT-+
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from bamboo_ds.plan.cluster import Bounds, Cluster, Worker
from bamboo_ds.plan.failover import fail_over, takeovers
from bamboo_ds.plan.membership import Loss
from bamboo_ds.plan.placement import arrange
from bamboo_ds.plan.plan import NOBODY, Plan


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
    """

    losses: tuple[Loss, ...]


@dataclass(frozen=True, slots=True)
class Boundary:
    """No step runs: it has committed, or everyone alive has dropped its work."""


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
    """Some stage has no owner: all drop the step's work and keep the weights from before it."""
    RECONFIGURE = "reconfigure"
    """A new epoch, whose layers come from live holders."""
    RESTORE = "restore"
    """A new epoch, whose layers come from the last checkpoint: nobody alive holds some stage."""


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
        return _lose(cluster, plan, event.losses)
    if isinstance(event, Boundary) and plan.aborted:
        return _next_epoch(cluster, plan)
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
        return _as_launched(event.plan, live)
    shape = bounds.shape(len(live))
    if shape is None:
        return PlanDecision(Action.WAIT, _too_few(bounds, live))
    cause = f"{len(live)} workers are there"
    return PlanDecision(Action.START, f"{cause}: {shape}", Plan(owners=arrange(live, shape=shape), cause=cause))


def _as_launched(plan: Plan, live: tuple[Worker, ...]) -> PlanDecision:
    missing = sorted(set(plan.workers) - {worker.id for worker in live})
    if missing:
        return PlanDecision(Action.WAIT, f"worker(s) {_listed(missing)} of the launcher's plan are not there")
    cause = f"the launcher has placed {len(plan.workers)} workers"
    shape = f"{plan.num_stages} stages x {plan.num_pipelines} pipelines"
    return PlanDecision(Action.START, f"{cause}: {shape}", replace(plan, cause=cause))


def _join(plan: Plan, workers: tuple[int, ...]) -> PlanDecision:
    new = [worker for worker in workers if worker not in plan.dead and worker not in plan.workers]
    if new:
        return PlanDecision(Action.STANDBY, f"worker(s) {_listed(new)} joined and have no stage yet")
    dead = [worker for worker in workers if worker in plan.dead]
    if dead:
        return PlanDecision(Action.KEEP, f"worker(s) {_listed(dead)} were declared dead: only new ids may join")
    return PlanDecision(Action.KEEP, f"worker(s) {_listed(workers)} have their stages")


def _lose(cluster: Cluster, plan: Plan, losses: tuple[Loss, ...]) -> PlanDecision:
    victims = [loss for loss in losses if any(loss.worker in owners for owners in plan.owners)]
    if not victims:
        return PlanDecision(Action.KEEP, f"no stage was lost with worker(s) {_listed(loss.worker for loss in losses)}")
    cause = "; ".join(loss.reason for loss in victims)
    after = fail_over(plan, [loss.worker for loss in losses], redundancy=cluster.bounds.redundancy, cause=cause)
    action = Action.ABORT if after.aborted else Action.FAILOVER
    return PlanDecision(action, f"{cause}: {_handed_over(plan, after)}", after)


def _next_epoch(cluster: Cluster, plan: Plan) -> PlanDecision:
    """Decide how an aborted job goes on."""
    bounds, live = cluster.bounds, cluster.live(plan.dead)
    shape = bounds.shape(len(live))
    if shape is None:
        return PlanDecision(Action.WAIT, _too_few(bounds, live))
    unheld = unheld_stages(plan, alive=(worker.id for worker in live), redundancy=bounds.redundancy)
    cause = f"the plan {_number(plan)} was aborted ({plan.cause})"
    if unheld:
        cause += f"; nobody alive holds stage(s) {_listed(unheld)}"
    action = Action.RESTORE if unheld else Action.RECONFIGURE
    # Whoever had a stage and is not there any more must not come back with it.
    dead = plan.dead.union(plan.workers) - {worker.id for worker in live}
    after = Plan(
        owners=arrange(live, shape=shape),
        epoch=plan.epoch + 1,
        dead=dead,
        from_checkpoint=bool(unheld),
        cause=cause,
    )
    return PlanDecision(action, f"{cause}: {shape}", after)


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

"""Who is lost: from what agents and workers saw to a verdict that all future coordinators would repeat.

A broken link alone proves nothing: it has two ends, and either may lie. A worker is lost when its agent saw it end,
when the lease of its node is gone, or when both of its neighbours in the pipeline say so. When two workers cannot
reach each other while both answer the coordinator, no step would ever end, so one of them is evicted by rule.

Verdicts are found one after another. What a lost worker reported no longer counts: cut off from its peers it would
accuse all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from bamboo_ds.plan.cluster import Cluster
from bamboo_ds.plan.failover import fail_over
from bamboo_ds.plan.plan import Plan


class Cause(str, Enum):
    """How a loss was confirmed."""

    EXIT = "exit"
    LEASE = "lease"
    NEIGHBOURS = "neighbours"
    EVICTED = "evicted"


@dataclass(frozen=True, slots=True)
class LinkReport:
    """One worker says that its link to another broke.

    Attributes:
        reporter: who says so.
        suspect: the worker at the other end.
        epoch: of the plan under which the link was made; likewise `version`. Links are made anew in every version, so
            reports of older ones say nothing.
        detail: what the reporter saw, for people.
    """

    reporter: int
    suspect: int
    epoch: int
    version: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is known against workers, besides the leases that are gone (their nodes are not in the cluster).

    Attributes:
        reports: broken links.
        ended: workers that their own agent saw end by a signal. A worker's own exception is no loss: it ends the job.
        answering: workers that have answered the coordinator *after* the reports were made.
    """

    reports: tuple[LinkReport, ...] = ()
    ended: frozenset[int] = frozenset()
    answering: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Loss:
    """A worker that is lost, or evicted, and why."""

    worker: int
    cause: Cause
    reason: str


def judge(cluster: Cluster, plan: Plan, evidence: Evidence) -> tuple[Loss, ...]:
    """Return the workers of the plan that are now confirmed as lost, or evicted, in the order of the verdicts.

    Args:
        cluster: the nodes whose lease lives.
        plan: the current plan. Only workers with a stage can be lost: nobody misses a standby.
        evidence: what was seen.
    """
    losses = [*_ended(plan, evidence), *_lapsed(cluster, plan, evidence)]
    while (loss := _accused_by_neighbours(cluster, plan, evidence, _workers(losses))) is not None:
        losses.append(loss)
    while (loss := _evicted(cluster, plan, evidence, _workers(losses))) is not None:
        losses.append(loss)
    return tuple(losses)


def _workers(losses: list[Loss]) -> frozenset[int]:
    return frozenset(loss.worker for loss in losses)


def _ended(plan: Plan, evidence: Evidence) -> list[Loss]:
    return [
        Loss(worker, Cause.EXIT, f"its agent saw worker {worker} end")
        for worker in plan.workers
        if worker in evidence.ended
    ]


def _lapsed(cluster: Cluster, plan: Plan, evidence: Evidence) -> list[Loss]:
    registered = {worker.id for worker in cluster.workers}
    accusers = _accusers(plan, evidence, lost=frozenset())
    losses = []
    for worker in plan.workers:
        if worker not in registered and worker not in evidence.ended:
            reporters = sorted(accusers.get(worker, ()))
            also = f", and its link to worker {reporters[0]} is broken" if reporters else ""
            losses.append(Loss(worker, Cause.LEASE, f"the lease of worker {worker}'s node is gone{also}"))
    return losses


def _accusers(plan: Plan, evidence: Evidence, *, lost: frozenset[int]) -> dict[int, set[int]]:
    """Return by suspect who reports it: workers of the plan that are not lost, about this version's links."""
    if not evidence.reports:
        return {}
    members = set(plan.workers) - lost
    accusers: dict[int, set[int]] = {}
    for report in evidence.reports:
        current = (report.epoch, report.version) == plan.number
        if current and report.reporter != report.suspect and {report.reporter, report.suspect} <= members:
            accusers.setdefault(report.suspect, set()).add(report.reporter)
    return accusers


def _accused_by_neighbours(cluster: Cluster, plan: Plan, evidence: Evidence, lost: frozenset[int]) -> Loss | None:
    """Return the loss of the worker with most accusers among those whose two neighbours both report it."""
    redundancy = cluster.bounds.redundancy
    accusers = _accusers(plan, evidence, lost=lost)
    neighbours = {suspect: plan.neighbours(suspect, redundancy=redundancy) for suspect in accusers}
    confirmed = [
        suspect
        for suspect, reporters in accusers.items()
        if len(neighbours[suspect]) > 1 and reporters.issuperset(neighbours[suspect])
    ]
    if not confirmed:
        return None
    worker = min(confirmed, key=lambda suspect: _rank(plan, suspect, accusers, lost, redundancy=redundancy))
    names = " and ".join(map(str, neighbours[worker]))
    return Loss(worker, Cause.NEIGHBOURS, f"both neighbours of worker {worker}, workers {names}, report a broken link")


def _evicted(cluster: Cluster, plan: Plan, evidence: Evidence, lost: frozenset[int]) -> Loss | None:
    """Return the eviction that ends the worst quarrel between two workers that both answer."""
    redundancy = cluster.bounds.redundancy
    accusers = _accusers(plan, evidence, lost=lost)
    quarrels = [
        {suspect, reporter}
        for suspect, reporters in accusers.items()
        for reporter in reporters
        if {suspect, reporter} <= evidence.answering
    ]
    if not quarrels:
        return None
    parties = set[int]().union(*quarrels)
    ranks = {party: _rank(plan, party, accusers, lost, redundancy=redundancy) for party in parties}
    worker = min(parties, key=ranks.__getitem__)
    other = min(set[int]().union(*(pair for pair in quarrels if worker in pair)) - {worker}, key=ranks.__getitem__)
    return Loss(worker, Cause.EVICTED, _why(worker, other, ranks))


_Rank = tuple[int, bool, int, int]


def _rank(plan: Plan, worker: int, accusers: dict[int, set[int]], lost: frozenset[int], *, redundancy: bool) -> _Rank:
    """Return the key by which the smallest goes first.

    That is who most others accuse; then who can be lost without aborting the step; then who owns fewest stages; then
    who joined last.
    """
    fatal = fail_over(plan, lost | {worker}, redundancy=redundancy).aborted
    return -len(accusers.get(worker, ())), fatal, len(plan.places(worker)), -worker


def _why(worker: int, other: int, ranks: dict[int, _Rank]) -> str:
    (accused, fatal, stages, _), (others, fatal_other, stages_other, _) = ranks[worker], ranks[other]
    because = f"it joined after worker {other}"
    if accused != others:
        because = f"{-accused} worker(s) report it and {-others} report worker {other}"
    elif fatal != fatal_other:
        because = f"its stages have a live shadow and those of worker {other} do not"
    elif stages != stages_other:
        because = f"it owns {stages} stage(s) and worker {other} owns {stages_other}"
    return f"the link between workers {worker} and {other} is broken while both answer; worker {worker} goes: {because}"

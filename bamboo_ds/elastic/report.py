"""Reads a job's keys into one picture of it, for people: who is there, who owns what, what happened and why.

It is pure: entries in, picture out. `elastic.mirror` gets the entries.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bamboo_ds.elastic import keys
from bamboo_ds.elastic.events import ClusterEvent, read_event
from bamboo_ds.plan.cluster import Node
from bamboo_ds.plan.codec import decode
from bamboo_ds.plan.job import Roster
from bamboo_ds.plan.plan import NOBODY, Plan
from bamboo_ds.store import Entry

__all__ = ["Cell", "NodeReport", "PlanReport", "Progress", "Report", "WorkerReport", "report"]

_ENGINE_FAILURES = f"{keys.FAILURES}engine-"


@dataclass(frozen=True, slots=True)
class NodeReport:
    """A node whose lease lives.

    Attributes:
        name: of the node; likewise `zone` and `address`.
        workers: ids of its workers that run.
        spot: whether the cloud may take it away.
        joined_seconds: since it joined; None when the event that tells it was trimmed.
    """

    name: str
    zone: str
    address: str
    workers: tuple[int, ...]
    spot: bool
    joined_seconds: float | None


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A worker that is known by any key.

    Attributes:
        id: of the worker.
        node: its node; "" when nothing tells it any more.
        zone: likewise.
        state: `training` (has a stage), `standby`, `ready` (there is no plan yet), `starting`, `ended` (its agent saw
            it end), `dead` (the plan says so), `left` (its script has ended in order).
    """

    id: int
    node: str
    zone: str
    state: str


@dataclass(frozen=True, slots=True)
class Cell:
    """One stage of one pipeline.

    Attributes:
        owner: the worker that owns it; None when it is lost.
        home: the worker that owned it when the epoch began.
        node: of the owner; "" when not known. Likewise `zone`.
        taken_over: whether a shadow owns it.
        merged: whether its owner owns another stage as well.
    """

    owner: int | None
    home: int
    node: str
    zone: str
    taken_over: bool
    merged: bool


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The current plan; `grid[pipeline][stage]` says who owns what."""

    epoch: int
    version: int
    cause: str
    aborted: bool
    from_checkpoint: bool
    num_stages: int
    num_pipelines: int
    dead: tuple[int, ...]
    grid: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the job is, as the coordinator last said; None for what it does not know."""

    step: int | None = None
    loss: float | None = None
    samples_per_second: float | None = None
    step_seconds: float | None = None
    vote_seconds: float | None = None
    age_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """A job at one moment.

    Attributes:
        job: its name.
        time: the moment, in Unix seconds.
        phase: `gathering` (no plan yet), `training`, `aborted` (waiting for workers), `deserted` (no node is left),
            `failed` or `finished`.
        phase_text: the same for people, with the cause.
        coordinator: the node that leads; None when none does.
        nodes: those alive, by name.
        workers: all that are known, by id.
        roster: the workers that begin; None before they are chosen.
        plan: None before the first.
        progress: None before the first commit.
        events: the last ones, oldest first.
    """

    job: str
    time: float
    phase: str
    phase_text: str
    coordinator: str | None
    nodes: tuple[NodeReport, ...]
    workers: tuple[WorkerReport, ...]
    roster: tuple[int, ...] | None
    plan: PlanReport | None
    progress: Progress | None
    events: tuple[ClusterEvent, ...]

    @property
    def over(self) -> bool:
        """Whether nothing will change any more."""
        return self.phase in ("failed", "finished")


def report(entries: Iterable[Entry], *, job: str, now: float, last_events: int = 20) -> Report:
    """Return the picture that a job's keys give.

    Args:
        entries: those that `elastic.mirror` keeps, in any order.
        job: name of the job.
        now: Unix seconds.
        last_events: how many events to show.

    Raises:
        ConfigError: a record was written by another version of this package.
    """
    found = {entry.key: entry for entry in sorted(entries, key=lambda entry: entry.key)}
    plan = decode(Plan, found[keys.PLAN].value) if keys.PLAN in found else None
    roster = decode(Roster, found[keys.ROSTER].value) if keys.ROSTER in found else None
    nodes = [decode(Node, entry.value) for entry in _below(found, keys.NODES)]
    events = [event for entry in _below(found, keys.EVENTS) if (event := read_event(entry.value)) is not None]
    workers = _workers(found, nodes, plan, events)
    phase, text = _phase(found, plan, nodes)
    return Report(
        job=job,
        time=now,
        phase=phase,
        phase_text=text,
        coordinator=_coordinator(found),
        nodes=tuple(_node(node, events, now) for node in nodes),
        workers=tuple(workers.values()),
        roster=roster.workers if roster is not None else None,
        plan=_plan(plan, workers) if plan is not None else None,
        progress=_progress(found[keys.PROGRESS].value, now) if keys.PROGRESS in found else None,
        events=tuple(events[-last_events:]) if last_events else (),
    )


def _below(found: Mapping[str, Entry], prefix: str) -> list[Entry]:
    return [entry for key, entry in found.items() if key.startswith(prefix)]


def _ids(found: Mapping[str, Entry], prefix: str) -> set[int]:
    names = (key.removeprefix(prefix) for key in found if key.startswith(prefix))
    return {int(name) for name in names if name.isdecimal()}


def _coordinator(found: Mapping[str, Entry]) -> str | None:
    """Return the oldest candidate, which is the leader (`store.election`)."""
    candidates = _below(found, f"{keys.COORDINATOR}/")
    oldest = min(candidates, key=lambda entry: entry.create_revision, default=None)
    return None if oldest is None else oldest.value.decode(errors="replace")


def _workers(
    found: Mapping[str, Entry], nodes: Iterable[Node], plan: Plan | None, events: Iterable[ClusterEvent]
) -> dict[int, WorkerReport]:
    """Return all workers that any key tells of, by id."""
    known = {*_ids(found, keys.READY), *_ids(found, keys.ENDED), *_ids(found, keys.LEFT)}
    if plan is not None:
        known |= {*plan.workers, *plan.dead}
    ready = {
        entry.key.removeprefix(keys.READY): entry.value.decode(errors="replace") for entry in _below(found, keys.READY)
    }
    places = {int(worker): (node, "") for worker, node in ready.items() if worker.isdecimal()} | _places(events)
    for node in nodes:
        places |= dict.fromkeys(node.workers, (node.name, node.zone))
        known |= {*node.workers}
    nowhere = ("", "")
    return {
        worker: WorkerReport(worker, *places.get(worker, nowhere), _state(worker, found, plan))
        for worker in sorted(known)
    }


def _places(events: Iterable[ClusterEvent]) -> dict[int, tuple[str, str]]:
    """Return node and zone by worker, as told when the nodes joined: also of those that are gone."""
    places: dict[int, tuple[str, str]] = {}
    for event in events:
        workers = event.fields.get("workers")
        if event.kind == "node_joined" and isinstance(workers, list):
            places |= dict.fromkeys(workers, (event.node, str(event.fields.get("zone", ""))))
    return places


def _state(worker: int, found: Mapping[str, Entry], plan: Plan | None) -> str:
    if plan is not None and worker in plan.dead:
        return "dead"
    if keys.ended(worker) in found:
        return "ended"
    if keys.left(worker) in found:
        return "left"
    if plan is not None and worker in plan.workers:
        return "training"
    if keys.ready(worker) not in found:
        return "starting"
    return "ready" if plan is None else "standby"


def _node(node: Node, events: Iterable[ClusterEvent], now: float) -> NodeReport:
    joined = max(
        (event.time for event in events if (event.kind, event.node) == ("node_joined", node.name)), default=None
    )
    since = None if joined is None else max(now - joined, 0.0)
    return NodeReport(node.name, node.zone, node.address, tuple(sorted(node.workers)), node.spot, since)


def _plan(plan: Plan, workers: Mapping[int, WorkerReport]) -> PlanReport:
    return PlanReport(
        epoch=plan.epoch,
        version=plan.version,
        cause=plan.cause,
        aborted=plan.aborted,
        from_checkpoint=plan.from_checkpoint,
        num_stages=plan.num_stages,
        num_pipelines=plan.num_pipelines,
        dead=tuple(sorted(plan.dead)),
        grid=tuple(_row(*rows, workers) for rows in zip(plan.owners, plan.homes, strict=True)),
    )


def _row(owners: tuple[int, ...], homes: tuple[int, ...], workers: Mapping[int, WorkerReport]) -> tuple[Cell, ...]:
    unknown = WorkerReport(NOBODY, "", "", "")
    places = [(owner, home, workers.get(owner, unknown)) for owner, home in zip(owners, homes, strict=True)]
    return tuple(
        Cell(
            owner=None if owner == NOBODY else owner,
            home=home,
            node=worker.node,
            zone=worker.zone,
            taken_over=owner not in (home, NOBODY),
            merged=owner != NOBODY and owners.count(owner) > 1,
        )
        for owner, home, worker in places
    )


def _phase(found: Mapping[str, Entry], plan: Plan | None, nodes: list[Node]) -> tuple[str, str]:
    if keys.failure("job") in found:
        return "failed", _failure(found[keys.failure("job")].value)
    if keys.FINISHED in found:
        return "finished", found[keys.FINISHED].value.decode(errors="replace") or "finished"
    if not nodes:
        return "deserted", "no node is alive"
    if plan is None:
        running = sum(len(node.workers) for node in nodes)
        return "gathering", f"{len(nodes)} node(s) with {running} worker(s) are there, and no plan yet"
    number = f"plan {keys.dotted(plan.number)}"
    if plan.aborted:
        return "aborted", f"nobody trains under {number}: {plan.cause}"
    failures = _below(found, _ENGINE_FAILURES)
    if failures:
        return "training", f"{number}; failed: {_failure(failures[0].value)}"
    return "training", number


def _failure(value: bytes) -> str:
    fields = _object(value)
    if {"worker", "kind", "message"} <= fields.keys():
        return f"worker {fields['worker']}: {fields['kind']}: {fields['message']}"
    return value.decode(errors="replace")


def _progress(value: bytes, now: float) -> Progress:
    fields = _object(value)
    said = _number(fields, "time")
    step = _number(fields, "step")
    return Progress(
        step=None if step is None else int(step),
        loss=_number(fields, "loss"),
        samples_per_second=_number(fields, "samples_per_second"),
        step_seconds=_number(fields, "step_seconds"),
        vote_seconds=_number(fields, "vote_seconds"),
        age_seconds=None if said is None else max(now - said, 0.0),
    )


def _object(value: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(value)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _number(fields: Mapping[str, Any], name: str) -> float | None:
    value = fields.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

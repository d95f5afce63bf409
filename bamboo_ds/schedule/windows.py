"""Where redundant forwards (FRC) run: the idle windows of 1F1B, and what to do with those that fit in none.

1F1B leaves windows that are known beforehand. On the worker of stage s, with equal costs f and b, they are s x f
before its first forward (useful only to the shadow of stage 0, whose FRC needs nothing but the input batch),
(P-1-s) x b between its warm-up forwards and its first backward, f before each of its last P-1-s backwards, and s x b
after its last backward. Unequal stages have more.

"fit" uses only these, with a margin, and so never stretches the step. "eflb" must run every FRC before the worker's own
backward of the micro-batch. It starts from the latest legal place, right before that backward, where an FRC at least
overlaps the wait for the gradients, and pulls FRCs into gaps of the simulated step that hold most of one. How full a
gap must be is not known beforehand (an overrun delays the neighbours, or is absorbed by their own gaps), so a few
thresholds are tried in simulated time, with the naive rule among the candidates, and the shortest step wins.

After a failover one worker owns two stages and is the slowest, so the others have more idle time: windows are those of
the step as it runs then. Only workers that could still take over a stage run redundant forwards (`shadowed_stage`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, get_args

from bamboo_ds.errors import ScheduleError
from bamboo_ds.schedule.bound import least_eager_seconds
from bamboo_ds.schedule.costs import StageCosts
from bamboo_ds.schedule.operations import (
    Kind,
    Operation,
    clock_order,
    is_sourced,
    owned_by,
    shadowed_stage,
    validate_owners,
)
from bamboo_ds.schedule.timing import Timeline, Window, simulate

Redundancy = Literal["off", "lflb", "fit", "eflb"]
MODES: tuple[Redundancy, ...] = get_args(Redundancy)

FIT_MARGIN = 0.1
"""Share of a window that "fit" leaves free: measured costs vary by a few percent and an FRC cannot be interrupted."""

PULL_THRESHOLDS = (1.0, 0.5, 0.1)
"""Shares of an FRC that must fit in a gap before "eflb" starts it there; each is tried."""

TOLERANCE = 1e-9
"""Relative slack for exact fits."""

Orders = Mapping[int, tuple[Operation, ...]]


def worker_orders(
    stages: int,
    *,
    micro_batches: int,
    redundancy: Redundancy = "off",
    costs: StageCosts | None = None,
    owners: Sequence[int] | None = None,
) -> Orders:
    """Return what each worker of a pipeline runs in a step without loss, in order, by the worker's home stage.

    Args:
        stages: Number of stages of the pipeline.
        micro_batches: Micro-batches of the pipeline in the step.
        redundancy: Which redundant forwards the orders contain; see the module.
        costs: Seconds per operation; None while unknown: then "fit" places nothing, "eflb" assumes uniform costs.
        owners: By stage, the home stage of its owner; None while every stage has its own.

    Raises:
        ScheduleError: When a number is out of range, the mode is unknown, or costs or owners are of another shape.
    """
    owning = validate_owners(owners, stages=stages)
    if redundancy not in MODES:
        raise ScheduleError(f"redundancy={redundancy!r}: must be one of {', '.join(MODES)}")
    if costs is not None and costs.stages != stages:
        raise ScheduleError(f"costs are for {costs.stages} stages, the pipeline has stages={stages}")
    if redundancy == "eflb" and stages > 1:
        return _eflb(owning, micro_batches, costs or StageCosts.uniform(stages))
    if redundancy == "fit" and stages > 1 and costs is not None:
        return _fit(owning, micro_batches, costs)
    return _plain(owning, micro_batches)


def frc_share(
    stages: int,
    *,
    micro_batches: int,
    redundancy: Redundancy,
    costs: StageCosts | None = None,
    owners: Sequence[int] | None = None,
) -> tuple[float, ...]:
    """Return the share of micro-batches whose redundant forward is scheduled, by the stage of the worker running it."""
    orders = worker_orders(stages, micro_batches=micro_batches, redundancy=redundancy, costs=costs, owners=owners)
    return tuple(
        sum(operation.kind is Kind.REDUNDANT for operation in orders.get(stage, ())) / micro_batches
        for stage in range(stages)
    )


@lru_cache(maxsize=8)
def eager_bound(stages: int, micro_batches: int, costs: StageCosts) -> float:
    """Return a lower bound of step time with "eflb" over step time with "off", 1.0 or more (see `bound`).

    Raises:
        ScheduleError: When a number is out of range or the costs are of another shape.
    """
    plain = simulate(worker_orders(stages, micro_batches=micro_batches, costs=costs), costs)
    return least_eager_seconds(plain, costs) / plain.step_seconds if stages > 1 else 1.0


@lru_cache(maxsize=8)
def _plain(owners: tuple[int, ...], micro_batches: int) -> Orders:
    return MappingProxyType(
        {
            worker: clock_order(owned_by(worker, owners=owners), stages=len(owners), micro_batches=micro_batches)
            for worker in sorted(set(owners))
        }
    )


def _shadows(owners: Sequence[int]) -> list[int]:
    return [worker for worker in set(owners) if shadowed_stage(worker, owners=owners) is not None]


@lru_cache(maxsize=8)
def _fit(owners: tuple[int, ...], micro_batches: int, costs: StageCosts) -> Orders:
    plain = _plain(owners, micro_batches)
    timeline = simulate(plain, costs)
    filled = {worker: _fill(worker, timeline, micro_batches, costs) for worker in _shadows(owners)}
    return MappingProxyType({**plain, **filled})


def _fill(worker: int, timeline: Timeline, micro_batches: int, costs: StageCosts) -> tuple[Operation, ...]:
    """Return the order of a worker with redundant forwards in its windows, in micro-batch order."""
    plain = tuple(event.operation for event in timeline.events[worker])
    pending = [Operation(Kind.REDUNDANT, (worker + 1) % costs.stages, m) for m in range(micro_batches)]
    order: list[Operation] = []
    copied = 0
    for window in timeline.idle(worker):
        order += plain[copied : window.before]
        copied = window.before
        capacity = int(window.seconds * (1 - FIT_MARGIN) / costs.redundant[worker] + TOLERANCE)
        ready = [operation for operation in pending if is_sourced(operation, before=plain[:copied])]
        order += ready[:capacity]
        pending = [operation for operation in pending if operation not in ready[:capacity]]
    return (*order, *plain[copied:])


@lru_cache(maxsize=8)
def _eflb(owners: tuple[int, ...], micro_batches: int, costs: StageCosts) -> Orders:
    latest = _all_beside(Kind.BACKWARD, owners, micro_batches)
    candidates = [_pull(latest, costs, threshold) for threshold in PULL_THRESHOLDS]
    candidates.append(_all_beside(Kind.FORWARD, owners, micro_batches))
    # Of equals the first is kept: a high threshold suffers least when a gap turns out shorter than predicted.
    return min(candidates, key=lambda orders: simulate(orders, costs).step_seconds)


def naive_orders(stages: int, *, micro_batches: int, owners: Sequence[int] | None = None) -> Orders:
    """Return the orders of the simplest eager rule, every redundant forward right after the worker's own forward."""
    return _all_beside(Kind.FORWARD, validate_owners(owners, stages=stages), micro_batches)


def _all_beside(kind: Kind, owners: tuple[int, ...], micro_batches: int) -> Orders:
    plain = _plain(owners, micro_batches)
    eager = {worker: _beside(kind, worker, plain[worker], len(owners)) for worker in _shadows(owners)}
    return MappingProxyType({**plain, **eager})


def _beside(kind: Kind, worker: int, plain: Sequence[Operation], stages: int) -> tuple[Operation, ...]:
    """Return an order with each redundant forward right after the own forward, or right before the own backward."""
    order: list[Operation] = []
    for operation in plain:
        redundant = Operation(Kind.REDUNDANT, (worker + 1) % stages, operation.micro_batch)
        if operation.kind is not kind:
            order.append(operation)
        else:
            order += (operation, redundant) if kind is Kind.FORWARD else (redundant, operation)
    return tuple(order)


def _pull(orders: Orders, costs: StageCosts, threshold: float) -> Orders:
    """Return the best orders met while pulling redundant forwards into gaps that hold `threshold` of one."""
    current = dict(orders)
    best, best_seconds = dict(current), float("inf")
    while True:
        timeline = simulate(current, costs)
        if timeline.step_seconds < best_seconds:
            best, best_seconds = dict(current), timeline.step_seconds
        # One move per worker, then time again: a move shifts every later gap. Moves only go forward, so this ends.
        moved = False
        for worker, order in current.items():
            needed = threshold * costs.redundant[worker] * (1 - TOLERANCE)
            pulled = _pull_one(order, [window for window in timeline.idle(worker) if window.seconds >= needed])
            if pulled is not None:
                current[worker], moved = pulled, True
        if not moved:
            return MappingProxyType(best)


def _pull_one(order: tuple[Operation, ...], windows: Sequence[Window]) -> tuple[Operation, ...] | None:
    """Return the order with one redundant forward moved into the first window that can take the next one."""
    for window in windows:
        head, tail = order[: window.before], order[window.before :]
        index = next((i for i, operation in enumerate(tail) if operation.kind is Kind.REDUNDANT), None)
        if index is None:
            return None
        if is_sourced(tail[index], before=head):
            return (*head, tail[index], *tail[:index], *tail[index + 1 :])
    return None

"""How long a step takes: an event simulation of the workers' orders under given costs.

Every worker runs its operations in its own fixed order and waits only for the values an operation needs. Sends do
not block, so the pipeline is a Kahn network: each operation starts when the worker is free and its input has
arrived, whatever the interleaving, and one pass in any order that respects the dependencies finds the only answer.
The pass runs one worker until it waits, notes what for, and wakes it when that is computed: linear in the operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from bamboo_ds.errors import ScheduleError
from bamboo_ds.schedule.costs import StageCosts
from bamboo_ds.schedule.operations import Kind, Operation, shadow_of


class Event(NamedTuple):
    """One operation and when it ran, in seconds from the start of the step."""

    operation: Operation
    start_seconds: float
    finish_seconds: float


class Window(NamedTuple):
    """Idle time of one worker, before the operation at index `before` of its order (or after the last)."""

    start_seconds: float
    finish_seconds: float
    before: int

    @property
    def seconds(self) -> float:
        """Length of the window."""
        return self.finish_seconds - self.start_seconds


@dataclass(frozen=True)
class Timeline:
    """When everything ran: the events of each worker in the order in which it ran them."""

    events: Mapping[int, tuple[Event, ...]]

    @cached_property
    def step_seconds(self) -> float:
        """When the last operation of all workers finishes."""
        return max((events[-1].finish_seconds for events in self.events.values() if events), default=0.0)

    def idle(self, worker: int) -> tuple[Window, ...]:
        """Return the idle windows of a worker from the start to the end of the step, none of length zero."""
        free, windows = 0.0, []
        for index, (_, start, finish) in enumerate(self.events[worker]):
            if start > free:
                windows.append(Window(free, start, index))
            free = finish
        if self.step_seconds > free:
            windows.append(Window(free, self.step_seconds, len(self.events[worker])))
        return tuple(windows)


def simulate(orders: Mapping[int, Sequence[Operation]], costs: StageCosts, *, latency_seconds: float = 0.0) -> Timeline:
    """Return when every operation runs if all workers follow their orders without delay.

    Args:
        orders: What each worker runs, in order; the keys are only names (usually the worker's own stage).
        costs: Seconds per operation. A redundant forward costs `redundant` of the stage whose worker shadows it.
        latency_seconds: From the end of an operation to its result at another worker.

    Raises:
        ScheduleError: When the orders deadlock; says which worker waits for what.
    """
    run = _Run(orders, costs, latency_seconds)
    ready = list(orders)
    while ready:
        worker = ready.pop()
        missing = run.advance(worker)
        ready += run.woken
        if missing is not None:
            run.waiting.setdefault(missing, []).append(worker)
    if run.waiting:
        raise ScheduleError(_describe(run.waiting, orders, run.position))
    return Timeline({worker: tuple(events) for worker, events in run.events.items()})


class _Run:
    """The state of one simulation."""

    def __init__(self, orders: Mapping[int, Sequence[Operation]], costs: StageCosts, latency_seconds: float) -> None:
        self.orders = orders
        self.latency_seconds = latency_seconds
        self.last_stage = costs.stages - 1
        self.costs = {
            Kind.FORWARD: costs.forward,
            Kind.BACKWARD: costs.backward,
            Kind.REDUNDANT: tuple(costs.redundant[shadow_of(s, stages=costs.stages)] for s in range(costs.stages)),
        }
        self.events: dict[int, list[Event]] = {worker: [] for worker in orders}
        self.position = dict.fromkeys(orders, 0)
        self.done: dict[tuple[Kind, int, int], tuple[float, int]] = {}
        self.waiting: dict[tuple[Kind, int, int], list[int]] = {}
        self.woken: list[int] = []

    def advance(self, worker: int) -> tuple[Kind, int, int] | None:
        """Run a worker until its order ends or it must wait; return what it waits for."""
        events, order, done = self.events[worker], self.orders[worker], self.done
        free = events[-1].finish_seconds if events else 0.0
        self.woken = []
        for index in range(self.position[worker], len(order)):
            operation = order[index]
            start = free
            for source in self.sources(operation):
                if source not in done:
                    self.position[worker] = index
                    return source
                finish, runner = done[source]
                start = max(start, finish if runner == worker else finish + self.latency_seconds)
            free = start + self.costs[operation.kind][operation.stage]
            events.append(Event(operation, start, free))
            done[operation] = (free, worker)
            if operation in self.waiting:
                self.woken += self.waiting.pop(operation)
        self.position[worker] = len(order)
        return None

    def sources(self, operation: Operation) -> tuple[tuple[Kind, int, int], ...]:
        """Return what an operation reads; plain tuples, equal to operations and cheaper to make."""
        kind, stage, micro_batch = operation
        if kind is Kind.BACKWARD:
            own = (Kind.FORWARD, stage, micro_batch)
            return (own,) if stage == self.last_stage else (own, (Kind.BACKWARD, stage + 1, micro_batch))
        return ((Kind.FORWARD, stage - 1, micro_batch),) if stage > 0 else ()


def _describe(
    waiting: Mapping[tuple[Kind, int, int], Sequence[int]],
    orders: Mapping[int, Sequence[Operation]],
    position: Mapping[int, int],
) -> str:
    stuck = sorted((worker, source) for source, workers in waiting.items() for worker in workers)
    return "deadlock: " + "; ".join(
        f"worker {worker} waits in {orders[worker][position[worker]]} for {Operation(*source)}"
        for worker, source in stuck
    )

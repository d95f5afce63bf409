"""How long a step takes: an event simulation of the workers' orders under given costs.

Every worker runs its operations in its own fixed order and waits only for the values an operation needs. Sends do
not block, so the pipeline is a Kahn network: each operation starts when the worker is free and its input has
arrived, whatever the interleaving, and one pass in any order that respects the dependencies finds the only answer.
The pass runs one worker until it waits, notes what for, and wakes it when that is computed: linear in the operations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from bamboo_ds.errors import ScheduleError
from bamboo_ds.schedule.costs import StageCosts
from bamboo_ds.schedule.operations import Kind, Operation, shadow_of

_Value = tuple[Kind, int, int]
"""What an operation leaves: that of a promoted forward is a forward."""


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
        costs: Seconds per operation. A redundant forward costs `redundant` of the stage whose worker shadows it, a
            promoted one nothing.
        latency_seconds: From the end of an operation to its result at another worker.

    Raises:
        ScheduleError: When the orders deadlock; says which worker waits for what.
    """
    simulation = Simulation(orders, costs, latency_seconds=latency_seconds)
    simulation.run()
    return simulation.finish()


class Simulation:
    """The event simulation, for those who change an order in the middle of it; others use `simulate`.

    Args:
        orders: As for `simulate`.
        costs: As for `simulate`.
        latency_seconds: As for `simulate`.
        until: By worker, the time from which on it starts nothing, till it gets another order.
    """

    def __init__(
        self,
        orders: Mapping[int, Sequence[Operation]],
        costs: StageCosts,
        *,
        latency_seconds: float = 0.0,
        until: Mapping[int, float] | None = None,
    ) -> None:
        self.events: dict[int, list[Event]] = {worker: [] for worker in orders}
        self._orders = dict(orders)
        self._latency_seconds = latency_seconds
        self._last_stage = costs.stages - 1
        self._costs = {
            Kind.FORWARD: costs.forward,
            Kind.BACKWARD: costs.backward,
            Kind.REDUNDANT: tuple(costs.redundant[shadow_of(s, stages=costs.stages)] for s in range(costs.stages)),
            Kind.PROMOTED: (0.0,) * costs.stages,
        }
        self._until = dict(until or {})
        self._free = dict.fromkeys(orders, 0.0)
        self._position = dict.fromkeys(orders, 0)
        self._done: dict[_Value, tuple[float, int]] = {}
        self._waiting: dict[_Value, list[int]] = {}
        self._woken: list[int] = []

    def run(self) -> None:
        """Run every worker as far as it gets."""
        ready = list(self._orders)
        self._waiting.clear()
        while ready:
            worker = ready.pop()
            missing = self._advance(worker)
            ready += self._woken
            if missing is not None:
                self._waiting.setdefault(missing, []).append(worker)

    def replace(self, worker: int, order: Sequence[Operation], *, start_seconds: float) -> None:
        """Give a worker another order, which it starts at `start_seconds` or when it has ended what it is running."""
        self._orders[worker], self._position[worker] = order, 0
        self._free[worker] = max(self._free[worker], start_seconds)
        self._until.pop(worker, None)

    def finish(self) -> Timeline:
        """Return when everything ran.

        Raises:
            ScheduleError: When a worker waits for something that nobody will compute.
        """
        if self._waiting:
            raise ScheduleError(_describe(self._waiting, self._orders, self._position))
        return Timeline({worker: tuple(events) for worker, events in self.events.items()})

    def _advance(self, worker: int) -> _Value | None:
        """Run a worker until its order or its time ends or it must wait; return what it waits for."""
        events, order, done = self.events[worker], self._orders[worker], self._done
        until = self._until.get(worker, math.inf)
        free = self._free[worker]
        self._woken = []
        for index in range(self._position[worker], len(order)):
            operation = order[index]
            start = free
            for source in self._sources(operation):
                if source not in done:
                    self._position[worker], self._free[worker] = index, free
                    return source
                finish, runner = done[source]
                start = max(start, finish if runner == worker else finish + self._latency_seconds)
            if start >= until:
                self._position[worker], self._free[worker] = index, free
                return None
            free = start + self._costs[operation.kind][operation.stage]
            events.append(Event(operation, start, free))
            value = operation if operation.kind is not Kind.PROMOTED else (Kind.FORWARD, *operation[1:])
            done[value] = (free, worker)
            if value in self._waiting:
                self._woken += self._waiting.pop(value)
        self._position[worker], self._free[worker] = len(order), free
        return None

    def _sources(self, operation: Operation) -> tuple[_Value, ...]:
        """Return what an operation reads; plain tuples, equal to operations and cheaper to make."""
        kind, stage, micro_batch = operation
        if kind is Kind.BACKWARD:
            own = (Kind.FORWARD, stage, micro_batch)
            return (own,) if stage == self._last_stage else (own, (Kind.BACKWARD, stage + 1, micro_batch))
        if kind is Kind.PROMOTED:
            return ((Kind.REDUNDANT, stage, micro_batch),)
        return ((Kind.FORWARD, stage - 1, micro_batch),) if stage > 0 else ()


def _describe(
    waiting: Mapping[_Value, Sequence[int]],
    orders: Mapping[int, Sequence[Operation]],
    position: Mapping[int, int],
) -> str:
    stuck = sorted((worker, source) for source, workers in waiting.items() for worker in workers)
    return "deadlock: " + "; ".join(
        f"worker {worker} waits in {orders[worker][position[worker]]} for {Operation(*source)}"
        for worker, source in stuck
    )

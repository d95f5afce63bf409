"""Times operations, so that redundant forwards can be placed in the idle windows of the schedule."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from deepspeed.accelerator import get_accelerator

from bamboo_ds.plan import Decision
from bamboo_ds.schedule import StageCosts

_STEPS = 5  # medians are taken over this many steps
_TOLERANCE = 0.1  # costs that move less than this keep the schedule as it is


class OperationClock:
    """Medians of the forward and backward seconds of each owned stage over the last steps.

    On an accelerator the work is timed by events on the device, read at the end of a step; on the CPU by the clock.
    """

    def __init__(self) -> None:
        self._on_device = get_accelerator().device_name() != "cpu"
        self._running: dict[tuple[str, int], list[Any]] = {}
        self._steps: dict[tuple[str, int], deque[float]] = {}

    @contextlib.contextmanager
    def timed(self, kind: str, stage: int) -> Iterator[None]:
        """Time one operation of a kind (`forward`, `backward`) on a stage."""
        start = self._now()
        yield
        self._running.setdefault((kind, stage), []).append((start, self._now()))

    def _now(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        event = get_accelerator().Event(enable_timing=True)
        event.record()
        return event

    def end_step(self) -> None:
        """Take the operations of a finished step into the medians."""
        for key, spans in self._running.items():
            seconds = statistics.median(self._seconds(*span) for span in spans)
            self._steps.setdefault(key, deque(maxlen=_STEPS)).append(seconds)
        self._running = {}

    def _seconds(self, start: Any, stop: Any) -> float:
        if not self._on_device:
            return float(stop - start)
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1000

    def seconds(self, kind: str, stage: int) -> float:
        """Return the median seconds of a kind on a stage; 0 while unknown."""
        steps = self._steps.get((kind, stage))
        return statistics.median(steps) if steps else 0.0


def follow(costs: StageCosts | None, decision: Decision) -> StageCosts | None:
    """Return the costs after a step: new ones when a measured time has moved by over a tenth, else those in use."""
    seconds = decision.stage_seconds
    if len(seconds) < 2:
        return costs
    forward, backward = tuple(pair[0] for pair in seconds), tuple(pair[1] for pair in seconds)
    if costs is not None and _close(costs.forward, forward) and _close(costs.backward, backward):
        return costs
    return StageCosts(forward=forward, backward=backward, redundant=(*forward[1:], forward[0]))


def _close(before: tuple[float, ...], now: tuple[float, ...]) -> bool:
    return all(abs(new - old) <= _TOLERANCE * old for old, new in zip(before, now, strict=True))

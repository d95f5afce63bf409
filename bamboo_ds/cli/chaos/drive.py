"""Follows a trace with the nodes of a local cluster: adds and kills them when the market does, so many times faster.

The clock of the trace starts when the job is ready to be disturbed, with the nodes that are there at its beginning.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from bamboo_ds.cli.chaos.journal import Journal, StepLine
from bamboo_ds.cli.chaos.worker import STACKS_SIGNAL
from bamboo_ds.cli.local import LocalCluster
from bamboo_ds.elastic.processes import send
from bamboo_ds.errors import ConfigError
from bamboo_ds.simulator.trace import Change, NodeEvent, Trace

__all__ = ["Deed", "Drive", "begins_with", "fitted"]

_LOOK_SECONDS = 0.1
_STACKS_SECONDS = 1.0
_STEPS_AFTER = 10  # that follow the end of the trace; nobody can have begun the last of them


def fitted(trace: Trace, *, nodes: int) -> Trace:
    """Return a trace whose mean number of nodes is scaled to `nodes`, which are also the most there are at once.

    So a job is meant that wants a fleet as large as the market gives on average: when it gives more, the job takes no
    more than it can use; when it gives less, the job has less.

    Raises:
        ConfigError: the trace never has nodes.
    """
    mean = trace.mean_live()
    if mean <= 0:
        raise ConfigError(f"trace {trace.name}: there is never a node in it")
    return trace.scaled(nodes / mean).limited(nodes)


def begins_with(trace: Trace) -> tuple[NodeEvent, ...]:
    """Return the nodes that are there when the trace begins, that is when it first has any."""
    first = trace.events[0].seconds if trace.events else 0.0
    return tuple(event for event in trace.events if event.seconds == first and event.change is Change.ADD)


@dataclass(frozen=True, slots=True)
class Deed:
    """What was done to the cluster.

    Attributes:
        at: `time.time()` of its beginning.
        change: what the market did.
        node: its name in the cluster.
        live: nodes that run from then on.
    """

    at: float
    change: Change
    node: str
    live: int


class Drive:
    """A run of a cluster through a trace; `go_on` is what its `wait` calls meanwhile.

    Args:
        cluster: that has begun with the nodes of `begins_with`.
        trace: to follow.
        speedup: seconds of the trace in a second.
        journal: of the workers.
        ready: whether the job can survive everything: its first checkpoint is there.
        steps: to train; None to end soon after the trace has.
        stuck_seconds: without a step, although a node is there, after which the run is given up.
        tell: says what goes on.

    Attributes:
        lines: of all workers, as they came.
        deeds: in order.
        began: `time.time()` when the clock of the trace started; infinity before.
        hung: whether it was given up.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        trace: Trace,
        *,
        speedup: float,
        journal: Journal,
        ready: Callable[[], bool],
        steps: int | None,
        stuck_seconds: float,
        tell: Callable[[str], None],
    ) -> None:
        first = begins_with(trace)
        self._cluster, self._journal, self._ready, self._tell = cluster, journal, ready, tell
        self._speedup, self._steps, self._stuck_seconds = speedup, steps, stuck_seconds
        self._names = {event.node: name for event, name in zip(first, cluster.names, strict=True)}
        self._due = deque(event for event in trace.events if event not in first)
        self._first = first[0].seconds
        self._zero: float | None = None
        self._looked, self._progress = 0.0, time.monotonic()
        self._trained = 0
        self.lines: list[StepLine] = []
        self.deeds = [Deed(time.time(), Change.ADD, name, len(first)) for name in cluster.names]
        self.began, self.hung = math.inf, False
        if steps is not None:
            journal.end_after(steps)

    def go_on(self) -> bool:
        """Do what is due; return whether more nodes may come."""
        now = time.monotonic()
        if now >= self._looked + _LOOK_SECONDS:
            self._looked = now
            self._look(now)
        if self.over:
            return False
        if self._zero is not None:
            self._play(self._first + (now - self._zero) * self._speedup)
        return bool(self._due)

    @property
    def over(self) -> bool:
        """Whether nothing is done to the cluster any more."""
        return self.hung or self._trained >= self._journal.steps or self._cluster.over

    def _look(self, now: float) -> None:
        """See how far the workers are."""
        if lines := self._journal.read():
            self.lines += lines
            self._trained = max(self._trained, *(line.step + 1 for line in lines))
        if self._zero is None and self.lines and self._ready():
            self._zero, self.began = now, time.time()
        if lines or not self._cluster.live:
            self._progress = now
        elif now > self._progress + self._stuck_seconds and not self.over:
            self._give_up()

    def _play(self, seconds: float) -> None:
        """Do what the market has done by a moment of the trace."""
        while self._due and self._due[0].seconds <= seconds:
            self._do(self._due.popleft())
        if not self._due and self._steps is None and self._journal.steps > self._trained + _STEPS_AFTER:
            self._journal.end_after(self._trained + _STEPS_AFTER)

    def _do(self, event: NodeEvent) -> None:
        at = time.time()  # a loss may be answered before all processes of the node are gone
        if event.change is Change.ADD:
            name = self._names[event.node] = self._cluster.add(zone=event.zone or None)
        else:
            name = self._names.pop(event.node)
            if name not in self._cluster.live:
                self._tell(f"{name} should be removed, but has ended by itself")
                return
            self._cluster.kill(name)
        live = len(self._cluster.live)
        self.deeds.append(Deed(at, event.change, name, live))
        verb = "added" if event.change is Change.ADD else "killed"
        self._tell(f"step {self._trained}: {name} {verb}, {live} nodes")

    def _give_up(self) -> None:
        """End a run that does not go on; its workers write down first where they are."""
        self.hung = True
        self._tell(f"no step for {self._stuck_seconds:g} s with {len(self._cluster.live)} nodes: given up")
        for name in self._cluster.live:
            send(self._cluster.processes(name).workers, STACKS_SIGNAL)
        time.sleep(_STACKS_SECONDS)
        for name in self._cluster.live:
            self._cluster.kill(name)

"""Follows a trace with the nodes of a local cluster: adds and kills them when the market does, so many times faster.

The clock of the trace starts when the job has trained its first step, with the nodes that are there at its beginning.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from bamboo_ds.cli.chaos.journal import Journal, StepLine
from bamboo_ds.cli.chaos.worker import STACKS_SIGNAL
from bamboo_ds.cli.local import LocalCluster
from bamboo_ds.elastic.processes import send
from bamboo_ds.simulator.trace import Change, NodeEvent, Trace

__all__ = ["Deed", "Drive", "begins_with", "fitted"]

_LOOK_SECONDS = 0.1
_STACKS_SECONDS = 1.0
_STEPS_AHEAD = 3  # of what anybody has trained: nobody can have begun that one
_AFTER_TRACE_SECONDS = 10.0


def fitted(trace: Trace, *, nodes: int) -> Trace:
    """Return a trace whose mean number of nodes is scaled to `nodes`, which are also the most there are at once.

    The price of a fleet that is wanted whole: where the market gives more than its mean, the job takes no more than it
    can use; where it gives less, the job has less.
    """
    return trace.scaled(nodes / trace.mean_live()).limited(nodes)


def begins_with(trace: Trace) -> list[NodeEvent]:
    """Return the nodes that are there when the trace begins, that is when it first has any."""
    if not trace.events:
        return []
    first = trace.events[0].seconds
    return [event for event in trace.events if event.seconds == first and event.change is Change.ADD]


@dataclass(frozen=True, slots=True)
class Deed:
    """What was done to the cluster.

    Attributes:
        at: `time.time()`.
        change: added or removed.
        node: its name in the cluster.
        zone: of the node that was added.
        live: nodes that run now.
    """

    at: float
    change: Change
    node: str
    zone: str
    live: int


@dataclass(slots=True)
class Drive:
    """A run of a cluster through a trace; `go_on` is what its `wait` calls meanwhile.

    Args:
        cluster: that has begun with the nodes of `begins_with`.
        trace: to follow; what is due then goes on from its second 0.
        speedup: seconds of the trace per second.
        journal: of the workers.
        folder: of the workers' logs.
        steps: to train; None to end soon after the trace has.
        stuck_seconds: without a step, although there are enough nodes: then the job counts as hung.
        tell: says what goes on.

    Attributes:
        lines: of all workers, as they came.
        deeds: in order.
        hung: why the run was given up; empty if it was not.
    """

    cluster: LocalCluster
    trace: Trace
    speedup: float
    journal: Journal
    steps: int | None
    stuck_seconds: float
    tell: Callable[[str], None]
    lines: list[StepLine] = field(default_factory=list)
    deeds: list[Deed] = field(default_factory=list)
    hung: str = ""
    _began: float | None = None
    _looked: float = 0.0
    _progress: float = field(default_factory=time.monotonic)
    _due: deque[NodeEvent] = field(default_factory=deque)
    _names: dict[str, str] = field(default_factory=dict)
    _ends: bool = False

    def __post_init__(self) -> None:
        """Know the first nodes by the names that the cluster gave them."""
        first = begins_with(self.trace)
        self._names = {event.node: name for event, name in zip(first, self.cluster.names, strict=True)}
        self._due = deque(event for event in self.trace.events if event not in first)
        now = time.time()
        self.deeds = [Deed(now, Change.ADD, name, "", len(first)) for name in self.cluster.names]
        if self.steps is not None:
            self.journal.end_after(self.steps)

    def go_on(self) -> bool:
        """Do what is due; return whether more nodes may come."""
        self._look()
        if self.cluster.over or self.hung or self._trained:
            return False
        if self._began is not None:
            seconds = self.trace.events[0].seconds + (time.monotonic() - self._began) * self.speedup
            while self._due and self._due[0].seconds <= seconds:
                self._do(self._due.popleft())
        return bool(self._due)

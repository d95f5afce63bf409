"""When the market gives and takes nodes: a trace, and what may be done with one.

A trace is checked once, when it is made: a node is there from its `add` to its `remove`, and never twice. Everything
else (the simulator, the generator, pictures) may rely on that.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import groupby, pairwise

from bamboo_ds.errors import ConfigError

__all__ = ["Change", "NodeEvent", "Trace"]


class Change(str, Enum):
    """What happens to a node."""

    ADD = "add"
    REMOVE = "remove"


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """A node that comes or goes.

    Attributes:
        seconds: from the beginning of the trace.
        change: which.
        node: its name, unique as long as it is there.
        zone: where it runs (of an `add`).
        price: dollars per hour (of an `add`); None for the price of the comparison.
        source: where this was read, such as `p3.csv:17`, for messages.
    """

    seconds: float
    change: Change
    node: str
    zone: str = ""
    price: float | None = None
    source: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Trace:
    """Nodes over time.

    Attributes:
        name: for people.
        events: by time; of equal times, in the order in which they happen.
        seconds: how long it lasts.
        warnings: what was odd about it when it was read.

    Raises:
        ConfigError: a node is added while it is there, or removed while it is not; names both places.
    """

    name: str
    events: tuple[NodeEvent, ...]
    seconds: float
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        last: dict[str, NodeEvent] = {}
        for event in self.events:
            before = last.get(event.node)
            there = before is not None and before.change is Change.ADD
            if there == (event.change is Change.ADD):
                raise ConfigError(_contradiction(event, before))
            last[event.node] = event

    @classmethod
    def of(
        cls, name: str, events: Iterable[NodeEvent], *, seconds: float | None = None, warnings: tuple[str, ...] = ()
    ) -> Trace:
        """Make a trace of events in any order, by time; without `seconds` it ends with the last event."""
        ordered = tuple(sorted(events, key=lambda event: event.seconds))
        end = ordered[-1].seconds if ordered else 0.0
        return cls(name, ordered, end if seconds is None else seconds, warnings)

    def instants(self) -> Iterator[tuple[float, tuple[NodeEvent, ...]]]:
        """Yield what happens at once, by time."""
        for seconds, events in groupby(self.events, key=lambda event: event.seconds):
            yield seconds, tuple(events)

    def live(self) -> tuple[tuple[float, int], ...]:
        """Return how many nodes are there, as (from this second on, count)."""
        counts, count = [], 0
        for seconds, events in self.instants():
            count += sum(1 if event.change is Change.ADD else -1 for event in events)
            counts.append((seconds, count))
        return tuple(counts)

    def mean_live(self, *, most: float = math.inf) -> float:
        """Return the mean number of nodes over time, no more than `most` counted at any moment."""
        if self.seconds <= 0:
            return 0.0
        steps = [(0.0, 0), *self.live(), (self.seconds, 0)]
        spans = pairwise(steps)
        return sum((end - start) * min(count, most) for (start, count), (end, _) in spans) / self.seconds

    @property
    def preemptions(self) -> int:
        """How many nodes are taken away."""
        return sum(event.change is Change.REMOVE for event in self.events)

    @property
    def zones(self) -> tuple[str, ...]:
        """The zones it names."""
        return tuple(sorted({event.zone for event in self.events if event.change is Change.ADD}))

    def cut(self, start_seconds: float, end_seconds: float) -> Trace:
        """Return a part of it; who is there when it begins is added at its second 0.

        Raises:
            ConfigError: the part is empty.
        """
        end = min(end_seconds, self.seconds)
        if not 0 <= start_seconds < end:
            raise ConfigError(
                f"trace {self.name}: cannot cut {start_seconds:g} to {end_seconds:g} s of {self.seconds:g}"
            )
        there: dict[str, NodeEvent] = {}
        events = []
        for event in self.events:
            if event.seconds > end:
                break
            if event.seconds > start_seconds:
                events.append(replace(event, seconds=event.seconds - start_seconds))
            elif event.change is Change.ADD:
                there[event.node] = replace(event, seconds=0.0)
            else:
                del there[event.node]
        return Trace(self.name, (*there.values(), *events), end - start_seconds)

    def scaled(self, factor: float) -> Trace:
        """Return it with so many times the nodes: of every node as many copies as make the count right.

        Raises:
            ConfigError: the factor is not above 0.
        """
        if not 0 < factor < math.inf:
            raise ConfigError(f"trace {self.name}: cannot scale its nodes by {factor:g}; give a number above 0")
        order: dict[str, int] = {}
        events = []
        for event in self.events:
            index = order.setdefault(event.node, len(order))
            for copy in range(math.floor((index + 1) * factor) - math.floor(index * factor)):
                events.append(replace(event, node=event.node if copy == 0 else f"{event.node}+{copy}"))
        return replace(self, events=tuple(events))

    def limited(self, most: int) -> Trace:
        """Return it with at most so many nodes at once: what the market gives beyond is taken when there is room.

        So a job keeps its fleet at P x D and never above. Of nodes that leave before there was room, nothing is seen.
        """
        queue: deque[NodeEvent] = deque()
        there: set[str] = set()
        events = []
        for event in self.events:
            if event.change is Change.ADD:
                queue.append(event)
            elif event.node in there:
                there.remove(event.node)
                events.append(event)
            else:
                queue = deque(waiting for waiting in queue if waiting.node != event.node)
            if queue and len(there) < most:  # an event makes room for one at most
                taken = queue.popleft()
                there.add(taken.node)
                events.append(replace(taken, seconds=event.seconds))
        return replace(self, events=tuple(events))

    def zoned(self, zones: Sequence[str]) -> Trace:
        """Return it with zones for its nodes: those that go at once are of one zone, the others are given them in turn.

        The published traces do not tell zones, but of 127 instants of preemption on EC2 only 7 touched more than one.
        """
        given: dict[str, str] = {}
        groups = 0
        for _, events in self.instants():
            gone = [event.node for event in events if event.change is Change.REMOVE and event.node not in given]
            given.update(dict.fromkeys(gone, zones[groups % len(zones)]))
            groups += bool(gone)
        staying = [event.node for event in self.events if event.node not in given]
        for index, node in enumerate(dict.fromkeys(staying)):
            given[node] = zones[index % len(zones)]
        return replace(
            self,
            events=tuple(
                replace(event, zone=given[event.node]) if event.change is Change.ADD else event for event in self.events
            ),
        )


def _contradiction(event: NodeEvent, before: NodeEvent | None) -> str:
    place = event.source or f"second {event.seconds:g}"
    if before is None:
        return f"{place}: node {event.node} is removed, but it was never added"
    earlier = before.source or f"second {before.seconds:g}"
    verb = "added" if event.change is Change.ADD else "removed"
    return f"{place}: node {event.node} is {verb} again; it was {verb} before in {earlier}"

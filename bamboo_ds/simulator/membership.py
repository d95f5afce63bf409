"""What a job sees of a trace: nodes that are ready to work, and nodes that are gone. And what they cost meanwhile."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from bamboo_ds.simulator.trace import Change, NodeEvent, Trace

__all__ = ["Instant", "dollars", "instants"]


@dataclass(slots=True)
class Instant:
    """What changes at once.

    Attributes:
        seconds: when.
        gone: names of nodes that were ready and are lost.
        joined: nodes that have become ready.
    """

    seconds: float
    gone: tuple[str, ...]
    joined: tuple[NodeEvent, ...]


def instants(trace: Trace, *, warm_up_seconds: float) -> list[Instant]:
    """Return when nodes become ready, so long after the market gave them, and are lost; by time."""
    gone: dict[float, list[str]] = defaultdict(list)
    joined: dict[float, list[NodeEvent]] = defaultdict(list)
    ends: dict[str, list[float]] = defaultdict(list)  # of each stay of a node, the last first
    for event in reversed(trace.events):
        if event.change is Change.REMOVE:
            ends[event.node].append(event.seconds)
    # Nodes that become ready at once are in the order in which they were given, whatever happens to them later.
    for event in trace.events:
        if event.change is Change.ADD:
            end = ends[event.node].pop() if ends[event.node] else math.inf
            if event.seconds + warm_up_seconds < end:
                joined[event.seconds + warm_up_seconds].append(event)
                gone[end].append(event.node)
    gone.pop(math.inf, None)
    moments = sorted(seconds for seconds in {*gone, *joined} if seconds <= trace.seconds)
    return [Instant(seconds, tuple(gone.get(seconds, ())), tuple(joined.get(seconds, ()))) for seconds in moments]


def dollars(trace: Trace, *, price: float) -> float:
    """Return what the nodes of a trace cost, from the moment they are given until they are taken.

    Args:
        trace: says when.
        price: dollars per hour of a node for which the trace tells none.
    """
    total = 0.0
    since: dict[str, NodeEvent] = {}
    for event in trace.events:
        if event.change is Change.ADD:
            since[event.node] = event
        else:
            total += _bill(since.pop(event.node), event.seconds, price)
    return total + sum(_bill(added, trace.seconds, price) for added in since.values())


def _bill(added: NodeEvent, until: float, price: float) -> float:
    hours = (until - added.seconds) / 3600
    return hours * (price if added.price is None else added.price)

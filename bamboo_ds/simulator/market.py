"""A market that is drawn: independent zones that take nodes in bulks, and give them late and in part.

In each zone preemption instants come at random, as often as makes the asked share of nodes disappear per hour. An
instant takes several nodes of the zone at once, and seldom some of another zone too. What is missing is asked for at
once; each request is answered after a while with a part of what it wants, and the rest is asked for again.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields

from bamboo_ds.errors import ConfigError
from bamboo_ds.simulator.trace import Change, NodeEvent, Trace

__all__ = ["Market", "generate"]

HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Market:
    """What is drawn.

    Attributes:
        nodes: how many the job wants, and has at the start.
        hours: how long.
        rate: probability that a node is taken within an hour.
        zones: how many, with independent markets.
        bulk: mean number of nodes that one instant takes. ec2-p3.csv: 167 at 79 instants.
        shared: probability that an instant touches a second zone. The paper: 7 of 127 instants on EC2 did.
        delay_seconds: mean time until a request is answered. ec2-p3.csv: 8.0 nodes of 32 are missing in the mean while
            14.7 are taken per hour, so one is missing for 33 minutes.
        grant: mean share of a request that is granted at once.

    Raises:
        ConfigError: names the value that cannot be right.
    """

    nodes: int = 48
    hours: float = 24.0
    rate: float = 0.10
    zones: int = 3
    bulk: float = 2.1
    shared: float = 0.055
    delay_seconds: float = 1980.0
    grant: float = 0.5

    def __post_init__(self) -> None:
        bounds = {
            "nodes": (1, math.inf), "hours": (1e-6, 1e6), "rate": (0, 0.999999), "zones": (1, self.nodes),
            "bulk": (1, math.inf), "shared": (0, 1), "delay_seconds": (0, 1e9), "grant": (1e-6, 1),
        }  # fmt: skip
        for field in fields(self):
            low, high = bounds[field.name]
            value = getattr(self, field.name)
            if not (low <= value <= high and math.isfinite(value)):
                raise ConfigError(f"{field.name}={value:g} of a generated trace: must be {low:g} to {high:g}")

    @property
    def hourly(self) -> float:
        """How many nodes are taken per node and hour."""
        return -math.log1p(-self.rate)


def generate(market: Market, *, seed: int) -> Trace:
    """Draw a trace; the same market and seed give the same one."""
    drawn = _Draw(market, random.Random(f"market {seed}"))
    name = f"generated-{market.nodes}x{market.hours:g}h-{market.rate:g}-seed{seed}"
    return Trace(name, tuple(drawn.events()), market.hours * HOUR)


class _Draw:
    """One drawing: who is there by zone, and what is to come."""

    def __init__(self, market: Market, source: random.Random) -> None:
        self._market, self._random = market, source
        self._there: list[list[str]] = [[] for _ in range(market.zones)]
        self._made = 0
        self._requests: list[tuple[float, int, int]] = []  # when answered, zone, how many

    def events(self) -> Iterator[NodeEvent]:
        """Yield all events by time."""
        for index in range(self._market.nodes):
            yield self._add(0.0, index % self._market.zones)
        now, end = 0.0, self._market.hours * HOUR
        while True:
            taken_at = now + self._until_preemption()
            answered_at = self._requests[0][0] if self._requests else math.inf
            now = min(taken_at, answered_at)
            if now >= end:
                return
            yield from self._take(now) if taken_at < answered_at else self._answer(now)

    def _until_preemption(self) -> float:
        """Draw the time to the next instant anywhere. It may be drawn anew after every event: it has no memory."""
        count = sum(map(len, self._there))
        # An instant that touches a second zone takes a second bulk.
        per_instant = self._market.bulk * (1 + self._second_zone())
        per_second = count * self._market.hourly / per_instant / HOUR
        return self._random.expovariate(per_second) if per_second > 0 else math.inf

    def _second_zone(self) -> float:
        return self._market.shared if self._market.zones > 1 else 0.0

    def _take(self, now: float) -> Iterator[NodeEvent]:
        """Let an instant take nodes of one zone, drawn by its size, or of two."""
        sizes = [len(there) for there in self._there]
        zones = self._random.choices(range(self._market.zones), weights=sizes)
        others = [zone for zone in range(self._market.zones) if zone not in zones and sizes[zone]]
        if others and self._random.random() < self._second_zone():
            zones.append(self._random.choice(others))
        for zone in zones:
            yield from self._take_of(zone, now)

    def _take_of(self, zone: int, now: float) -> Iterator[NodeEvent]:
        there = self._there[zone]
        count = min(self._bulk(), len(there))
        for _ in range(count):
            index = self._random.randrange(len(there))
            there[index], there[-1] = there[-1], there[index]
            yield NodeEvent(now, Change.REMOVE, there.pop())
        self._request(now, zone, count)

    def _bulk(self) -> int:
        """Draw the size of a bulk, geometric with the mean that is asked for."""
        if self._market.bulk == 1:
            return 1
        return 1 + int(math.log(1 - self._random.random()) / math.log1p(-1 / self._market.bulk))

    def _request(self, now: float, zone: int, count: int) -> None:
        if count:
            delay = self._random.expovariate(1 / self._market.delay_seconds) if self._market.delay_seconds else 0.0
            heapq.heappush(self._requests, (now + delay, zone, count))

    def _answer(self, now: float) -> Iterator[NodeEvent]:
        """Grant a part of a request, at least one node, and ask for the rest again."""
        _, zone, count = heapq.heappop(self._requests)
        share = self._random.random() * 2 * self._market.grant
        granted = min(max(round(share * count), 1), count)
        for _ in range(granted):
            yield self._add(now, zone)
        self._request(now, zone, count - granted)

    def _add(self, now: float, zone: int) -> NodeEvent:
        self._made += 1
        name = f"n{self._made}"
        self._there[zone].append(name)
        return NodeEvent(now, Change.ADD, name, _zone_name(zone))


def _zone_name(zone: int) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[zone] if zone < 26 else f"zone{zone + 1}"

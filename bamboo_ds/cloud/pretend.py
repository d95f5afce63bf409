"""A pretend spot market: what a real one does, from a seed, by a clock that is handed in.

Each zone has a capacity that changes with time. An order may be refused, filled in part, or filled late; what is
promised may never come; running nodes are taken away when the capacity falls. The same token is the same order. The
local provider and the benches of the fleet ask it; it starts nothing itself, but says what starts and what ends.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bamboo_ds.errors import ConfigError

__all__ = ["Answer", "Manners", "PretendMarket", "Supply", "steady_supply"]


@dataclass(frozen=True, slots=True)
class Supply:
    """The capacity of each zone over time: by zone the moments (ascending seconds) and what there is from then on."""

    moments: Mapping[str, tuple[float, ...]]
    capacities: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, changes: Iterable[tuple[float, str, int]], *, zones: Sequence[str]) -> Supply:
        """Return the supply of (seconds, zone, nodes more or fewer), in the order of time."""
        moments: dict[str, list[float]] = {zone: [0.0] for zone in zones}
        capacities: dict[str, list[int]] = {zone: [0] for zone in zones}
        for seconds, zone, change in changes:
            moments[zone].append(seconds)
            capacities[zone].append(capacities[zone][-1] + change)
        return cls(
            {zone: tuple(found) for zone, found in moments.items()},
            {zone: tuple(found) for zone, found in capacities.items()},
        )

    @property
    def zones(self) -> tuple[str, ...]:
        """The zones, sorted."""
        return tuple(sorted(self.moments))

    def capacity(self, zone: str, at: float) -> int:
        """Return how many nodes a zone can have at a moment; 0 before its first."""
        index = bisect.bisect_right(self.moments[zone], at) - 1
        return self.capacities[zone][index] if index >= 0 else 0

    def total(self, at: float) -> int:
        """Return the capacity of all zones at a moment."""
        return sum(self.capacity(zone, at) for zone in self.zones)

    def changes(self) -> tuple[float, ...]:
        """Return all moments at which a capacity changes, ascending."""
        return tuple(sorted(set(itertools.chain.from_iterable(self.moments.values()))))


@dataclass(frozen=True, slots=True)
class Manners:
    """How the market treats its customers.

    Attributes:
        refuse: share of orders that are refused though there is capacity.
        partly: share of orders of several nodes that are filled in part.
        delay_seconds: shortest and longest time from an order to its nodes.
        forget: share of promised nodes that never come.
    """

    refuse: float = 0.0
    partly: float = 0.0
    delay_seconds: tuple[float, float] = (0.0, 0.0)
    forget: float = 0.0

    def __post_init__(self) -> None:
        for name in ("refuse", "partly", "forget"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"market {name} = {getattr(self, name)}: must be a share between 0 and 1")
        if not 0 <= self.delay_seconds[0] <= self.delay_seconds[1]:
            raise ConfigError(
                f"market delay_seconds = {list(self.delay_seconds)}: must be the shortest and the longest"
            )


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of an order: how many nodes are promised, and why not all."""

    promised: int
    reason: str = ""


@dataclass(slots=True)
class _Promise:
    due: float
    zone: str
    token: str
    kept: bool


@dataclass(slots=True)
class _Book:
    running: dict[str, str] = field(default_factory=dict)
    """Zones by name of the node."""
    promises: list[_Promise] = field(default_factory=list)
    answers: dict[str, Answer] = field(default_factory=dict)
    orders: dict[str, str] = field(default_factory=dict)
    """Tokens by name of the node."""


class PretendMarket:
    """The market. All moments are seconds of one clock, and never go back.

    Args:
        supply: its capacity.
        manners: how it treats its customers.
        seed: of all that is random.
        name: prefix of the nodes' names.
    """

    def __init__(self, supply: Supply, *, manners: Manners | None = None, seed: int = 0, name: str = "s") -> None:
        self.supply, self._manners = supply, Manners() if manners is None else manners
        self._draw, self._name = random.Random(seed), name
        self._book, self._numbers = _Book(), itertools.count()

    @property
    def running(self) -> dict[str, str]:
        """The zones of the nodes that run, by name."""
        return dict(self._book.running)

    @property
    def promised(self) -> Counter[str]:
        """How many nodes each zone has promised."""
        return Counter(promise.zone for promise in self._book.promises)

    def token(self, name: str) -> str:
        """Return the token of the order that a node came by; empty if it came by none."""
        return self._book.orders.get(name, "")

    def answered(self, token: str) -> bool:
        """Return whether an order of this token was made."""
        return token in self._book.answers

    def add(self, name: str, zone: str) -> None:
        """Take in a node that came by no order."""
        self._book.running[name] = zone

    def order(self, token: str, nodes: int, zone: str, *, now: float) -> Answer:
        """Ask for nodes; the same token again gets the same answer."""
        if token not in self._book.answers:
            self._book.answers[token] = self._answer(token, nodes, zone, now)
        return self._book.answers[token]

    def _answer(self, token: str, nodes: int, zone: str, now: float) -> Answer:
        if zone not in self.supply.moments:
            return Answer(0, f"there is no zone {zone}")
        taken = Counter(self._book.running.values())[zone] + self.promised[zone]
        room = self.supply.capacity(zone, now) - taken
        if room <= 0 or self._draw.random() < self._manners.refuse:
            return Answer(0, "no capacity")
        granted = min(nodes, room)
        if granted > 1 and self._draw.random() < self._manners.partly:
            granted = self._draw.randint(1, granted)
        for _ in range(granted):
            due = now + self._draw.uniform(*self._manners.delay_seconds)
            self._book.promises.append(_Promise(due, zone, token, self._draw.random() >= self._manners.forget))
        return Answer(granted, "" if granted == nodes else "no capacity for more")

    def next_due(self) -> float | None:
        """Return when the next promised node is due; None when none is."""
        return min((promise.due for promise in self._book.promises), default=None)

    def start(self, now: float, *, name: Callable[[str], str] | None = None) -> dict[str, str]:
        """Return the nodes that start now, and their zones; promises that are not kept lapse.

        Args:
            now: the moment.
            name: starts a node in a zone and returns its name; None to start nothing but give it a name.
        """
        due = sorted((one for one in self._book.promises if one.due <= now), key=lambda one: one.due)
        self._book.promises = [one for one in self._book.promises if one.due > now]
        started = {}
        for promise in due:
            zone, running = promise.zone, Counter(self._book.running.values())
            if promise.kept and running[zone] < self.supply.capacity(zone, now):
                node = f"{self._name}{next(self._numbers)}" if name is None else name(zone)
                started[node] = self._book.running[node] = zone
                self._book.orders[node] = promise.token
        return started

    def reclaim(self, now: float) -> list[str]:
        """Return the nodes that are taken away now, as there are more than the capacity."""
        by_zone: dict[str, list[str]] = defaultdict(list)
        for name, zone in self._book.running.items():
            by_zone[zone].append(name)
        gone = []
        for zone, names in sorted(by_zone.items()):
            excess = len(names) - (self.supply.capacity(zone, now) if zone in self.supply.moments else len(names))
            gone += self._draw.sample(sorted(names), max(excess, 0))
        self.end(gone)
        return gone

    def end(self, names: Iterable[str]) -> None:
        """Take nodes off the market's list: they have ended, or are given back."""
        for name in names:
            self._book.running.pop(name, None)


def steady_supply(zones: Sequence[str], *, capacity: int) -> Supply:
    """Return a supply of the same capacity in each zone, for ever."""
    return Supply(dict.fromkeys(zones, (0.0,)), dict.fromkeys(zones, (capacity,)))

"""How many nodes to ask for, where, and which to give back: pure, from what is there.

The fleet is kept at P x D and never above. What counts as there: instances that run or boot, nodes of which the cloud
knows nothing (started by hand), what is promised, what an order has brought that the cloud does not list yet, and
orders whose answer nobody knows. So an order is made only for what is missing beyond doubt.

Zones get even shares, as placement deals them out evenly: as long as no zone has more than half of the nodes, no
neighbours need to share one (`plan.placement`). A zone that refused is left alone for a while, and the others fill up:
a node in a crowded zone is better than none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from bamboo_ds.cloud.port import ANY_ZONE, Instance

__all__ = ["FleetFacts", "FleetRules", "Release", "Wish", "fleet", "spread"]


@dataclass(frozen=True, slots=True)
class FleetRules:
    """How patient the keeper is.

    Attributes:
        retry_seconds: a zone that refused is asked again after so long, then after twice as long, and so on.
        retry_max_seconds: at most after so long.
        release_seconds: nodes above P x D are given back after so long.
        boot_seconds: an instance whose agent has not joined by then is given back.
        appear_seconds: how long a cloud may take to list an instance that it has granted.
    """

    retry_seconds: float = 15.0
    retry_max_seconds: float = 60.0
    release_seconds: float = 300.0
    boot_seconds: float = 900.0
    appear_seconds: float = 180.0


@dataclass(frozen=True, slots=True)
class FleetFacts:
    """What is there at one moment.

    Attributes:
        target: P x D in nodes; None while nobody knows it.
        zones: where nodes can be ordered; empty if the cloud chooses.
        instances: that run or boot, as the cloud lists them.
        unlisted: instances that were granted and are not listed yet.
        strangers: zones by name of the nodes that have joined and are no instances of ours.
        under_way: by zone, nodes that are promised or ordered.
        closed: zones that refused lately, `ANY_ZONE` for all, and for how many seconds they are left alone.
        idle: names of nodes without a stage.
        surplus_seconds: for how long there have been more than the target.
        duds: instances whose agent did not join in time.
    """

    target: int | None
    zones: tuple[str, ...] = ()
    instances: tuple[Instance, ...] = ()
    unlisted: tuple[Instance, ...] = ()
    strangers: Mapping[str, str] = field(default_factory=dict)
    under_way: Mapping[str, int] = field(default_factory=dict)
    closed: Mapping[str, float] = field(default_factory=dict)
    idle: frozenset[str] = frozenset()
    surplus_seconds: float = 0.0
    duds: frozenset[str] = frozenset()

    @property
    def counts(self) -> Counter[str]:
        """How many nodes each zone has or will have."""
        counts = Counter(instance.zone for instance in (*self.instances, *self.unlisted))
        counts.update(self.strangers.values())
        counts.update(self.under_way)
        return counts

    @property
    def total(self) -> int:
        """How many nodes there are or will be."""
        return sum(self.counts.values())

    @property
    def ours(self) -> int:
        """How many of them are the cloud's."""
        return self.total - len(self.strangers)


@dataclass(frozen=True, slots=True)
class Release:
    """An instance to give back, and why."""

    instance: str
    why: str


@dataclass(frozen=True, slots=True)
class Wish:
    """What should be done now.

    Attributes:
        orders: by zone, how many nodes to ask for.
        releases: what to give back.
        missing: how many nodes are missing, asked for now or not.
        wait_seconds: after which a closed zone may be asked again; None when nothing is waited for.
    """

    orders: Mapping[str, int] = field(default_factory=dict)
    releases: tuple[Release, ...] = ()
    missing: int = 0
    wait_seconds: float | None = None


def fleet(facts: FleetFacts, rules: FleetRules) -> Wish:
    """Return what should be done about the fleet."""
    duds = tuple(
        Release(instance.id, f"its agent has not joined within {rules.boot_seconds:g} s")
        for instance in facts.instances
        if instance.id in facts.duds
    )
    if facts.target is None or duds:  # what is given back is counted no longer the next time
        return Wish(releases=duds)
    missing = facts.target - facts.total
    if missing < 0:
        return Wish(releases=_surplus(facts, -missing, rules))
    if missing == 0:
        return Wish()
    zones = _open_zones(facts)
    if not zones:
        return Wish(missing=missing, wait_seconds=_next_opening(facts))
    return Wish(orders=spread(missing, counts=facts.counts, zones=zones), missing=missing)


def spread(nodes: int, *, counts: Mapping[str, int], zones: Collection[str]) -> dict[str, int]:
    """Share nodes out so that the zones come as near to equal counts as can be.

    Args:
        nodes: how many.
        counts: what the zones have.
        zones: that can get some.
    """
    levels = {zone: counts.get(zone, 0) for zone in zones}
    shares: Counter[str] = Counter()
    for _ in range(nodes):
        zone = min(levels, key=lambda name: (levels[name], name))
        levels[zone] += 1
        shares[zone] += 1
    return dict(shares)


def _open_zones(facts: FleetFacts) -> tuple[str, ...]:
    if ANY_ZONE in facts.closed:
        return ()
    return tuple(zone for zone in facts.zones or (ANY_ZONE,) if zone not in facts.closed)


def _next_opening(facts: FleetFacts) -> float:
    if ANY_ZONE in facts.closed:
        return facts.closed[ANY_ZONE]
    return min(facts.closed[zone] for zone in facts.zones)


def _surplus(facts: FleetFacts, nodes: int, rules: FleetRules) -> tuple[Release, ...]:
    """Return what to give back of the surplus: instances without a stage, of the fullest zone first."""
    if facts.surplus_seconds < rules.release_seconds:
        return ()
    counts, left = facts.counts, [instance for instance in facts.instances if instance.id in facts.idle]
    chosen: list[Release] = []
    for _ in range(min(nodes, len(left))):
        instance = max(left, key=lambda one: (counts[one.zone], one.zone, one.id))
        left.remove(instance)
        counts[instance.zone] -= 1
        why = f"{facts.total} nodes are there, {facts.target} are wanted, and it has had no stage"
        chosen.append(Release(instance.id, f"{why} for {rules.release_seconds:g} s"))
    return tuple(chosen)

"""What the keeper of the fleet must not forget: one record in the store, so that its successor goes on where it died.

An order is written down before it is made and struck out when its answer is known. So at any moment the record holds
every order of which nobody knows what came, and a successor makes exactly those again, under the same tokens.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from bamboo_ds.cloud.fleet import FleetRules
from bamboo_ds.cloud.port import ANY_ZONE, Grant, Instance, Order
from bamboo_ds.cloud.trouble import Trouble
from bamboo_ds.errors import ConfigError

__all__ = ["Closed", "Ledger", "Stranger", "Unlisted"]

SCHEMA = 1
_MOST_DOUBLINGS = 20


@dataclass(frozen=True, slots=True)
class Closed:
    """A zone that refused: how often in a row, and until when it is left alone (Unix seconds)."""

    failures: int
    until: float


@dataclass(frozen=True, slots=True)
class Unlisted:
    """An instance that was granted and is not listed yet, and until when that is believed (Unix seconds)."""

    instance: Instance
    until: float


@dataclass(frozen=True, slots=True)
class Stranger:
    """A node that was started by hand: its zone, and until when it counts (Unix seconds); None while it is there."""

    zone: str
    until: float | None = None


@dataclass(frozen=True, slots=True)
class Ledger:
    """The record.

    Attributes:
        id: random, part of every token: a job that begins anew under an old name repeats no old order.
        number: of the next order.
        open: orders of which nobody knows what came.
        unlisted: by id, instances that were granted and are not listed yet.
        closed: by zone (`ANY_ZONE` for all), what refused lately.
        strangers: by name, nodes that were started by hand. No cloud tells whether the machine of one lives whose
            agent has gone, so it counts for a while: agents are started again.
        known: ids of instances that the cloud lists, or has listed and whose agents are still registered. When one is
            taken away, its agent seems to live for a TTL: a new keeper must not take it for a stranger meanwhile.
    """

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    number: int = 0
    open: tuple[Order, ...] = ()
    unlisted: Mapping[str, Unlisted] = field(default_factory=dict)
    closed: Mapping[str, Closed] = field(default_factory=dict)
    strangers: Mapping[str, Stranger] = field(default_factory=dict)
    known: tuple[str, ...] = ()

    def ordered(self, wishes: Mapping[str, int], *, total: int, now: float) -> Ledger:
        """Return the record with new orders, one for each zone.

        Args:
            wishes: nodes by zone.
            total: what the cloud will have given once all of them are filled.
            now: Unix seconds.
        """
        new = []
        for number, (zone, nodes) in enumerate(sorted(wishes.items()), start=self.number):
            new.append(Order(f"bamboo-{self.id}-{number}", nodes, zone, total, now))
        return replace(self, number=self.number + len(new), open=(*self.open, *new))

    def settled(self, order: Order, grant: Grant, *, rules: FleetRules, now: float) -> Ledger:
        """Return the record after the answer to an order."""
        until = now + rules.appear_seconds
        new = {instance.id: Unlisted(instance, until) for instance in grant.instances}
        rest = tuple(one for one in self.open if one.token != order.token)
        after = replace(self, open=rest, unlisted={**self.unlisted, **new})
        if grant.nodes:  # a cloud that gives something is no longer one that only refuses
            opened = (order.zone, ANY_ZONE)
            after = replace(after, closed={zone: one for zone, one in self.closed.items() if zone not in opened})
        return after if grant.trouble is None else after.refused(grant.trouble, rules=rules, now=now)

    def refused(self, trouble: Trouble, *, rules: FleetRules, now: float) -> Ledger:
        """Return the record in which a zone is left alone, longer with each refusal in a row."""
        before = self.closed.get(trouble.zone, Closed(0, 0.0))
        pause = min(rules.retry_seconds * 2.0 ** min(before.failures, _MOST_DOUBLINGS), rules.retry_max_seconds)
        pause *= trouble.patience
        return replace(self, closed={**self.closed, trouble.zone: Closed(before.failures + 1, now + pause)})

    def listed(self, instances: Iterable[Instance], *, joined: Collection[str], now: float) -> Ledger:
        """Return the record once the cloud was looked at.

        Granted instances that are listed now, or are so late that they are gone, are no longer waited for.

        Args:
            instances: as the cloud lists them.
            joined: ids, or names, of the nodes that are registered.
            now: Unix seconds.
        """
        seen = {instance.id for instance in instances}
        rest = {id_: one for id_, one in self.unlisted.items() if id_ not in seen and one.until > now}
        known = tuple(sorted(seen | ({*self.known, *self.unlisted} & set(joined))))
        if len(rest) == len(self.unlisted) and known == self.known:
            return self
        return replace(self, unlisted=rest, known=known)

    def visited(self, strangers: Mapping[str, str], *, rules: FleetRules, now: float) -> Ledger:
        """Return the record with the strangers that are there, by name and zone, and those that left lately."""
        there = {name: Stranger(zone) for name, zone in strangers.items()}
        gone = {name: one for name, one in self.strangers.items() if name not in there}
        late = {
            name: replace(one, until=now + rules.appear_seconds if one.until is None else one.until)
            for name, one in gone.items()
            if one.until is None or one.until > now
        }
        found = {**there, **late}
        return self if found == self.strangers else replace(self, strangers=found)

    def closed_seconds(self, now: float) -> dict[str, float]:
        """Return for how long each closed zone is left alone."""
        return {zone: closed.until - now for zone, closed in self.closed.items() if closed.until > now}

    def encode(self) -> bytes:
        """Return the text that goes to the store."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, sort_keys=True).encode()

    @classmethod
    def decode(cls, text: bytes) -> Ledger:
        """Return the record of a text.

        Raises:
            ConfigError: another version of the package wrote it.
        """
        try:
            found = json.loads(text)
            if found.pop("schema") != SCHEMA:
                raise ValueError("another schema")
            return cls(**{**found, **_records(found)})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"the fleet's record in the store cannot be read ({error}): run the same version of bamboo_ds on all "
                "nodes"
            ) from None


def _records(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "open": tuple(Order(**order) for order in found["open"]),
        "unlisted": {
            id_: Unlisted(Instance(**one["instance"]), one["until"]) for id_, one in found["unlisted"].items()
        },
        "closed": {zone: Closed(**one) for zone, one in found["closed"].items()},
        "strangers": {name: Stranger(**one) for name, one in found["strangers"].items()},
        "known": tuple(found.get("known", ())),  # absent in records of former versions, which outlive a run
    }

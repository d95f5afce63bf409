"""Counts the money of a job in its store: who is there by cloud and store, what they cost by the price book."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bamboo_ds.cloud import keys as fleet_keys
from bamboo_ds.cloud.keys import OVER_KEYS
from bamboo_ds.cloud.meter import Cost, Pace, counted
from bamboo_ds.cloud.port import Holdings
from bamboo_ds.cloud.prices import Machine, PriceBook
from bamboo_ds.elastic import keys
from bamboo_ds.errors import StoreError
from bamboo_ds.plan.cluster import Node
from bamboo_ds.plan.codec import decode
from bamboo_ds.store import Fence, Store

__all__ = ["Bookkeeper"]

_SETTINGS = keys.settings(0)


class Bookkeeper:
    """Keeps the count, as long as its fence holds. It belongs to one thread.

    Args:
        store: of the job.
        fence: of the keeper's election.
        prices: what nodes cost.
        on_cost: is told of each count.
        wall: Unix seconds.
    """

    def __init__(
        self,
        store: Store,
        *,
        fence: Fence,
        prices: PriceBook,
        on_cost: Callable[[Cost], None] | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._fence, self._prices = store, fence, prices
        self._on_cost, self._wall = on_cost, wall
        self._holdings: Holdings | None = None

    def count(self, holdings: Holdings | None) -> Cost:
        """Count up to now, and write it down.

        Args:
            holdings: what the cloud has given, as it was last seen; None when no cloud is asked.

        Raises:
            ConflictError: another keeper was elected.
            StoreUnavailableError: the store does not answer.
        """
        self._holdings = holdings
        before = self._before()
        cost = counted(before, self._machines(), prices=self._prices, now=self._wall(), pace=self._pace())
        if before is not None and before.final and not self._over():
            cost = replace(cost, final=False)  # the job has begun anew
        return self._write(cost)

    def close(self) -> Cost | None:
        """Count for the last time; return the count if it is to be told: the job is over and nobody has told it yet."""
        try:
            cost = self.count(self._holdings)
            if cost.final or not self._over():
                return None
            self._write(replace(cost, final=True))
        except StoreError:
            return None
        return cost if cost.unpriced_seconds < cost.node_seconds else None

    def _before(self) -> Cost | None:
        entry = self._store.get(fleet_keys.COST)
        return None if entry is None else Cost.decode(entry.value)

    def _write(self, cost: Cost) -> Cost:
        self._store.put(fleet_keys.COST, cost.encode(), fence=self._fence)
        if self._on_cost is not None:
            self._on_cost(cost)
        return cost

    def _over(self) -> bool:
        return any(self._store.get(key) is not None for key in OVER_KEYS)

    def _machines(self) -> list[Machine]:
        """Return all that costs money: instances, and nodes that no cloud of ours knows."""
        entries = self._store.list(fleet_keys.NODES).entries
        said = {entry.key.removeprefix(fleet_keys.NODES): _object(entry.value) for entry in entries}
        instances = () if self._holdings is None else self._holdings.instances
        machines = {one.id: Machine(one.type, one.zone, one.spot) for one in instances}
        for node in (decode(Node, entry.value) for entry in self._store.list(keys.NODES).entries):
            who = said.get(node.name, {})
            name = str(who.get("instance") or node.name)
            machines.setdefault(name, Machine(str(who.get("type", "")), str(who.get("zone") or node.zone), node.spot))
        return list(machines.values())

    def _pace(self) -> Pace:
        progress, settings = self._store.get(keys.PROGRESS), self._store.get(_SETTINGS)
        step = None if progress is None else _object(progress.value).get("step")
        flat = {} if settings is None else _object(settings.value).get("settings", {})
        try:
            size = json.loads(flat.get("train_batch_size", "null"))
        except ValueError:
            size = None
        return Pace(step if isinstance(step, int) else None, size if isinstance(size, int) else None)


def _object(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}

"""What a job's store says of its fleet, for people: who keeps it, who is warned, what it costs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from bamboo_ds.cloud import keys as fleet_keys
from bamboo_ds.cloud.meter import Cost
from bamboo_ds.errors import StoreUnavailableError
from bamboo_ds.store import Store

__all__ = ["FleetReport", "fleet_report"]


@dataclass(frozen=True, slots=True)
class FleetReport:
    """A fleet at one moment.

    Attributes:
        keeper: the node whose agent keeps it; None if none does.
        warned: why nodes will be taken away, by name.
        cost: the count of its money; None if nobody counts.
    """

    keeper: str | None = None
    warned: Mapping[str, str] = field(default_factory=dict)
    cost: Cost | None = None

    def as_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        cost = None
        if self.cost is not None:
            means = {"mean_per_hour": self.cost.mean_per_hour, "samples_per_dollar": self.cost.samples_per_dollar}
            cost = {**asdict(self.cost), **means}
        return {"keeper": self.keeper, "warned": dict(self.warned), "cost": cost}


def fleet_report(store: Store) -> FleetReport:
    """Return what is known of the fleet; nothing while the store does not answer."""
    try:
        candidates = store.list(f"{fleet_keys.KEEPER}/").entries
        leaving = store.list(fleet_keys.LEAVING).entries
        cost = store.get(fleet_keys.COST)
    except StoreUnavailableError:
        return FleetReport()
    keeper = min(candidates, key=lambda entry: entry.create_revision, default=None)
    return FleetReport(
        keeper=None if keeper is None else keeper.value.decode(errors="replace"),
        warned={entry.key.removeprefix(fleet_keys.LEAVING): _text(entry.value) for entry in leaving},
        cost=None if cost is None else Cost.decode(cost.value),
    )


def _text(value: bytes) -> str:
    try:
        return str(json.loads(value)["text"])
    except (ValueError, KeyError, TypeError):
        return value.decode(errors="replace")

"""What nodes cost, from the table in the cloud file, else from whoever knows today's prices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bamboo_ds.config.cloud import PriceConfig

__all__ = ["Machine", "PriceBook"]

ALL = "*"


@dataclass(frozen=True, slots=True)
class Machine:
    """What decides about the price of a node; empty for what is not known."""

    type: str
    zone: str
    spot: bool


class PriceBook:
    """Dollars per hour.

    Args:
        table: what is written down, if anything is; it counts first.
        spot: returns today's price by type and zone, None if it knows none.
    """

    def __init__(
        self, table: PriceConfig | None = None, *, spot: Callable[[str, str], float | None] | None = None
    ) -> None:
        self._table, self._spot = table or PriceConfig(), spot

    def price(self, machine: Machine) -> float | None:
        """Return what a machine costs; None if nobody knows."""
        if not machine.spot:
            return self.on_demand(machine)
        written = _lookup(self._table.spot, machine)
        if written is not None or self._spot is None:
            return written
        return self._spot(machine.type, machine.zone)

    def on_demand(self, machine: Machine) -> float | None:
        """Return what the same machine would cost if the cloud did not take it away; None if nobody knows."""
        return _lookup(self._table.on_demand, machine)


def _lookup(table: Mapping[str, float], machine: Machine) -> float | None:
    names = (f"{machine.type}/{machine.zone}", machine.type, machine.zone, ALL)
    return next((table[name] for name in names if name in table), None)

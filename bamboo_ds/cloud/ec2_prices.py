"""What EC2 asks for spot instances now, by type and zone; asked once in a while and remembered."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from bamboo_ds.cloud.ec2_client import Clients
from bamboo_ds.cloud.ec2_errors import request
from bamboo_ds.cloud.trouble import CloudError

__all__ = ["Ec2Prices"]

_FRESH_SECONDS = 1800.0
_FAILED_SECONDS = 300.0
_LINUX = ["Linux/UNIX", "Linux/UNIX (Amazon VPC)"]


class Ec2Prices:
    """Spot prices in dollars per hour. It belongs to one thread.

    Args:
        clients: of boto3.
        wall: Unix seconds.
    """

    def __init__(self, clients: Clients, *, wall: Callable[[], float] = time.time) -> None:
        self._clients, self._wall = clients, wall
        self._prices: dict[tuple[str, str], float] = {}
        self._next_at: dict[str, float] = {}

    def spot(self, type_: str, zone: str) -> float | None:
        """Return the price of a type in a zone; None if EC2 names none, or does not answer."""
        if type_ and self._wall() >= self._next_at.get(type_, 0.0):
            self._ask(type_)
        return self._prices.get((type_, zone))

    def _ask(self, type_: str) -> None:
        self._next_at[type_] = self._wall() + _FRESH_SECONDS
        try:
            client = self._clients("ec2")
            found = request(lambda: self._newest(client, type_))
        except CloudError:  # the keeper tells of a cloud that does not answer
            self._next_at[type_] = self._wall() + _FAILED_SECONDS
            return
        self._prices.update({(type_, zone): price for zone, price in found.items()})

    def _newest(self, client: Any, type_: str) -> dict[str, float]:
        """Return the newest price of each zone: `StartTime` now means those in force now."""
        pages = client.get_paginator("describe_spot_price_history").paginate(
            InstanceTypes=[type_],
            ProductDescriptions=_LINUX,
            StartTime=datetime.fromtimestamp(self._wall(), timezone.utc),
        )
        rows = [row for page in pages for row in page["SpotPriceHistory"]]
        rows.sort(key=lambda row: row["Timestamp"])
        return {row["AvailabilityZone"]: float(row["SpotPrice"]) for row in rows}

"""Counts the money of a job: what it costs now, what it has cost, what the same would have cost on demand.

The count is a record in the store, so it goes on when the keeper dies; what ran meanwhile is counted by what is there
when the next one looks. It is an estimate, by the second and by today's prices: the bill is the cloud's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace

from bamboo_ds.cloud.prices import Machine, PriceBook

__all__ = ["Cost", "Pace", "counted"]

_LONGEST_GAP_SECONDS = 300.0  # between two looks; longer than that nobody was there to know
_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Pace:
    """How far the training is: optimizer steps, and samples in each; None while that is not known."""

    step: int | None = None
    batch_size: int | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """The count.

    Attributes:
        since: when it began, in Unix seconds; likewise `at`, up to when it has counted.
        nodes: that there were at that moment; likewise `per_hour` and `on_demand_per_hour`, in dollars.
        spent: dollars.
        on_demand: dollars that the same would have cost, for the nodes of which that is known.
        node_seconds: all that was counted.
        unpriced_seconds: of these, of nodes whose price nobody knows; they are in no sum.
        samples: trained on meanwhile.
        step: up to which they are counted.
        final: whether the job is over and its cost has been told.
    """

    since: float
    at: float
    nodes: int = 0
    per_hour: float = 0.0
    on_demand_per_hour: float | None = None
    spent: float = 0.0
    on_demand: float | None = None
    node_seconds: float = 0.0
    unpriced_seconds: float = 0.0
    samples: int = 0
    step: int | None = None
    final: bool = False

    @property
    def samples_per_dollar(self) -> float | None:
        """How many samples a dollar has trained on; None before the first."""
        return self.samples / self.spent if self.spent > 0 and self.samples else None

    @property
    def mean_per_hour(self) -> float | None:
        """Dollars per hour since it began; None at its beginning."""
        return self.spent * _HOUR / (self.at - self.since) if self.at > self.since else None

    @property
    def text(self) -> str:
        """The count for people."""
        parts = [f"{self.node_seconds / _HOUR:.2f} node-hours have cost ${self.spent:.2f}"]
        if self.mean_per_hour is not None:
            parts[0] += f", ${self.mean_per_hour:.2f} per hour"
        if self.on_demand is not None:
            parts.append(f"on demand they would have cost ${self.on_demand:.2f}")
        if self.samples_per_dollar is not None:
            parts.append(f"{self.samples_per_dollar:,.0f} samples per dollar")
        if self.unpriced_seconds:
            parts.append(f"without {self.unpriced_seconds / _HOUR:.2f} node-hours whose price is not known")
        return "; ".join(parts)

    def encode(self) -> bytes:
        """Return the text that goes to the store."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, text: bytes) -> Cost | None:
        """Return the count that a text holds; None if it holds none."""
        try:
            found = json.loads(text)
            return cls(**{field.name: found[field.name] for field in fields(cls)})
        except (ValueError, TypeError, KeyError):
            return None


def counted(
    before: Cost | None, machines: Sequence[Machine], *, prices: PriceBook, now: float, pace: Pace | None = None
) -> Cost:
    """Return the count up to now.

    Args:
        before: the count so far; None for none.
        machines: that are there now.
        prices: what they cost.
        now: Unix seconds.
        pace: how far the training is.
    """
    before = before or Cost(now, now)
    seconds = min(max(now - before.at, 0.0), _LONGEST_GAP_SECONDS)
    known = [price for machine in machines if (price := prices.price(machine)) is not None]
    on_demand = [price for machine in machines if (price := prices.on_demand(machine)) is not None]
    per_hour, dearer = sum(known), sum(on_demand) if on_demand else None
    after = replace(
        before,
        at=max(now, before.at),
        nodes=len(machines),
        per_hour=per_hour,
        on_demand_per_hour=dearer,
        spent=before.spent + per_hour * seconds / _HOUR,
        on_demand=before.on_demand if dearer is None else (before.on_demand or 0.0) + dearer * seconds / _HOUR,
        node_seconds=before.node_seconds + len(machines) * seconds,
        unpriced_seconds=before.unpriced_seconds + (len(machines) - len(known)) * seconds,
    )
    return after if pace is None else _trained(after, pace)


def _trained(cost: Cost, pace: Pace) -> Cost:
    """Count the steps since the last look; a step that is smaller than before is one that a checkpoint took back."""
    if pace.step is None:
        return cost
    new = pace.step - cost.step if cost.step is not None else pace.step
    return replace(cost, step=pace.step, samples=cost.samples + max(new, 0) * (pace.batch_size or 0))

"""Holds a simulated run against a real one on the same trace, whose costs the simulator was given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bamboo_ds.errors import ConfigError
from bamboo_ds.simulator.comparison import Figures

__all__ = ["TOLERANCE", "Validation", "validate"]

TOLERANCE = 0.1
"""How far the throughput may be off, either way."""


@dataclass(frozen=True, slots=True)
class Validation:
    """What the comparison says.

    Attributes:
        throughput_ratio: simulated over measured.
        failovers: simulated and measured; likewise `reconfigurations`.
    """

    throughput_ratio: float
    failovers: tuple[int, int]
    reconfigurations: tuple[int, int]

    @property
    def ok(self) -> bool:
        """Whether the throughput is within the tolerance and the decisions were as many."""
        decisions = (self.failovers, self.reconfigurations)
        return abs(self.throughput_ratio - 1) <= TOLERANCE and all(simulated == real for simulated, real in decisions)

    def as_json(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "ok": self.ok,
            "throughput_ratio": float(f"{self.throughput_ratio:.4g}"),
            "failovers": list(self.failovers),
            "reconfigurations": list(self.reconfigurations),
        }


def validate(simulated: Figures, measured: Mapping[str, Any]) -> Validation:
    """Compare.

    Args:
        simulated: figures of the policy `bamboo`.
        measured: of the real cluster: `samples_per_second`, `failovers`, `reconfigurations`.

    Raises:
        ConfigError: a measured figure is missing or cannot be right.
    """
    try:
        throughput = float(measured["samples_per_second"])
        failovers, reconfigurations = int(measured["failovers"]), int(measured["reconfigurations"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"the measured figures lack or garble one: {error}") from None
    if throughput <= 0:
        raise ConfigError(f"samples_per_second = {throughput:g} of the real cluster: nothing was trained")
    return Validation(
        throughput_ratio=simulated.throughput / throughput,
        failovers=(round(simulated.failovers), failovers),
        reconfigurations=(round(simulated.reconfigurations), reconfigurations),
    )

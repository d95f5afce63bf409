"""Every number of the simulation that is not of the model or of the trace, with where it comes from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any

from bamboo_ds.errors import ConfigError

__all__ = ["Constants"]


def _of(default: float, source: str) -> Any:
    return field(default=default, metadata={"source": source})


_BENCH = "docs/cluster.md, `bamboo-ds bench {}`"
_ARTIFACT = "artifact of the Bamboo paper, its simulator"
_OOBLECK = "artifact of the Oobleck paper, its simulator's figures of Varuna for BERT-large"


@dataclass(frozen=True, slots=True)
class Constants:
    """Seconds, bytes per second and dollars. `sources` tells where each comes from.

    Raises:
        ConfigError: a value is negative or not finite, or a bandwidth is 0.
    """

    # The nodes
    spot_price: float = _of(0.918, "the paper: dollars per GPU hour")
    on_demand_price: float = _of(3.06, "the paper: dollars per GPU hour")
    warm_up_seconds: float = _of(45.0, f"{_ARTIFACT}: from the node to a worker that may get a stage")
    patience_seconds: float = _of(30.0, "default of the coordinator's start rule")

    # The network
    latency_seconds: float = _of(0.0001, "typical of one zone")
    bandwidth: float = _of(1.25e9, "p3.2xlarge: up to 10 Gb/s")
    zone_latency_seconds: float = _of(0.001, "typical between zones of a region")
    zone_bandwidth: float = _of(0.625e9, "AWS: 5 Gb/s for one flow outside of a placement group")

    # Bamboo
    commit_seconds: float = _of(0.005, _BENCH.format("store"))
    commit_seconds_per_pipeline: float = _of(0.0015, f"{_BENCH.format('store')}: 9, 25, 101 ms with 4, 16, 64")
    detect_seconds: float = _of(0.09, _BENCH.format("detect"))
    lease_seconds: float = _of(
        10.0, "default of `--ttl`: for what no two neighbours can report, and for the coordinator"
    )
    reroute_seconds: float = _of(0.1, "docs/cluster.md: some 100 ms for new links")
    reconfigure_seconds: float = _of(0.3, "bound of `bamboo-ds bench reconfigure`, besides twice the transfer")
    transfer_factor: float = _of(2.0, "bound of `bamboo-ds bench reconfigure`: of bytes per worker over bandwidth")

    # Checkpoints
    checkpoint_seconds: float = _of(600.0, "assumed: interval of `bamboo.checkpoint`")
    storage_bandwidth: float = _of(1e8, "assumed: bytes per second and worker, to and from S3")
    copy_bandwidth: float = _of(6e9, "PCIe 3 x16 to host memory, half of its peak")

    # Others
    restart_seconds: float = _of(86.0, f"{_OOBLECK}: 76 s of restart and 10 s of rendezvous")
    restart_checkpoint_seconds: float = _of(240.0, f"{_OOBLECK}: every 10 steps of 24 s")
    varuna_checkpoint_stall_seconds: float = _of(15.8, _OOBLECK)
    drop_seconds: float = _of(20.0, f"{_ARTIFACT}: rendezvous of BERT; until a dropped pipeline is gone or back")
    oobleck_seconds: float = _of(20.0, f"{_ARTIFACT}, taken for Oobleck too: we know no published figure")

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            positive = "bandwidth" in each.name or each.name.endswith("checkpoint_seconds")
            if not 0 <= value < math.inf or (positive and value == 0):
                raise ConfigError(f"constant {each.name} = {value:g}: must be {'above' if positive else 'at least'} 0")

    def with_values(self, values: dict[str, float]) -> Constants:
        """Return them with some replaced.

        Raises:
            ConfigError: there is no such constant.
        """
        known = [each.name for each in fields(self)]
        for name in values:
            if name not in known:
                raise ConfigError(f"there is no constant {name}: it must be one of {', '.join(known)}")
        return replace(self, **values)

    def table(self) -> dict[str, dict[str, Any]]:
        """Return value and source of each."""
        return {
            each.name: {"value": getattr(self, each.name), "source": each.metadata["source"]} for each in fields(self)
        }

"""Who and where this machine is, as its cloud says: instance, zone, type, and whether it may be taken away."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from bamboo_ds.cloud.metadata import CloudName, Metadata, MetadataError

__all__ = ["Identity", "identify"]

_SHARES_OF_DEADLINE = 0.6
"""After so much of the time no further request is made: each may take as long as its own time-out."""

_EC2 = "/latest/meta-data/"
_GCP = "/computeMetadata/v1/instance/"
_AZURE = "/metadata/instance/compute?api-version=2021-02-01"


@dataclass(frozen=True, slots=True)
class Identity:
    """What a cloud says of a machine; empty for what it does not.

    Attributes:
        cloud: which; empty off a cloud.
        instance: its id there.
        zone: where it runs.
        type: such as g5.xlarge.
        spot: whether the cloud may take it away; None if it does not say.
    """

    cloud: str = ""
    instance: str = ""
    zone: str = ""
    type: str = ""
    spot: bool | None = None

    def encode(self) -> bytes:
        """Return the text that goes to the store."""
        return json.dumps(asdict(self)).encode()


def identify(
    metadata: Metadata | None, *, deadline_seconds: float = 1.0, now: Callable[[], float] = time.monotonic
) -> Identity:
    """Ask a machine's cloud who it is; what is not answered in time stays empty.

    Args:
        metadata: the cloud's server; None off a cloud.
        deadline_seconds: after which no more is asked.
        now: seconds of some clock.
    """
    if metadata is None:
        return Identity()
    end = now() + deadline_seconds * _SHARES_OF_DEADLINE

    def ask(path: str) -> str:
        if now() > end:
            raise MetadataError("the deadline is over")
        return metadata.get(path) or ""

    try:
        return _READERS[metadata.cloud](ask)
    except MetadataError:
        return Identity(metadata.cloud)


def _ec2(ask: Callable[[str], str]) -> Identity:
    life = ask(f"{_EC2}instance-life-cycle")
    return Identity(
        cloud="ec2",
        instance=ask(f"{_EC2}instance-id"),
        zone=ask(f"{_EC2}placement/availability-zone"),
        type=ask(f"{_EC2}instance-type"),
        spot=life == "spot" if life else None,
    )


def _gcp(ask: Callable[[str], str]) -> Identity:
    preemptible = ask(f"{_GCP}scheduling/preemptible")
    return Identity(
        cloud="gcp",
        instance=ask(f"{_GCP}name"),
        zone=ask(f"{_GCP}zone").rpartition("/")[2],
        type=ask(f"{_GCP}machine-type").rpartition("/")[2],
        spot=preemptible == "TRUE" if preemptible else None,
    )


def _azure(ask: Callable[[str], str]) -> Identity:
    try:
        found = json.loads(ask(_AZURE))
        location, zone = str(found.get("location", "")), str(found.get("zone", ""))
        return Identity(
            cloud="azure",
            instance=str(found.get("name", "")),
            zone=f"{location}-{zone}" if zone else location,
            type=str(found.get("vmSize", "")),
            spot=found.get("priority") == "Spot",
        )
    except (ValueError, AttributeError):
        return Identity("azure")


_READERS: Mapping[CloudName, Callable[[Callable[[str], str]], Identity]] = {"ec2": _ec2, "gcp": _gcp, "azure": _azure}

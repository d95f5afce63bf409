"""Clients of boto3 that give up within seconds. boto3 is imported when a cloud is asked for the first time."""

from __future__ import annotations

import importlib.util
from typing import Any

from bamboo_ds.cloud.ec2_errors import request
from bamboo_ds.errors import ConfigError

__all__ = ["Clients", "check_boto3"]

_CONNECT_SECONDS, _READ_SECONDS = 5.0, 25.0
_MOST_TRIES = 1  # the keeper repeats itself, with more patience, and after a look at what came of it


def check_boto3() -> None:
    """Check that boto3 is there, without the second that its import takes.

    Raises:
        ConfigError: it is not.
    """
    if importlib.util.find_spec("boto3") is None:
        raise ConfigError("the provider ec2 needs boto3: pip install 'bamboo_ds[aws]'")


class Clients:
    """Makes the clients of one region, each when it is asked for.

    Args:
        region: None for boto3's own.
    """

    def __init__(self, region: str | None) -> None:
        self._region = region
        self._made: dict[str, Any] = {}

    def __call__(self, service: str) -> Any:
        """Return the client of a service.

        Raises:
            CloudError: boto3 knows no region.
        """
        if service not in self._made:
            self._made[service] = request(self._make, service=service)
        return self._made[service]

    def _make(self, *, service: str) -> Any:
        import boto3
        from botocore.config import Config

        config = Config(
            connect_timeout=_CONNECT_SECONDS,
            read_timeout=_READ_SECONDS,
            retries={"total_max_attempts": _MOST_TRIES, "mode": "standard"},
        )
        return boto3.session.Session(region_name=self._region).client(service, config=config)

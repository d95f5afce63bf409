"""The provider of `--local-nodes`: asks the launcher of the emulated nodes, which is their cloud, over a Unix socket.

One request a connection, one JSON object each way, each on a line.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bamboo_ds.cloud.port import Grant, Holdings, Instance, Order
from bamboo_ds.cloud.trouble import CloudError, Trouble

__all__ = ["LocalProvider"]

_TIMEOUT_SECONDS = 5.0
_MOST_BYTES = 1_000_000


class LocalProvider:
    """The provider.

    Args:
        path: of the launcher's socket.
        zones: where it starts nodes.
    """

    def __init__(self, path: Path, *, zones: tuple[str, ...]) -> None:
        self._path, self._zones = path, zones

    @property
    def zones(self) -> tuple[str, ...]:
        """Where nodes can be ordered."""
        return self._zones

    def look(self) -> Holdings:
        """Return the nodes of this machine."""
        found = self._ask({"do": "look"})
        instances = tuple(Instance(name, zone, order=token) for name, zone, token in found["instances"])
        return Holdings(instances, dict(found["under_way"]))

    def order(self, order: Order, *, again: bool) -> Grant:
        """Ask for nodes; the launcher knows its tokens."""
        found = self._ask({"do": "order", "token": order.token, "nodes": order.nodes, "zone": order.zone})
        reason = found["reason"]
        trouble = (
            Trouble("NoCapacity", reason, "none is needed: it is asked again later", order.zone) if reason else None
        )
        return Grant(promised=found["promised"], trouble=trouble)

    def release(self, instance: str) -> None:
        """End a node."""
        self._ask({"do": "release", "instance": instance})

    def finish(self) -> None:
        """Start no more nodes."""
        self._ask({"do": "finish"})

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Make a request.

        Raises:
            CloudError: no answer in time.
        """
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(_TIMEOUT_SECONDS)
                connection.connect(str(self._path))
                connection.sendall(json.dumps(request).encode() + b"\n")
                with connection.makefile("rb") as answer:
                    found: dict[str, Any] = json.loads(answer.readline(_MOST_BYTES))
                    return found
        except (OSError, ValueError) as error:
            text, remedy = f"the launcher of the local nodes does not answer ({error})", "none is needed"
            raise CloudError(Trouble("NoLauncher", text, remedy), indefinite=True) from None

"""The cloud of emulated nodes: the launcher's side of `cloud.local`, on a pretend market.

It has no thread: while the launcher waits it lets it `go_on`.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from bamboo_ds.cloud.pretend import PretendMarket
from bamboo_ds.elastic.preemption import How
from bamboo_ds.errors import ConfigError

__all__ = ["LocalCloud", "Nodes"]

_MOST_BYTES = 100_000
_BACKLOG = 64
_ANSWER_SECONDS = 1.0


class Nodes(Protocol):
    """The emulated nodes, as their cloud sees them: a `LocalCluster`."""

    @property
    def live(self) -> Collection[str]:
        """Names of the nodes that run."""
        ...

    @property
    def over(self) -> bool:
        """Whether the job is over."""
        ...

    def add(self, *, zone: str | None = None) -> str:
        """Start a node and return its name."""
        ...

    def kill(self, node: str, how: How = "kill") -> float:
        """Break a node."""
        ...


class LocalCloud:
    """Answers the agents of local nodes. Use it in a `with` block, or `close` it.

    Args:
        market: what it grants.
        path: of its socket.
        now: seconds of some clock; the market's begins with `begin`.
    """

    def __init__(self, market: PretendMarket, path: Path, *, now: Callable[[], float] = time.monotonic) -> None:
        self.market, self._path, self._clock = market, path, now
        self._began: float | None = None
        self._released: list[str] = []
        self._finished = False
        self._partial: dict[socket.socket, bytes] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        self._listener.bind(str(path))
        self._listener.listen(_BACKLOG)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def close(self) -> None:
        """Answer no more. May be called again."""
        for connection in [self._listener, *self._partial]:
            connection.close()
        self._partial.clear()
        self._selector.close()
        self._path.unlink(missing_ok=True)

    def __enter__(self) -> LocalCloud:
        """Answer."""
        return self

    def __exit__(self, *error: object) -> None:
        """Answer no more."""
        self.close()

    def begin(self, nodes: Mapping[str, str]) -> None:
        """Begin the market's time, with the nodes that there are: zones by name."""
        for name, zone in nodes.items():
            self.market.add(name, zone)
        self._began = self._clock()

    def _now(self) -> float:
        return 0.0 if self._began is None else self._clock() - self._began

    def serve(self) -> None:
        """Answer whoever has asked; waits for nobody."""
        while found := self._selector.select(0):
            for key, _ in found:
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._hear(key.fileobj)  # type: ignore[arg-type]

    def go_on(self, nodes: Nodes) -> bool:
        """Answer who has asked, and do what market and job want; return whether more nodes will come."""
        self.serve()
        market, now = self.market, self._now()
        market.end(set(market.running) - set(nodes.live))
        for name in market.reclaim(now):
            _end(nodes, name, "kill")
        for name in self._released:
            _end(nodes, name, "term")
        self._released.clear()
        if self._finished or nodes.over:  # a node that comes now would begin the job once more
            return False
        market.start(now, name=lambda zone: nodes.add(zone=zone))
        return bool(market.promised)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._partial[connection] = b""
            self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, connection: socket.socket) -> None:
        """Read from a connection; answer and close it once a whole line is there, or nobody is at its other end."""
        try:
            data = connection.recv(_MOST_BYTES)
        except OSError:
            data = b""
        text = self._partial[connection] = self._partial[connection] + data
        if data and b"\n" not in text and len(text) < _MOST_BYTES:
            return
        self._selector.unregister(connection)
        del self._partial[connection]
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_ANSWER_SECONDS)
            connection.sendall(json.dumps(self._answer(text)).encode() + b"\n")

    def _answer(self, text: bytes) -> dict[str, Any]:
        try:
            request = json.loads(text)
            return self._do(str(request["do"]), request)
        except (ValueError, KeyError, TypeError) as error:
            return {"error": repr(error)}

    def _do(self, what: str, request: Mapping[str, Any]) -> dict[str, Any]:
        market = self.market
        if what == "order":
            answer = market.order(request["token"], int(request["nodes"]), request["zone"], now=self._now())
            return {"promised": answer.promised, "reason": answer.reason}
        if what == "release":
            market.end([request["instance"]])
            self._released.append(str(request["instance"]))
        elif what == "finish":
            self._finished = True
        instances = [[name, zone, market.token(name)] for name, zone in sorted(market.running.items())]
        return {"instances": instances, "under_way": dict(market.promised)}


def _end(nodes: Nodes, name: str, how: How) -> None:
    """End a node, which may have ended by itself meanwhile, as all do when the job has finished."""
    with contextlib.suppress(ConfigError):
        nodes.kill(name, how)

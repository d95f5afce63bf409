"""Plain connections between two workers, for much data at once.

A gloo group costs several round trips to the store and a thread at either end, and all groups of a process share one
thread that moves their bytes. State travels between many pairs at the same time and once only, so each worker has a
*door* instead, of which all others know address and token, and a connection that is made in one round trip. Its waits
end like all others: on the data, at the deadline, or with news of the plan.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import NoReturn

from bamboo_ds.comm.waits import Waits
from bamboo_ds.errors import PeerLostError

_LOOK_SECONDS = 0.05  # between two looks at the plan, while no data moves
_GREETING_SECONDS = 2.0  # a stranger who says nothing holds others up for so long
_BACKLOG = 1024
_GREETING = struct.Struct("<32sq")


@dataclass(frozen=True, slots=True)
class Sign:
    """What others must know of a door.

    Attributes:
        host: address of it.
        port: likewise.
        token: 32 characters that a caller must name.
    """

    host: str
    port: int
    token: str


class Connection:
    """One end of a connection.

    Args:
        made: the connected socket, which now belongs to this.
        peer: id of the other worker.
        waits: how waits end.
    """

    def __init__(self, made: socket.socket, *, peer: int, waits: Waits) -> None:
        self._socket, self.peer, self._waits = made, peer, waits
        made.settimeout(_LOOK_SECONDS)

    def put(self, data: memoryview) -> None:
        """Send bytes.

        Raises:
            PeerLostError: the peer is gone, or has taken nothing for the time-out.
            PlanChangedError: there is a newer plan.
        """
        self._move(data, self._socket.send)

    def take(self, room: memoryview) -> None:
        """Receive bytes until the room is full; raises as `put` does."""
        self._move(room, self._receive)

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def _receive(self, room: memoryview) -> int:
        received = self._socket.recv_into(room)
        if not received:
            raise ConnectionResetError("it was closed there")
        return received

    def _move(self, data: memoryview, some: Callable[[memoryview], int]) -> None:
        self._waits.check()
        deadline = time.monotonic() + self._waits.timeout_seconds
        while data.nbytes:
            try:
                data = data[some(data) :]
                deadline = time.monotonic() + self._waits.timeout_seconds
            except TimeoutError:
                _look(self._waits, deadline, f"worker {self.peer} moved no state")
            except OSError as error:
                _lose(self._waits, self.peer, error)


class Door:
    """Where other workers reach this one.

    Args:
        address: of this node; empty for that of its own name.
        waits: how waits end.

    Attributes:
        sign: for the others.
    """

    def __init__(self, address: str, *, waits: Waits) -> None:
        self._waits = waits
        self._listener = _listener(address)
        self._listener.settimeout(_LOOK_SECONDS)
        host, port = self._listener.getsockname()[:2]
        self.sign = Sign(host, port, secrets.token_hex(16))

    def answer(self, expected: set[int]) -> Connection:
        """Wait for one of some workers to call; strangers are sent away.

        Raises:
            PeerLostError: none of them calls in time.
            PlanChangedError: there is a newer plan.
        """
        deadline = time.monotonic() + self._waits.timeout_seconds
        while True:
            try:
                made, _ = self._listener.accept()
            except TimeoutError:
                _look(self._waits, deadline, f"none of workers {sorted(expected)} connected")
                continue
            caller = self._caller(made)
            if caller in expected:
                return Connection(made, peer=caller, waits=self._waits)
            made.close()

    def _caller(self, made: socket.socket) -> int | None:
        """Return who calls; None if it is a stranger."""
        deadline, greeting = time.monotonic() + _GREETING_SECONDS, b""
        with suppress(OSError):
            while (missing := _GREETING.size - len(greeting)) and (remaining := deadline - time.monotonic()) > 0:
                made.settimeout(remaining)
                if not (part := made.recv(missing)):
                    break
                greeting += part
        if len(greeting) < _GREETING.size:
            return None
        token, caller = _GREETING.unpack(greeting)
        return int(caller) if secrets.compare_digest(token, self.sign.token.encode()) else None

    def close(self) -> None:
        """Answer no more. May be called again."""
        self._listener.close()


def call(sign: Sign, *, caller: int, peer: int, waits: Waits) -> Connection:
    """Connect to the door of another worker.

    Args:
        sign: of the door.
        caller: id of this worker.
        peer: id of the other.
        waits: how waits end.

    Raises:
        PeerLostError: it does not answer in time.
        PlanChangedError: there is a newer plan.
    """
    deadline = time.monotonic() + waits.timeout_seconds
    with ExitStack() as opened:
        try:
            family, kind, protocol, _, place = _resolved(sign.host, sign.port)
            made = socket.socket(family, kind, protocol)
            opened.callback(made.close)
            made.setblocking(False)
            made.connect_ex(place)
            while not _is_writable(made):
                _look(waits, deadline, f"worker {peer} at {sign.host} took no connection")
            if trouble := made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(trouble, os.strerror(trouble))
        except OSError as error:
            _lose(waits, peer, error)
        connection = Connection(made, peer=peer, waits=waits)
        connection.put(memoryview(_GREETING.pack(sign.token.encode(), caller)))
        opened.pop_all()
    return connection


def _listener(address: str) -> socket.socket:
    try:
        family, *_, place = _resolved(address or socket.gethostname(), 0)
        return socket.create_server(place[:2], family=family, backlog=_BACKLOG)
    except OSError:
        if address:
            raise
        return socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)  # a name that cannot be resolved, as with gloo


def _resolved(host: str, port: int) -> tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int]]:
    family, kind, protocol, name, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return family, kind, protocol, name, (str(place[0]), int(place[1]))


def _is_writable(made: socket.socket) -> bool:
    poll = select.poll()
    poll.register(made, select.POLLOUT)
    return bool(poll.poll(1000 * _LOOK_SECONDS))


def _look(waits: Waits, deadline: float, trouble: str) -> None:
    """Look at the plan and the clock while nothing moves."""
    waits.check()
    if time.monotonic() > deadline:
        raise PeerLostError(
            f"{trouble} for {waits.timeout_seconds:g} s; if it is only slow, raise bamboo.timeout_seconds"
        )


def _lose(waits: Waits, peer: int, error: OSError) -> NoReturn:
    lost = PeerLostError(f"the connection to worker {peer} broke: {error.strerror or error}")
    lost.__cause__ = error
    waits.lose(lost)

"""Connections for state: who is let in, and how every wait on one ends."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from bamboo_ds.comm.doors import Connection, Door, call
from bamboo_ds.comm.waits import Waits
from bamboo_ds.errors import BambooError, PeerLostError, PlanChangedError

ME, PEER = 3, 5


def waits(*, check: Callable[[], None] = lambda: None, timeout_seconds: float = 10.0) -> Waits:
    return Waits(check=check, timeout_seconds=timeout_seconds)


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door("127.0.0.1", waits=waits(timeout_seconds=1.0))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def closed_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close every connection that a test has opened."""
    begin, opened = Connection.__init__, list[Connection]()

    def beginning(self: Connection, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        opened.append(self)

    monkeypatch.setattr(Connection, "__init__", beginning)
    yield
    for connection in opened:
        connection.close()


def pair(door: Door, *, ours: Waits, theirs: Waits) -> tuple[Connection, Connection]:
    """Return the caller's end and the other."""
    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(door.answer, {PEER})
        calling = call(door.sign, caller=PEER, peer=ME, waits=theirs)
        connection = answered.result()
    connection._waits = ours
    return calling, connection


def test_bytes_of_any_number_arrive_in_order(door: Door) -> None:
    calling, answering = pair(door, ours=waits(), theirs=waits())
    sent = bytes(range(256)) * 40_000
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(lambda: [calling.put(memoryview(part)) for part in (sent, b"", sent[:1])])
        room = bytearray(len(sent) + 1)
        answering.take(memoryview(room))
        sending.result()
    assert room == sent + sent[:1]
    assert answering.peer == PEER


@pytest.mark.parametrize("greeting", [b"", b"GET / HTTP/1.1\r\n\r\n", b"x" * 40, b"x" * 400])
def test_a_stranger_is_sent_away_and_the_worker_behind_it_let_in(door: Door, greeting: bytes) -> None:
    with socket.create_connection((door.sign.host, door.sign.port)) as stranger, ThreadPoolExecutor(1) as pool:
        stranger.sendall(greeting)
        stranger.shutdown(socket.SHUT_WR)
        answered = pool.submit(door.answer, {PEER})
        call(door.sign, caller=PEER, peer=ME, waits=waits())
        assert answered.result().peer == PEER


def test_a_worker_who_is_not_expected_is_sent_away(door: Door) -> None:
    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(door.answer, {PEER})
        early = call(door.sign, caller=11, peer=ME, waits=waits())
        with pytest.raises(PeerLostError, match="connection to worker 3 broke"):
            early.take(memoryview(bytearray(1)))
        call(door.sign, caller=PEER, peer=ME, waits=waits())
        answered.result()


def test_nobody_calls(door: Door) -> None:
    with pytest.raises(PeerLostError, match=r"none of workers \[5, 8\] connected for 1 s; if it is only slow, raise"):
        door.answer({PEER, 8})


def test_a_door_that_is_closed(door: Door) -> None:
    door.close()
    with pytest.raises(PeerLostError, match="connection to worker 3 broke: Connection refused"):
        call(door.sign, caller=PEER, peer=ME, waits=waits())


@pytest.mark.parametrize("way", ["put", "take"])
@pytest.mark.parametrize("end", ["closed", "silent", "news"])
def test_every_wait_on_a_peer_ends(door: Door, way: str, end: str) -> None:
    changed = threading.Event()

    def check() -> None:
        if changed.is_set():
            raise PlanChangedError("plan 0.0 was replaced by 0.1")

    calling, answering = pair(door, ours=waits(check=check, timeout_seconds=1.0), theirs=waits())
    if end == "closed":
        threading.Timer(0.2, calling.close).start()
    elif end == "news":
        threading.Timer(0.2, changed.set).start()
    began, much = time.monotonic(), memoryview(bytearray(64 << 20))
    with pytest.raises(BambooError) as caught:
        getattr(answering, way)(much)
    seconds = time.monotonic() - began
    told = {"closed": "worker 5 broke", "silent": "worker 5 moved no state for 1 s", "news": "replaced by 0.1"}
    assert told[end] in str(caught.value)
    assert (0.9 if end == "silent" else 0.1) < seconds < (2.0 if end == "silent" else 0.9)

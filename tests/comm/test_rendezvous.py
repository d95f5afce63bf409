"""Waits on the rendezvous store end: with the key, at the deadline, or when the plan has changed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as torch_distributed

from bamboo_ds.cli.bench.workers import WorkerResult, values
from bamboo_ds.comm.groups import GroupFactory
from bamboo_ds.comm.rendezvous import RendezvousStore
from bamboo_ds.errors import PeerLostError

Run = Callable[..., list[WorkerResult]]


class PlanChangedError(RuntimeError):
    """Raised by a check, as a plan source does."""


def store(timeout_seconds: float = 5.0, check: Any = lambda: None) -> RendezvousStore:
    return RendezvousStore(torch_distributed.HashStore(), timeout_seconds=timeout_seconds, check=check)


def test_what_is_written_is_read() -> None:
    keys = store()
    keys.set("text", "héllo")
    keys.set("bytes", b"\x00\xff")
    assert (keys.get("text"), keys.get("bytes")) == ("héllo".encode(), b"\x00\xff")
    assert (keys.add("count", 2), keys.add("count", 3)) == (2, 5)
    assert keys.check(["text"])
    assert not keys.check(["text", "missing"])


def test_a_wait_ends_when_the_key_appears() -> None:
    keys = store()
    threading.Timer(0.1, lambda: keys.set("late", "x")).start()
    started = time.monotonic()
    assert keys.get("late") == b"x"
    assert 0.05 < time.monotonic() - started < 2


@pytest.mark.parametrize("ask", [lambda s: s.get("never"), lambda s: s.wait(["never"], timedelta(seconds=0.2))])
def test_a_wait_ends_at_its_deadline(ask: Any) -> None:
    started = time.monotonic()
    with pytest.raises(PeerLostError, match=r"did not appear within 0.2 s \(waited for \['never'\]\)"):
        ask(store(timeout_seconds=0.2))
    assert 0.15 < time.monotonic() - started < 2


def test_set_timeout_moves_the_deadline() -> None:
    keys = store(timeout_seconds=60)
    keys.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(PeerLostError, match=r"within 0\.1 s"):
        keys.get("never")


def changing() -> Any:
    """Return a check that raises from its third call on."""
    calls = [0]

    def check() -> None:
        calls[0] += 1
        if calls[0] > 2:
            raise PlanChangedError("a newer plan")

    return check


def test_a_wait_ends_when_the_plan_changes() -> None:
    started = time.monotonic()
    with pytest.raises(PlanChangedError):
        store(timeout_seconds=60, check=changing()).get("never")
    assert time.monotonic() - started < 2


def test_the_construction_of_a_group_ends_with_the_plan_or_the_deadline(workers: Run) -> None:
    def make(timeout_seconds: float, check: Any) -> tuple[str, float]:
        backing = torch_distributed.HashStore()
        factory = GroupFactory(backing, prefix="p", worker=0, timeout_seconds=timeout_seconds, check=check)
        started = time.monotonic()
        try:
            factory.host("pair", (0, 1))
        except (PeerLostError, PlanChangedError) as error:
            return type(error).__name__, time.monotonic() - started
        return "no error", 0.0

    def both(rank: int) -> list[tuple[str, float]]:
        return [make(60.0, changing()), make(0.3, lambda: None)]

    # In a fork: gloo starts threads, and a process with threads cannot fork workers for the tests after this one.
    ends = values(workers(both, 1, timeout_seconds=20))[0]
    assert all(kind in ("PeerLostError", "PlanChangedError") and seconds < 5 for kind, seconds in ends)

"""The cluster's store has the calls of torch's, and waits on it are woken rather than asked again and again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from bamboo_ds.elastic.key_value import StoreKeys
from bamboo_ds.errors import PeerLostError, PlanChangedError, StoreUnavailableError
from bamboo_ds.store import MemoryServer, MemoryStore
from bamboo_ds.world.rendezvous import RendezvousStore, keys_below
from tests.world.cluster import at_most, start


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer()


@pytest.fixture
def store(server: MemoryServer) -> MemoryStore:
    return MemoryStore(server=server)


@pytest.fixture
def keys(store: MemoryStore) -> StoreKeys:
    return StoreKeys(store, prefix="rdzv/")


def test_what_is_written_is_read_below_its_prefix(store: MemoryStore, keys: StoreKeys) -> None:
    keys.set("text", "héllo")
    keys.set("bytes", b"\x00\xff")
    assert (keys.get("text"), keys.get("bytes")) == ("héllo".encode(), b"\x00\xff")
    assert (keys.add("count", 2), keys.add("count", 3)) == (2, 5)
    assert keys.check(["text", "count"])
    assert not keys.check(["text", "missing"])
    assert [entry.key for entry in store.list().entries] == ["rdzv/bytes", "rdzv/count", "rdzv/text"]
    with pytest.raises(KeyError, match="rdzv/missing"):
        keys.get("missing")
    assert keys.delete_key("text")
    assert not keys.delete_key("text")
    assert not keys.check(["text"])


def test_compare_set_does_what_torch_does(keys: StoreKeys) -> None:
    import torch.distributed as torch_distributed

    for torch_like in (keys, torch_distributed.HashStore()):
        assert torch_like.compare_set("a", "other", "x") == b"other", "there is no such key"
        assert not torch_like.check(["a"])
        assert torch_like.compare_set("a", "", "first") == b"first"
        assert torch_like.compare_set("a", "", "second") == b"first"
        assert torch_like.compare_set("a", "first", "second") == b"second"
        assert torch_like.get("a") == b"second"


def test_a_key_that_may_change_is_read_anew_and_one_that_is_written_once_is_not(
    server: MemoryServer, keys: StoreKeys
) -> None:
    below = keys.below("group/")
    for one in (keys, below):
        one.set("key", "old")
        assert one.await_keys(["key"], timeout_seconds=1)
    MemoryStore(server=server).put("rdzv/key", b"new")
    assert keys.get("key") == b"new"
    server.reachable = False
    assert below.get("key") == b"old"
    assert below.check(["key"])
    assert below.await_keys(["key"], timeout_seconds=0)
    with pytest.raises(StoreUnavailableError):
        keys.get("key")


def test_a_wait_ends_when_the_last_key_appears_or_the_time_is_over(server: MemoryServer, keys: StoreKeys) -> None:
    other = MemoryStore(server=server)
    keys.set("here", "x")
    wait = start(lambda: keys.await_keys(["here", "late"], timeout_seconds=5))
    with at_most(0.1):
        other.put("rdzv/late", b"y")
        wait.end()
    assert wait.result is True
    with at_most(0.5):
        assert not keys.await_keys(["never"], timeout_seconds=0.1)
    keys.delete_key("late")
    assert not keys.await_keys(["late"], timeout_seconds=0.1)


def test_waiting_asks_the_store_once(store: MemoryStore, keys: StoreKeys) -> None:
    asked: list[str] = []
    for name in ("get", "list", "transact"):
        call = getattr(store, name)
        setattr(
            store,
            name,
            lambda *args, _name=name, _call=call, **options: (asked.append(_name), _call(*args, **options))[1],
        )
    below = keys.below("group/")
    for _ in range(20):
        below.await_keys(["late"], timeout_seconds=0.01)
    below.set("late", "x")
    assert below.await_keys(["late"], timeout_seconds=1)
    assert below.get("late") == b"x"
    assert asked == ["list", "transact"]


def test_a_rest_ends_the_watch_and_the_next_wait_begins_another(server: MemoryServer, keys: StoreKeys) -> None:
    keys.await_keys(["a"], timeout_seconds=0)
    keys.rest()
    keys.rest()
    other = MemoryStore(server=server)
    other.put("rdzv/a", b"1")
    other.compact(other.list().revision)
    assert keys.await_keys(["a"], timeout_seconds=1)
    other.put("rdzv/b", b"1")
    other.put("rdzv/c", b"1")
    other.compact(other.list().revision)
    assert keys.await_keys(["b", "c"], timeout_seconds=1), "it lists again"


def test_no_wait_holds_another_up(server: MemoryServer, keys: StoreKeys) -> None:
    other = MemoryStore(server=server)
    never = start(lambda: keys.await_keys(["never"], timeout_seconds=2))
    waits = [start(lambda name=name: keys.await_keys([name], timeout_seconds=2)) for name in "abc"]
    with at_most(0.3):
        for name, wait in zip("cba", reversed(waits), strict=True):
            other.put(f"rdzv/{name}", b"x")
            assert wait.end().result is True
    keys.rest()
    other.put("rdzv/never", b"x")
    with at_most(0.3):
        assert never.end().result is True, "it listens again by itself"


# ---- under a rendezvous ----------------------------------------------------------------------------------------


def rendezvous(keys: StoreKeys, *, check: Callable[[], None] = lambda: None, seconds: float = 5.0) -> RendezvousStore:
    return RendezvousStore(keys_below(keys, "group/"), timeout_seconds=seconds, check=check)


def test_a_rendezvous_waits_for_news_and_ends_with_the_plan_or_the_deadline(keys: StoreKeys) -> None:
    changed: list[int] = []

    def check() -> None:
        if changed:
            raise PlanChangedError("a newer plan")

    waiting = rendezvous(keys, check=check)
    wait = start(lambda: waiting.get("late"))
    with at_most(0.1):
        rendezvous(keys).set("late", "x")
        wait.end()
    assert wait.result == b"x"
    wait = start(lambda: waiting.get("never"))
    with at_most(0.15):
        changed.append(1)
        wait.end()
    assert isinstance(wait.error, PlanChangedError)
    with pytest.raises(PeerLostError, match=r"did not appear within 0.2 s \(waited for \['never'\]\)"):
        rendezvous(keys, seconds=0.2).get("never")


@pytest.mark.parametrize("call", [lambda r: r.set("a", "x"), lambda r: r.get("there"), lambda r: r.check(["a"])])
def test_a_rendezvous_bears_an_outage(server: MemoryServer, keys: StoreKeys, call: Any) -> None:
    rendezvous(keys).set("there", "x")
    server.reachable = False
    wait = start(lambda: call(rendezvous(keys)))
    time.sleep(0.2)
    server.reachable = True
    assert wait.end(1).error is None


def test_a_rendezvous_ends_with_an_outage_that_lasts(server: MemoryServer, keys: StoreKeys) -> None:
    def check() -> None:
        raise StoreUnavailableError("for a minute")

    server.reachable = False
    with pytest.raises(StoreUnavailableError, match="for a minute"):
        rendezvous(keys, check=check).set("a", "x")
    with at_most(1.0), pytest.raises(StoreUnavailableError, match="does not answer"):
        rendezvous(keys, seconds=0.2).set("a", "x")

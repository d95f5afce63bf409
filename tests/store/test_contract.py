"""The contract, held by memory and by a real etcd alike."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from bamboo_ds.errors import (
    CompactedError,
    ConfigError,
    ConflictError,
    LeaseLostError,
    StoreError,
)
from bamboo_ds.store import (
    ABSENT,
    Delete,
    DeletePrefix,
    Entry,
    Event,
    EventKind,
    Fence,
    MemoryServer,
    MemoryStore,
    Put,
    Store,
    Unchanged,
)
from tests.store.servers import World, collect


@pytest.fixture
def store(world: World) -> Store:
    return world.store()


def put(key: str, value: bytes, revision: int) -> Event:
    return Event(EventKind.PUT, key, value, revision)


def deleted(key: str, revision: int) -> Event:
    return Event(EventKind.DELETE, key, b"", revision)


def test_a_key_that_was_put_is_got(store: Store) -> None:
    assert store.get("plan") is None
    first = store.put("plan", b"\x00one")
    second = store.put("plan", b"")
    assert second > first
    assert store.get("plan") == Entry("plan", b"", revision=second, create_revision=first)


def test_a_key_that_was_deleted_is_gone_and_begins_anew(store: Store) -> None:
    assert store.delete("plan") is False
    first = store.put("plan", b"1")
    assert store.delete("plan") is True
    assert store.get("plan") is None
    second = store.put("plan", b"2")
    found = store.get("plan")
    assert found is not None
    assert found.create_revision == second > first


def test_a_list_is_sorted_and_ends_with_its_prefix(store: Store) -> None:
    for key in ("nodes/b", "nodes/a", "nodes", "nodes0", "nodes/a/x", "nodez"):
        last = store.put(key, key.encode())
    snapshot = store.list("nodes/")
    assert [entry.key for entry in snapshot.entries] == ["nodes/a", "nodes/a/x", "nodes/b"]
    assert snapshot.revision == last
    assert len(store.list().entries) == 6


def test_prefixes_keep_jobs_apart(world: World) -> None:
    one, other = world.store(), world.store("/bamboo/another job/")
    one.put("plan", b"1")
    other.put("plan", b"2")
    assert one.delete_prefix("") == 1
    assert other.delete_prefix("") == 1


def test_delete_prefix_counts_what_it_deleted(store: Store) -> None:
    for key in ("votes/1/a", "votes/1/b", "votes/10/a"):
        store.put(key, b"")
    assert store.delete_prefix("votes/1/") == 2
    assert store.delete_prefix("votes/1/") == 0
    assert [entry.key for entry in store.list().entries] == ["votes/10/a"]


def test_compare_and_set_wants_the_revision_that_was_read(store: Store) -> None:
    first = store.compare_and_set("plan", b"1", expected=ABSENT)
    with pytest.raises(ConflictError, match=f"'plan' has revision {first}, expected no such key"):
        store.compare_and_set("plan", b"2", expected=ABSENT)
    second = store.compare_and_set("plan", b"2", expected=first)
    with pytest.raises(ConflictError, match=f"'plan' has revision {second}, expected revision {first}"):
        store.compare_and_set("plan", b"3", expected=first)
    with pytest.raises(ConflictError, match="'other' does not exist, expected revision 7"):
        store.compare_and_set("other", b"3", expected=7)
    found = store.get("plan")
    assert found is not None
    assert (found.value, found.revision) == (b"2", second)


def test_of_many_who_compare_and_set_at_once_one_wins(world: World) -> None:
    stores = [world.store() for _ in range(4)]

    def try_it(store: Store) -> bool:
        try:
            store.compare_and_set("plan", b"", expected=ABSENT)
        except ConflictError:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(try_it, stores * 5)) == 1


def test_a_transaction_happens_in_whole_at_one_revision(store: Store) -> None:
    store.put("old", b"")
    plan = store.put("plan", b"1")
    done = store.transact([Unchanged("plan", plan)], [Put("plan", b"2"), Put("event", b"e"), Delete("old")])
    assert done.deleted == 1
    assert {(entry.key, entry.revision) for entry in store.list().entries} == {
        ("plan", done.revision),
        ("event", done.revision),
    }


def test_a_transaction_whose_condition_fails_writes_nothing_and_names_all_reasons(store: Store) -> None:
    plan = store.put("plan", b"1")
    with pytest.raises(ConflictError, match=r"'plan' has revision .*; 'x' does not exist"):
        store.transact([Unchanged("plan", plan + 1), Unchanged("x", 3)], [Put("plan", b"2"), DeletePrefix("votes/")])
    assert [entry.value for entry in store.list().entries] == [b"1"]
    assert store.list().revision == plan


def test_a_transaction_without_writes_only_checks(store: Store) -> None:
    plan = store.put("plan", b"1")
    assert store.transact([Unchanged("plan", plan)], []).revision == plan
    with pytest.raises(ConflictError):
        store.transact([Unchanged("plan", ABSENT)], [])


@pytest.mark.parametrize(
    "writes",
    [
        [Put("a", b"1"), Put("a", b"2")],
        [Put("a", b"1"), Delete("a")],
        [DeletePrefix("votes/"), Put("votes/1", b"")],
    ],
)
def test_two_writes_of_one_key_are_refused(store: Store, writes: list[Put | Delete | DeletePrefix]) -> None:
    with pytest.raises(ValueError, match="two writes of one transaction touch"):
        store.transact([], writes)


def test_bad_arguments_are_refused_with_their_names(world: World) -> None:
    store = world.store()
    with pytest.raises(ValueError, match="key must not be empty"):
        store.get("")
    with pytest.raises(TypeError, match="a key is a str, not bytes"):
        store.get(b"plan")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the value of 'plan' must be bytes, not str"):
        store.put("plan", "1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="from_revision = 0"):
        store.watch(from_revision=0)
    with pytest.raises(ValueError, match="ttl_seconds = 0"):
        store.lease(0)
    with pytest.raises(ConfigError, match='must end with "/"'):
        world.store("/bamboo/job")


def test_a_counter_adds_up_whoever_adds(world: World) -> None:
    stores = [world.store() for _ in range(3)]

    def add(store: Store) -> list[int]:
        return [store.add("rank", 1) for _ in range(10)]

    with ThreadPoolExecutor(3) as pool:
        seen = sorted(number for numbers in pool.map(add, stores) for number in numbers)
    assert seen == list(range(1, 31))
    assert stores[0].add("rank", -30) == 0
    stores[0].put("word", b"ten")
    with pytest.raises(StoreError, match="'word' is no counter: it holds b'ten'"):
        stores[0].add("word", 1)


def test_a_watch_tells_each_change_once_and_in_order(store: Store) -> None:
    first = store.put("nodes/a", b"1")
    store.put("other", b"")
    with store.watch("nodes/", from_revision=first) as watch:
        assert watch.next(5) == (put("nodes/a", b"1", first),)
        second = store.put("nodes/b", b"2")
        third = store.put("nodes/a", b"3")
        store.delete("nodes/a")
        assert collect(watch, 3) == [
            put("nodes/b", b"2", second),
            put("nodes/a", b"3", third),
            deleted("nodes/a", third + 1),
        ]
        assert watch.next(0) == ()


def test_a_watch_from_a_snapshot_on_misses_nothing(store: Store) -> None:
    store.put("plan", b"1")
    snapshot = store.list()
    second = store.put("plan", b"2")
    with store.watch(from_revision=snapshot.revision + 1) as watch:
        assert collect(watch, 1) == [put("plan", b"2", second)]


def test_who_listens_is_told_what_is_there_and_then_each_change_once_whoever_writes_meanwhile(world: World) -> None:
    store, other = world.store(), world.store()
    written: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(lambda: written.extend(other.put(f"nodes/{n % 7}", str(n).encode()) for n in range(60)))
        heard = [store.listen("nodes/") for _ in range(5)]
        writing.result()
    for snapshot, watch in heard:
        later = [revision for revision in written if revision > snapshot.revision]
        told = [event.revision for event in collect(watch, len(later))] if later else []
        known = {entry.revision for entry in snapshot.entries}
        assert told == later
        assert known <= set(written) - set(later)
        assert not written[: len(written) - len(later)] or max(known) == written[-len(later) - 1]
        assert watch.next(world.brief_seconds) == ()
        watch.close()


def test_changes_of_one_transaction_come_together(store: Store) -> None:
    start = store.list().revision
    with store.watch(from_revision=start + 1) as watch:
        revision = store.transact([], [Put(f"votes/{number}", b"") for number in range(20)]).revision
        assert watch.next(5) == tuple(put(f"votes/{number}", b"", revision) for number in range(20))


def test_a_watch_wakes_a_thread_that_waits(store: Store) -> None:
    start = store.list().revision
    with store.watch(from_revision=start + 1) as watch:
        timer = threading.Timer(0.2, store.put, ("plan", b"1"))
        timer.start()
        assert watch.next(20) == (put("plan", b"1", start + 1),)
        timer.join()


def test_closing_a_watch_wakes_whoever_waits_in_it(store: Store) -> None:
    watch = store.watch(from_revision=store.put("x", b""))
    collect(watch, 1)
    timer = threading.Timer(0.2, watch.close)
    timer.start()
    with pytest.raises(StoreError, match="closed"):
        watch.next(20)
    timer.join()
    watch.close()


def test_a_watch_of_a_history_that_is_gone_says_so(store: Store) -> None:
    first = store.put("plan", b"1")
    revisions = [store.put("plan", str(number).encode()) for number in range(5)]
    store.compact(revisions[2])
    with store.watch(from_revision=first) as watch:
        with pytest.raises(CompactedError, match=f"history up to revision {revisions[2]} is gone"):
            watch.next(5)
        with pytest.raises(CompactedError):
            watch.next(0)
    with store.watch(from_revision=revisions[2] + 1) as watch:
        assert [event.revision for event in collect(watch, 2)] == revisions[3:]
    with pytest.raises(StoreError, match="compact"):
        store.compact(revisions[2])
    with pytest.raises(StoreError, match="compact"):
        store.compact(revisions[-1] + 100)


def test_a_snapshot_lets_a_watch_go_on_after_a_compaction(world: World) -> None:
    store = world.store()
    store.put("gone", b"")
    store.delete("gone")
    store.compact(store.list().revision)
    snapshot = store.list()
    with store.watch(from_revision=snapshot.revision + 1) as watch:
        assert watch.next(world.brief_seconds) == ()
        revision = store.put("plan", b"1")
        assert collect(watch, 1) == [put("plan", b"1", revision)]


def test_a_key_lives_as_long_as_its_lease_is_renewed(world: World) -> None:
    store = world.store()
    lease = store.lease(world.ttl_seconds)
    assert lease.ttl_seconds == world.ttl_seconds
    store.put("nodes/a", b"", lease=lease)
    world.pass_time(2.5 * world.ttl_seconds)
    found = store.get("nodes/a")
    assert found is not None
    assert found.lease_id == lease.id
    assert lease.alive
    assert 0 < lease.remaining_seconds <= lease.ttl_seconds
    assert not lease.lost.is_set()


def test_a_key_goes_when_its_holder_stops_renewing_but_not_before(world: World) -> None:
    holder, store = world.store(), world.store()
    lease = holder.lease(world.ttl_seconds)
    holder.put("nodes/a", b"", lease=lease)
    start = store.list().revision
    holder.close()
    assert not lease.alive
    assert lease.lost.is_set()
    world.pass_time(world.ttl_seconds / 2)
    assert store.get("nodes/a") is not None
    world.pass_time(world.ttl_seconds)
    with store.watch("nodes/", from_revision=start + 1) as watch:
        assert [event.kind for event in collect(watch, 1)] == [EventKind.DELETE]
    assert store.get("nodes/a") is None


def test_revoking_a_lease_deletes_its_keys_at_once(world: World) -> None:
    store = world.store()
    lease, other = store.lease(30), store.lease(30)
    assert lease.id != other.id
    for key in ("nodes/a", "nodes/b"):
        store.put(key, b"", lease=lease)
    store.put("nodes/b", b"", lease=other)
    store.put("nodes/c", b"", lease=lease)
    store.put("nodes/c", b"")
    lease.revoke()
    assert [entry.key for entry in store.list("nodes/").entries] == ["nodes/b", "nodes/c"]
    assert not lease.alive
    assert lease.remaining_seconds == 0
    lease.revoke()
    with pytest.raises(LeaseLostError):
        store.put("nodes/a", b"", lease=lease)
    assert store.get("nodes/a") is None


def test_a_write_with_a_fallen_fence_fails_definitely(store: Store) -> None:
    created = store.put("coordinator", b"me")
    fence = Fence("coordinator", created)
    store.put("coordinator", b"still me")
    store.put("plan", b"1", fence=fence)
    store.delete("coordinator")
    for write in (
        lambda: store.put("plan", b"2", fence=fence),
        lambda: store.delete("plan", fence=fence),
        lambda: store.delete_prefix("", fence=fence),
        lambda: store.compare_and_set("plan", b"2", expected=created + 2, fence=fence),
        lambda: store.transact([], [Put("plan", b"2")], fence=fence),
    ):
        with pytest.raises(ConflictError, match=f"'coordinator' is gone, the fence expects create revision {created}"):
            write()
    store.put("coordinator", b"another")
    with pytest.raises(ConflictError, match=r"'coordinator' has create revision .*: fenced off"):
        store.put("plan", b"2", fence=fence)
    found = store.get("plan")
    assert found is not None
    assert found.value == b"1"


def test_a_closed_store_refuses_everything_and_closes_again(world: World) -> None:
    store = world.store()
    watch = store.watch(from_revision=store.list().revision + 1)
    store.close()
    store.close()
    for call in (
        lambda: store.get("x"),
        lambda: store.put("x", b""),
        lambda: watch.next(1),
        lambda: store.listen(),
        lambda: store.lease(3),
    ):
        with pytest.raises(StoreError, match="closed"):
            call()


def test_the_store_serves_a_rendezvous(store: Store) -> None:
    """The four calls under our process groups fit on the contract."""

    class OverStore:
        def get(self, key: str) -> bytes:
            entry = store.get(f"rdzv/{key}")
            if entry is None:
                raise KeyError(key)
            return entry.value

        def set(self, key: str, value: bytes) -> None:
            store.put(f"rdzv/{key}", value)

        def add(self, key: str, amount: int) -> int:
            return store.add(f"rdzv/{key}", amount)

        def check(self, keys: list[str]) -> bool:
            return all(store.get(f"rdzv/{key}") is not None for key in keys)

    backing = OverStore()
    assert not backing.check(["rank0"])
    backing.set("rank0", b"addr")
    assert backing.check(["rank0"])
    assert backing.get("rank0") == b"addr"
    assert backing.add("n", 2) == 2
    assert backing.get("n") == b"2"


def test_a_memory_server_s_history_is_bounded() -> None:
    store = MemoryStore(server=MemoryServer(history_revisions=3))
    revisions = [store.put("x", b"") for _ in range(5)]
    with store.watch(from_revision=revisions[1]) as watch, pytest.raises(CompactedError):
        watch.next(0)
    with store.watch(from_revision=revisions[2]) as watch:
        assert [event.revision for event in watch.next(0)] == revisions[2:]


def test_a_memory_lease_ends_for_a_watch_that_waits_in_real_time() -> None:
    server = MemoryServer()
    holder, store = MemoryStore(server=server), MemoryStore(server=server)
    holder.put("nodes/a", b"", lease=holder.lease(1))
    start = store.list().revision
    holder.close()
    began = time.monotonic()
    with store.watch(from_revision=start + 1) as watch:
        assert watch.next(10) == (deleted("nodes/a", start + 1),)
    assert 0.5 < time.monotonic() - began < 3

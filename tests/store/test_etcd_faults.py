"""What breaks under a store: the server is killed, stopped, compacted, gone. Each test: fault, heal, recover, check."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

import pytest

from bamboo_ds.errors import CompactedError, ConfigError, StoreError, StoreUnavailableError
from bamboo_ds.store import ABSENT, EventKind
from bamboo_ds.store.embedded import EmbeddedEtcd
from bamboo_ds.store.etcd import EtcdStore
from bamboo_ds.store.etcd_connection import Connection
from tests.store.servers import Cluster, collect, eventually, insist, stop

Connect = Callable[..., EtcdStore]


def test_no_event_is_lost_or_repeated_while_the_server_is_killed_and_restarted(
    own_etcd: EmbeddedEtcd, connect: Connect
) -> None:
    store, other = connect(own_etcd), connect(own_etcd)
    watch = store.watch("n/", from_revision=1)
    written: list[tuple[str, int]] = []

    def write() -> None:
        for number in range(150):
            key = f"n/{number}"
            try:
                written.append((key, other.compare_and_set(key, b"", expected=ABSENT)))
            except StoreUnavailableError:  # may have happened: read back
                found = insist(lambda key=key: other.get(key))
                revision = found.revision if found else insist(lambda key=key: other.put(key, b""))
                written.append((key, revision))
            time.sleep(0.01)

    writer = threading.Thread(target=write)
    writer.start()
    for _ in range(2):
        time.sleep(0.3)
        own_etcd.kill()
        time.sleep(0.2)
        own_etcd.start()
    writer.join(60)
    assert len(written) == 150
    events = collect(watch, 150)
    assert [(event.key, event.revision) for event in events] == written
    assert watch.next(0.5) == ()


def test_a_lease_outlives_a_restart_of_the_server(own_etcd: EmbeddedEtcd, connect: Connect) -> None:
    store = connect(own_etcd)
    lease = store.lease(3)
    store.put("nodes/a", b"", lease=lease)
    own_etcd.kill()
    time.sleep(0.3)
    own_etcd.start()
    time.sleep(3.2)
    assert lease.alive
    assert store.get("nodes/a") is not None


def test_a_lease_is_lost_in_time_when_the_server_is_gone_for_good(own_etcd: EmbeddedEtcd, connect: Connect) -> None:
    lease = connect(own_etcd).lease(2)
    eventually(lambda: lease.remaining_seconds < 1.5, within_seconds=5, what="time passes")
    own_etcd.kill()
    began, remaining = time.monotonic(), lease.remaining_seconds
    assert lease.alive
    assert lease.lost.wait(5)
    assert not lease.alive
    assert lease.remaining_seconds == 0
    assert remaining - 0.1 <= time.monotonic() - began <= remaining + 0.3


def test_a_lease_is_renewed_while_the_server_hangs_for_less_than_its_time(
    own_etcd: EmbeddedEtcd, connect: Connect
) -> None:
    store = connect(own_etcd)
    lease = store.lease(2)
    store.put("nodes/a", b"", lease=lease)
    stop(own_etcd)
    time.sleep(1.2)
    own_etcd.signal(signal.SIGCONT)
    time.sleep(2)
    assert lease.alive
    assert store.get("nodes/a") is not None


def test_a_lease_that_the_server_ended_is_reported_at_the_next_renewal(
    own_etcd: EmbeddedEtcd, connect: Connect
) -> None:
    store, other = connect(own_etcd), connect(own_etcd)
    lease = store.lease(3)
    revoke = other._messages.LeaseRevokeRequest(ID=lease.id)
    other._connection.ask(
        lambda server: server.lease.LeaseRevoke, revoke, what="revoke", deadline=time.monotonic() + 5, repeatable=True
    )
    assert lease.lost.wait(2)


def test_a_watcher_hears_of_a_killed_server_within_its_deadline_and_goes_on_afterwards(
    own_etcd: EmbeddedEtcd, connect: Connect
) -> None:
    store = connect(own_etcd)
    revision = store.put("plan", b"1")
    watch = store.watch(from_revision=revision)
    assert len(collect(watch, 1)) == 1
    own_etcd.kill()
    began = time.monotonic()
    with pytest.raises(StoreUnavailableError, match="call again, the watch goes on by itself"):
        watch.next(1.0)
    assert 0.9 < time.monotonic() - began < 1.5
    own_etcd.start()
    store.put("plan", b"2", timeout_seconds=10)
    assert [event.value for event in collect(watch, 1)] == [b"2"]


def test_a_watcher_tells_silence_from_no_news(own_etcd: EmbeddedEtcd, connect: Connect) -> None:
    """A stopped server breaks no connection; only its silence gives it away."""
    store = connect(own_etcd, timeout_seconds=1.0)
    revision = store.put("plan", b"1", timeout_seconds=5)
    watch = store.watch(from_revision=revision)
    collect(watch, 1)
    for _ in range(3):
        assert watch.next(0.6) == ()  # no news, and the server answers when asked for a sign of life
    stop(own_etcd)
    silence = ""
    for _ in range(6):
        try:
            assert watch.next(0.5) == ()
        except StoreUnavailableError as error:
            silence = str(error)
            break
    assert "nothing heard from etcd" in silence
    own_etcd.signal(signal.SIGCONT)
    second = insist(lambda: store.put("plan", b"2"))
    assert second in [event.revision for event in collect(watch, 1)]


def test_who_begins_to_listen_hears_at_once(own_etcd: EmbeddedEtcd, connect: Connect) -> None:
    """Etcd lets a watch that begins at a past revision wait for up to 100 ms, every time."""
    store, other = connect(own_etcd), connect(own_etcd)
    seconds = []
    for number in range(9):
        snapshot, watch = store.listen("nodes/")
        began = time.monotonic()
        other.put(f"nodes/{number}", b"")
        assert [event.key for event in watch.next(5)] == [f"nodes/{number}"]
        seconds.append(time.monotonic() - began)
        assert len(snapshot.entries) == number
        watch.close()
    assert sorted(seconds)[4] < 0.05


def test_a_listener_misses_nothing_when_the_server_is_killed_before_the_first_change(
    own_etcd: EmbeddedEtcd, connect: Connect
) -> None:
    store = connect(own_etcd)
    store.put("plan", b"1")
    snapshot, watch = store.listen()
    own_etcd.kill()
    own_etcd.start()
    second = store.put("plan", b"2", timeout_seconds=10)
    assert [event.revision for event in collect(watch, 1)] == [second]
    assert [entry.value for entry in snapshot.entries] == [b"1"]


def test_a_stopped_server_delays_no_call_beyond_its_deadline(own_etcd: EmbeddedEtcd, connect: Connect) -> None:
    store = connect(own_etcd)
    store.put("plan", b"1")
    stop(own_etcd)
    with pytest.raises(StoreUnavailableError, match="it may have been done: read back before you repeat it"):
        store.put("plan", b"2", timeout_seconds=0.2)
    calls: list[Callable[[], object]] = [
        lambda: store.get("plan", timeout_seconds=0.5),
        lambda: store.list(timeout_seconds=0.5),
        lambda: store.listen(timeout_seconds=0.5),
        lambda: store.put("plan", b"2", timeout_seconds=0.5),
        lambda: store.add("n", 1, timeout_seconds=0.5),
        lambda: store.lease(5, timeout_seconds=0.5),
    ]
    for call in calls:
        began = time.monotonic()
        with pytest.raises(StoreUnavailableError, match=r"put|get|list|watch|lease"):
            call()
        assert time.monotonic() - began < 1.0
    own_etcd.signal(signal.SIGCONT)
    eventually(lambda: store.get("plan"), within_seconds=5, what="the store goes on")


def test_a_call_waits_for_a_server_that_comes_back_before_the_deadline(
    own_etcd: EmbeddedEtcd, connect: Connect
) -> None:
    store = connect(own_etcd)
    first = store.put("plan", b"1")
    own_etcd.kill()

    def is_refused() -> bool:
        with pytest.raises(StoreUnavailableError) as caught:
            store.get("plan", timeout_seconds=0.5)
        return "Connection refused" in str(caught.value)

    # What is sent before the client has noticed the end of the server may have been done.
    eventually(is_refused, within_seconds=20, what="the client knows that nobody listens")
    timer = threading.Timer(0.5, own_etcd.start)
    timer.start()
    # A write, too: it certainly was not done while nobody listened.
    second = store.compare_and_set("plan", b"2", expected=first, timeout_seconds=20)
    timer.join()
    assert second == first + 1


def test_a_watch_that_was_cut_off_during_a_compaction_says_what_to_do(own_etcd: EmbeddedEtcd, connect: Connect) -> None:
    store = connect(own_etcd, timeout_seconds=1.0)
    first = store.put("plan", b"0", timeout_seconds=5)
    watch = store.watch(from_revision=first)
    collect(watch, 1)
    stream = watch._stream  # type: ignore[attr-defined]
    release = threading.Event()
    open_again = watch._open  # type: ignore[attr-defined]
    watch._open = lambda *arguments: (release.wait(20), open_again(*arguments))[1]  # type: ignore[attr-defined]
    stream.call.cancel()
    for number in range(5):
        last = store.put("plan", str(number).encode())
    store.compact(last)
    release.set()
    with pytest.raises(CompactedError, match=f"history up to revision {last} is gone.*list again"):
        collect(watch, 1)
    snapshot = store.list()
    assert [entry.value for entry in snapshot.entries] == [b"4"]
    with store.watch(from_revision=snapshot.revision + 1) as again:
        store.delete("plan")
        assert [event.kind for event in collect(again, 1)] == [EventKind.DELETE]


def test_a_large_prefix_is_listed_in_one_piece(etcd: EmbeddedEtcd, connect: Connect, prefix: str) -> None:
    store = connect(etcd, prefix=prefix)
    for number in range(8):
        store.put(f"big/{number}", b"x" * 900_000)
    assert sum(len(entry.value) for entry in store.list("big/").entries) == 8 * 900_000
    with pytest.raises(StoreError, match="write less in one transaction") as caught:
        store.put("big/9", b"x" * 3_000_000)
    assert not isinstance(caught.value, StoreUnavailableError)
    store.delete_prefix("")


@pytest.mark.parametrize(
    ("endpoints", "message"),
    [
        ([], "must be a list of host:port"),
        ("127.0.0.1:2379", "must be a list of host:port"),
        (["127.0.0.1"], 'endpoint "127.0.0.1": must be host:port'),
        (["ftp://127.0.0.1:1"], "must be host:port"),
        (["http://a:1", "https://b:1"], "either all are encrypted"),
    ],
)
def test_endpoints_that_cannot_be_right_are_refused(endpoints: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EtcdStore(endpoints, prefix="/bamboo/test/")


def test_no_server_at_all_is_a_clear_error_within_the_deadline(connect: Connect) -> None:
    store = connect(["127.0.0.1:1", "127.0.0.1:2"], timeout_seconds=0.5)
    began = time.monotonic()
    with pytest.raises(StoreUnavailableError, match=r"put 'x': etcd at 127.0.0.1:\d: .*Connection refused"):
        store.put("x", b"")
    assert 0.4 < time.monotonic() - began < 1.0


def test_closing_a_store_ends_a_call_that_waits(connect: Connect) -> None:
    store = connect(["127.0.0.1:1"], timeout_seconds=20)
    timer = threading.Timer(0.3, store.close)
    timer.start()
    began = time.monotonic()
    with pytest.raises(StoreError, match="closed"):
        store.get("x")
    assert time.monotonic() - began < 2
    timer.join()


def test_a_cluster_of_three_loses_its_leader_and_the_store_goes_on(connect: Connect) -> None:
    with Cluster() as cluster:
        leader, others = cluster.leader_last()
        # The leader first, so that the store uses it and must move.
        store = connect([leader.endpoint, *(server.endpoint for server in others)], timeout_seconds=2.0)
        lease = store.lease(4)
        store.put("nodes/a", b"", lease=lease)
        first = store.put("n", b"0")
        watch = store.watch("n", from_revision=first)
        collect(watch, 1)
        leader.kill()
        found = store.get("n", timeout_seconds=15)
        assert found is not None
        second = insist(lambda: store.put("n", b"1"))
        assert collect(watch, 1)[-1].revision == second
        assert lease.alive
        assert store.get("nodes/a") is not None
        _check_that_a_hung_server_is_left(store, cluster, watch_revision=second)


def _check_that_a_hung_server_is_left(store: EtcdStore, cluster: Cluster, *, watch_revision: int) -> None:
    """Bring the cluster back to three, stop the server in use, and see reads, writes, watch and lease move on."""
    next(server for server in cluster.servers if server.pid is None).start()
    connection: Connection = store._connection
    hung = next(server for server in cluster.servers if server.endpoint == connection.server().address)
    lease = store.lease(4)
    with store.watch("n", from_revision=watch_revision) as watch:
        collect(watch, 1)
        stop(hung)
        assert store.get("n", timeout_seconds=5) is not None
        insist(lambda: store.put("n", b"2"))
        assert collect(watch, 1, within_seconds=15)[-1].value == b"2"
        assert lease.alive
        hung.signal(signal.SIGCONT)

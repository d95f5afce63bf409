"""Events: in order, by best effort, never at the expense of who writes them."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from bamboo_ds.clock import ManualClock
from bamboo_ds.elastic.events import (
    ClusterEvent,
    EventLog,
    append_event,
    read_event,
    read_events,
    trim_events,
)
from bamboo_ds.errors import ConflictError, StoreUnavailableError
from bamboo_ds.store import Fence, MemoryStore

NOON = 1_800_000_000_000_000_000


def frozen() -> int:
    return NOON


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(clock=ManualClock())


def texts(store: MemoryStore) -> list[str]:
    return [event.text for event in read_events(store)]


def test_an_event_is_written_as_flat_json_under_its_time(store: MemoryStore) -> None:
    log = EventLog(store, node="n1", wall_nanoseconds=frozen)
    event = log.tell("failover", "worker 2 was killed", workers=[2], plan="0.1")
    (entry,) = store.list("events/").entries
    assert entry.key == "events/01800000000000000000-n1"
    assert json.loads(entry.value) == {
        "time": NOON / 1e9, "node": "n1", "kind": "failover", "text": "worker 2 was killed", "workers": [2],
        "plan": "0.1",
    }  # fmt: skip
    assert read_event(entry.value) == event
    assert read_events(store) == (event,)


def test_an_event_may_be_about_another_node(store: MemoryStore) -> None:
    log = EventLog(store, node="n1", wall_nanoseconds=frozen)
    assert log.tell("node_lost", "node n7 is gone", about="n7").node == "n7"
    assert store.list("events/").entries[0].key.endswith("-n1")


def test_fields_never_hide_what_every_event_has() -> None:
    event = ClusterEvent(1.0, "n1", "plan", "text", {"kind": "other", "time": 2})
    found = read_event(event.encode())
    assert found is not None
    assert (found.time, found.kind, found.fields) == (1.0, "plan", {})


def test_a_field_that_json_does_not_know_is_written_as_text() -> None:
    found = read_event(ClusterEvent(1.0, "n1", "plan", "text", {"path": Path("/a")}).encode())
    assert found is not None
    assert found.fields == {"path": "/a"}


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"7", b"{}", b"\xff", b'{"time": "soon", "node": "", "kind": "", "text": ""}', b"null"]
)
def test_what_is_no_event_is_left_out(store: MemoryStore, text: bytes) -> None:
    assert read_event(text) is None
    store.put("events/1", text)
    EventLog(store, node="n1").tell("plan", "the only one")
    assert texts(store) == ["the only one"]


def test_events_of_a_clock_that_stands_still_or_goes_back_keep_their_order(store: MemoryStore) -> None:
    times = iter([NOON, NOON, NOON - 5, NOON + 9])
    log = EventLog(store, node="n1", wall_nanoseconds=lambda: next(times))
    for number in range(4):
        log.tell("plan", str(number))
    assert texts(store) == ["0", "1", "2", "3"]


def test_events_wait_for_the_flush_and_are_written_in_few_transactions(store: MemoryStore) -> None:
    log = EventLog(store, node="n1", wall_nanoseconds=frozen)
    before = store.list("").revision
    for number in range(120):
        log.note("plan", str(number))
    assert texts(store) == []
    assert log.flush()
    assert texts(store) == [str(number) for number in range(120)]
    assert store.list("").revision == before + 3


def test_an_outage_fails_nobody_and_its_events_come_later_in_order(store: MemoryStore) -> None:
    log = EventLog(store, node="n1", wall_nanoseconds=frozen)
    store.server.reachable = False
    for number in range(3):
        log.tell("plan", str(number))
    assert not log.flush()
    store.server.reachable = True
    log.tell("plan", "3")
    assert texts(store) == ["0", "1", "2", "3"]


def test_a_long_outage_keeps_the_newest(store: MemoryStore) -> None:
    log = EventLog(store, node="n1", wall_nanoseconds=frozen)
    store.server.reachable = False
    for number in range(1200):
        log.note("plan", str(number))
    log.flush()
    store.server.reachable = True
    log.flush()
    found = texts(store)
    assert (len(found), found[0], found[-1]) == (1000, "200", "1199")


def test_an_event_whose_answer_got_lost_is_written_once() -> None:
    class Deaf(MemoryStore):
        deaf = True

        def transact(self, *arguments: object, **options: object):  # type: ignore[no-untyped-def,override]
            done = super().transact(*arguments, **options)  # type: ignore[arg-type]
            if self.deaf:
                raise StoreUnavailableError("no answer")
            return done

    store = Deaf(clock=ManualClock())
    log = EventLog(store, node="n1", wall_nanoseconds=frozen)
    log.tell("plan", "once")
    store.deaf = False
    assert log.flush()
    assert texts(store) == ["once"]


def test_a_leader_that_was_fenced_off_writes_no_event_and_keeps_none(store: MemoryStore) -> None:
    log = EventLog(store, node="n1", wall_nanoseconds=frozen)
    log.note("plan", "of the past")
    assert not log.flush(fence=Fence("coordinator/1", 5))
    log.tell("plan", "new")
    assert texts(store) == ["new"]


def test_a_closed_store_fails_nobody(store: MemoryStore) -> None:
    store.close()
    assert EventLog(store, node="n1").tell("plan", "into the void").text == "into the void"


def test_the_last_events_can_be_read_alone(store: MemoryStore) -> None:
    log = EventLog(store, node="n1", wall_nanoseconds=frozen)
    for number in range(9):
        log.note("plan", str(number))
    log.flush()
    assert [event.text for event in read_events(store, newest=2)] == ["7", "8"]
    assert read_events(store, newest=0) == ()
    assert len(read_events(store, newest=99)) == 9


def test_old_events_are_deleted_a_few_hundred_at_a_time(store: MemoryStore) -> None:
    for number in range(730):
        store.put(f"events/{number:020d}-n1", b"{}")
    assert trim_events(store, newest=100) == 500
    assert trim_events(store, newest=100) == 130
    assert trim_events(store, newest=100) == 0
    keys = [entry.key for entry in store.list("events/").entries]
    assert keys == [f"events/{number:020d}-n1" for number in range(630, 730)]


def test_who_leads_no_longer_deletes_none(store: MemoryStore) -> None:
    for number in range(3):
        store.put(f"events/{number}", b"{}")
    with pytest.raises(ConflictError):
        trim_events(store, fence=Fence("coordinator/1", 5), newest=1)
    assert len(store.list("events/").entries) == 3


def test_a_file_of_events_has_one_line_for_each_whoever_appends(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"

    def append(writer: int) -> None:
        for number in range(50):
            append_event(path, ClusterEvent(float(number), f"n{writer}", "plan", "x\ny" * 200))

    threads = [threading.Thread(target=append, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = path.read_text().splitlines()
    assert len(lines) == 200
    found = [read_event(line.encode()) for line in lines]
    for writer in range(4):
        own = [event.time for event in found if event is not None and event.node == f"n{writer}"]
        assert own == [float(number) for number in range(50)]

"""The picture of a job that its keys give, and the mirror that keeps the keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from bamboo_ds.clock import ManualClock
from bamboo_ds.elastic import keys
from bamboo_ds.elastic.mirror import Mirror
from bamboo_ds.elastic.report import Report, report
from bamboo_ds.errors import ConfigError, StoreUnavailableError
from bamboo_ds.plan.cluster import Node
from bamboo_ds.plan.codec import encode
from bamboo_ds.plan.failover import fail_over
from bamboo_ds.plan.job import Roster
from bamboo_ds.plan.plan import Plan
from bamboo_ds.store import MemoryServer, MemoryStore

NOW = 1000.0
START = Plan(owners=((0, 2, 4), (1, 3, 5)))


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    with MemoryStore(server=MemoryServer(clock=ManualClock(1.0))) as store:
        yield store


def look(store: MemoryStore, **options: int) -> Report:
    with Mirror(store) as mirror:
        return report(mirror.entries, job="test", now=NOW, **options)


def join(store: MemoryStore, name: str, *workers: int, zone: str = "a") -> None:
    store.put(keys.node(name), encode(Node(name, zone, workers, address="127.0.0.2")))
    for worker in workers:
        store.put(keys.ready(worker), name.encode())


def tell(store: MemoryStore, time: float, kind: str, node: str = "n0", text: str = "why", **fields: Any) -> None:
    event = {"time": time, "node": node, "kind": kind, "text": text, **fields}
    store.put(f"{keys.EVENTS}{int(time * 1e9):020d}-{node}", json.dumps(event).encode())


def train(store: MemoryStore) -> None:
    for node in range(3):
        join(store, f"n{node}", 2 * node, 2 * node + 1, zone="abc"[node])
    store.put(keys.ROSTER, encode(Roster((0, 1, 2, 3, 4, 5))))
    store.put(keys.PLAN, encode(START))


def test_before_the_plan_nodes_gather(store: MemoryStore) -> None:
    join(store, "n0", 0)
    store.put(keys.node("n1"), encode(Node("n1", "b", (1, 2))))
    store.put(keys.ready(1), b"n1")
    found = look(store)
    assert (found.phase, found.plan, found.roster, found.progress) == ("gathering", None, None, None)
    assert found.phase_text == "2 node(s) with 3 worker(s) are there, and no plan yet"
    assert [(worker.id, worker.node, worker.zone, worker.state) for worker in found.workers] == [
        (0, "n0", "a", "ready"),
        (1, "n1", "b", "ready"),
        (2, "n1", "b", "starting"),
    ]


def test_a_plan_is_a_grid_of_who_owns_what_and_where(store: MemoryStore) -> None:
    train(store)
    plan = look(store).plan
    assert plan is not None
    assert [[(cell.owner, cell.node, cell.zone) for cell in row] for row in plan.grid] == [
        [(0, "n0", "a"), (2, "n1", "b"), (4, "n2", "c")],
        [(1, "n0", "a"), (3, "n1", "b"), (5, "n2", "c")],
    ]
    assert not any(cell.merged or cell.taken_over for row in plan.grid for cell in row)
    assert look(store).roster == (0, 1, 2, 3, 4, 5)


def test_after_a_failover_the_shadow_shows_twice_and_the_victim_is_dead(store: MemoryStore) -> None:
    train(store)
    store.put(keys.PLAN, encode(fail_over(START, [2, 3], redundancy=True, cause="the lease is gone")))
    store.delete(keys.node("n1"))
    tell(store, 900.0, "node_joined", "n1", zone="b", workers=[2, 3])
    found = look(store)
    assert found.plan is not None
    cells = found.plan.grid[0]
    assert [(cell.owner, cell.home, cell.taken_over, cell.merged) for cell in cells] == [
        (0, 0, False, True),
        (0, 2, True, True),
        (4, 4, False, False),
    ]
    assert (found.phase, found.phase_text, found.plan.cause) == ("training", "plan 0.1", "the lease is gone")
    states = {worker.id: (worker.node, worker.zone, worker.state) for worker in found.workers}
    assert states[2] == ("n1", "b", "dead")
    assert states[0] == ("n0", "a", "training")
    assert found.plan.dead == (2, 3)


def test_a_lost_stage_has_no_owner_and_the_job_is_aborted(store: MemoryStore) -> None:
    train(store)
    store.put(keys.PLAN, encode(fail_over(START, [0, 2], redundancy=True, cause="two leases are gone")))
    found = look(store)
    assert found.phase == "aborted"
    assert "two leases are gone" in found.phase_text
    assert found.plan is not None
    assert found.plan.grid[0][1].owner is None
    assert not found.plan.grid[0][1].taken_over


def test_who_is_ready_and_has_no_stage_is_a_standby(store: MemoryStore) -> None:
    train(store)
    join(store, "n7", 8)
    store.put(keys.left(4), b"")
    store.put(keys.ended(9), b"{}")
    states = {worker.id: worker.state for worker in look(store).workers}
    assert (states[8], states[4], states[9]) == ("standby", "left", "ended")


def test_the_oldest_candidate_is_the_coordinator(store: MemoryStore) -> None:
    assert look(store).coordinator is None
    for lease, node in ((0x30, b"n2"), (0x10, b"n0"), (0x20, b"n1")):
        store.put(f"{keys.COORDINATOR}/{lease:016x}", node)
    assert look(store).coordinator == "n2"
    store.put(f"{keys.COORDINATOR}/{0x30:016x}", b"n2")  # written again, it is no younger
    assert look(store).coordinator == "n2"
    store.delete(f"{keys.COORDINATOR}/{0x30:016x}")
    assert look(store).coordinator == "n0"


def test_progress_has_its_age_and_may_lack_things(store: MemoryStore) -> None:
    store.put(keys.PROGRESS, json.dumps({"step": 7, "loss": 1.5, "time": NOW - 3}).encode())
    progress = look(store).progress
    assert progress is not None
    assert (progress.step, progress.loss, progress.age_seconds) == (7, 1.5, 3.0)
    assert progress.samples_per_second is None


def test_the_last_events_come_oldest_first_and_tell_when_a_node_joined(store: MemoryStore) -> None:
    join(store, "n0", 0)
    join(store, "n1", 1)
    tell(store, 900.0, "node_joined")
    tell(store, 950.0, "node_joined")  # again, after a restart
    tell(store, 960.5, "plan", text="1 worker is there")
    store.put(f"{keys.EVENTS}0-odd", b"no JSON")
    found = look(store, last_events=2)
    assert [event.kind for event in found.events] == ["node_joined", "plan"]
    assert found.events[-1].text == "1 worker is there"
    assert {node.name: node.joined_seconds for node in found.nodes} == {"n0": 50.0, "n1": None}
    assert look(store, last_events=0).events == ()


@pytest.mark.parametrize(
    ("key", "value", "phase", "text"),
    [
        (
            keys.failure("job"),
            json.dumps({"worker": 3, "kind": "ZeroDivisionError", "message": "1/0"}).encode(),
            "failed",
            "worker 3: ZeroDivisionError: 1/0",
        ),
        (keys.FINISHED, b"all workers have left", "finished", "all workers have left"),
    ],
)
def test_the_end_of_a_job_has_its_reason(store: MemoryStore, key: str, value: bytes, phase: str, text: str) -> None:
    train(store)
    store.put(key, value)
    found = look(store)
    assert (found.phase, found.phase_text, found.over) == (phase, text, True)


def test_without_a_node_the_job_is_deserted_and_not_over(store: MemoryStore) -> None:
    store.put(keys.PLAN, encode(START))
    found = look(store)
    assert (found.phase, found.over) == ("deserted", False)


def test_a_plan_of_another_version_of_the_package_is_refused_with_the_remedy(store: MemoryStore) -> None:
    store.put(keys.PLAN, b'{"record": "plan", "schema": 99}')
    with pytest.raises(ConfigError, match="run the same version"):
        look(store)


def test_the_mirror_follows_all_that_a_picture_needs_and_nothing_else(store: MemoryStore) -> None:
    train(store)
    with Mirror(store) as mirror:
        mirror.follow(0.0)
        store.put(f"{keys.votes(0, 1)}0.0/0", b"a vote")
        assert not mirror.follow(0.0)
        store.put(keys.FINISHED, b"done")
        store.delete(keys.node("n2"))
        tell(store, 5.0, "node_lost", "n2")
        assert mirror.follow(0.0)
        found = report(mirror.entries, job="test", now=NOW)
        assert (found.phase, [node.name for node in found.nodes], len(found.events)) == ("finished", ["n0", "n1"], 1)
        assert found == look(store)


def test_a_mirror_that_was_cut_off_by_a_compaction_lists_again(store: MemoryStore) -> None:
    train(store)
    with Mirror(store) as mirror:
        store.delete(keys.ROSTER)
        store.put(keys.FINISHED, b"done")
        store.delete(keys.node("n0"))
        store.compact(store.list().revision)
        assert mirror.follow(0.0)
        assert report(mirror.entries, job="test", now=NOW) == look(store)
        store.put(keys.FINISHED, b"really")
        assert mirror.follow(0.0)
        assert report(mirror.entries, job="test", now=NOW).phase_text == "really"


def test_a_mirror_says_that_the_store_is_out_of_reach_and_goes_on(store: MemoryStore) -> None:
    train(store)
    with Mirror(store) as mirror:
        mirror.follow(0.0)
        store.server.reachable = False
        with pytest.raises(StoreUnavailableError):
            mirror.follow(0.0)
        store.server.reachable = True
        store.put(keys.FINISHED, b"done")
        assert mirror.follow(0.0)

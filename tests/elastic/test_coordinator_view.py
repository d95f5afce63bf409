"""What the coordinator sees and hears: right, in whatever order it comes, and at a price that a vote can pay."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_ds.clock import ManualClock
from bamboo_ds.elastic import keys
from bamboo_ds.elastic.hearing import Hearing
from bamboo_ds.elastic.view import View
from bamboo_ds.errors import ConfigError, StoreError, StoreUnavailableError
from bamboo_ds.plan import static_plan
from bamboo_ds.plan.cluster import Node
from bamboo_ds.plan.codec import encode
from bamboo_ds.store import Event, EventKind, Lease, MemoryServer, MemoryStore
from tests.elastic.coordinating import SPEC, TTL_SECONDS, Job, ballot, eight

# ---- the view --------------------------------------------------------------------------------------------------------


def state(view: View) -> dict[str, object]:
    names = ("nodes", "registered", "ready", "ended", "left", "answers", "suspects", "plan", "roster", "spec", "roll")
    found = {name: getattr(view, name) for name in names}
    boxes = {where: box.ballots for where, box in view.boxes.items()}
    decisions = {engine: commits for engine, commits in view.decisions.items() if commits}
    return {**found, "boxes": boxes, "decisions": decisions, "over": view.over}


KEYS = [
    *(keys.node(f"n{n}") for n in range(3)), *(keys.ready(n) for n in range(3)), keys.ended(1), keys.left(2),
    keys.answer(0), keys.suspect((0, 0), 1, 2), keys.suspect((0, 1), 2, 1), keys.vote(0, 1, (0, 0), 0),
    keys.vote(0, 1, (0, 0), 1), keys.vote(1, 12, (0, 1), 0), keys.PLAN, keys.ROSTER, keys.SPEC, keys.ROLL,
    keys.decision(0, 1), keys.decision(0, 2), keys.decision(1, 0), keys.FINISHED, keys.failure("job"),
    keys.failure("engine-0"), keys.settings(0), keys.preempt("n1"), "desk/strange", "board/strange", "desk/ready/x",
]  # fmt: skip


def value_of(key: str, number: int) -> bytes:
    from bamboo_ds.plan.job import Roster
    from bamboo_ds.plan.membership import LinkReport

    if key.startswith(keys.NODES):
        name = key.removeprefix(keys.NODES)
        return encode(Node(name, "z", (int(name[1:]) * 10 + number,)))
    if key.startswith(keys.SUSPECTS):
        return encode(LinkReport(1, 2, 0, number))
    known = {keys.PLAN: static_plan(world_size=number + 1, num_stages=1), keys.ROSTER: Roster((number,))}
    if key in known:
        return encode(known[key])  # type: ignore[type-var]
    return encode(SPEC) if key == keys.SPEC else str(number).encode()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(KEYS), st.none() | st.integers(0, 3), st.booleans()), max_size=40))
def test_a_view_that_follows_is_like_one_that_lists(changes: list[tuple[str, int | None, bool]]) -> None:
    store = MemoryStore(clock=ManualClock())
    view = View(store)
    for key, number, refresh in changes:
        if number is None:
            store.delete(key)
        else:
            store.put(key, value_of(key, number))
        if refresh:
            view.refresh()
    view.refresh()
    followed, listed = state(view), state(View(store))
    # A report is as old as its first writing; a value that came later under the same key is not read.
    assert {**followed, "suspects": 0} == {**listed, "suspects": 0}
    for number, reports in view.suspects.items():
        revisions = {pair: report.revision for pair, report in View(store).suspects[number].items()}
        assert {pair: report.revision for pair, report in reports.items()} == revisions


def test_what_the_coordinator_wrote_itself_shows_at_once_and_is_not_undone_by_what_was_on_its_way() -> None:
    job, chair = eight()
    view, plan = chair.view, job.plan
    old = Event(EventKind.PUT, keys.PLAN, encode(plan), view.revision(keys.PLAN))
    newer = static_plan(world_size=4, num_stages=2)
    view.note(keys.PLAN, encode(newer), old.revision + 5)
    view._apply((old,))
    assert view.plan == newer
    view._apply((Event(EventKind.DELETE, keys.PLAN, b"", old.revision + 1),))
    assert view.plan == newer


def test_records_of_another_version_are_left_out_but_for_those_that_all_rest_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job, chair = eight()
    job.store.put(keys.node("n9"), encode(Node("n9", "z", (9,))).replace(b'"schema":1', b'"schema":9'))
    job.store.put(keys.node("twin"), encode(Node("twin", "z", (0,))))
    job.store.put(keys.node("liar"), encode(Node("other", "z", (99,))))
    job.store.put("desk/ready/x", b"")
    chair.view.refresh()
    assert len(chair.view.nodes) == 8
    told = "\n".join(caplog.messages)
    for words in (
        "schema 9",
        "its worker 0 is one of node n0 already",
        "a node of another name, other",
        "desk/ready/x",
    ):
        assert words in told
    job.store.put(keys.PLAN, b"{}")
    with pytest.raises(ConfigError, match="the store holds record None"):
        chair.view.refresh()


def test_a_worker_that_moves_to_another_node_is_on_that_one() -> None:
    job, chair = eight()
    job.list_workers("n0")
    job.list_workers("n1", 1, 0)
    chair.view.refresh()
    assert chair.view.registered[0] == "n1"
    job.lapse("n0")
    chair.view.refresh()
    assert chair.view.registered[0] == "n1"


def test_a_vote_costs_the_same_among_a_thousand_nodes_as_among_eight() -> None:
    """What grows a little is the memory store's own search."""

    def seconds_per_commit(nodes: int) -> float:
        job, chair = eight()
        for number in range(8, nodes):
            job.join(f"n{number}", number)
        chair.run()
        best = 1.0
        for commit in range(60):
            for pipeline in (0, 1):
                text = encode(ballot(commit, pipeline))
                job.store.put(keys.vote(0, commit, (0, 0), pipeline), text)
            chair.view.refresh()
            start = time.perf_counter()
            chair.coordinator._settle_commits()
            best = min(best, time.perf_counter() - start)
            assert not chair.coordinator._is_due(), "a vote is no reason to look at all nodes"
        return best

    few, many = seconds_per_commit(8), seconds_per_commit(1000)
    print(f"\none commit: {few * 1e6:.0f} us among 8 nodes, {many * 1e6:.0f} us among 1,000")
    assert many < 3 * few + 1e-3


def test_a_thousand_nodes_join_in_a_second_or_two() -> None:
    job, chair = eight()
    start = time.perf_counter()
    for number in range(8, 1000):
        job.join(f"n{number}", number)
        if number % 10 == 9:
            chair.run()
    assert time.perf_counter() - start < 30
    assert len(chair.view.present) == 1000


# ---- waiting ---------------------------------------------------------------------------------------------------------


def test_a_view_waits_for_desk_and_board_alike() -> None:
    server = MemoryServer()
    store = MemoryStore(server=server)
    with View(store) as view:
        for key, seen in ((keys.ended(1), lambda: 1 in view.ended), (keys.FINISHED, lambda: view.over)):
            timer = threading.Timer(0.05, store.put, (key, b"x"))
            timer.start()
            view.wait(10.0)
            assert seen()
            timer.join()


def test_waking_ends_a_wait() -> None:
    with View(MemoryStore()) as view:
        timer = threading.Timer(0.05, view.wake)
        timer.start()
        start = time.monotonic()
        view.wait(0.0)
        view.wait(10.0)
        assert time.monotonic() - start < 5
        timer.join()


def test_silence_is_told_and_the_view_is_kept() -> None:
    store = MemoryStore()
    store.put(keys.ended(1), b"")
    with View(store) as view:
        view.wait(0.0)
        store.server.reachable = False
        with pytest.raises(StoreUnavailableError):
            view.wait(5.0)
        assert 1 in view.ended
        store.server.reachable = True
        store.put(keys.ended(2), b"")
        until = time.monotonic() + 5
        while 2 not in view.ended and time.monotonic() < until:
            try:
                view.wait(1.0)
            except StoreUnavailableError:
                continue
        assert 2 in view.ended


def test_a_closed_store_ends_a_wait() -> None:
    store = MemoryStore()
    with View(store) as view:
        view.wait(0.0)
        timer = threading.Timer(0.05, store.close)
        timer.start()
        with pytest.raises(StoreError, match="closed"):
            view.wait(10.0)
        timer.join()


# ---- hearing ---------------------------------------------------------------------------------------------------------


class Renewed(Lease):
    """A lease with as much left as a test says."""

    def __init__(self, remaining_seconds: float = TTL_SECONDS) -> None:
        self.id, self.ttl_seconds, self.lost, self.left = 1, TTL_SECONDS, threading.Event(), remaining_seconds

    @property
    def remaining_seconds(self) -> float:
        return self.left

    def revoke(self, *, timeout_seconds: float | None = None) -> None:
        raise NotImplementedError


def listening(lease: Lease) -> tuple[Hearing, ManualClock]:
    """Return a hearing that has heard for long."""
    clock = ManualClock()
    hearing = Hearing(clock, ttl_seconds=TTL_SECONDS)
    assert not hearing.certain
    for _ in range(6):
        clock.advance(0.5)
        hearing.look(lease)
    assert hearing.certain
    return hearing, clock


def test_a_lease_that_is_renewed_as_it_should_be_keeps_what_is_certain() -> None:
    lease = Renewed()
    hearing, clock = listening(lease)
    for number in range(100):
        clock.advance(0.5)
        lease.left = TTL_SECONDS - number % 2 * TTL_SECONDS / 3
        hearing.look(lease)
        assert hearing.certain
    assert hearing.breaks == 0


@pytest.mark.parametrize("stall", [2.0, 2.1, 2.5, 2.99])
@pytest.mark.parametrize("renewed_before", [0.0, 0.3, 0.99])
@pytest.mark.parametrize("phase", [0.0, 0.17, 0.4])
def test_a_stall_that_can_end_leases_is_noticed_however_we_look(
    stall: float, renewed_before: float, phase: float
) -> None:
    """Our lease was renewed up to a third of its time before; we look every sixth."""
    lease = Renewed()
    hearing, clock = listening(lease)
    clock.advance(phase)
    lease.left -= renewed_before
    end = clock.now() + stall
    while clock.now() + 0.5 < end:
        clock.advance(0.5)
        lease.left -= 0.5
        hearing.look(lease)
    clock.advance(end - clock.now())
    lease.left = TTL_SECONDS
    hearing.look(lease)
    assert not hearing.certain
    assert hearing.breaks == 1
    clock.advance(hearing.seconds_to_certainty)
    assert hearing.certain


def test_our_own_sleep_is_a_break() -> None:
    lease = Renewed()
    hearing, clock = listening(lease)
    clock.advance(1.4)
    hearing.look(lease)
    assert hearing.certain
    clock.advance(1.6)
    hearing.look(lease)
    assert not hearing.certain


def test_an_outage_of_many_failures_is_one_break() -> None:
    hearing, clock = listening(Renewed())
    for _ in range(10):
        clock.advance(1.0)
        hearing.lost()
    assert hearing.breaks == 1
    assert hearing.seconds_to_certainty == TTL_SECONDS


def test_the_view_of_a_job_that_has_ended_says_so() -> None:
    job = Job()
    view = View(job.store)
    assert not view.over
    job.store.put(keys.failure("engine-0"), b"{}")
    view.refresh()
    assert not view.over
    job.fail()
    view.refresh()
    assert view.over

"""A member hears the board in order, every wait of it ends with the news, and an evicted one writes nothing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from bamboo_ds.elastic import keys
from bamboo_ds.elastic.member import Member
from bamboo_ds.errors import (
    ConfigError,
    EvictedError,
    PeerLostError,
    PlanChangedError,
    RefusedError,
    ScheduleError,
    StoreError,
    StoreUnavailableError,
)
from bamboo_ds.plan import codec
from bamboo_ds.plan.cluster import Node
from bamboo_ds.plan.commit import Ballot
from bamboo_ds.plan.job import JobSettings, JobSpec
from bamboo_ds.plan.membership import LinkReport
from bamboo_ds.store import MemoryServer, MemoryStore
from tests.world.cluster import Pen, at_most, dead, decision, eventually, start, two_stages

SPEC = JobSpec(publisher=3, num_stages=2, num_layers=8)
PLAN = two_stages()
SOON = 0.1
"""Seconds within which a wait must end; it is a few milliseconds, on a busy machine."""


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer()


@pytest.fixture
def pen(server: MemoryServer) -> Pen:
    return Pen(MemoryStore(server=server))


@pytest.fixture
def seat(server: MemoryServer) -> Iterator[Callable[..., Member]]:
    """Make members."""
    members: list[Member] = []

    def make(worker: int, **options: Any) -> Member:
        members.append(Member(MemoryStore(server=server), worker=worker, node=f"n{worker}", **options))
        return members[-1]

    yield make
    for member in members:
        member.close()


@pytest.fixture
def member(pen: Pen, seat: Callable[..., Member]) -> Member:
    """Worker 3, seated in a plan of workers 3 and 5."""
    pen.roster(3, 5)
    pen.plan(PLAN)
    one = seat(3)
    one.await_roster()
    one.take_seat(SPEC)
    return one


# ---- joining ---------------------------------------------------------------------------------------------------


def test_a_member_joins_and_waits_for_the_roster(pen: Pen, seat: Callable[..., Member]) -> None:
    one = seat(3)
    one.join()
    found = pen.store.get(keys.ready(3))
    assert found is not None
    assert found.value == b"n3"
    wait = start(one.await_roster)
    pen.roster(3, 5)
    assert wait.end(SOON).result.workers == (3, 5)
    assert one.company() == ((-1, 0), (3, 5))
    assert one.roster.workers == (3, 5)


def test_what_is_not_there_yet_is_our_bug_to_ask_for(seat: Callable[..., Member]) -> None:
    one = seat(3)
    with pytest.raises(ScheduleError, match="await_roster"):
        _ = one.roster
    with pytest.raises(ScheduleError, match="take_seat"):
        one.current()


def test_a_rank_is_among_the_roster_until_the_member_itself_has_its_seat(pen: Pen, seat: Callable[..., Member]) -> None:
    pen.roster(3, 5, 7)
    one = seat(3)
    one.await_roster()
    pen.plan(PLAN)
    time.sleep(SOON)
    assert one.current() == PLAN
    assert one.company() == ((-1, 0), (3, 5, 7))
    assert one.take_seat(SPEC) == PLAN
    assert one.company() == ((0, 0), (3, 5))


def test_one_that_comes_late_goes_on_alone_and_is_not_ready(pen: Pen, seat: Callable[..., Member]) -> None:
    pen.roster(3, 5)
    late = seat(7)
    late.join()
    wait = start(late.await_roster)
    time.sleep(SOON)
    assert wait.thread.is_alive()  # there is no plan yet
    pen.plan(PLAN)
    assert wait.end(SOON).result.workers == (3, 5, 7)
    assert pen.store.get(keys.ready(7)) is None
    assert late.alone
    assert late.company() == ((0, 0), (3, 5, 7))
    stand_in = late.take_seat(SPEC)
    assert stand_in.number < PLAN.number
    assert stand_in.owners == ((3, 7),)


def test_a_standby_hears_of_every_newer_plan_and_has_its_seat_when_one_has_a_place(
    pen: Pen, seat: Callable[..., Member]
) -> None:
    pen.roster(3, 5)
    pen.plan(PLAN)
    late = seat(7)
    late.await_roster()
    without = two_stages(version=1, owners=(5, 5))
    for plan, alone in ((without, True), (two_stages(version=2, owners=(5, 7)), False)):
        before = late.current()
        wait = start(lambda before=before: late.await_place(before))  # type: ignore[misc]
        eventually(lambda: pen.store.get(keys.ready(7)) is not None)
        assert wait.thread.is_alive()
        pen.plan(plan)
        wait.end(SOON)
        assert late.alone is alone
    assert late.company() == ((0, 2), (5, 7))


def test_a_worker_without_a_place_in_the_first_plan_builds_for_one_and_is_not_ready(
    pen: Pen, seat: Callable[..., Member]
) -> None:
    pen.roster(3, 5, 7)
    spare = seat(7)
    spare.join()
    spare.await_roster()
    wait = start(lambda: spare.take_seat(SPEC))
    time.sleep(SOON)
    assert wait.thread.is_alive()
    pen.plan(PLAN)
    assert 7 in wait.end(SOON).result.workers
    assert spare.alone
    assert pen.store.get(keys.ready(7)) is None


def test_one_that_loses_its_place_stands_by(pen: Pen, member: Member) -> None:
    after = replace(two_stages(version=0, owners=(5, 7)), epoch=1)
    pen.plan(after)
    eventually(lambda: member.current() == after)
    wait = start(lambda: member.await_place(after))
    eventually(lambda: member.alone)
    pen.plan(replace(two_stages(version=0, owners=(3, 7)), epoch=2))
    wait.end(SOON)
    assert not member.alone


@pytest.mark.parametrize("ask", [lambda one: one.await_roster(), lambda one: one.await_place(PLAN)])
def test_a_standby_ends_in_order_with_the_job(pen: Pen, seat: Callable[..., Member], ask: Any) -> None:
    pen.plan(PLAN)
    wait = start(lambda: ask(seat(7)))
    pen.finish()
    error = wait.end(SOON).error
    assert isinstance(error, SystemExit)
    assert error.code == 0


# ---- agreeing --------------------------------------------------------------------------------------------------


def test_the_first_publishes_the_specification_and_the_others_agree(pen: Pen, seat: Callable[..., Member]) -> None:
    pen.plan(PLAN)
    other = JobSpec(publisher=5, num_stages=2, num_layers=8)
    assert seat(3).take_seat(SPEC) == seat(5).take_seat(other) == PLAN
    found = pen.store.get(keys.SPEC)
    assert found is not None
    assert codec.decode(JobSpec, found.value) == SPEC


def test_a_worker_with_another_model_is_refused_by_the_key_and_the_cluster_hears_of_it(
    pen: Pen, seat: Callable[..., Member]
) -> None:
    pen.plan(PLAN)
    seat(3).take_seat(SPEC)
    with pytest.raises(RefusedError, match=r"num_layers = 9 here, but 8 in the job \(as worker 3 published\)"):
        seat(5).take_seat(JobSpec(publisher=5, num_stages=2, num_layers=9))
    found = pen.store.get(keys.ended(5))
    assert found is not None
    record = json.loads(found.value)
    assert record["signal"] is None
    assert record["reason"].startswith("refused: num_layers = 9")


def test_a_refused_worker_does_not_say_that_it_left_in_order(pen: Pen, seat: Callable[..., Member]) -> None:
    one = seat(3)
    one.refuse("too old")
    one.leave()
    assert pen.store.list(keys.LEFT).entries == ()


def test_a_worker_with_another_config_is_refused_by_the_key(member: Member, seat: Callable[..., Member]) -> None:
    member.check_settings(0, JobSettings(3, {"optimizer.params.lr": "0.1", "steps": "5"}))
    member.check_settings(1, JobSettings(3, {"optimizer.params.lr": "0.2"}))
    seat(5).check_settings(1, JobSettings(5, {"optimizer.params.lr": "0.2"}))
    with pytest.raises(RefusedError, match=r"optimizer.params.lr = 0.2 here, but 0.1 in the job"):
        seat(5).check_settings(0, JobSettings(5, {"optimizer.params.lr": "0.2", "steps": "6"}))


# ---- waits end -------------------------------------------------------------------------------------------------

NEWS: dict[str, tuple[Callable[[Pen], Any], type[BaseException], str]] = {
    "a newer plan": (lambda pen: pen.plan(dead(PLAN, 5)), PlanChangedError, r"plan 0.0 was replaced by 0.1: it was k"),
    "eviction": (lambda pen: pen.plan(dead(PLAN, 3)), EvictedError, r"worker 3 was declared dead by plan 0.1"),
    "a failure": (lambda pen: pen.fail(), PeerLostError, r"worker 9: ValueError: no such layer$"),
    "the end": (lambda pen: pen.finish("enough"), PeerLostError, r"is over while worker 3 still works: enough"),
}


@pytest.mark.parametrize("news", NEWS)
def test_a_wait_for_a_decision_ends_with_news(member: Member, pen: Pen, news: str) -> None:
    write, kind, message = NEWS[news]
    wait = start(lambda: member.await_outcome(0, 4, PLAN))
    with at_most(SOON):
        write(pen)
        wait.end()
    assert type(wait.error) is kind
    with pytest.raises(kind, match=message):
        raise wait.error


@pytest.mark.parametrize("news", NEWS)
def test_a_look_tells_the_news(member: Member, pen: Pen, news: str) -> None:
    write, kind, message = NEWS[news]
    member.check(PLAN)
    heard = threading.Event()
    member.subscribe(heard.set)
    with at_most(SOON):
        write(pen)
        assert heard.wait(5)
    with pytest.raises(kind, match=message):
        member.check(PLAN)


def test_a_failure_of_one_engine_ends_no_other_work(member: Member, pen: Pen) -> None:
    pen.fail("engine-1")
    eventually(lambda: member.failure("engine-1"))
    member.check(PLAN)
    assert member.failure() is None


def test_a_listener_hears_of_plans_and_failures_only_until_it_ends_that(member: Member, pen: Pen) -> None:
    calls: list[int] = []
    end = member.subscribe(lambda: calls.append(1))
    pen.store.put(keys.ROLL, b"7")
    pen.outcome(0, 1, decision(1))
    eventually(lambda: pen.store.get(keys.answer(3)))
    assert calls == []
    pen.plan(dead(PLAN, 5))
    eventually(lambda: calls == [1])
    end()
    end()
    pen.fail()
    eventually(member.failure)
    assert calls == [1]


def test_a_wait_ends_at_its_deadline(member: Member) -> None:
    with pytest.raises(PeerLostError, match=r"the decision on commit 4 did not come within 0.1 s"):
        member.await_outcome(0, 4, PLAN, timeout_seconds=0.1)


def test_closing_ends_all_waits(member: Member) -> None:
    wait = start(lambda: member.await_outcome(0, 4, PLAN))
    member.close()
    member.close()
    assert isinstance(wait.end(SOON).error, StoreError)


def test_a_plan_that_cannot_be_read_is_named(member: Member, pen: Pen) -> None:
    wait = start(lambda: member.await_outcome(0, 4, PLAN))
    pen.store.put(keys.PLAN, b'{"record": "plan", "schema": 2}')
    error = wait.end(SOON).error
    assert isinstance(error, ConfigError)
    assert "schema 2" in str(error)
    with pytest.raises(ConfigError, match="run the same version"):
        member.check(PLAN)


# ---- commits ---------------------------------------------------------------------------------------------------


def test_a_decision_is_waited_for_and_the_last_ones_are_kept(member: Member, pen: Pen) -> None:
    wait = start(lambda: member.await_outcome(0, 1, PLAN))
    pen.outcome(1, 1, decision(11))
    pen.outcome(0, 1, decision(1))
    assert wait.end(SOON).result == decision(1)
    assert member.outcome(1, 1) == decision(11)
    assert member.outcome(0, 2) is None
    for number in range(2, 12):
        pen.outcome(0, number, decision(number))
        pen.store.delete(keys.decision(0, number - 1))
    assert member.await_outcome(0, 11, PLAN) == decision(11)
    assert member.await_outcome(0, 10, PLAN) == decision(10)
    assert member.outcome(0, 1) is None
    assert member.outcome(1, 1) == decision(11), "engines are apart"


def test_a_step_that_was_decided_counts_although_the_plan_has_changed_since(member: Member, pen: Pen) -> None:
    pen.outcome(0, 4, decision(4))
    pen.plan(dead(PLAN, 5))
    eventually(lambda: member.current().version == 1)
    assert member.await_outcome(0, 4, PLAN) == decision(4)
    with pytest.raises(PlanChangedError):
        member.await_outcome(0, 5, PLAN)


def test_an_evicted_worker_gets_no_decision(member: Member, pen: Pen) -> None:
    pen.outcome(0, 4, decision(4))
    pen.plan(dead(PLAN, 3))
    eventually(lambda: member.evicted)
    with pytest.raises(EvictedError):
        member.await_outcome(0, 4, PLAN)


BALLOT = Ballot(votes=(), rows=("a",))


def test_a_ballot_is_cast_under_its_plan_and_casting_it_twice_is_casting_it_once(member: Member, pen: Pen) -> None:
    member.vote(0, 4, 1, BALLOT, plan=PLAN)
    member.vote(0, 4, 1, BALLOT, plan=PLAN)
    entries = pen.store.list(keys.VOTES).entries
    assert [entry.key for entry in entries] == [keys.vote(0, 4, (0, 0), 1)]
    assert codec.decode(Ballot, entries[0].value) == BALLOT


def test_a_ballot_of_an_older_plan_is_not_cast_even_if_the_voter_has_not_heard_of_the_newer(
    server: MemoryServer, member: Member, pen: Pen
) -> None:
    with _deaf(member):
        pen.plan(dead(PLAN, 5))
        wait = start(lambda: member.vote(0, 4, 0, BALLOT, plan=PLAN))
        assert wait.thread.is_alive(), "it waits for the news that must be under way"
    assert isinstance(wait.end(SOON).error, PlanChangedError)
    assert pen.store.list(keys.VOTES).entries == ()


def test_a_ballot_for_a_commit_that_is_decided_leaves_nothing_behind(member: Member, pen: Pen) -> None:
    with _deaf(member):
        pen.outcome(0, 4, decision(4))
        wait = start(lambda: member.vote(0, 4, 0, BALLOT, plan=PLAN))
    assert wait.end(SOON).error is None
    member.vote(0, 4, 0, BALLOT, plan=PLAN)
    assert pen.store.list(keys.VOTES).entries == ()


class _deaf:
    """Hold up the thread that follows the board of a member."""

    def __init__(self, member: Member) -> None:
        self._release, self._held = threading.Event(), threading.Event()
        self._unsubscribe = member.subscribe(self._hold)
        self._member = member

    def _hold(self) -> None:
        self._held.set()
        self._release.wait(5)

    def __enter__(self) -> None:
        # A failure of another scope wakes listeners and means nothing to this member.
        self._member.fail("engine-99", b"{}")
        assert self._held.wait(5)

    def __exit__(self, *_: object) -> None:
        self._unsubscribe()
        self._release.set()


# ---- failures, reports, the roll -------------------------------------------------------------------------------


def test_the_first_failure_stands(member: Member, seat: Callable[..., Member]) -> None:
    assert member.fail("job", b"first") == b"first"
    assert seat(5).fail("job", b"second") == b"first"
    assert eventually(member.failure) == b"first"
    assert member.fail("engine-0", b"apart") == b"apart"


def test_a_broken_link_is_reported_once_a_plan_and_suspect(member: Member, pen: Pen) -> None:
    for _ in range(3):
        member.report(5, "reset by peer", plan=PLAN)
    (entry,) = eventually(lambda: pen.store.list(keys.SUSPECTS).entries)
    assert entry.key == keys.suspect((0, 0), 3, 5)
    assert codec.decode(LinkReport, entry.value) == LinkReport(3, 5, epoch=0, version=0, detail="reset by peer")
    pen.store.delete(entry.key)
    member.report(5, "reset by peer", plan=PLAN)
    newer = two_stages(version=1)
    pen.plan(newer)
    eventually(lambda: member.current() == newer)
    member.report(5, "late news of a link that is gone", plan=PLAN)
    member.report(5, "reset by peer", plan=newer)
    found = eventually(lambda: pen.store.list(keys.SUSPECTS).entries)
    assert [entry.key for entry in found] == [keys.suspect((0, 1), 3, 5)]


def test_reporting_does_not_wait_for_the_store(member: Member, server: MemoryServer, pen: Pen) -> None:
    server.reachable = False
    with at_most(SOON):
        member.report(5, "reset by peer", plan=PLAN)
    time.sleep(0.3)
    server.reachable = True
    assert eventually(lambda: pen.store.list(keys.SUSPECTS).entries)


def test_the_roll_is_answered_at_once_and_again_when_it_is_called_again(member: Member, pen: Pen) -> None:
    for number in (b"1", b"2"):
        with at_most(SOON):
            pen.store.put(keys.ROLL, number)
            eventually(lambda number=number: (found := pen.store.get(keys.answer(3))) and found.value == number)


def test_an_answer_that_the_store_did_not_take_is_given_later(member: Member, pen: Pen) -> None:
    refused = threading.Event()
    transact = member.store.transact

    def failing(conditions: Any, writes: Any, **options: Any) -> Any:
        if not refused.is_set() and [write.key for write in writes] == [keys.answer(3)]:
            refused.set()
            raise StoreUnavailableError("lost on the way")
        return transact(conditions, writes, **options)

    member.store.transact = failing  # type: ignore[method-assign]
    pen.store.put(keys.ROLL, b"1")
    eventually(lambda: pen.store.get(keys.answer(3)))
    assert refused.is_set()


def test_an_evicted_worker_writes_nothing_more(member: Member, pen: Pen) -> None:
    before = dead(PLAN, 3)
    pen.plan(before)
    eventually(lambda: member.evicted)
    revision = pen.store.list().revision
    with pytest.raises(EvictedError):
        member.vote(0, 1, 0, BALLOT, plan=PLAN)
    with pytest.raises(EvictedError):
        member.vote(0, 1, 0, BALLOT, plan=before)
    with pytest.raises(EvictedError):
        member.join()
    member.report(5, "all links broke", plan=before)
    member.fail("job", b"it was not me")
    member.tell("failover", "nothing")
    member.leave()
    member.refuse("a reason")
    time.sleep(SOON)
    assert pen.store.list().revision == revision
    pen.store.put(keys.ROLL, b"5")
    time.sleep(SOON)
    assert pen.store.get(keys.answer(3)) is None


def test_who_is_gone_is_known_from_the_agents(member: Member, pen: Pen) -> None:
    assert member.gone((3, 5)) == (), "without agents nobody keeps count"
    pen.store.put(keys.node("n3"), codec.encode(Node("n3", "a", (3, 4))))
    assert member.gone((3, 5)) == (5,)
    pen.store.put(keys.left(5), b"")
    assert member.left((3, 5)) == (5,)


# ---- outages ---------------------------------------------------------------------------------------------------


def test_a_short_outage_is_borne_and_a_long_one_is_not(
    pen: Pen, server: MemoryServer, seat: Callable[..., Any]
) -> None:
    pen.plan(PLAN)
    one = seat(3, outage_seconds=1.0)
    one.take_seat(SPEC)
    server.reachable = False
    wait = start(lambda: one.vote(0, 1, 0, BALLOT, plan=PLAN))
    time.sleep(0.6)
    one.check(PLAN)
    server.reachable = True
    assert wait.end(1).error is None
    time.sleep(0.6)  # until the watch has heard of the store again
    server.reachable = False
    waits = [
        start(lambda: one.await_outcome(0, 1, PLAN)),
        start(lambda: one.vote(0, 1, 0, BALLOT, plan=PLAN)),
        start(one.join),
    ]
    for wait in waits:
        error = wait.end(4).error
        assert isinstance(error, StoreUnavailableError)
        assert 1.0 < wait.seconds < 3.0
    with pytest.raises(StoreUnavailableError, match="outage_seconds is 1: look at the etcd servers"):
        one.check(PLAN)
    assert one.fail("job", b"ours") == b"ours", "it is ours as far as we know"
    one.leave()


def test_a_store_that_was_never_there_is_an_outage_too(server: MemoryServer, seat: Callable[..., Member]) -> None:
    server.reachable = False
    wait = start(lambda: seat(3, outage_seconds=0.5).await_roster())
    assert isinstance(wait.end(3).error, StoreUnavailableError)


def test_a_watch_that_was_compacted_away_misses_nothing(server: MemoryServer, member: Member, pen: Pen) -> None:
    with _deaf(member):
        pen.plan(dead(PLAN, 5))
        pen.outcome(0, 4, decision(4))
        pen.store.compact(pen.store.list().revision)
        pen.fail("engine-0")
    with at_most(1.0):
        assert member.await_outcome(0, 4, PLAN) == decision(4)
        with pytest.raises(PlanChangedError):
            member.await_outcome(0, 5, PLAN)
        eventually(lambda: member.failure("engine-0"))

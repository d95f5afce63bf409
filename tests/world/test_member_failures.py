"""In a cluster a failure goes to the board once, and who meets a broken link hears the verdict from there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bamboo_ds.elastic import keys
from bamboo_ds.elastic.member import Member
from bamboo_ds.errors import (
    DataExhaustedError,
    EvictedError,
    PeerLostError,
    PlanChangedError,
    RefusedError,
)
from bamboo_ds.store import MemoryServer, MemoryStore
from bamboo_ds.world import Guard, MemberFailures
from bamboo_ds.world.failure import Failure, consequence_note, is_consequence
from tests.world.cluster import Pen, at_most, dead, eventually, start, two_stages

PLAN = two_stages()
BROKEN = PeerLostError("the link to worker 5 broke: reset by peer")


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer()


@pytest.fixture
def pen(server: MemoryServer) -> Pen:
    pen = Pen(MemoryStore(server=server))
    pen.plan(PLAN)
    return pen


@pytest.fixture
def failures(server: MemoryServer, pen: Pen) -> Iterator[Callable[..., MemberFailures]]:
    """Make the failures of a worker."""
    members: list[Member] = []

    def make(worker: int = 3, *, scope: str = "engine-0", timeout_seconds: float = 5.0) -> MemberFailures:
        members.append(Member(MemoryStore(server=server), worker=worker, node="n"))
        member = members[-1]
        eventually(lambda: member._board.news.plan)
        return MemberFailures(member, plan=lambda: PLAN, scope=scope, timeout_seconds=timeout_seconds)

    yield make
    for member in members:
        member.close()


def board(pen: Pen, scope: str) -> Any:
    entry = pen.store.get(keys.failure(scope))
    return None if entry is None else json.loads(entry.value)


def raised(error: BaseException) -> BaseException:
    """Return an error that has been raised."""
    try:
        raise error
    except BaseException as same:
        return same


def test_the_first_failure_is_written_with_its_traceback_and_a_repetition_is_marked(pen: Pen, failures: Any) -> None:
    first, second, other = raised(ValueError("a fish")), raised(ValueError("a fish")), raised(ValueError("a bird"))
    failures(3).report(first)
    failures(5).report(second)
    failures(7).report(other)
    found = board(pen, "engine-0")
    assert (found["worker"], found["kind"], found["message"]) == (3, "ValueError", "a fish")
    assert "raise error" in found["traceback"]
    assert consequence_note(second) == "it met the same error as worker 3: ValueError"
    assert not is_consequence(first)
    assert not is_consequence(other)
    assert board(pen, "job") is None


@pytest.mark.parametrize("error", [EvictedError("dead"), RefusedError("another model")])
def test_what_concerns_this_worker_alone_is_no_failure_of_the_job(pen: Pen, failures: Any, error: Exception) -> None:
    failures(3).report(error)
    assert board(pen, "engine-0") is None
    assert consequence_note(error) == str(error)


def test_a_failure_of_the_scope_or_of_the_job_is_seen_and_of_another_engine_is_not(pen: Pen, failures: Any) -> None:
    ours, others = failures(3), failures(5, scope="engine-1")
    pen.fail("engine-0", worker=5, traceback="")
    with pytest.raises(PeerLostError, match="worker 5 has failed: ValueError"):
        eventually(ours.check)
    others.check()
    assert others.cause() is None
    pen.fail("job", worker=6)
    assert eventually(others.cause) == Failure(6, "ValueError", "no such layer\nat all")
    assert ours.cause().worker == 5


VERDICTS: dict[str, tuple[Callable[[Pen], Any], type[Exception], str]] = {
    "plan": (lambda pen: pen.plan(dead(PLAN, 5)), PlanChangedError, "plan 0.0 was replaced by 0.1: it was killed"),
    "eviction": (lambda pen: pen.plan(dead(PLAN, 3)), EvictedError, "worker 3 was declared dead"),
    "failure": (lambda pen: pen.fail(), PeerLostError, "worker 9 failed: ValueError: no such layer"),
    "data": (
        lambda pen: pen.fail("engine-0", kind="DataExhaustedError", message="no more"),
        DataExhaustedError,
        "worker 9 failed: no more",
    ),
    "agent": (lambda pen: pen.store.put(keys.failure("job"), b"no JSON"), PeerLostError, "worker -1 failed: failure"),
    "end": (lambda pen: pen.finish(), PeerLostError, "the job is over while worker 3 still works"),
    "left": (lambda pen: pen.store.put(keys.left(5), b""), PeerLostError, "worker 5 left: the script ended there"),
}


@pytest.mark.parametrize("verdict", VERDICTS)
def test_a_broken_link_is_explained_by_the_verdict_of_the_cluster(pen: Pen, failures: Any, verdict: str) -> None:
    write, kind, message = VERDICTS[verdict]
    ours = failures(3)
    wait = start(lambda: ours.explain(BROKEN))
    assert wait.thread.is_alive()
    with at_most(1.3 if verdict == "left" else 0.2):
        write(pen)
        wait.end()
    assert type(wait.result) is kind
    assert message in str(wait.result)
    assert is_consequence(wait.result) == (kind is not PlanChangedError)


def test_a_broken_link_that_nobody_explains_is_an_error_in_time(failures: Any) -> None:
    with at_most(1.0):
        error = failures(3, timeout_seconds=0.3).explain(BROKEN)
    assert type(error) is PeerLostError
    assert "reset by peer; within 0.3 s the cluster has not said what became of the peer" in str(error)
    assert not is_consequence(error)


def test_a_guard_stops_and_lets_the_news_pass_without_a_failure(pen: Pen, failures: Any) -> None:
    for error in (PlanChangedError("a newer plan"), EvictedError("dead")):
        stopped: list[BaseException] = []
        with pytest.raises(type(error)), Guard(failures(3), stopped.append):
            raise error
        assert stopped == [error]
    assert board(pen, "engine-0") is None


def test_a_guard_raises_the_verdict_in_place_of_a_broken_link(pen: Pen, failures: Any) -> None:
    pen.plan(dead(PLAN, 5))
    stopped: list[BaseException] = []
    with pytest.raises(PlanChangedError), Guard(failures(3), stopped.append):
        raise BROKEN
    assert stopped == [BROKEN]
    assert board(pen, "engine-0") is None


def test_a_guard_reports_a_failure_before_it_stops(pen: Pen, failures: Any) -> None:
    seen: list[Any] = []
    with pytest.raises(ValueError, match="a fish"), Guard(failures(3), lambda _: seen.append(board(pen, "engine-0"))):
        raise ValueError("a fish")
    assert seen[0]["message"] == "a fish"

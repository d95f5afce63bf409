"""Coordinators die, pause, wake up and are cut off at every moment; what is decided is the same as without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import event as note
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_ds.elastic import keys
from bamboo_ds.elastic.coordinator import CoordinatorSettings
from bamboo_ds.elastic.hearing import Hearing
from bamboo_ds.errors import ConflictError, StoreUnavailableError
from bamboo_ds.plan.codec import decode, encode
from bamboo_ds.plan.commit import Outcome
from bamboo_ds.plan.plan import Plan
from bamboo_ds.plan.roster import StartRule
from bamboo_ds.store import EventKind, Put
from tests.elastic.coordinating import SPEC, TTL_SECONDS, Chair, Job, ballot, eight
from tests.elastic.faulty_store import Fault, FaultyStore, Killed

PATIENT = CoordinatorSettings(ttl_seconds=TTL_SECONDS, start=StartRule(4, 1e6), keep_seconds=1e6)


# ---- outages ---------------------------------------------------------------------------------------------------------


def test_a_node_that_vanishes_after_an_outage_has_one_ttl_to_come_back() -> None:
    job, chair = eight()
    job.server.reachable = False
    with pytest.raises(StoreUnavailableError):
        chair.view.refresh()
    chair.hearing.lost()  # as the thread does that heard it
    job.server.reachable = True
    job.lapse("n2")
    job.lapse("n5")
    assert chair.run() == ["store_outage"]
    assert chair.coordinator.seconds_to_next == pytest.approx(TTL_SECONDS)
    job.advance(TTL_SECONDS - 0.1)
    assert chair.run() == []
    job.join("n2", 2, ready=False)
    job.advance(0.1)
    assert chair.run() == ["node_lost", "failover"]
    assert job.plan.dead == {5}


def test_an_outage_that_ended_in_a_takeover_is_told_by_the_new_coordinator_and_an_old_one_is_not() -> None:
    job, chair = eight()
    candidate = Hearing(job.clock, ttl_seconds=TTL_SECONDS)
    job.advance(TTL_SECONDS)
    candidate.lost()
    chair.die()
    chair = job.elect("n1", hearing=candidate)
    assert chair.run() == ["coordinator", "store_outage"]
    job.advance(TTL_SECONDS)
    chair.die()
    assert job.elect("n1", hearing=candidate).run() == ["coordinator"]


def test_an_exit_that_an_agent_saw_is_believed_at_once_after_an_outage() -> None:
    job, chair = eight()
    chair.hearing.lost()
    job.lapse("n2")
    job.end(5)
    chair.run()
    assert job.plan.dead == {5}


def test_a_takeover_as_the_coordinators_node_died_believes_its_end_at_once() -> None:
    job, chair = eight()
    candidate = Hearing(job.clock, ttl_seconds=TTL_SECONDS)
    job.advance(TTL_SECONDS)
    chair.die()
    job.lapse("n0")
    chair = job.elect("n1", hearing=candidate)
    assert "failover" in chair.run()
    assert job.plan.dead == {0}


def test_a_takeover_by_who_has_just_come_waits_until_it_can_know() -> None:
    """It may have come in the middle of an outage, which ended the lease of the others."""
    job, chair = eight()
    chair.die()
    for number in range(8):
        job.lapse(f"n{number}")
    chair = job.elect("n9", hearing=Hearing(job.clock, ttl_seconds=TTL_SECONDS))
    assert chair.run() == ["coordinator"]
    for number in range(1, 8):
        job.join(f"n{number}", number, ready=False)
    job.advance(TTL_SECONDS)
    chair.run()
    assert job.plan.dead == {0}


def test_the_first_plan_and_a_new_epoch_wait_too_for_those_who_may_come_back() -> None:
    job = Job(PATIENT)
    chair = job.elect()
    for number in range(4):
        job.join(f"n{number}", number)
    chair.run()
    chair.hearing.lost()
    job.lapse("n1")
    job.publish(replace(SPEC, num_stages=2, min_stages=1))
    chair.run()
    assert not job.has(keys.PLAN)
    job.join("n1", 1, ready=False)
    chair.run()
    assert job.plan.owners == ((0, 2), (1, 3))
    chair.hearing.lost()
    job.lapse("n0")
    job.end(1, 3)
    chair.run()
    assert (job.plan.aborted, job.plan.epoch) == (True, 0)
    job.join("n0", 0, ready=False)
    chair.run()
    assert (job.plan.epoch, job.plan.workers) == (1, (0, 2))


def test_a_roster_is_not_given_up_while_its_workers_may_come_back() -> None:
    job = Job(PATIENT)
    chair = job.elect()
    job.join("n0", 0, 1, 2, 3)
    chair.run()
    chair.hearing.lost()
    job.lapse("n0")
    job.join("n1", 4, 5, 6, 7)
    chair.run()
    assert job.roster is not None
    assert job.roster.workers == (0, 1, 2, 3)
    job.advance(TTL_SECONDS)
    chair.run()
    assert job.roster.workers == (4, 5, 6, 7)


def test_while_the_store_is_away_a_step_does_nothing_and_afterwards_it_goes_on() -> None:
    job, chair = eight()
    job.end(2)
    chair.view.refresh()
    job.server.reachable = False
    for _ in range(3):
        assert chair.coordinator.step() == ()
        assert chair.coordinator.seconds_to_next > 0
    job.server.reachable = True
    assert [deed.kind for deed in chair.coordinator.step()] == ["store_outage", "failover"]


def test_a_history_that_was_compacted_away_is_read_anew() -> None:
    job, chair = eight()
    job.end(2)
    job.vote(0, 0)
    job.store.compact(job.store.put("x", b""))
    job.vote(0, 1)
    assert chair.run() == ["decision", "failover"]


# ---- one write goes wrong --------------------------------------------------------------------------------------------


def story(job: Job) -> list[Callable[[], None]]:
    """A whole life: beginning, commits, a quarrel, a failover, an abort, a new epoch, the end."""

    def rendezvous() -> None:
        job.store.put(keys.rendezvous(job.plan.number, "engine-0") + "key", b"")

    def vote(commit: int) -> Callable[[], None]:
        return lambda: job.vote(commit, *range(job.plan.num_pipelines))

    return [
        *(lambda n=n: job.join(f"n{n}", n) for n in range(4)),
        lambda: job.publish(replace(SPEC, num_stages=2, min_stages=1)),
        rendezvous,
        vote(0),
        lambda: job.join("n4", 4),
        lambda: job.report("0>2 2>0"),
        lambda: job.answer(0, 1, 2, 3),
        rendezvous,
        vote(1),
        lambda: job.end(1),
        vote(2),
        lambda: job.lapse("n3"),
        rendezvous,
        vote(3),
        lambda: job.join("n5", 5),
        vote(4),
        lambda: job.leave(*job.plan.workers),
    ]


def compared(job: Job) -> dict[str, bytes]:
    return {key: value for key, value in job.lasting().items() if not key.startswith("rdzv/")}


@dataclass
class Theatre:
    """Plays stories with coordinators that go wrong, and watches that those who fell write nothing.

    Attributes:
        job: the store.
        faults: to come: a kind, and at which write from the last one on.
        fallen: coordinators that do not know that they lead no longer.
    """

    faults: list[tuple[Fault, int]] = field(default_factory=list)
    job: Job = field(default_factory=lambda: Job(PATIENT))
    fallen: list[Chair] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generation = 0
        self.succeed()

    def succeed(self) -> None:
        """Let the next candidate take over."""
        self.store = FaultyStore(self.job.server)
        self.chair = self.job.elect(f"c{self.generation}", store=self.store)
        self.store.fall = lambda lease=self.chair.lease: self.job.server.expire(lease.id)
        self.generation += 1
        self.arm()

    def arm(self) -> None:
        if self.store.countdown <= 0 and self.faults:
            self.store.fault, self.store.countdown = self.faults.pop(0)

    def settle(self) -> None:
        """Run until there is nothing to do and nobody has died."""
        for _ in range(200):
            try:
                self.chair.run()
            except Killed:
                self.chair.die()
                self.succeed()
            except ConflictError:
                self.store.countdown = 0
                self.fallen.append(self.chair)
                self.succeed()
            else:
                self.arm()
                if not self.chair.coordinator._in_doubt:
                    return
        raise AssertionError("the coordinators find no rest")

    def play(self, step: Callable[[], None]) -> None:
        step()
        self.settle()
        if self.chair.hearing.breaks:
            self.job.advance(TTL_SECONDS + 0.5)
            self.settle()
        self.store.deliver()
        self.settle()
        self.wake_the_fallen()

    def wake_the_fallen(self) -> None:
        before = self.job.store.put("x", b"")
        for chair in self.fallen:
            with pytest.raises(ConflictError):
                insist(chair)
        assert self.job.store.put("x", b"") == before + 1, "who leads no longer writes nothing"


def insist(chair: Chair) -> None:
    """Let a coordinator try whatever it can."""
    chair.run()
    chair.coordinator._pen.write((), [Put("x", b"")])


def played(faults: list[tuple[Fault, int]]) -> Theatre:
    theatre = Theatre(faults)
    for step in story(theatre.job):
        theatre.play(step)
    return theatre


UNDISTURBED = compared(played([]).job)


def writes_of_the_story() -> int:
    theatre = Theatre()
    theatre.store.countdown = 10_000
    for step in story(theatre.job):
        theatre.play(step)
    return 10_000 - theatre.store.countdown


def test_the_story_is_a_whole_life() -> None:
    plan = decode(Plan, UNDISTURBED[keys.PLAN])
    assert (plan.number, plan.dead, plan.workers) == ((1, 0), {1, 2, 3}, (0, 4))
    assert {keys.ROSTER, keys.SPEC, keys.FINISHED, keys.ROLL, keys.decision(0, 4)} <= UNDISTURBED.keys()
    assert writes_of_the_story() > 20


@pytest.mark.parametrize("fault", list(Fault))
def test_whatever_becomes_of_any_single_write_the_result_is_the_same(fault: Fault) -> None:
    for number in range(1, writes_of_the_story() + 1):
        theatre = played([(fault, number)])
        assert compared(theatre.job) == UNDISTURBED, f"{fault} at write {number}"
        assert check_history(theatre.job) == []


def test_two_coordinators_can_never_both_succeed() -> None:
    job, sleeper = eight()
    job.end(2)
    job.vote(0, 0, 1)
    sleeper.view.refresh()  # it has seen all that is needed, and is stopped before it writes
    job.server.expire(sleeper.lease.id)
    awake = job.elect("c1")
    assert awake.run() == ["coordinator", "decision", "failover"]
    before = job.store.list("")
    with pytest.raises(ConflictError, match="fenced off"):
        sleeper.coordinator.step()
    assert job.store.list("") == before


def test_one_that_sleeps_through_its_lease_writes_no_event_either() -> None:
    job, sleeper = eight()
    job.server.expire(sleeper.lease.id)
    job.join("n8", 8)
    before = job.store.list("")
    sleeper.run()
    assert job.store.list("") == before


# ---- random lives ----------------------------------------------------------------------------------------------------


@dataclass
class Life:
    """A random story: what happens depends on what was decided before, which is the same whatever goes wrong."""

    job: Job
    born: int = 0
    commit: int = 0

    def join(self, workers: int) -> None:
        self.job.join(f"n{self.born}", *range(self.born, self.born + workers), zone="abc"[self.born % 3])
        self.born += workers

    def publish(self, pipelines: int) -> None:
        self.job.publish(replace(SPEC, num_stages=3, pipelines=pipelines, min_stages=1))

    @property
    def workers(self) -> tuple[int, ...]:
        return self.job.plan.workers if self.job.has(keys.PLAN) else tuple(range(self.born))

    def pick(self, number: int) -> int:
        return self.workers[number % len(self.workers)] if self.workers else 0

    def end(self, pick: int) -> None:
        self.job.end(self.pick(pick))

    def lapse(self, pick: int) -> None:
        if self.job.leases:
            self.job.lapse(sorted(self.job.leases)[pick % len(self.job.leases)])

    def leave(self, pick: int) -> None:
        self.job.leave(self.pick(pick))

    def quarrel(self, reporter: int, suspect: int) -> None:
        if self.job.has(keys.PLAN):
            self.job.report(f"{self.pick(reporter)}>{self.pick(suspect)}")

    def answer(self) -> None:
        self.job.answer(*self.workers)

    def vote(self) -> None:
        if not self.job.has(keys.PLAN):
            return
        plan = self.job.plan
        while self.job.has(keys.decision(0, self.commit)):
            self.commit += 1
        # The loss tells under which plan was voted.
        loss = plan.epoch * 1000.0 + plan.version
        for pipeline in range(plan.num_pipelines):
            text = encode(ballot(self.commit, pipeline, loss=loss, stages=plan.num_stages))
            self.job.store.put(keys.vote(0, self.commit, plan.number, pipeline), text)

    def vote_in_part(self) -> None:
        if self.job.has(keys.PLAN):
            text = encode(ballot(self.commit, 0))
            self.job.store.put(keys.vote(0, self.commit, self.job.plan.number, 0), text)


picks = st.integers(0, 20)
acts = st.one_of(
    st.tuples(st.just("join"), st.integers(1, 2)),
    st.tuples(st.sampled_from(["end", "lapse", "end", "lapse", "leave"]), picks),
    st.tuples(st.just("quarrel"), picks, picks),
    st.sampled_from([("answer",), ("answer",), ("vote",), ("vote",), ("vote",), ("vote_in_part",)]),
)
lives = st.tuples(
    st.lists(st.tuples(st.just("join"), st.integers(1, 2)), min_size=2, max_size=5),
    st.tuples(st.just("publish"), st.integers(1, 2)).map(lambda act: [act]),
    st.lists(acts, max_size=14),
).map(lambda parts: [act for part in parts for act in part])
faults_ = st.lists(st.tuples(st.sampled_from(list(Fault)), st.integers(1, 6)), min_size=1, max_size=8)


def lived(life: list[tuple[object, ...]], faults: list[tuple[Fault, int]]) -> Theatre:
    theatre = Theatre(list(faults))
    person = Life(theatre.job)
    for name, *arguments in life:
        theatre.play(lambda name=name, arguments=arguments: getattr(person, str(name))(*arguments))  # type: ignore[misc]
    return theatre


def check_history(job: Job) -> list[str]:
    """Return what was ever written that must not be: plans that go back, decisions under an old plan or made twice."""
    wrong: list[str] = []
    number, decided = (-1, 0), set[str]()
    for change in job.server._history:
        for event in change:
            key = event.key.removeprefix(job.store.prefix)
            if event.kind is not EventKind.PUT:
                continue
            if key == keys.PLAN:
                plan = decode(Plan, event.value)
                wrong += [f"plan {plan.number} after {number}"] if plan.number <= number else []
                number = plan.number
            elif key.startswith(keys.DECISIONS):
                wrong += [f"{key} twice"] if key in decided else []
                decided.add(key)
                decision = decode(Outcome, event.value).decision
                assert decision is not None
                if decision.mean_loss not in (1.0, number[0] * 1000.0 + number[1]):
                    wrong.append(f"{key} of votes under plan {decision.mean_loss} while it is {number}")
    return wrong


@settings(max_examples=150, deadline=None)
@given(lives, faults_)
def test_random_lives_end_alike_whatever_goes_wrong_with_their_coordinators(
    life: list[tuple[object, ...]], faults: list[tuple[Fault, int]]
) -> None:
    disturbed, undisturbed = lived(life, faults), lived(life, [])
    assert check_history(disturbed.job) == check_history(undisturbed.job) == []
    assert compared(disturbed.job) == compared(undisturbed.job)
    note(f"{min(disturbed.generation - 1, 4)} successors")
    if disturbed.job.has(keys.PLAN):
        plan = disturbed.job.plan
        note(f"epoch {min(plan.epoch, 3)}")
        gone = set(disturbed.chair.view.ended) | (set(plan.workers) - disturbed.chair.view.registered.keys())
        assert disturbed.chair.view.over or not gone & set(plan.workers) - disturbed.chair.view.left.keys()

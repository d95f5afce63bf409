"""A worker's seat in the cluster: all that it hears, waits for and says.

One thread follows the board (`member_board`), answers the roll call at once, and wakes whoever waits. Waits end on what
they wait for, on a newer plan, a failure, the end of the job, this worker's eviction, or an outage that lasts too long,
within milliseconds of the news. What a worker writes carries the condition that its plan is still the newest, so one
that was stopped, declared dead and wakes up writes nothing.
"""

from __future__ import annotations

import functools
import json
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from bamboo_ds.elastic import keys
from bamboo_ds.elastic.events import EventLog
from bamboo_ds.elastic.member_board import Board, Found, News
from bamboo_ds.elastic.namespaces import cut_own_link
from bamboo_ds.errors import (
    BambooError,
    ConfigError,
    ConflictError,
    EvictedError,
    PeerLostError,
    PlanChangedError,
    RefusedError,
    ScheduleError,
    StoreError,
)
from bamboo_ds.plan import Plan, codec
from bamboo_ds.plan.cluster import Node
from bamboo_ds.plan.commit import Ballot, Outcome
from bamboo_ds.plan.job import JobSettings, JobSpec, Roster
from bamboo_ds.plan.membership import LinkReport
from bamboo_ds.plan.standby import stand_in
from bamboo_ds.store import ABSENT, Condition, Delete, Put, Store, Unchanged

__all__ = ["JOB", "NO_PLAN", "Member"]

_log = logging.getLogger(__name__)

Agreement = TypeVar("Agreement", JobSpec, JobSettings)

JOB = "job"
"""The scope of failures that end the job."""
NO_PLAN = (-1, 0)
"""The number under which workers meet before they have a plan."""
_BRIEF_SECONDS = 1.0  # deadline of a request that must not hold up the thread that follows the board


def _never(news: News) -> bool:
    return False


class Member:
    """One worker among those of its job; a `PlanSource`. All methods may be called from all threads.

    Args:
        store: of the job; closed by `close`.
        worker: id of this worker.
        node: name of its node.
        outage_seconds: how long the store may be silent before this worker gives up.
        conditions: go with all that it writes: that the run of the job is still the same, where ids are given again.

    Attributes:
        store: of the job.
        node: name of this worker's node.
    """

    elastic = True

    def __init__(
        self,
        store: Store,
        *,
        worker: int,
        node: str,
        outage_seconds: float = 60.0,
        conditions: Sequence[Condition] = (),
    ) -> None:
        self.store, self._worker, self.node, self._conditions = store, worker, node, tuple(conditions)
        self._events = EventLog(store, node=node)
        self._seated, self._alone, self._refused = False, False, False
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []
        self._reported: set[tuple[tuple[int, int], int]] = set()
        self._answered = ""
        self._board = Board(store, outage_seconds=outage_seconds, on_look=self._look)
        self._board.start()

    # ---- what is known -----------------------------------------------------------------------------------------

    @property
    def worker(self) -> int:
        """Id of this worker."""
        return self._worker

    @property
    def roster(self) -> Roster:
        """Who begins the job.

        Raises:
            ScheduleError: it is not closed yet.
        """
        if self._board.news.roster is None:
            raise ScheduleError("the roster is asked for before it is closed: await_roster() first")
        return self._board.news.roster

    def current(self) -> Plan:
        """Return the newest plan.

        Raises:
            ScheduleError: there is none yet.
        """
        if self._board.news.plan is None:
            raise ScheduleError("the plan is asked for before there is one: take_seat() first")
        return self._board.news.plan

    def company(self) -> tuple[tuple[int, int], tuple[int, ...]]:
        """Return among whom this worker has its rank: a number, and ids of workers in ascending order.

        Those of the roster until this worker has taken its seat, whatever the others do meanwhile; of the newest plan
        afterwards. To one that came too late for the roster, and has no seat, it is as if it had one already.
        """
        news = self._board.news
        if (self._seated or self._alone) and news.plan is not None:
            return news.plan.number, tuple(sorted({*news.plan.workers, self._worker}))
        return NO_PLAN, () if news.roster is None else news.roster.workers

    @property
    def alone(self) -> bool:
        """Whether this worker has no seat although the others train: nobody answers its script's collectives."""
        return self._alone

    def failure(self, scope: str = JOB) -> bytes | None:
        """Return the first failure of a scope, as written; None while there is none."""
        return self._board.news.failures.get(scope)

    @property
    def evicted(self) -> bool:
        """Whether the cluster has declared this worker dead."""
        return self._worker in self.dead

    @property
    def dead(self) -> frozenset[int]:
        """Ids of all workers that were declared dead."""
        plan = self._board.news.plan
        return frozenset() if plan is None else plan.dead

    def gone(self, workers: tuple[int, ...]) -> tuple[int, ...]:
        """Return which of these workers are not there (any more), as far as their agents have told the store.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
        nodes = [codec.decode(Node, entry.value) for entry in self.store.list(keys.NODES).entries]
        running = {worker for node in nodes for worker in node.workers}
        # Without an agent of our own nobody keeps count.
        return tuple(worker for worker in workers if worker not in running) if self._worker in running else ()

    def left(self, workers: tuple[int, ...]) -> tuple[int, ...]:
        """Return which of these workers' scripts have ended in order.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
        found = {entry.key for entry in self.store.list(keys.LEFT).entries}
        return tuple(worker for worker in workers if keys.left(worker) in found)

    # ---- watching ----------------------------------------------------------------------------------------------

    def check(self, plan: Plan | None) -> None:
        """Raise when work under a plan has to end; it costs next to nothing. Without a plan, when any work has to.

        Raises:
            EvictedError: the cluster declared this worker dead.
            PeerLostError: another worker's failure has ended the job.
            PlanChangedError: there is a newer plan.
            StoreUnavailableError: nothing was heard of the store for too long.
        """
        self._end_with(self._board.news, plan)
        self._board.check()

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Let `listener` be called at any news of a plan, a failure or the end of the job.

        It is called from the thread that follows the board: it must be quick and not raise.

        Returns:
            What ends it.
        """
        with self._lock:
            self._listeners.append(listener)

        def end() -> None:
            with self._lock:
                if listener in self._listeners:
                    self._listeners.remove(listener)

        return end

    # ---- joining -----------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Say that this worker can be given a stage."""
        self._insist(lambda: self._put(keys.ready(self._worker), self.node.encode()))

    def await_roster(self, *, timeout_seconds: float | None = None) -> Roster:
        """Wait until this worker may begin: it is in the roster, or the others have begun without it.

        In the latter case it is not ready any more: it first makes its engine, then it stands by (`await_place`).

        Returns:
            The workers among whom this one has its rank.

        Raises:
            SystemExit: the job has finished, and this worker was never needed.
            EvictedError, PeerLostError, StoreUnavailableError: as for `check`.
        """

        def ready(news: News) -> Roster | None:
            self._end_if_evicted(news)
            if news.roster is not None and self._worker in news.roster.workers:
                return news.roster
            if news.roster is not None and news.plan is not None:
                return Roster(tuple(sorted({*news.plan.workers, self._worker})), news.plan.cause)
            return None

        roster = self._wait(ready, timeout_seconds, "the roster of the job, or its first plan,")
        known = self._board.news.roster
        if known is not None and self._worker not in known.workers:
            self._withdraw()
        return roster

    def _withdraw(self) -> None:
        """Say that this worker cannot be given a stage: the others would wait while it makes its engine."""
        self._alone = True
        self._insist(lambda: self.store.transact(self._conditions, [Delete(keys.ready(self._worker))]))

    def await_place(self, plan: Plan) -> None:
        """Say that this worker can be given a stage, and wait for a newer plan than `plan`, whatever is in it.

        Raises:
            SystemExit: the job has finished, and this worker was not needed any more.
            EvictedError, PeerLostError, StoreUnavailableError: as for `check`.
        """
        if self._worker not in plan.workers:
            self._seated, self._alone = False, True
            self.join()

        def ready(news: News) -> Plan | None:
            self._end_if_evicted(news)
            return news.plan if news.plan is not None and news.plan.number > plan.number else None

        if self._worker in self._wait(ready, None, "a newer plan").workers:
            self._seated, self._alone = True, False

    def take_seat(self, spec: JobSpec, *, timeout_seconds: float | None = None) -> Plan:
        """Agree with the others on the job, and wait for its plan.

        Args:
            spec: this worker's view of the job. The first to come publishes it for all.
            timeout_seconds: how long to wait for the plan; None for as long as the job goes on.

        Returns:
            The plan. If it has no place for this worker, what it would be with one (`plan.standby.stand_in`).

        Raises:
            RefusedError: the job is another one; the message names what differs. The cluster goes on without this
                worker.
            SystemExit: the job has finished, and this worker was never needed.
            EvictedError, PeerLostError, StoreUnavailableError: as for `check`.
        """
        self._agree(keys.SPEC, spec)

        def ready(news: News) -> Plan | None:
            self._end_if_evicted(news)
            return news.plan

        plan = self._wait(ready, timeout_seconds, "the plan of the job")
        if self._worker not in plan.workers or self._alone:
            self._withdraw()
            return stand_in(plan, self._worker)
        self._seated = True
        return plan

    def check_settings(self, engine: int, settings: JobSettings) -> JobSettings:
        """Agree with the others on the config of an engine; return what the first has published.

        Raises:
            RefusedError: the others' differs; the message names the first key.
        """
        return self._agree(keys.settings(engine), settings)

    def _agree(self, key: str, ours: Agreement) -> Agreement:
        """Publish what all must agree on, or hold ours against what the first has published; return that."""
        value = self._insist(lambda: self._first(key, codec.encode(ours)))
        theirs = codec.decode(type(ours), value)
        try:
            theirs.check(ours)
        except ConfigError as error:
            self.refuse(str(error))
            raise RefusedError(f"worker {self._worker} is refused: {error}") from None
        return theirs

    # ---- speaking ----------------------------------------------------------------------------------------------

    def report(self, suspect: int, detail: str, *, plan: Plan) -> None:
        """Tell the coordinator that this worker's link to another broke. Once a plan and suspect, in the background."""
        with self._lock:
            self._reported = {seen for seen in self._reported if seen[0] == plan.number}
            if (plan.number, suspect) in self._reported:
                return
            self._reported.add((plan.number, suspect))
        threading.Thread(
            target=self._send_report, args=(suspect, detail, plan), name="bamboo-report", daemon=True
        ).start()

    def _send_report(self, suspect: int, detail: str, plan: Plan) -> None:
        report = LinkReport(self._worker, suspect, epoch=plan.epoch, version=plan.version, detail=detail)
        write = Put(keys.suspect(plan.number, self._worker, suspect), codec.encode(report))
        try:
            self._under_plan(plan, [], write)
        except Exception as error:  # it has become pointless, or impossible
            _log.info("did not report the broken link to worker %d: %s", suspect, error)

    def tell(self, kind: str, text: str, **fields: Any) -> None:
        """Write an event for people, as well as the store answers."""
        if not self.evicted:
            self._events.tell(kind, text, **fields)

    def cut(self) -> None:
        """Take this worker's node off the network, as a fault that is asked for.

        Raises:
            ConfigError: the node has no network of its own.
        """
        cut_own_link()

    def vote(self, engine: int, number: int, pipeline: int, ballot: Ballot, *, plan: Plan) -> None:
        """Cast the ballot of a pipeline in a commit; it may be cast again. Does nothing when the commit is decided.

        Args:
            engine: number of the engine in its script.
            number: of the commit.
            pipeline: whose votes these are.
            ballot: the votes.
            plan: under which they were made: under a newer one they say nothing.

        Raises:
            PlanChangedError and all else that `check` raises.
        """
        write = Put(keys.vote(engine, number, plan.number, pipeline), codec.encode(ballot))
        undecided = Unchanged(keys.decision(engine, number), ABSENT)
        self._under_plan(plan, [undecided], write, unless=lambda news: (engine, number) in news.outcomes)

    def outcome(self, engine: int, number: int) -> Outcome | None:
        """Return the outcome of a commit if it is there."""
        value = self._board.news.outcomes.get((engine, number))
        return None if value is None else codec.decode(Outcome, value)

    def newest_outcome(self, engine: int) -> int:
        """Return the number of the last commit of an engine whose outcome is there; -1 if there is none."""
        return max((number for of, number in self._board.news.outcomes if of == engine), default=-1)

    def await_outcome(self, engine: int, number: int, plan: Plan, *, timeout_seconds: float | None = None) -> Outcome:
        """Wait for the outcome of a commit. One that was decided counts, even if the plan has changed since.

        Raises:
            PlanChangedError: the plan was replaced before the commit was decided.
            EvictedError, PeerLostError, StoreUnavailableError: as for `check`.
        """

        def ready(news: News) -> bytes | None:
            self._end_if_evicted(news)
            return news.outcomes.get((engine, number))

        value = self._board.wait(
            ready,
            over=lambda news: self._end_with(news, plan),
            timeout_seconds=timeout_seconds,
            what=f"the decision on commit {number}",
        )
        return codec.decode(Outcome, value)

    def fail(self, scope: str, failure: bytes) -> bytes:
        """Write a failure unless another came first, and return the first. The store may be out of reach: then ours.

        That of a worker which came late, and has no place yet, is its own only: it is not taken.
        """
        if self.evicted or self._refused:
            return failure
        try:
            if self._alone:
                self.refuse(_described(failure))
                return failure
            return self._first(keys.failure(scope), failure)
        except StoreError as error:
            _log.warning("the failure could not be written: %s", error)
            return failure

    def leave(self) -> None:
        """Say that this worker's script has ended in order; nothing if it was evicted or refused."""
        if self.evicted or self._refused:
            return
        try:
            self._board.insist(lambda: self._put(keys.left(self._worker), b""), over=self._end_if_evicted)
        except (StoreError, EvictedError) as error:
            _log.warning("could not say that this worker has left: %s", error)

    def refuse(self, reason: str) -> None:
        """Say that this worker takes no part, and why: the cluster goes on without it."""
        if self.evicted or self._refused:
            return
        self._refused = True
        record = json.dumps({"signal": None, "reason": f"refused: {reason}"}).encode()
        self._insist(lambda: self._put(keys.ended(self._worker), record))

    def await_end(self, *, timeout_seconds: float) -> bool:
        """Wait until the job has finished or failed, and return whether it has."""

        def over(news: News) -> bool | None:
            return True if news.finished is not None or JOB in news.failures else None

        try:
            return self._board.wait(
                over, over=lambda news: None, timeout_seconds=timeout_seconds, what="the end of the job"
            )
        except (PeerLostError, StoreError):
            return False

    def give_up(self, error: BambooError) -> None:
        """Let all waits and checks of this worker raise an error: its agent knows that it cannot go on."""
        self._board.fail(error)

    def close(self) -> None:
        """Leave the cluster's store; all waits end. May be called again."""
        self._board.close()
        self.store.close()

    # ---- inside ------------------------------------------------------------------------------------------------

    def _under_plan(
        self, plan: Plan, conditions: list[Condition], write: Put, *, unless: Callable[[News], bool] = _never
    ) -> None:
        """Write a key if `plan` is the newest, through outages; not if `unless` holds."""
        while not unless(news := self._board.news):
            self._end_with(news, plan)
            attempt = functools.partial(self._try, [Unchanged(keys.PLAN, news.plan_revision), *conditions], write)
            if self._board.insist(attempt, over=lambda news: self._end_with(news, plan)):
                return
            # A newer plan, or the outcome: it has not reached us yet.
            self._board.await_change(since=news)

    def _try(self, conditions: list[Condition], write: Put) -> bool:
        try:
            self.store.transact([*conditions, *self._conditions], [write])
        except ConflictError:
            return False
        return True

    def _put(self, key: str, value: bytes, *, timeout_seconds: float | None = None) -> None:
        self.store.transact(self._conditions, [Put(key, value)], timeout_seconds=timeout_seconds)

    def _first(self, key: str, value: bytes) -> bytes:
        """Write a key unless it is there, and return what it holds. May be repeated."""
        while True:
            try:
                self.store.transact([Unchanged(key, ABSENT), *self._conditions], [Put(key, value)])
                return value
            except ConflictError:
                entry = self.store.get(key)
                if entry is not None:
                    return entry.value
                self.store.transact(self._conditions, ())  # raises if it is they that do not hold any more

    def _wait(self, ready: Callable[[News], Found | None], timeout_seconds: float | None, what: str) -> Found:
        return self._board.wait(ready, over=self._end_standby, timeout_seconds=timeout_seconds, what=what)

    def _insist(self, call: Callable[[], Found]) -> Found:
        return self._board.insist(call, over=self._end_standby)

    def _end_standby(self, news: News) -> None:
        """Raise when a worker without a stage need not wait any longer."""
        if news.finished is not None and not self._seated:
            raise SystemExit(0)
        self._end_with(news, None)

    def _end_with(self, news: News, plan: Plan | None) -> None:
        self._end_if_evicted(news)
        if (failure := news.failures.get(JOB)) is not None:
            raise PeerLostError(f"the job has failed: {_described(failure)}")
        if news.finished is not None:
            raise PeerLostError(f"the job is over while worker {self._worker} still works: {news.finished}")
        if plan is not None and news.plan is not None and news.plan.number != plan.number:
            raise PlanChangedError(
                f"plan {keys.dotted(plan.number)} was replaced by {keys.dotted(news.plan.number)}: {news.plan.cause}"
            )

    def _end_if_evicted(self, news: News) -> None:
        if news.plan is not None and self._worker in news.plan.dead:
            raise EvictedError(
                f"worker {self._worker} was declared dead by plan {keys.dotted(news.plan.number)} or before "
                f"({news.plan.cause}): it stops; the others train on without it"
            )

    def _look(self, before: News) -> None:
        """Hear the news, on the thread that follows the board."""
        news = self._board.news
        self._answer_roll(news)
        if news is before or not news.is_alarming_after(before):
            return
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    def _answer_roll(self, news: News) -> None:
        """Say that this worker lives; after an outage, as soon as it is over."""
        if news.roll == self._answered or self.evicted:
            return
        try:
            self._put(keys.answer(self._worker), news.roll.encode(), timeout_seconds=_BRIEF_SECONDS)
            self._answered = news.roll
        except StoreError as error:
            _log.info("roll call %s is not answered yet: %s", news.roll, error)


def _described(failure: bytes) -> str:
    """Name a failure in one line."""
    try:
        found = json.loads(failure)
        return f"worker {found['worker']}: {found['kind']}: {str(found['message']).strip().splitlines()[0]}"
    except (ValueError, KeyError, TypeError, IndexError):
        return failure.decode(errors="replace")

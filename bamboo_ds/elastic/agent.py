"""One agent per node: it registers the node, starts its workers, watches them and the board, and ends them in time.

The main thread alone changes the agent's state. It waits for three things at once: reports of the spawner, deadlines,
and calls that other threads and signal handlers put into its inbox. It never waits for the store for longer than a
request takes, and hardly ever for that.

What an end of a worker means::

    exit code 0                      its script has ended in order
    SIGKILL, SIGTERM, SIGINT, SIGHUP a loss: the cluster goes on without it
    any other code or signal         a failure, which ends the job; unless the cluster has refused or evicted it
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import select
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from bamboo_ds.clock import Clock, SystemClock
from bamboo_ds.elastic import keys, preemption
from bamboo_ds.elastic.agent_settings import AgentPort, AgentSettings
from bamboo_ds.elastic.inbox import Inbox
from bamboo_ds.elastic.membership import Membership
from bamboo_ds.elastic.node_workers import NodeWorkers, worker_environment
from bamboo_ds.elastic.presence import Presence
from bamboo_ds.elastic.spawner import Spawner, SpawnerLostError
from bamboo_ds.elastic.worker_exits import JOB, Verdict, WorkerExit, judge, publish_failure, read_failure
from bamboo_ds.elastic.worker_logs import WorkerLogs
from bamboo_ds.errors import BambooError, ConfigError, ConflictError, StoreError, StoreUnavailableError
from bamboo_ds.plan import codec
from bamboo_ds.plan.plan import NOBODY, Plan
from bamboo_ds.store import ABSENT, Delete, Entry, Event, EventKind, Unchanged

if TYPE_CHECKING:
    from bamboo_ds.elastic.agent_metrics import MetricsFeed

__all__ = ["FAILED", "FINISHED", "GONE", "Agent", "AgentSettings"]

_Found = TypeVar("_Found")

FINISHED, FAILED, GONE = 0, 1, 3
"""Exit codes of an agent: the job has finished, the job has failed, this node was lost, evicted or told to leave."""

_EVICTED_SECONDS = 2.0  # in which an evicted worker ends by itself
_FAILED_SECONDS = 4.0  # in which workers end by themselves when another has failed
_FINISHED_SECONDS = 10.0  # the same when the job has finished
_TERM_SECONDS = 3.0  # between SIGTERM and SIGKILL
_RETRY_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 0.5  # between two looks at the workers
_CLOSE_SECONDS = 2.0

_LAST_WORD_SECONDS = 12.0  # in an outage workers give up so much earlier than the agent, so that each can say why


class Agent:
    """The agent of one node. `run` it in the main thread of a process that has no other threads and no store yet.

    Args:
        settings: what it must know.
        clock: measures deadlines.
    """

    def __init__(self, settings: AgentSettings, *, clock: Clock | None = None) -> None:
        self._settings = settings
        self._clock = SystemClock() if clock is None else clock
        self._inbox = Inbox()
        self._code: int | None = None
        """As what this agent ends, once it does."""
        self._presence: Presence | None = None
        self._feed: MetricsFeed | None = None
        self._own: frozenset[int] = frozenset()
        self._left, self._took_part = False, False
        self._unexplained: list[WorkerExit] = []
        self._next_try = -math.inf
        self._cut, self._told_wait = False, False

    def run(self) -> int:
        """Take part in the job until it is over for this node, and return the exit code.

        Raises:
            ConfigError: the settings cannot be right.
        """
        settings = self._settings
        with contextlib.ExitStack() as closing:
            spawner = Spawner(settings.program)  # a fork: before all else
            closing.callback(spawner.close)
            self._logs = WorkerLogs(settings.log_folder, echo=settings.echo)
            self._workers = NodeWorkers(
                spawner,
                self._logs,
                clock=self._clock,
                stopped_seconds=settings.ttl_seconds,
                pid_file=settings.pid_file,
            )
            closing.enter_context(self._handlers())
            self._feed = self._open_metrics(closing)
            self._guarded(lambda: self._join(closing))
            while not self._over:
                self._guarded(self._turn)
        return GONE if self._code is None else self._code

    @property
    def _over(self) -> bool:
        return self._code is not None and not self._workers.running

    def _guarded(self, step: Callable[[], None]) -> None:
        """Take a step; what goes wrong ends this agent in order.

        Raises:
            ConfigError: before the node has joined, as the settings are wrong.
        """
        try:
            step()
        except SpawnerLostError as error:
            self._on_spawner_lost(error)
        except BambooError as error:
            if isinstance(error, ConfigError) and not self._own:
                raise
            self._end(FAILED, f"node {self._settings.node} gives up: {error}")

    # ---- joining -----------------------------------------------------------------------------------------------

    def _join(self, closing: contextlib.ExitStack) -> None:
        """Put the node into the cluster and start its workers; `closing` undoes it in the opposite order."""
        presence = self._presence = Presence(
            self._settings,
            clock=self._clock,
            on_board=self._call_soon(self._on_board),
            on_lost=self._call_soon(self._on_lost),
            feed=self._feed,
        )
        closing.callback(presence.close)
        closing.callback(self._logs.close, wait_seconds=_CLOSE_SECONDS)
        if ended := presence.ended(given_up=self._given_up):
            self._end(FINISHED, f"node {self._settings.node} comes too late and leaves: {ended}")
            return
        ids = presence.join(given_up=self._given_up)
        self._own = frozenset(ids)
        for index, worker in enumerate(ids):
            self._workers.start(worker, self._environment(worker, index))
        presence.begin(given_up=self._given_up)
        for companion in self._settings.companions:
            closing.callback(companion(self._port(presence)).close)

    def _port(self, presence: Presence) -> AgentPort:
        """Return what companions may use of this agent."""
        return AgentPort(
            store=presence.store,
            node=self._settings.node,
            zone=self._settings.zone,
            lease=presence.registration.lease,
            tell=presence.events.tell,
            say=self._say,
            leave=self._call_soon(self._leave),
            registry=None if self._feed is None else self._feed.metrics.registry,
        )

    def _given_up(self) -> bool:
        if not self._told_wait:
            self._told_wait, etcd = True, ",".join(self._settings.etcd.endpoints)
            limit = f"for {self._settings.outage_seconds:g} s"
            self._say(f"node {self._settings.node} cannot reach etcd at {etcd} yet and goes on trying {limit}")
        self._inbox.run()
        return self._code is not None

    def _environment(self, worker: int, index: int) -> dict[str, str]:
        settings = self._settings
        own = {**os.environ, **settings.environment}
        environment = worker_environment(own, index=index, workers=settings.workers)
        membership = Membership(
            etcd=settings.etcd,
            job=settings.job,
            node=settings.node,
            worker=worker,
            address=settings.address,
            outage_seconds=max(settings.outage_seconds - _LAST_WORD_SECONDS, settings.outage_seconds / 2),
        )
        membership.write(environment)
        return environment

    def _open_metrics(self, closing: contextlib.ExitStack) -> MetricsFeed | None:
        """Serve metrics if that is asked for.

        Raises:
            ConfigError: the port is taken.
        """
        if self._settings.metrics_port is None:
            return None
        from bamboo_ds.elastic.agent_metrics import MetricsFeed  # needs prometheus_client
        from bamboo_ds.elastic.metrics import Metrics

        metrics = Metrics(job=self._settings.job, node=self._settings.node)
        closing.callback(metrics.close)
        self._say(f"node {self._settings.node} serves metrics at port {metrics.serve(self._settings.metrics_port)}")
        return MetricsFeed(metrics, clock=self._clock)

    # ---- the loop ----------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Wait for something to do, and do it."""
        pause = max(min(self._workers.tick(), _LONGEST_PAUSE_SECONDS), 0.0)
        select.select([self._inbox.fileno(), self._workers.fileno()], [], [], pause)
        self._inbox.run()
        self._unexplained += self._workers.read()
        if self._code is None:
            self._explain()
        self._feed_metrics()
        if self._code is None and not self._workers.running and not self._unexplained:
            self._on_nobody_left()

    def _on_nobody_left(self) -> None:
        """Decide whether to wait for the end of the job, now that no worker of this node runs."""
        if not self._left:
            self._end(GONE, f"node {self._settings.node} has no worker left")
        elif not self._took_part:  # the script does not use Bamboo: nobody will say that the job is over
            self._end(FINISHED, "")

    def _feed_metrics(self) -> None:
        if self._feed is not None and self._presence is not None:
            self._feed.metrics.local_workers(len(self._workers.running))
            self._feed.metrics.leading(self._presence.leads)

    def _end(self, code: int, text: str, *, term_seconds: float = 0.0, kill_seconds: float = _TERM_SECONDS) -> None:
        """Begin to end this agent: its workers by the times given, then itself. The first reason counts."""
        if self._code is None:
            self._code = code
            if text:
                self._say(text)
        for worker in self._workers.running:
            self._workers.end(worker, term_seconds=term_seconds, kill_seconds=kill_seconds, reason=text)

    # ---- ends of workers ---------------------------------------------------------------------------------------

    def _explain(self) -> None:
        """Find out what the ends of workers mean; when the store does not answer, later."""
        if self._presence is None or self._clock.now() < self._next_try:
            return
        for ended in list(self._unexplained):
            try:
                self._settle(self._presence, ended)
                self._unexplained.remove(ended)
            except StoreUnavailableError:
                self._next_try = self._clock.now() + _RETRY_SECONDS

    def _settle(self, presence: Presence, ended: WorkerExit) -> None:
        """Tell the cluster what the end of a worker means.

        Raises:
            StoreUnavailableError: the store does not answer; may be called again.
        """
        verdict, worker, store = judge(presence.store, ended), ended.worker, presence.store
        if verdict is Verdict.LEFT:
            self._left = True
            if store.get(keys.ready(worker)) is not None:
                self._took_part = True
                with contextlib.suppress(ConflictError):  # it has said so itself
                    store.compare_and_set(keys.left(worker), self._settings.node.encode(), expected=ABSENT)
        elif verdict in (Verdict.FAILED, Verdict.FOLLOWED):
            if verdict is Verdict.FAILED:
                publish_failure(store, ended, log=self._workers.last_words(worker))
            self._on_failure(store.get(keys.failure(JOB)))
        else:
            lost = verdict is Verdict.LOST
            presence.registration.strike({worker: ended.record(self._settings.node) if lost else None})
            how = ended.how if lost else f"has ended: the cluster has {verdict.value} it"
            self._tell_event("worker_ended", f"worker {worker} {how}", worker=worker)

    def _on_failure(self, entry: Entry | None) -> None:
        if entry is None or self._code is not None:
            return
        worker, text = read_failure(entry.value)
        shown = f"the job has failed: {text if worker == NOBODY else f'worker {worker}: {text}'}"
        if worker in self._own and self._presence is not None:
            self._presence.events.tell("failure", shown, worker=worker)
            shown += f"\n(its log: {self._logs.path(worker)})"
        said = shown if self._settings.alone or worker in self._own else ""
        self._end(FAILED, said, term_seconds=_FAILED_SECONDS, kill_seconds=_FAILED_SECONDS + _TERM_SECONDS)

    def _on_spawner_lost(self, error: SpawnerLostError) -> None:
        if self._presence is not None:
            lost = [WorkerExit(worker, -signal.SIGKILL, str(error)) for worker in self._workers.running]
            self._strike(self._presence, lost)
        self._workers.abandon()
        self._end(GONE, f"node {self._settings.node} is lost: {error}")

    def _strike(self, presence: Presence, exits: list[WorkerExit]) -> None:
        presence.registration.strike({ended.worker: ended.record(self._settings.node) for ended in exits})

    # ---- news --------------------------------------------------------------------------------------------------

    def _on_board(self, event: Event) -> None:
        if event.kind is EventKind.DELETE:
            return
        if event.key == keys.PLAN:
            self._on_plan(codec.decode(Plan, event.value))
        elif event.key == keys.failure(JOB):
            self._on_failure(Entry(event.key, event.value, event.revision, event.revision))
        elif event.key == keys.FINISHED:
            self._end(FINISHED, "", term_seconds=_FINISHED_SECONDS, kill_seconds=_FINISHED_SECONDS + _TERM_SECONDS)
        elif event.key == keys.preempt(self._settings.node):
            self._on_preempt(event)

    def _on_plan(self, plan: Plan) -> None:
        for worker in self._workers.running & plan.dead:
            # It reads the same plan and ends by itself, unless it hangs.
            self._workers.end(
                worker, term_seconds=math.inf, kill_seconds=_EVICTED_SECONDS, reason=f"it is evicted: {plan.cause}"
            )

    def _on_lost(self, error: StoreError) -> None:
        if isinstance(error, ConflictError) or self._cut:
            self._end(GONE, f"node {self._settings.node} is lost: {error}")
        else:
            self._end(FAILED, f"node {self._settings.node} gives up: {error}")

    def _on_signal(self, number: int) -> None:
        if self._code is not None:  # asked twice
            self._end(GONE, "", kill_seconds=0.0)
        self._leave(f"it was told to ({signal.Signals(number).name})")

    def _leave(self, reason: str) -> None:
        """Take this node out of the job: the others hear of it at once, its workers have a moment to end."""
        if self._code is None and self._presence is not None:
            running = self._workers.running
            text = f"its node leaves, {reason}"
            self._strike(self._presence, [WorkerExit(worker, -signal.SIGTERM, text) for worker in running])
        self._end(GONE, f"node {self._settings.node} leaves: {reason}")

    def _on_preempt(self, event: Event) -> None:
        """Break this node, as the board asks. The request is deleted first: the next node of this name shall live."""
        node = self._settings.node
        if self._presence is not None:
            with contextlib.suppress(StoreError):
                self._presence.store.transact([Unchanged(event.key, event.revision)], [Delete(event.key)])
        try:
            how = preemption.read_how(event.value.decode(errors="replace"))
            preemption.check(how)
        except ConfigError as error:
            self._tell_event("preempt", f"node {node} was told to break and cannot: {error}")
            return
        self._tell_event("preempt", f"node {node} breaks as it was told to: {how}", how=how)
        self._cut = self._cut or how == "cut"
        if how == "term":
            self._leave("it was preempted (term)")
        else:
            preemption.break_own_node(how)

    # ---- small things ------------------------------------------------------------------------------------------

    def _call_soon(self, call: Callable[[_Found], None]) -> Callable[[_Found], None]:
        """Return what lets another thread have `call` called in the main thread."""
        return lambda found: self._inbox.put(functools.partial(call, found))

    def _tell_event(self, kind: str, text: str, **fields: Any) -> None:
        if self._presence is not None:
            self._presence.events.tell(kind, text, **fields)
        self._say(text)

    def _say(self, text: str) -> None:
        """Write to stderr, in one piece: workers and other agents write at the same time."""
        clear = "\r\x1b[2K" if os.isatty(2) else ""  # a progress bar of a worker may stand in this line
        with contextlib.suppress(OSError):
            os.write(2, f"{clear}bamboo: {text}\n".encode())

    @contextlib.contextmanager
    def _handlers(self) -> Iterator[None]:
        """Let signals that ask to end make this node leave."""
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
        call = self._call_soon(self._on_signal)
        for number in before:
            signal.signal(number, lambda number, frame: call(number))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

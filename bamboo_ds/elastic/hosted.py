"""The agent of a worker that a stock launcher has started: threads of the worker itself, in place of a process.

It takes part in the same cluster as an agent of ours. Two things differ. Nobody watches the worker from outside, so
one that is killed tells nothing: the others find out from its broken links, or when its lease ends. And ids are ranks,
which the next run of the job gives again. So each launch claims the job, once all nodes of the run before are gone, and
what its workers write carries the condition that no other launch has claimed it since::

    worker 0   reach   claim, register   tell the others . begin . take its seat
    others     reach   . . . . . . . . . . . . . register, begin . take their seats
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from bamboo_ds.clock import Clock
from bamboo_ds.config.etcd import EtcdConfig
from bamboo_ds.elastic import keys, preemption
from bamboo_ds.elastic.coordinator import CoordinatorSettings
from bamboo_ds.elastic.follower import Follower
from bamboo_ds.elastic.leadership import Leadership
from bamboo_ds.elastic.member import JOB, Member
from bamboo_ds.elastic.membership import open_store
from bamboo_ds.elastic.registration import Registration
from bamboo_ds.elastic.worker_exits import WorkerExit
from bamboo_ds.errors import ConfigError, ConflictError, InfeasiblePlanError, StoreError
from bamboo_ds.plan.cluster import Node
from bamboo_ds.plan.job import JobSpec
from bamboo_ds.plan.plan import Plan
from bamboo_ds.plan.roster import StartRule
from bamboo_ds.store import ABSENT, Delete, DeletePrefix, Event, EventKind, Put, Unchanged

__all__ = ["HostedAgent", "HostedSettings"]

_log = logging.getLogger(__name__)

_Error = TypeVar("_Error", bound=ConfigError | StoreError)

_RETRY_SECONDS = 0.2
_CLOSE_SECONDS = 2.0
_LINGER_SECONDS = 3.0
_FOREIGN = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedSettings:
    """What a hosted agent must know.

    Attributes:
        etcd: how to reach the store.
        job: name of the job.
        worker: id of the worker, which is its rank.
        workers: how many workers the launcher has started.
        ttl_seconds: how long the worker is believed to live without a word from its agent.
        timeout_seconds: how long to wait for the other workers.
        outage_seconds: how long the store may be out of reach.
    """

    etcd: EtcdConfig
    job: str
    worker: int
    workers: int
    ttl_seconds: float = 10.0
    timeout_seconds: float = 300.0
    outage_seconds: float = 60.0

    @property
    def node(self) -> str:
        """Name of the node: the same in the next run, and no other worker's."""
        host = _FOREIGN.sub("-", socket.gethostname().partition(".")[0]).strip("-._") or "host"
        return f"{host}-{self.worker}"


class HostedAgent:
    """The agent in a worker. Make it once a process, before any wait for the others: it finds out what cannot work.

    Args:
        settings: what it must know.
        clock: measures deadlines.

    Attributes:
        spec: the specification of the job, once `join` was called.

    Raises:
        ConfigError: the settings cannot be right.
        StoreUnavailableError: the store does not answer within the deadline of a request.
        StoreError: it refuses, or this process was forked from one that had opened a store.
    """

    spec: JobSpec | None = None

    def __init__(self, settings: HostedSettings, *, clock: Clock | None = None) -> None:
        self._settings, self._closing = settings, contextlib.ExitStack()
        self._lost: StoreError | None = None
        self._member: Member | None = None
        with self._named():
            self._store = self._closing.enter_context(open_store(settings.etcd, job=settings.job, clock=clock))
            try:
                self._store.get(keys.LAUNCH)
            except StoreError:
                self._closing.close()
                raise
        self._closing.callback(self._close_member)
        node = Node(settings.node, "", ())
        self._registration = Registration(
            self._store,
            node,
            ttl_seconds=settings.ttl_seconds,
            outage_seconds=settings.outage_seconds,
            on_end=self._on_lost,
        )
        self._leadership = Leadership(
            self._store,
            node=settings.node,
            lease=self._registration.lease,
            settings=CoordinatorSettings(
                ttl_seconds=settings.ttl_seconds,
                start=StartRule(start_workers=settings.workers, patience_seconds=settings.timeout_seconds),
            ),
        )

    @property
    def member(self) -> Member:
        """The worker's seat in the cluster.

        Raises:
            StoreError: neither `claim` nor `enter` was called.
        """
        if self._member is None:
            raise StoreError(f"worker {self._settings.worker} has not entered the job yet")
        return self._member

    # ---- beginning ---------------------------------------------------------------------------------------------

    def claim(self) -> int:
        """Make this launch the one run of the job, and enter it: for one worker, before all others.

        Returns:
            A number by which the others enter.

        Raises:
            ConfigError: another run of this job lives.
            StoreError: the store does not answer, or refuses.
        """
        with self._named():
            claimed = self._claim()
            self._register()
            try:
                # Whoever has not seen our node until now cannot claim the job any more.
                claim = self._store.compare_and_set(keys.LAUNCH, self._settings.node.encode(), expected=claimed)
            except ConflictError:
                raise self._taken("another launch has claimed it at the same moment") from None
            self._begin(claim)
        return claim

    def enter(self, claim: int) -> None:
        """Enter the run of the job that the first worker has claimed.

        Raises:
            ConfigError: another worker has this node's name.
            StoreError: the store does not answer, or refuses.
        """
        with self._named():
            self._register()
            self._begin(claim)

    def join(self, spec: JobSpec) -> Plan:
        """Take the seat that the launcher's rank stands for.

        Args:
            spec: of the job; its `launched` is the plan of the ranks.

        Raises:
            InfeasiblePlanError: the job begins with another plan, as a worker is missing.
            BambooError: all that `Member.take_seat` raises.
        """
        timeout, launched = self._settings.timeout_seconds, spec.launched
        with self._named():
            self.member.join()
            self.member.await_roster(timeout_seconds=timeout)
            plan = self.member.take_seat(spec, timeout_seconds=timeout)
        if launched is None or plan.homes != launched.owners:
            raise InfeasiblePlanError(
                f"the job begins with the plan {plan.homes} ({plan.cause}), but the modules were built for that "
                "of the launcher's ranks: start the job again with all its workers"
            )
        self.spec = spec
        return plan

    def _claim(self) -> int:
        clock, wait = self._store.clock, threading.Condition()
        deadline, told = clock.now() + 2 * self._settings.ttl_seconds + 1.0, False
        while True:
            found = self._store.get(keys.LAUNCH)
            nodes = self._store.list(keys.NODES).entries
            if not nodes and (claimed := self._forget_former_run(ABSENT if found is None else found.revision)):
                return claimed
            if clock.now() > deadline:
                names = ", ".join(entry.key.removeprefix(keys.NODES) for entry in nodes[:3])
                raise self._taken(f"{len(nodes)} of its nodes live: {names}{', ...' if len(nodes) > 3 else ''}")
            if nodes and not told:
                told = True
                _log.warning("%s waits until %d nodes of a former run of job %r are gone",
                             self._settings.node, len(nodes), self._settings.job)  # fmt: skip
            with wait:
                clock.wait(wait, _RETRY_SECONDS)

    def _forget_former_run(self, revision: int) -> int:
        """Forget the run before, unless another launch was claimed meanwhile; return the revision of our claim, or 0.

        Its events stay.
        """
        forget = [DeletePrefix(prefix) for prefix in (keys.BOARD, keys.DESK, keys.RENDEZVOUS)]
        claim = Put(keys.LAUNCH, self._settings.node.encode())
        try:
            claimed = self._store.transact(
                [Unchanged(keys.LAUNCH, revision)], [*forget, Delete(keys.PROGRESS), claim]
            ).revision
        except ConflictError:
            return 0
        missing = self._settings.workers - self._store.add(keys.WORKER_COUNTER, 0)
        if missing > 0:  # an agent of ours that comes to this job takes none of our ids
            self._store.add(keys.WORKER_COUNTER, missing)
        return claimed

    def _taken(self, why: str) -> ConfigError:
        return ConfigError(
            f'bamboo.job = "{self._settings.job}": a job of this name runs already ({why}): end it, or give this one '
            "another name"
        )

    def _register(self) -> None:
        self._closing.callback(self._registration.leave, timeout_seconds=_CLOSE_SECONDS)
        self._registration.enter((self._settings.worker,))

    def _begin(self, claim: int) -> None:
        """Open the seat, stand for election, and listen for a request to break."""
        settings = self._settings
        self._member = Member(
            self._store,
            worker=settings.worker,
            node=settings.node,
            outage_seconds=settings.outage_seconds,
            conditions=[Unchanged(keys.LAUNCH, claim)],
        )
        if self._lost is not None:
            self._member.give_up(self._lost)
        thread = threading.Thread(target=self._leadership.run, name="leadership", daemon=True)
        thread.start()
        self._closing.callback(thread.join, _CLOSE_SECONDS)
        self._closing.callback(self._leadership.stop)
        follower = Follower(self._store, keys.preempt(settings.node), self._on_preempt, on_end=self._on_lost)
        self._closing.callback(follower.close)

    # ---- ending ------------------------------------------------------------------------------------------------

    def fail(self, kind: str, message: str) -> None:
        """End the job, unless its failure is known or this worker is no part of it: its script ends with an error.

        It may only have met what another did, which has ended without an error; but nobody else sees it end.

        Args:
            kind: of the error: its class.
            message: of the error.
        """
        failure = {"worker": self._settings.worker, "kind": kind, "message": message}
        self.member.fail(JOB, json.dumps(failure).encode())

    def await_end(self) -> None:
        """After the script's orderly end, if this agent coordinates: wait a moment for the others, to write the end."""
        if self._leadership.leading:
            self.member.await_end(timeout_seconds=_LINGER_SECONDS)

    def close(self) -> None:
        """Leave the cluster: the node is gone at once, and somebody else coordinates. May be called again."""
        self._closing.close()

    def _close_member(self) -> None:
        if self._member is not None:
            self._member.close()

    def _on_lost(self, error: StoreError) -> None:
        """Let the worker hear that its node cannot be kept registered; called from the threads."""
        self._lost = self._naming_endpoints(error)
        if self._member is not None:
            self._member.give_up(self._lost)

    def _on_preempt(self, event: Event) -> None:
        """Break this node, as a person asks. The request is deleted first: the node of the next run shall live."""
        settings = self._settings
        if event.kind is EventKind.DELETE or event.key != keys.preempt(settings.node):
            return
        with contextlib.suppress(StoreError):
            self._store.transact([Unchanged(event.key, event.revision)], [Delete(event.key)])
        try:
            how = preemption.read_how(event.value.decode(errors="replace"))
            preemption.check(how)
        except ConfigError as error:
            self.member.tell("preempt", f"node {settings.node} was told to break and cannot: {error}")
            return
        self.member.tell("preempt", f"node {settings.node} breaks as it was told to: {how}", how=how)
        if how == "term":
            ended = WorkerExit(settings.worker, -signal.SIGTERM, "its node leaves, it was preempted (term)")
            self._registration.strike({settings.worker: ended.record(settings.node)})
            self._registration.flush(timeout_seconds=_CLOSE_SECONDS)
        preemption.break_own_node(how)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Name the endpoints in what the store says."""
        try:
            yield
        except (ConfigError, StoreError) as error:
            raise self._naming_endpoints(error) from None

    def _naming_endpoints(self, error: _Error) -> _Error:
        if str(error).startswith("bamboo."):
            return error
        return type(error)(f"bamboo.etcd.endpoints = {', '.join(self._settings.etcd.endpoints)}: {error}")

"""`bamboo-ds bench store`: what one commit costs the cluster's store, and that the store does not grow with the run.

A job of D pipelines is simulated by clients of one real etcd: the coordinator is the real one, the spokesman of each
pipeline is a real `Member` that casts a real ballot and waits for the outcome; only tensors are missing. A round begins
for all pipelines at one moment and is over when the last spokesman has the outcome.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from typing import Any

from bamboo_ds.cli.bench.report import JSON_OPTION, QUICK_OPTION, finish, progress, reported_failure, rounded, table
from bamboo_ds.cli.bench.workers import run_workers, values
from bamboo_ds.config.etcd import EtcdConfig
from bamboo_ds.elastic import keys
from bamboo_ds.elastic.coordinator import CoordinatorSettings
from bamboo_ds.elastic.leadership import Leadership
from bamboo_ds.elastic.member import Member
from bamboo_ds.elastic.membership import open_store
from bamboo_ds.errors import StoreUnavailableError
from bamboo_ds.plan import Plan, Vote
from bamboo_ds.plan.cluster import Node
from bamboo_ds.plan.codec import decode, encode
from bamboo_ds.plan.commit import Ballot, settle
from bamboo_ds.plan.job import JobSpec
from bamboo_ds.plan.roster import StartRule
from bamboo_ds.store import EventKind, Lease, Put, Store, Watch
from bamboo_ds.store.embedded import EmbeddedEtcd

STAGES, UNITS, SHARE = 8, 4, 8
"""Stages of a pipeline, layers of a stage, micro-batches of a pipeline: they make the size of a ballot."""
PIPELINES = (4, 16, 64)
VOTER_PROCESSES, WATCHER_PROCESSES = 4, 4
WARM_ROUNDS = 3
TTL_SECONDS = 10.0
_DEADLINE_SECONDS = 60.0
_LEAD_SECONDS = 0.02  # between the agreement on a round's beginning and the beginning
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Load:
    """A job to simulate.

    Attributes:
        pipelines: D.
        watchers: more clients that watch the board.
        rounds: to time.
    """

    pipelines: int
    watchers: int = 0
    rounds: int = 40


@dataclass(frozen=True, slots=True)
class Rounds:
    """What a job showed.

    Attributes:
        milliseconds: of each round.
        etcd_milliseconds: of CPU that etcd used, mean of the rounds.
        heard: outcomes that the watcher got that got fewest; None without watchers.
    """

    milliseconds: Sequence[float]
    etcd_milliseconds: float
    heard: int | None


class Starter:
    """Lets all voters of all processes begin a round at one moment. Make it before they are forked."""

    def __init__(self, voters: int, processes: int) -> None:
        context = multiprocessing.get_context("fork")
        self._voters: Barrier = context.Barrier(voters)
        self._processes: Barrier = context.Barrier(processes)
        self._at = context.Value("d", 0.0)

    def begin(self) -> float:
        """Wait for all voters, then for the moment on which they agree; return it."""
        if self._voters.wait(_DEADLINE_SECONDS) == 0:
            self._at.value = time.monotonic() + _LEAD_SECONDS
        self._voters.wait(_DEADLINE_SECONDS)
        at = float(self._at.value)
        time.sleep(max(at - time.monotonic(), 0.0))
        return at

    def meet(self, seconds: float = _DEADLINE_SECONDS) -> None:
        """Wait for all processes."""
        self._processes.wait(seconds)


def measure(etcd: EtcdConfig, load: Load, *, server_pid: int, job: str) -> Rounds:
    """Run a job's rounds and time them."""
    voters, watchers = min(VOTER_PROCESSES, load.pipelines), min(WATCHER_PROCESSES, load.watchers)
    starter = Starter(load.pipelines, 1 + voters + watchers)

    def play(rank: int) -> Any:
        if rank == 0:
            return _coordinate(etcd, job, load, starter, server_pid)
        if rank <= voters:
            return _vote_all(etcd, job, parts(load.pipelines, voters)[rank - 1], load, starter)
        return _watch_all(etcd, job, len(parts(load.watchers, watchers)[rank - 1 - voters]), load, starter)

    seconds = 2 * _DEADLINE_SECONDS + load.rounds
    found = values(run_workers(play, 1 + voters + watchers, timeout_seconds=seconds, grace_seconds=3.0))
    times = [each for several in found[1 : 1 + voters] for each in several]
    spans = [max(of_round) for of_round in zip(*times, strict=True)][WARM_ROUNDS:]
    heard = min(found[1 + voters :], default=None)
    return Rounds([1000.0 * span for span in spans], 1000.0 * found[0] / (load.rounds + WARM_ROUNDS), heard)


def parts(total: int, count: int) -> list[range]:
    """Return the numbers below `total` in so many runs of about one length."""
    return [range(total * index // count, total * (index + 1) // count) for index in range(count)]


# ---- what the clients do -------------------------------------------------------------------------------------------


def _coordinate(etcd: EtcdConfig, job: str, load: Load, starter: Starter, server_pid: int) -> float:
    """Be all agents of a job, one of which coordinates; return seconds of CPU that etcd used for the rounds."""
    with open_store(etcd, job=job) as store, leading(store, load.pipelines):
        starter.meet()
        before = cpu_seconds(server_pid)
        starter.meet(_DEADLINE_SECONDS + load.rounds)
        used = cpu_seconds(server_pid) - before
        starter.meet()
        return used


def _vote_all(etcd: EtcdConfig, job: str, part: range, load: Load, starter: Starter) -> list[list[float]]:
    """Be the spokesmen of some pipelines; return by pipeline how many seconds each round took."""
    with open_store(etcd, job=job) as store, ExitStack() as closing, ThreadPoolExecutor(len(part)) as pool:
        plan = await_plan(store)
        members = [Member(store, worker=plan.owners[pipeline][0], node="") for pipeline in part]
        for member in members:
            closing.callback(member.close)
        starter.meet()
        voting = [pool.submit(_vote, member, plan, load, starter) for member in members]
        times = [each.result() for each in voting]
        starter.meet()
        starter.meet()
        return times


def _vote(member: Member, plan: Plan, load: Load, starter: Starter) -> list[float]:
    pipeline, seconds = plan.place(member.worker).pipeline, []
    for number in range(WARM_ROUNDS + load.rounds):
        ballot, at = ballot_of(pipeline, number), starter.begin()
        member.vote(0, number, pipeline, ballot, plan=plan)
        member.await_outcome(0, number, plan, timeout_seconds=_DEADLINE_SECONDS)
        seconds.append(time.monotonic() - at)
    return seconds


def _watch_all(etcd: EtcdConfig, job: str, count: int, load: Load, starter: Starter) -> int:
    """Watch the board so many times; return how many outcomes the watch got that got fewest."""
    with open_store(etcd, job=job) as store:
        revision = store.list(keys.BOARD).revision
        watches = [store.watch(keys.BOARD, from_revision=revision + 1) for _ in range(count)]
        early = [_outcomes(watch, wait=True) for watch in watches]
        starter.meet()
        starter.meet(_DEADLINE_SECONDS + load.rounds)
        time.sleep(1.0)
        heard = [already + _outcomes(watch, wait=False) for already, watch in zip(early, watches, strict=True)]
        starter.meet()
        return min(heard)


def _outcomes(watch: Watch, *, wait: bool) -> int:
    """Return how many outcomes a watch has got since the last call; wait until it is connected."""
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while True:
        try:
            events = watch.next(0.5 if wait else 0.0)
            return sum(event.kind is EventKind.PUT and event.key.startswith(keys.DECISIONS) for event in events)
        except StoreUnavailableError:
            if time.monotonic() > deadline:
                raise


@contextmanager
def leading(store: Store, pipelines: int) -> Iterator[None]:
    """Be the agents of a job, and coordinate it in a thread."""
    lease = store.lease(TTL_SECONDS)
    register(store, pipelines, lease)
    settings = CoordinatorSettings(ttl_seconds=TTL_SECONDS, start=StartRule(STAGES * pipelines, _DEADLINE_SECONDS))
    leadership = Leadership(store, node=name_of(0), lease=lambda: lease, settings=settings)
    thread = threading.Thread(target=leadership.run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        leadership.stop()
        thread.join(_DEADLINE_SECONDS)


def register(store: Store, pipelines: int, lease: Lease) -> None:
    """Put the nodes of a job into the store, one for each worker, all ready, and say what they train."""
    for worker in range(STAGES * pipelines):
        node = Node(name_of(worker), "", (worker,))
        store.transact((), [Put(keys.node(node.name), encode(node), lease), Put(keys.ready(worker), node.name.encode())])
    spec = JobSpec(publisher=0, num_stages=STAGES, num_layers=STAGES * UNITS, pipelines=pipelines)
    store.put(keys.SPEC, encode(spec))


def name_of(worker: int) -> str:
    """Return the name of the node on which a worker runs."""
    return f"n{worker}"


def await_plan(store: Store) -> Plan:
    """Wait for the first plan.

    Raises:
        TimeoutError: it does not come.
    """
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while (entry := store.get(keys.PLAN)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no plan within {_DEADLINE_SECONDS:g} s")
        time.sleep(0.01)
    return decode(Plan, entry.value)


def ballot_of(pipeline: int, step: int) -> Ballot:
    """Return a ballot as a pipeline of some real model casts it: numbers with all their digits."""
    def vote(stage: int) -> Vote:
        norms = {str(stage * UNITS + unit): 0.1 / (1.0 + stage + unit + step) for unit in range(UNITS)}
        losses = {pipeline * SHARE + index: 3.0 + 0.7 / (1.0 + index + step) for index in range(SHARE)}
        return Vote(
            worker=pipeline * STAGES + stage, step=step, pipeline=pipeline, stage=stage, squared_norms=norms,
            losses=losses if stage == STAGES - 1 else {},
            forward_seconds=0.01 + 0.001 / (3.0 + step), backward_seconds=0.02 + 0.002 / (3.0 + step),
        )  # fmt: skip

    return Ballot(tuple(vote(stage) for stage in range(STAGES)))


def cpu_seconds(pid: int) -> float:
    """Return how many seconds of CPU a process has used."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        user, system = file.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / _TICKS

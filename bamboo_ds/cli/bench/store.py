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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import Synchronized
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
from bamboo_ds.plan import Plan, Vote
from bamboo_ds.plan.cluster import Node
from bamboo_ds.plan.codec import decode, encode
from bamboo_ds.plan.commit import Ballot, settle
from bamboo_ds.plan.job import JobSpec
from bamboo_ds.plan.roster import StartRule
from bamboo_ds.store import Lease, Put, Store
from bamboo_ds.store.embedded import EmbeddedEtcd

STAGES, UNITS, SHARE = 8, 4, 8
"""Stages of a pipeline, layers of a stage, micro-batches of a pipeline: they make the size of a ballot."""
PIPELINES = (4, 16, 64)
VOTER_PROCESSES, WATCHER_PROCESSES = 4, 4
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
        heard: changes that the fewest-hearing watcher got; 0 without watchers.
    """

    milliseconds: Sequence[float]
    etcd_milliseconds: float
    heard: int


class Starter:
    """Lets all voters of all processes begin a round at one moment. Make it before they are forked."""

    def __init__(self, voters: int, processes: int) -> None:
        context = multiprocessing.get_context("fork")
        self._voters: Barrier = context.Barrier(voters)
        self._processes: Barrier = context.Barrier(processes)
        self._at: Synchronized[float] = context.Value("d", 0.0)

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
    voters = min(VOTER_PROCESSES, load.pipelines)
    watchers = min(WATCHER_PROCESSES, load.watchers)
    starter = Starter(load.pipelines, 1 + voters + watchers)
    roles: list[Callable[[], Any]] = [lambda: _coordinate(etcd, job, load, starter, server_pid)]
    roles += [lambda part=part: _vote_all(etcd, job, part, load, starter) for part in parts(load.pipelines, voters)]  # type: ignore[misc]
    roles += [lambda part=part: _watch_all(etcd, job, len(part), starter) for part in parts(load.watchers, watchers)]  # type: ignore[misc]
    seconds = 2 * _DEADLINE_SECONDS + load.rounds
    found = values(
        run_workers(lambda rank: roles[rank](), len(roles), timeout_seconds=seconds, grace_seconds=3.0)
    )
    times = [each for several in found[1 : 1 + voters] for each in several]
    spans = [max(heard for _, heard in of_round) - of_round[0][0] for of_round in zip(*times, strict=True)]
    return Rounds(
        [1000.0 * span for span in spans], found[0] / load.rounds, min(found[1 + voters :], default=0)
    )


def parts(total: int, count: int) -> list[range]:
    """Return the numbers below `total` in so many runs of about one length."""
    return [range(total * index // count, total * (index + 1) // count) for index in range(count)]


# ---- what the clients do -------------------------------------------------------------------------------------------


def _coordinate(etcd: EtcdConfig, job: str, load: Load, starter: Starter, server_pid: int) -> float:
    """Be all agents of a job, one of which coordinates; return milliseconds of CPU that etcd used for the rounds."""
    with open_store(etcd, job=job) as store, leading(store, STAGES * load.pipelines):
        register(store, load.pipelines)
        starter.meet()
        before = cpu_seconds(server_pid)
        starter.meet(_DEADLINE_SECONDS + load.rounds)
        used = cpu_seconds(server_pid) - before
        starter.meet()
    return 1000.0 * used


@contextmanager
def leading(store: Store, workers: int) -> Iterator[Lease]:
    """Coordinate in a thread; give the lease."""
    lease = store.lease(TTL_SECONDS)
    settings = CoordinatorSettings(ttl_seconds=TTL_SECONDS, start=StartRule(workers, _DEADLINE_SECONDS))
    leadership = Leadership(store, node=name_of(0), lease=lambda: lease, settings=settings)
    thread = threading.Thread(target=leadership.run, daemon=True)
    thread.start()
    try:
        yield lease
    finally:
        leadership.stop()
        thread.join(_DEADLINE_SECONDS)
        lease.revoke()

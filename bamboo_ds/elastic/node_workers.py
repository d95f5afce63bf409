"""The workers of one node as their agent sees them: starts them, knows who runs, ends them when their time has come."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bamboo_ds.clock import Clock
from bamboo_ds.elastic.processes import send
from bamboo_ds.elastic.spawner import Change, Report, Spawner, SpawnerLostError, sweep
from bamboo_ds.elastic.worker_exits import WorkerExit
from bamboo_ds.elastic.worker_logs import WorkerLogs

__all__ = ["NodeWorkers", "worker_environment"]

_LONGEST_GAP_SECONDS = 1.0  # between two looks; after a longer one we were stopped ourselves
_LOG_SECONDS = 1.0
_UNHEARD_SECONDS = 3.0  # after SIGKILL; so long nothing takes, unless the spawner is stopped
_FOREIGN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "ROLE_RANK", "TORCHELASTIC_RUN_ID")
"""Variables of another launcher that started the agent; they tell nothing of its workers."""


@dataclass(slots=True)
class _Running:
    pid: int = 0
    stopped_at: float = math.inf
    term_at: float = math.inf
    kill_at: float = math.inf
    killed_at: float = math.inf
    reason: str = ""


class NodeWorkers:
    """The workers of a node.

    Args:
        spawner: starts them.
        logs: take what they write.
        clock: of the agent.
        stopped_seconds: how long one may be stopped (SIGSTOP) before it is killed; its node's lease does not tell.
        pid_file: takes the process ids of spawner and workers.
    """

    def __init__(
        self,
        spawner: Spawner,
        logs: WorkerLogs,
        *,
        clock: Clock,
        stopped_seconds: float,
        pid_file: Path | None = None,
    ) -> None:
        self._spawner, self._logs, self._clock = spawner, logs, clock
        self._stopped_seconds = stopped_seconds
        self._running: dict[int, _Running] = {}
        self._looked_at = clock.now()
        self._pid_file = pid_file
        self._keep_pid(spawner.pid)

    @property
    def running(self) -> frozenset[int]:
        """Ids of the workers that run."""
        return frozenset(self._running)

    def fileno(self) -> int:
        """Return the descriptor that can be read when there is something to `read`."""
        return self._spawner.fileno()

    def start(self, worker: int, environment: Mapping[str, str]) -> None:
        """Start a worker.

        Raises:
            SpawnerLostError: the spawner is gone.
            ConfigError: its log cannot be written.
        """
        stdout, stderr = self._logs.open(worker)
        self._running[worker] = _Running()
        self._spawner.spawn(worker, stdout=stdout, stderr=stderr, environment=environment)

    def read(self) -> list[WorkerExit]:
        """Return the workers that have ended since the last call.

        Raises:
            SpawnerLostError: the spawner is gone, and all workers with it.
        """
        return [found for report in self._spawner.read() if (found := self._take(report)) is not None]

    def end(self, worker: int, *, term_seconds: float, kill_seconds: float, reason: str) -> None:
        """End a worker unless it has ended by then.

        Args:
            worker: its id; nothing happens if it does not run.
            term_seconds: from now, until it gets SIGTERM.
            kill_seconds: from now, until it gets SIGKILL and its whole session with it.
            reason: for people.
        """
        if (running := self._running.get(worker)) is not None:
            now = self._clock.now()
            running.term_at = min(running.term_at, now + term_seconds)
            running.kill_at = min(running.kill_at, now + kill_seconds)
            running.reason = running.reason or reason

    def tick(self) -> float:
        """Do what is due, and return how many seconds there are until something is.

        Raises:
            SpawnerLostError: the spawner is gone, or it does not do as it is told.
        """
        now = self._clock.now()
        self._excuse_own_sleep(now)
        if any(now > running.killed_at + _UNHEARD_SECONDS for running in self._running.values()):
            raise SpawnerLostError(
                f"process {self._spawner.pid}, which starts the workers of this node, does not answer"
            )
        for worker, running in self._running.items():
            if now >= running.stopped_at + self._stopped_seconds:
                running.reason = running.reason or f"it had been stopped for {self._stopped_seconds:g} s"
                running.kill_at, running.stopped_at = now, math.inf
            if now >= running.term_at:
                running.term_at = math.inf
                self._spawner.signal(worker, signal.SIGTERM)
            if now >= running.kill_at:
                running.kill_at, running.killed_at = math.inf, min(running.killed_at, now)
                self._spawner.signal(worker, signal.SIGKILL)
        return min((self._due(running) for running in self._running.values()), default=math.inf) - now

    def abandon(self) -> None:
        """End all workers behind a spawner that is gone."""
        pids = [running.pid for running in self._running.values() if running.pid]
        self._running.clear()
        send(pids, signal.SIGKILL)
        sweep(pids)

    def last_words(self, worker: int) -> str:
        """Return the end of what an ended worker wrote."""
        return self._logs.tail(worker, wait_seconds=_LOG_SECONDS)

    def _take(self, report: Report) -> WorkerExit | None:
        running = self._running[report.worker]
        if report.change is Change.STARTED:
            running.pid = report.pid
            self._keep_pid(report.pid)
        elif report.change is Change.STOPPED:
            running.stopped_at = self._clock.now()
        elif report.change is Change.CONTINUED:
            running.stopped_at = math.inf
        else:
            del self._running[report.worker]
            return WorkerExit(report.worker, report.code, running.reason)
        return None

    def _keep_pid(self, pid: int) -> None:
        if self._pid_file is not None:
            with self._pid_file.open("a", encoding="utf-8") as file:
                file.write(f"{pid}\n")

    def _excuse_own_sleep(self, now: float) -> None:
        """Let the time of stopped workers begin anew if this agent was stopped with them: who wakes it wakes them."""
        if now - self._looked_at > _LONGEST_GAP_SECONDS:
            for running in self._running.values():
                if running.stopped_at < math.inf:
                    running.stopped_at = now
        self._looked_at = now

    def _due(self, running: _Running) -> float:
        return min(running.stopped_at + self._stopped_seconds, running.term_at, running.kill_at)


def worker_environment(own: Mapping[str, str], *, index: int, workers: int) -> dict[str, str]:
    """Return the variables that tell a worker its place on this node.

    Args:
        own: those of the agent and of the user.
        index: of the worker on this node.
        workers: on this node.
    """
    environment = {name: value for name, value in own.items() if name not in _FOREIGN}
    environment.update(LOCAL_RANK=str(index), LOCAL_WORLD_SIZE=str(workers))
    environment.setdefault("PYTHONUNBUFFERED", "1")  # its output is a pipe: what it wrote before a kill shall be there
    if workers > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    return environment

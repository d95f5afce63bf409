"""Processes as Linux shows them in /proc: who belongs to a worker, who is stopped.

A worker leads a session. All that it starts is in it (unless it leaves on purpose), however deep and whoever's child it
has become. The number of a session is not given to another process while it has a member or its leader is not reaped;
so whoever still holds the leader as a zombie may kill by session without fear of hitting a stranger.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["NodeProcesses", "Process", "descendants", "members", "node_processes", "process", "running", "send"]


@dataclass(frozen=True, slots=True)
class Process:
    """A process, as it was when it was looked at."""

    pid: int
    parent: int
    session: int
    state: str
    """One letter: R running, S sleeping, D waiting for a device, T stopped, t traced, Z ended but not reaped."""

    @property
    def ended(self) -> bool:
        """Whether it only waits to be reaped."""
        return self.state in "ZX"


@dataclass(frozen=True, slots=True)
class NodeProcesses:
    """The processes of a node: ids of those that matter by name, and of all."""

    agent: int
    spawner: int | None
    workers: tuple[int, ...]
    everything: tuple[int, ...]
    """All of them, the agent last."""


def process(pid: int) -> Process | None:
    """Return a process; None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, parent, _, session = text.rpartition(")")[2].split()[:4]  # the name before may hold anything
    return Process(pid, int(parent), int(session), state)


def running() -> tuple[Process, ...]:
    """Return all processes of this machine that have not ended."""
    found = (process(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return tuple(each for each in found if each is not None and not each.ended)


def members(sessions: Iterable[int]) -> tuple[int, ...]:
    """Return the ids of the running processes of some sessions."""
    wanted = frozenset(sessions)
    return tuple(each.pid for each in running() if each.session in wanted) if wanted else ()


def descendants(pid: int, among: Iterable[Process]) -> tuple[Process, ...]:
    """Return the children of a process, their children, and so on; parents before their children."""
    by_parent: dict[int, list[Process]] = {}
    for each in among:
        by_parent.setdefault(each.parent, []).append(each)
    found = list(by_parent.get(pid, ()))
    for each in found:
        found += by_parent.get(each.pid, ())
    return tuple(found)


def node_processes(agent: int) -> NodeProcesses:
    """Return the processes of a node as long as its agent lives: agent, spawner, workers and all that workers started.

    The spawner is the agent's child that leads a session, the workers are those among the spawner's children.
    """
    everybody = running()
    below = descendants(agent, everybody)
    spawner = next((each.pid for each in below if each.parent == agent and each.session == each.pid), None)
    workers = tuple(each.pid for each in below if each.parent == spawner and each.session == each.pid)
    orphans = [each.pid for each in everybody if each.session in workers]
    others = dict.fromkeys([*workers, *orphans, *(each.pid for each in below)])
    return NodeProcesses(agent, spawner, workers, (*others, agent))


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to processes; those that are gone get none."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)

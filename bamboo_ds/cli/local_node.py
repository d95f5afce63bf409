"""A node of a local cluster as its launcher knows it: the process of its agent, and what has become of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bamboo_ds.elastic.agent_settings import AgentSettings
from bamboo_ds.elastic.preemption import How
from bamboo_ds.elastic.processes import members, node_processes, process, send

__all__ = ["POLL_SECONDS", "LocalNode", "await_agents", "kill_nodes", "sweep_nodes"]

POLL_SECONDS = 0.01
_SWEPT_SECONDS = 3.0  # in which what a killed agent leaves is ended by its spawner


@dataclass(slots=True)
class LocalNode:
    """A node of a local cluster.

    Attributes:
        name: of the node.
        index: from 0.
        settings: of its agent.
        pid: of its agent.
        code: exit code of its agent, negative for the signal that ended it; None while it runs.
        fault: how it was broken from outside. What its agent says in the end no longer counts.
    """

    name: str
    index: int
    settings: AgentSettings
    pid: int = 0
    code: int | None = None
    fault: How | None = None

    @property
    def idle(self) -> bool:
        """Whether it runs but will do nothing: it is stopped or cut off."""
        if self.fault in ("stop", "cut"):
            return True
        found = process(self.pid)
        return found is not None and found.state == "T"

    def reap(self) -> bool:
        """Return whether its agent has ended."""
        if self.code is None and self.pid:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def sessions(self) -> list[int]:
        """Return the sessions of its spawner and workers, whatever has become of its agent."""
        try:
            lines = (self.settings.pid_file or Path()).read_text(encoding="utf-8").split()
        except OSError:
            return []
        return [int(line) for line in lines]


def await_agents(nodes: Sequence[LocalNode], *, timeout_seconds: float) -> None:
    """Wait for the ends of agents, or for the end of the time."""
    deadline = time.monotonic() + timeout_seconds
    while [node for node in nodes if not node.reap()] and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def kill_nodes(nodes: Sequence[LocalNode]) -> None:
    """Kill all processes of nodes whose agents run, and reap the agents."""
    for node in nodes:
        send(node_processes(node.pid).everything, signal.SIGKILL)
    await_agents(nodes, timeout_seconds=_SWEPT_SECONDS)


def sweep_nodes(nodes: Sequence[LocalNode]) -> None:
    """Wait for the end of what killed agents have left, which their spawners see to; then see to it."""
    sessions = [session for node in nodes for session in node.sessions()]
    begin = time.monotonic()
    while (rest := members(sessions)) and time.monotonic() < begin + 2 * _SWEPT_SECONDS:
        if time.monotonic() > begin + _SWEPT_SECONDS:
            send(rest, signal.SIGKILL)
        time.sleep(POLL_SECONDS)

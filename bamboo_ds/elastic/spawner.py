"""Starts the workers of a node, in a process of its own: the spawner.

The agent cannot do it. It must fork to start a worker, it uses gRPC, and gRPC survives no fork; and a worker shall die
with whoever started it, which on Linux is the *thread* that forked it. So the agent, before it does anything else,
forks a spawner with a single thread and no store, and asks it for workers.

The ends, whoever ends first, by SIGKILL too::

    agent    -> the spawner reads the end of its channel, kills all sessions of its workers and ends; should it be
                stopped, the kernel wakes it with SIGCONT
    spawner  -> the kernel kills the workers; the agent reads the end of the channel and sweeps their sessions
    worker   -> the spawner tells the agent and sweeps the session: what the worker had started ends with it

A sweep sends SIGTERM and, a second later, SIGKILL: helpers such as multiprocessing's resource tracker, which removes
the shared memory that a killed process has left, need a moment. A worker is reaped only when its session is empty, so
that its number cannot be another's meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, NoReturn

from bamboo_ds.elastic import forking
from bamboo_ds.elastic.processes import members, send
from bamboo_ds.errors import BambooError

__all__ = ["Change", "Program", "Report", "Script", "Spawner", "SpawnerLostError", "sweep"]

_LONGEST_MESSAGE_BYTES = 1 << 20
_SWEEP_GRACE_SECONDS = 1.0
_SWEEP_POLL_SECONDS = 0.02
_END_SECONDS = 5.0
_ANY_CHANGE = os.WEXITED | os.WSTOPPED | os.WCONTINUED


@dataclass(frozen=True, slots=True)
class Script:
    """A script or module with its arguments, run as `python -m bamboo_ds [-m] ARGV...` in its own interpreter."""

    argv: tuple[str, ...]
    as_module: bool = False

    @property
    def command(self) -> tuple[str, ...]:
        """The command line that runs it."""
        return (sys.executable, "-m", "bamboo_ds", *(["-m"] if self.as_module else []), *self.argv)


Program = Script | Callable[[], object]
"""What a worker runs. A callable runs in a fork of the agent's process, with `Membership` in its environment. It ends
as a script does (its exception goes to `sys.excepthook`, its `SystemExit` gives the exit code, threads are joined, exit
handlers run), but for the interpreter, which is not taken apart."""


class Change(str, Enum):
    """What has become of a worker."""

    STARTED = "started"
    STOPPED = "stopped"
    CONTINUED = "continued"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Report:
    """A change of a worker."""

    worker: int
    change: Change
    pid: int
    code: int = 0
    """The exit code of one that has ended; as `subprocess` counts, negative for the signal that ended it."""


class SpawnerLostError(BambooError):
    """Report a spawner that is gone: all workers of the node are, or will be in a moment."""


class Spawner:
    """The agent's end: asks for workers and hears of them. Make it before any thread, gRPC or handler of signals.

    Args:
        program: what each worker runs.
    """

    def __init__(self, program: Program) -> None:
        # Packets: a message is read whole or not at all.
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        agent = os.getpid()

        def child() -> NoReturn:
            self._channel.close()
            _Spawner(program, theirs, agent=agent).run()

        self.pid = forking.fork(child)
        theirs.close()
        self._channel.settimeout(_END_SECONDS)  # it answers at once, unless it is stopped

    def fileno(self) -> int:
        """Return the descriptor that can be read when there are reports."""
        return self._channel.fileno()

    def spawn(self, worker: int, *, stdout: int, stderr: int, environment: Mapping[str, str]) -> None:
        """Start a worker.

        Args:
            worker: its id.
            stdout: descriptor that becomes its stdout; closed here.
            stderr: the same for stderr.
            environment: all its variables.

        Raises:
            SpawnerLostError: the spawner is gone.
        """
        try:
            self._ask({"do": "spawn", "worker": worker, "environment": dict(environment)}, [stdout, stderr])
        finally:
            os.close(stdout)
            os.close(stderr)

    def signal(self, worker: int, number: signal.Signals) -> None:
        """Send a signal to a worker if it still runs, SIGKILL to its whole session.

        Raises:
            SpawnerLostError: the spawner is gone.
        """
        self._ask({"do": "signal", "worker": worker, "number": int(number)})

    def read(self) -> list[Report]:
        """Return the reports that are there now.

        Raises:
            SpawnerLostError: the spawner is gone.
        """
        found: list[Report] = []
        while select.select([self._channel], [], [], 0)[0]:
            try:
                message = self._channel.recv(_LONGEST_MESSAGE_BYTES)
            except ConnectionError:
                message = b""
            if not message:
                if found:
                    return found  # the next call says it
                raise SpawnerLostError(f"process {self.pid}, which starts the workers of this node, is gone")
            text = json.loads(message)
            found.append(Report(**{**text, "change": Change(text["change"])}))
        return found

    def close(self) -> None:
        """End the spawner, with all workers that still run, and wait for it."""
        self._channel.close()
        deadline = time.monotonic() + _END_SECONDS
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > deadline:
                    os.kill(self.pid, signal.SIGKILL)
                time.sleep(_SWEEP_POLL_SECONDS)

    def _ask(self, request: Mapping[str, Any], descriptors: list[int] | None = None) -> None:
        try:
            socket.send_fds(self._channel, [json.dumps(request).encode()], descriptors or [])
        except TimeoutError:
            raise SpawnerLostError(f"process {self.pid}, which starts the workers of this node, is stopped") from None
        except (ConnectionError, BrokenPipeError):
            raise SpawnerLostError(f"process {self.pid}, which starts the workers of this node, is gone") from None


@dataclass(slots=True)
class _Worker:
    """A child of the spawner."""

    id: int
    pid: int
    code: int | None = None
    kill_at: float = 0.0
    """When those of its session that have outlived it and SIGTERM are killed."""


class _Spawner:
    """The spawner's own side: one thread, one loop."""

    def __init__(self, program: Program, channel: socket.socket, *, agent: int) -> None:
        self._program, self._channel, self._agent = program, channel, agent
        self._workers: list[_Worker] = []
        self._alarm = -1

    def run(self) -> NoReturn:
        """Serve until the channel ends; whatever goes wrong, no worker outlives this process."""
        try:
            self._settle()
            while self._turn():
                self._look()
        finally:
            self._end_all()
        os._exit(0)

    def _turn(self) -> bool:
        """Wait for something to do, do what the agent asks, and return whether it is still there."""
        pause = _SWEEP_POLL_SECONDS if any(worker.code is not None for worker in self._workers) else None
        ready, _, _ = select.select([self._channel.fileno(), self._alarm], [], [], pause)
        if self._alarm in ready:
            os.read(self._alarm, 4096)
        return self._channel.fileno() not in ready or self._serve()

    def _settle(self) -> None:
        forking.forget_parent()
        os.setsid()  # keys of a terminal, such as Ctrl-C, are for the agent
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        self._alarm, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Not SIGKILL: the workers' sessions are still to be swept. A stopped process would not see the channel's end.
        forking.signal_at_parents_death(signal.SIGCONT, parent=self._agent)

    def _serve(self) -> bool:
        """Do what the agent asks; return whether it is still there."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self._channel, _LONGEST_MESSAGE_BYTES, 2)
        except ConnectionError:  # it died before it had read all that it was told
            return False
        if not message:
            return False
        request = json.loads(message)
        if request["do"] == "spawn":
            self._spawn(request["worker"], descriptors, request["environment"])
        else:
            self._signal(request["worker"], signal.Signals(request["number"]))
        return True

    def _spawn(self, worker: int, descriptors: list[int], environment: Mapping[str, str]) -> None:
        spawner, wake = os.getpid(), signal.set_wakeup_fd(-1)

        def child() -> NoReturn:
            os.setsid()
            signal.signal(signal.SIGQUIT, signal.SIG_DFL)
            forking.forget_parent()
            forking.signal_at_parents_death(signal.SIGKILL, parent=spawner)
            for descriptor in (self._channel.fileno(), self._alarm, wake):
                os.close(descriptor)
            forking.become_script(stdout=descriptors[0], stderr=descriptors[1], environment=environment)
            _run(self._program)

        pid = forking.fork(child)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for descriptor in descriptors:
            os.close(descriptor)
        self._workers.append(_Worker(worker, pid))
        self._tell(Report(worker, Change.STARTED, pid))

    def _signal(self, worker: int, number: signal.Signals) -> None:
        for each in self._workers:
            if each.id == worker and each.code is None:
                send([each.pid], number)
                if number == signal.SIGKILL:
                    send(members([each.pid]), number)

    def _look(self) -> None:
        """Report what has changed, and sweep behind those that have ended."""
        for worker in list(self._workers):
            if worker.code is None:
                self._look_at(worker)
            if worker.code is not None and self._swept(worker):
                os.waitpid(worker.pid, 0)
                self._workers.remove(worker)

    def _look_at(self, worker: _Worker) -> None:
        # An ended one stays a zombie until its session is swept, so that its number is not given to another.
        found = os.waitid(os.P_PID, worker.pid, _ANY_CHANGE | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return
        if found.si_code in (os.CLD_STOPPED, os.CLD_CONTINUED):
            stopped = found.si_code == os.CLD_STOPPED
            # Only this kind of change: meanwhile there may be one of the other kind, or its end.
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, worker.pid, (os.WSTOPPED if stopped else os.WCONTINUED) | os.WNOHANG)
            self._tell(Report(worker.id, Change.STOPPED if stopped else Change.CONTINUED, worker.pid))
            self._look_at(worker)
            return
        worker.code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        self._tell(Report(worker.id, Change.ENDED, worker.pid, worker.code))
        send(members([worker.pid]), signal.SIGTERM)
        worker.kill_at = time.monotonic() + _SWEEP_GRACE_SECONDS

    def _swept(self, worker: _Worker) -> bool:
        rest = members([worker.pid])
        if rest and time.monotonic() >= worker.kill_at:
            send(rest, signal.SIGKILL)
        return not rest

    def _end_all(self) -> None:
        """Kill the workers at once and sweep their sessions."""
        send([worker.pid for worker in self._workers if worker.code is None], signal.SIGKILL)
        sweep([worker.pid for worker in self._workers])

    def _tell(self, report: Report) -> None:
        with contextlib.suppress(ConnectionError, BrokenPipeError):  # the loop reads the end next
            self._channel.send(json.dumps(asdict(report)).encode())


def sweep(sessions: list[int]) -> None:
    """End the sessions of workers that are gone: SIGTERM, and SIGKILL to what is left after a second.

    What cannot be killed even so, as it waits for a device, is left to itself.
    """
    _signal_all(sessions, signal.SIGTERM, seconds=_SWEEP_GRACE_SECONDS, again=False)
    _signal_all(sessions, signal.SIGKILL, seconds=_END_SECONDS, again=True)


def _signal_all(sessions: list[int], number: signal.Signals, *, seconds: float, again: bool) -> None:
    """Send a signal to all members of some sessions, and wait for their end; `again` to those that come meanwhile."""
    deadline: float | None = None
    while rest := members(sessions):
        if deadline is None or again:
            send(rest, number)
        deadline = time.monotonic() + seconds if deadline is None else deadline
        if time.monotonic() > deadline:
            return
        time.sleep(_SWEEP_POLL_SECONDS)


def _run(program: Program) -> NoReturn:
    if isinstance(program, Script):
        try:
            os.execv(program.command[0], program.command)
        except OSError as error:
            os.write(2, f"bamboo: cannot run {program.command[0]}: {error.strerror}\n".encode())
            os._exit(127)
    forking.replace_streams()
    forking.run_as_script(program, finalize=False)

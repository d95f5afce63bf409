"""Finds the first cause when a job ends, so that every worker names it instead of its broken link.

A worker that raises takes the job with it, and the others would only see links break. So the first failure is written
to the store *before* any link is closed, and whoever meets a broken link looks there. A worker that was killed or
hangs writes nothing; then the survivors call the roll, and those without an answer are named.

The process that hosts the store may itself be gone, or stopped: every look ends within a few seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch.distributed as torch_distributed

from bamboo_ds.errors import (
    BambooError,
    DataExhaustedError,
    DataMismatchError,
    EvictedError,
    NonFiniteLossError,
    PeerLostError,
    PlanChangedError,
    RefusedError,
)

_LOOK_SECONDS = 0.02
_ALARM_SECONDS = 0.25  # between two looks of a waiting worker at the alarm
_ROLL_SECONDS = 1.0  # how long workers have to answer the roll
_STORE_SECONDS = 2.5  # the host is alive but busy, or it hangs
_SHARED_CAUSES = {kind.__name__: kind for kind in (DataExhaustedError, DataMismatchError, NonFiniteLossError)}
JOB = "job"


@dataclass(frozen=True, slots=True)
class Failure:
    """The first cause of a job's end.

    Attributes:
        worker: who failed.
        kind: name of the exception's class.
        message: its text.
        traceback: of the exception, for whoever shows the first cause of a job; may be empty.
    """

    worker: int
    kind: str
    message: str
    traceback: str = ""


class Failures(Protocol):
    """Where workers say why they fail, and find out why others do."""

    def report(self, error: BaseException) -> None:
        """Write this worker's failure if none came first; mark the error if it only repeats the first."""
        ...

    def check(self) -> None:
        """Raise when another worker has failed; called by whoever waits."""
        ...

    def answer_the_roll(self) -> None:
        """Say that this worker lives although it has lost a peer."""
        ...

    def explain(self, error: PeerLostError) -> BambooError:
        """Return the error of a worker whose link broke: the first cause in place of its consequence."""
        ...

    def cause(self) -> Failure | None:
        """Return the first failure."""
        ...

    def leave(self) -> None:
        """Say that this worker's script has ended without an error."""
        ...

    def depart(self) -> None:
        """Say that this worker needs the store no more."""
        ...

    def await_others(self, *, wait_seconds: float) -> None:
        """Wait for those who still need something of this process."""
        ...


class BoundedStore:
    """A torch store whose calls end within `_STORE_SECONDS`, with None once its host is gone or does not answer."""

    def __init__(self, store: Any) -> None:
        self._store, self.lost = store, False
        self._connections = _connections_to(_port_of(store))

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the store."""
        self.lost = self.lost or not self._connected()
        if self.lost:
            return None
        answers: list[Any] = []
        thread = threading.Thread(target=self._call, args=(answers, name, arguments), daemon=True)
        thread.start()
        thread.join(_STORE_SECONDS)
        self.lost = not answers
        return answers[0] if answers else None

    def _call(self, answers: list[Any], name: str, arguments: tuple[Any, ...]) -> None:
        with contextlib.suppress(RuntimeError):  # what torch raises when the store's host is gone
            answers.append(getattr(self._store, name)(*arguments))

    def _connected(self) -> bool:
        """Return whether the host still holds the connection; torch, finding it closed, would log its whole stack.

        A connection of our own for a try is no way to ask: many of them make torch's server hang.
        """
        return not self._connections or any(map(_is_open, self._connections))

    def has(self, key: str) -> bool:
        """Return whether a key exists."""
        return bool(self.call("check", [key]))


def _connections_to(port: int | None) -> list[socket.socket]:
    """Return this process's connections to a port, as sockets to look at (never to read from)."""
    connections: list[socket.socket] = []
    for name in os.listdir("/proc/self/fd") if port is not None else ():
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
            if connection.type == socket.SOCK_STREAM and connection.getpeername()[1:2] == (port,):
                connections.append(connection)
            else:
                connection.close()
    return connections


def _is_open(connection: socket.socket) -> bool:
    """Return whether the other end still holds a connection."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _port_of(store: Any) -> int | None:
    """Return the port of a `TCPStore`, below any prefixes; None for a store of another kind."""
    while isinstance(store, torch_distributed.PrefixStore):
        store = store.underlying_store
    return store.port if isinstance(store, torch_distributed.TCPStore) else None


class FailureBoard:
    """Where workers write their failures, and find those of others.

    Args:
        store: of all workers.
        worker: id of this worker.
        workers: ids of all workers.
        scope: `JOB`, or the name of an engine: a failure of an engine that the script survives is not one of the job.
    """

    def __init__(self, store: Any, *, worker: int, workers: Sequence[int], scope: str = JOB) -> None:
        self._store, self._worker, self._workers, self._scope = BoundedStore(store), worker, workers, scope
        self._next_look = 0.0

    def report(self, error: BaseException) -> None:
        """Write this worker's failure if none came first; mark the error if it only repeats the first."""
        if is_consequence(error):
            return
        failure = Failure(worker=self._worker, kind=type(error).__name__, message=str(error))
        raw = self._store.call("compare_set", self._key("failure"), "", json.dumps(asdict(failure)))
        self._raise_alarm()
        mark_repetition(error, failure, first=Failure(**json.loads(raw)) if raw else failure)

    def check(self) -> None:
        """Look, not too often, whether another worker has failed; called by whoever waits.

        Raises:
            PeerLostError: one has.
        """
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _ALARM_SECONDS
        if self._store.has(f"{self._scope}/alarm") or self._store.has(f"{JOB}/alarm"):
            raise PeerLostError("another worker has failed or lost a peer")

    def answer_the_roll(self) -> None:
        """Say that this worker lives although it has lost a peer, and let the others say so too."""
        self._store.call("set", self._key(f"roll/{self._worker}"), "here")
        self._raise_alarm()

    def explain(self, error: PeerLostError) -> BambooError:
        """Return the error of a worker whose link broke: the first cause in place of its consequence."""
        deadline = time.monotonic() + _ROLL_SECONDS
        while (cause := self.cause()) is None and self._missing() and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        return mark(PeerLostError(self._who_is_missing(error))) if cause is None else consequence_of(cause)

    def cause(self) -> Failure | None:
        """Return the first failure of this scope or of the job."""
        for scope in (self._scope, JOB):
            if self._store.has(f"{scope}/failure") and (raw := self._store.call("get", f"{scope}/failure")):
                return Failure(**json.loads(raw))
        return None

    def _missing(self) -> list[int]:
        """Return the workers that have neither answered the roll nor left."""
        others = [worker for worker in self._workers if worker != self._worker]
        return [worker for worker in others if not (self._store.has(self._key(f"roll/{worker}")) or self._left(worker))]

    def _who_is_missing(self, error: PeerLostError) -> str:
        missing, left = self._missing(), [worker for worker in self._workers if self._left(worker)]
        if self._store.lost:
            host = "the launcher" if _launcher_holds_store() else "worker 0"
            return f"{host}, which holds the job's store, is gone or hangs ({error})"
        if left:
            return f"{names_of(left)} left: the script ended there while others still trained ({error})"
        if missing:
            return f"{names_of(missing)} gave no sign of life: killed, hung or cut off ({error})"
        return f"{error}; every worker lives, so look at the network between them"

    def _left(self, worker: int) -> bool:
        return self._store.has(f"{JOB}/left/{worker}")

    def leave(self) -> None:
        """Say that this worker's script has ended without an error."""
        self._store.call("set", f"{JOB}/left/{self._worker}", "left")

    def depart(self) -> None:
        """Say that this worker needs the store no more."""
        self._store.call("set", f"{JOB}/departed/{self._worker}", "departed")

    def await_others(self, *, wait_seconds: float) -> None:
        """Wait until all workers have departed: who hosts the store leaves last, so that the others can read it."""
        if _launcher_holds_store() or self._worker != 0:
            return
        deadline = time.monotonic() + wait_seconds
        waiting = [worker for worker in self._workers if worker != self._worker]
        while waiting and not self._store.lost and time.monotonic() < deadline:
            waiting = [worker for worker in waiting if not self._store.has(f"{JOB}/departed/{worker}")]
            time.sleep(_LOOK_SECONDS)

    def _raise_alarm(self) -> None:
        self._store.call("set", self._key("alarm"), "1")

    def _key(self, name: str) -> str:
        return f"{self._scope}/{name}"


class Guard(contextlib.AbstractContextManager[None]):
    """Lets every worker hear why one fails, and none wait for it.

    A class, because a generator may not raise a `StopIteration` such as `DataExhaustedError`.

    Args:
        board: where failures are written.
        stop: closes the links; called after the failure is on the board.
    """

    def __init__(self, board: Failures, stop: Callable[[BaseException], None]) -> None:
        self._board, self._stop = board, stop

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Report an error, or find the cause of a lost peer. That the plan has changed is no failure.

        Raises:
            BambooError: in place of a `PeerLostError`: the same, or the cause where all workers share it.
        """
        if isinstance(error, PeerLostError) and not is_consequence(error):
            self._board.answer_the_roll()
            self._stop(error)
            raise self._board.explain(error) from None
        if error is not None:
            if not isinstance(error, PlanChangedError):
                self._board.report(error)
            self._stop(error)


def mark_repetition(error: BaseException, failure: Failure, *, first: Failure) -> None:
    """Mark an error that another worker has met before."""
    if first.worker != failure.worker and (first.kind, first.message) == (failure.kind, failure.message):
        mark(error, f"it met the same error as worker {first.worker}: {first.kind}")


def consequence_of(cause: Failure) -> BambooError:
    """Return the error that other workers raise when one has failed."""
    if kind := _SHARED_CAUSES.get(cause.kind):
        return mark(kind(f"worker {cause.worker} failed: {cause.message}"))
    text = ": ".join(filter(None, (cause.kind, _first_line(cause.message))))
    return mark(PeerLostError(f"worker {cause.worker} failed: {text}"))


def mark(error: BaseException, note: str = "") -> Any:
    """Mark an error as the consequence of one that another worker reports in full."""
    with contextlib.suppress(AttributeError):  # a class with slots cannot be marked: it is then reported twice
        error.bamboo_consequence = note or str(error)  # type: ignore[attr-defined]
    return error


def is_consequence(error: BaseException) -> bool:
    """Return whether this error is no failure of the job's: another worker reports its cause, or it is private.

    Private is that this worker was evicted or refused: the job goes on without it.
    """
    return bool(consequence_note(error))


def consequence_note(error: BaseException) -> str:
    """Return the one line to show for a consequence; empty for a first cause."""
    private = str(error) or type(error).__name__ if isinstance(error, (EvictedError, RefusedError)) else ""
    return str(getattr(error, "bamboo_consequence", private))


def _launcher_holds_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""


def names_of(workers: Sequence[int]) -> str:
    """Return `worker 3`, or `workers 3, 5`."""
    return f"worker{'s' if len(workers) > 1 else ''} {', '.join(map(str, workers))}"

"""Ends a worker in order, and says once why the job ended.

A process that exits with live gloo groups may be aborted with signal 6, which a launcher takes for a failure of its
own; so engines are closed first. When one worker raises, its
traceback is the story; the others, whose links break, say one line.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import weakref
from types import TracebackType
from typing import Any

from bamboo_ds.comm.failure import Failure
from bamboo_ds.errors import BambooError, DataExhaustedError, DataMismatchError, NonFiniteLossError, PeerLostError

_LINGER_SECONDS = 3.0
_SHARED_CAUSES = {kind.__name__: kind for kind in (DataExhaustedError, DataMismatchError, NonFiniteLossError)}
_ENGINES: weakref.WeakSet[Any] = weakref.WeakSet()


def close_at_exit(engine: Any) -> None:
    """Close an engine before the interpreter ends, and let it tell the others of an uncaught exception."""
    _ENGINES.add(engine)
    _install()


@functools.cache
def _install() -> None:
    atexit.register(_close_all)
    sys.excepthook = functools.partial(_report, sys.excepthook)


def _close_all() -> None:
    boards = [(engine._failures, engine.global_rank, len(engine.plan.workers)) for engine in list(_ENGINES)]
    for engine in list(_ENGINES):
        engine.close()
    for board, rank, workers in boards:
        board.leave()
        if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            board.await_others(workers, wait_seconds=_LINGER_SECONDS)


def _report(previous: Any, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    for engine in list(_ENGINES):
        engine.fail(error)
    if isinstance(error, PeerLostError) or getattr(error, "is_consequence", False):
        rank = next((engine.global_rank for engine in _ENGINES), os.environ.get("RANK", "?"))
        sys.stderr.write(f"bamboo: worker {rank} ends: {error}\n")
        return
    previous(kind, error, trace)


def consequence(error: PeerLostError, cause: Failure | None) -> BambooError:
    """Return the error of a worker whose link broke, given what the worker that failed first has said."""
    if cause is None:
        return PeerLostError(f"{error}; no worker said why, so one was killed or its machine is gone")
    kind = _SHARED_CAUSES.get(cause.kind, PeerLostError)
    text = cause.message if kind is not PeerLostError else f"{cause.kind}: {cause.message}"
    raised = kind(f"worker {cause.worker} failed: {text}")
    raised.is_consequence = True  # type: ignore[union-attr]
    return raised

"""Ends a worker in order, and says once why the job ended.

A process that exits with live gloo groups may be aborted with signal 6, which a launcher takes for a failure of its
own; so engines and groups are closed first. When one worker raises, its traceback is the story, and it is shown once;
the others say one line. torchrun, which would call whoever it saw ending first the root cause, is told as well.

In a cluster the job goes on without a worker that was evicted or refused: it says why in one line and fails nobody.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import sys
import threading
import time
import traceback
import weakref
from types import TracebackType
from typing import Any, Protocol

import torch.distributed as torch_distributed
from torch.distributed import distributed_c10d

from bamboo_ds.elastic.membership import Membership
from bamboo_ds.errors import BambooError, EvictedError, PeerLostError, RefusedError
from bamboo_ds.world.failure import FailureBoard, Failures, consequence_note, is_consequence
from bamboo_ds.world.group import BACKEND
from bamboo_ds.world.hosting import hosted
from bamboo_ds.world.joining import joined
from bamboo_ds.world.member_failures import MemberFailures

EVICTED = 3
"""Exit code of a worker that the cluster has declared dead."""
_LINGER_SECONDS = 3.0
_THREADS_SECONDS = 1.0
_CAUSE_SECONDS = 2.0  # for the failure that broke a collective of the script's own to be known here


class Ending(Protocol):
    """What has to be closed before the process ends: an engine."""

    def close(self) -> None:
        """End links and groups."""
        ...

    def fail(self, error: BaseException) -> None:
        """Tell the other workers that this one ends with `error`, and close."""
        ...


_OPEN: weakref.WeakSet[Any] = weakref.WeakSet()
_failure: BaseException | None = None
_exit_code = 0


def close_at_exit(engine: Ending) -> None:
    """Close an engine before the interpreter ends, and let it tell the others of an uncaught exception."""
    _OPEN.add(engine)
    end_in_order()


@functools.cache
def end_in_order() -> None:
    """From now on, report uncaught exceptions once for the whole job, and close what is open at exit."""
    atexit.register(_leave)
    sys.excepthook = functools.partial(_report, sys.excepthook)


@functools.cache
def job_board() -> Failures | None:
    """Return the board of the whole job; None outside of one."""
    if (member := joined()) is not None:
        return MemberFailures(member, plan=lambda: None, timeout_seconds=_CAUSE_SECONDS)
    if not torch_distributed.is_initialized():
        return None
    size = torch_distributed.get_world_size()
    return FailureBoard(world_store(), worker=torch_distributed.get_rank(), workers=range(size))


def world_store() -> torch_distributed.Store:
    """Return the store that all workers share, in a corner of our own."""
    return torch_distributed.PrefixStore("bamboo", distributed_c10d._get_default_store())


def _leave() -> None:
    if not job_board.cache_info().currsize and joined() is None:
        return  # the script has not used Bamboo
    board = job_board()
    if board is not None and _failure is None:
        board.leave()
    for engine in list(_OPEN):
        engine.close()
    if board is not None:
        board.depart()
        board.await_others(wait_seconds=_LINGER_SECONDS)
    if torch_distributed.is_initialized() and (_failure is None or torch_distributed.get_backend() == BACKEND):
        with contextlib.suppress(RuntimeError):
            torch_distributed.destroy_process_group()
    if (agent := hosted()) is not None:
        if _failure is not None:
            agent.fail(type(_failure).__name__, str(_failure))
        else:
            agent.await_end()
        agent.close()
    if (member := joined()) is not None:
        member.close()
    _await_threads()
    if _exit_code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_code)  # Python has no other way to change the code of an uncaught exception


def _await_threads() -> None:
    """Wait a moment for threads of ours and of gRPC, which have been told to end.

    One that comes back from native code when the interpreter is taken apart aborts the process: a group that forms and
    is not wanted any more asks its store, which is Python, until that says so.
    """
    deadline = time.monotonic() + _THREADS_SECONDS
    for thread in threading.enumerate():
        homes = (type(thread).__module__, getattr(getattr(thread, "_target", None), "__module__", "") or "")
        if thread.daemon and any(home.startswith(("bamboo_ds.", "grpc.")) for home in homes):
            thread.join(max(deadline - time.monotonic(), 0.0))


def _report(previous: Any, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Show an uncaught exception: the whole of a cause, one line of a consequence."""
    global _failure, _exit_code
    _failure = error
    board = job_board() if torch_distributed.is_initialized() or joined() is not None else None
    if board is not None:
        error = _failure = _explained(error, board)
        board.report(error)
    for engine in list(_OPEN):
        engine.fail(error)
    if isinstance(error, EvictedError):
        _exit_code = EVICTED
    if isinstance(error, RefusedError) and (member := joined()) is not None:
        member.refuse(str(error))
    if is_consequence(error):
        sys.stderr.write(f"bamboo: worker {_name()} ends: {consequence_note(error)}\n")
        return
    _tell_torchrun(error)
    _show(previous, type(error), error, error.__traceback__ or trace, worker=_name())


def _explained(error: BaseException, board: Failures) -> BaseException:
    """Return what the cluster says of a broken link that the script's own code has met, or the error as it is."""
    if joined() is None or not isinstance(error, PeerLostError) or is_consequence(error):
        return error
    explained: BambooError = board.explain(error)
    explained.__cause__ = error
    return explained


def _name() -> str:
    seat = joined() or Membership.read()  # an agent has given the id before the worker joins
    return os.environ.get("RANK", "?") if seat is None else str(seat.worker)


def _show(
    previous: Any, kind: type[BaseException], error: BaseException, trace: TracebackType | None, *, worker: str
) -> None:
    """Write the traceback in one piece: other workers write at the same time."""
    headline = f"bamboo: worker {worker} failed first, with:\n"
    if previous is sys.__excepthook__:
        sys.stderr.write(headline + "".join(traceback.format_exception(kind, error, trace)))
        return
    sys.stderr.write(headline)
    previous(kind, error, trace)


def _tell_torchrun(error: BaseException) -> None:
    """Write the error file that torchrun's summary shows as the root cause."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return
    # torchrun counts whole seconds; a second earlier, the cause comes before consequences of the same second.
    extra = {"timestamp": str(int(time.time()) - 1)}
    told = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump(told, file)

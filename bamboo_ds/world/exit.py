"""Ends a worker in order, and says once why the job ended.

A process that exits with live gloo groups may be aborted with signal 6, which a launcher takes for a failure of its
own; so engines and groups are closed first. When one worker raises, its traceback is the story, and it is shown once;
the others say one line. torchrun, which would call whoever it saw ending first the root cause, is told as well.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import sys
import time
import traceback
import weakref
from types import TracebackType
from typing import Any, Protocol

import torch.distributed as torch_distributed
from torch.distributed import distributed_c10d

from bamboo_ds.world.failure import FailureBoard, consequence_note, is_consequence

_LINGER_SECONDS = 3.0


class Ending(Protocol):
    """What has to be closed before the process ends: an engine."""

    def close(self) -> None:
        """End links and groups."""
        ...

    def fail(self, error: BaseException) -> None:
        """Tell the other workers that this one ends with `error`, and close."""
        ...


_OPEN: weakref.WeakSet[Any] = weakref.WeakSet()
_failed = False


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
def job_board() -> FailureBoard | None:
    """Return the board of the whole job; None outside of one."""
    if not torch_distributed.is_initialized():
        return None
    size = torch_distributed.get_world_size()
    return FailureBoard(world_store(), worker=torch_distributed.get_rank(), workers=range(size))


def world_store() -> torch_distributed.Store:
    """Return the store that all workers share, in a corner of our own."""
    return torch_distributed.PrefixStore("bamboo", distributed_c10d._get_default_store())


def _leave() -> None:
    if not job_board.cache_info().currsize:
        return  # the script has not used Bamboo
    board = job_board()
    if board is not None and not _failed:
        board.leave()
    for engine in list(_OPEN):
        engine.close()
    if board is not None:
        board.depart()
        board.await_others(wait_seconds=_LINGER_SECONDS)
    if not _failed and torch_distributed.is_initialized():
        with contextlib.suppress(RuntimeError):
            torch_distributed.destroy_process_group()


def _report(previous: Any, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Show an uncaught exception: the whole of a cause, one line of a consequence."""
    global _failed
    _failed = True
    if torch_distributed.is_initialized() and (board := job_board()) is not None:
        board.report(error)
    for engine in list(_OPEN):
        engine.fail(error)
    worker = os.environ.get("RANK", "?")
    if is_consequence(error):
        sys.stderr.write(f"bamboo: worker {worker} ends: {consequence_note(error)}\n")
        return
    _tell_torchrun(error)
    _show(previous, kind, error, trace, worker=worker)


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

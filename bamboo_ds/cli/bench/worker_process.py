"""The child's side of a forked worker: settle in, run the job, send the result, leave in order."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import logging
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

STACK_DUMP_SIGNAL = signal.SIGUSR2
"""Makes a worker write the stacks of all its threads to its log, even if it holds the interpreter's lock."""
_PR_SET_PDEATHSIG = 1


def be_worker(
    job: Callable[[], Any],
    variables: Mapping[str, str | None],
    writer: int,
    log: int,
    inherited: Sequence[int],
    parent: int,
    naturally: bool,
) -> NoReturn:
    """Run a job as a worker in a fresh fork; never returns: the parent's stack lies below, no exception may reach it.

    Args:
        job: Its value, or its traceback, is sent.
        variables: Set in the environment; None removes one.
        writer: Descriptor of the pipe that takes the result.
        log: Descriptor that takes stdout and stderr.
        inherited: Descriptors of the parent that are closed here.
        parent: Process id of the parent; the worker dies with it.
        naturally: End as a script does, instead of at once.
    """
    code = 1
    try:
        _settle(variables, log, inherited, parent)
        value, error = _attempt(job)
        _send(writer, value, error)
        code = 0 if error is None else 1
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        if naturally:
            _finalize(code)
        os._exit(code)


def _settle(variables: Mapping[str, str | None], log: int, inherited: Sequence[int], parent: int) -> None:
    """Make this fresh fork a process of its own: group, signals, output, environment, threads."""
    os.setpgid(0, 0)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
    for descriptor in inherited:
        os.close(descriptor)
    atexit._clear()  # the parent's handlers are not ours to run: they would, say, remove its temporary folders
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    _redirect(log)
    for name, text in variables.items():
        if text is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = text
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def _redirect(log: int) -> None:
    """Send stdout, stderr, log handlers and stack dumps to the log, whatever (pytest's capture) they were before."""
    os.dup2(log, 1)
    os.dup2(log, 2)
    before = {sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__}
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for handler in {handler for logger in loggers for handler in getattr(logger, "handlers", [])}:
        if type(handler) is logging.StreamHandler and (handler.stream in before or handler.stream.closed):
            handler.stream = sys.stderr
    faulthandler.enable(file=2, all_threads=True)
    faulthandler.register(STACK_DUMP_SIGNAL, file=2, all_threads=True)


def _attempt(job: Callable[[], Any]) -> tuple[Any, str | None]:
    try:
        return job(), None
    except SystemExit as leaving:
        return None, None if not leaving.code else f"SystemExit: {leaving.code}"
    except BaseException:
        return None, traceback.format_exc()


def _send(writer: int, value: Any, error: str | None) -> None:
    try:
        payload = pickle.dumps((value, error))
    except Exception:
        payload = pickle.dumps((None, f"the value of the target does not pickle\n{traceback.format_exc()}"))
    with open(writer, "wb") as pipe:
        pipe.write(payload)


def _finalize(code: int) -> None:
    """End as a script does: exit handlers, threads joined, interpreter finalized, C++ destructors."""
    ctypes.pythonapi.Py_Exit(code)

"""What a fork must do to be a process of its own, and how one ends as the process of a script does.

A fork inherits more than it should: its parent's exit handlers (which would, say, remove the parent's temporary
folders), signal handlers, log streams, and one state of NumPy's random generator for all its siblings.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import io
import logging
import os
import signal
import sys
import tempfile
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import NoReturn

__all__ = [
    "become_script",
    "forget_parent",
    "fork",
    "replace_streams",
    "run_as_script",
    "signal_at_parents_death",
]

_PR_SET_PDEATHSIG = 1
_DEFAULTS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM, signal.SIGCHLD, signal.SIGTSTP)
_HELD_BACK = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def fork(child: Callable[[], NoReturn]) -> int:
    """Fork a process that runs `child`, and return its id.

    Signals that ask it to end are held back until it has set its own handlers (`forget_parent`), so none gets lost in
    those of its parent.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
    try:
        with warnings.catch_warnings():
            # Python warns of threads that may hold a lock. Ours does not fork while it uses what a child needs.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            _never_return(child)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _never_return(child: Callable[[], NoReturn]) -> NoReturn:
    """Run the child's code; the parent's stack lies below, no exception may reach it."""
    try:
        child()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(1)


def signal_at_parents_death(number: signal.Signals, *, parent: int) -> None:
    """Let the kernel send this process a signal when the parent's thread that forked it ends.

    Args:
        number: SIGKILL to die with it; SIGCONT to wake up even when stopped.
        parent: its id. If it is dead already, this process ends at once.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def forget_parent() -> None:
    """Drop what belongs to the parent: exit handlers, signal handlers, cached folder names, shared randomness."""
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    _restore_exit_handlers()
    signal.set_wakeup_fd(-1)
    for number in _DEFAULTS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD_BACK)
    tempfile.tempdir = None
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's own generator does that by itself


def _restore_exit_handlers() -> None:
    """Register anew what the standard library wants at the exit of every process that uses it."""
    atexit.register(logging.shutdown)
    if "multiprocessing.util" in sys.modules:
        util = sys.modules["multiprocessing.util"]
        util._finalizer_registry.clear()
        atexit.register(util._exit_function)


def _set_environment(variables: Mapping[str, str]) -> None:
    """Make these the environment, and no others."""
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def become_script(*, stdout: int, stderr: int, environment: Mapping[str, str]) -> None:
    """Take descriptors and environment of a script's process; nothing to read on stdin."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)  # inheritable, as `source` is not
    for descriptor in {nothing, stdout, stderr} - {0, 1, 2}:
        os.close(descriptor)
    _set_environment(environment)


def replace_streams() -> None:
    """Let stdout, stderr, log handlers and stack dumps go to descriptors 1 and 2, whatever they were before."""
    before = {sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__}
    sys.stdout = sys.__stdout__ = _stream(1, errors="strict")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, errors="backslashreplace")  # type: ignore[misc]
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for handler in {handler for logger in loggers for handler in getattr(logger, "handlers", [])}:
        if type(handler) is logging.StreamHandler and (handler.stream in before or handler.stream.closed):
            handler.stream = sys.stderr
    faulthandler.enable(file=2, all_threads=True)


def _stream(descriptor: int, *, errors: str) -> io.TextIOWrapper:
    """Open a stream that writes whole lines at once: what a killed process has written is there."""
    return open(descriptor, "w", buffering=1, closefd=False, errors=errors)


def run_as_script(program: Callable[[], object], *, finalize: bool) -> NoReturn:
    """Run a callable and end this process as Python ends that of a script.

    `SystemExit` gives the exit code, other exceptions go to `sys.excepthook`; then threads are joined, exit handlers
    run and streams are flushed.

    Args:
        program: what to run.
        finalize: also take the interpreter apart and run all C++ destructors. With torch loaded that costs a third of
            a second of CPU, most of it for memory that a fork shares until then.
    """
    code = 0
    try:
        program()
    except SystemExit as leaving:
        code = _exit_code(leaving)
    except KeyboardInterrupt as error:
        _show(error)
        code = -signal.SIGINT
    except BaseException as error:
        _show(error)
        code = 1
    if finalize and code >= 0:
        ctypes.pythonapi.Py_Exit(code)
    _end(code)


def _exit_code(leaving: SystemExit) -> int:
    if leaving.code is None or isinstance(leaving.code, int):
        return int(leaving.code or 0) & 0xFF
    print(leaving.code, file=sys.stderr)  # noqa: T201  # as Python does
    return 1


def _show(error: BaseException) -> None:
    """Hand an exception to the hook, without our own frame."""
    trace: TracebackType | None = error.__traceback__.tb_next if error.__traceback__ else None
    try:
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    except BaseException:
        traceback.print_exc()


def _end(code: int) -> NoReturn:
    """End without taking the interpreter apart; by a signal, for a negative code: so does Python after SIGINT."""
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)

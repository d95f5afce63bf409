"""Starts user scripts as launchers do, waits with a deadline, and looks for what they leave behind.

`launch` runs a real launcher. `launch_forked` starts the same scripts in forks of this process, which has imported
torch and DeepSpeed: a job of four workers then costs half a second instead of ten. A forked worker ends as a script
does: exception hook, exit handlers, finalization of the interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import importlib
import multiprocessing.util
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from bamboo_ds.cli.bench.workers import free_port, warm_up

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).resolve().parent / "scripts"
MEMORY_OF_TESTS = "bamboo-test-"
"""What names of shared memory begin with that a test makes itself; others look for what was left there meanwhile."""

_TOKEN = "BAMBOO_TEST_TOKEN"
_BEQUEST_SECONDS = 5.0
_NOT_OURS = ("torchelastic_", "torchinductor_")  # torchrun's logs of a failed job, and the cache that torch shares
_WARM = ("bamboo_ds.initialization", "torch.utils.data", "torch.optim.lr_scheduler")


@dataclass(frozen=True, slots=True)
class Ended:
    """What a job left.

    Attributes:
        codes: exit code by rank (`launch`: that of the launcher alone, under 0); negative: number of a signal.
        output: stdout and stderr of all processes, in order of arrival.
        seconds: from start to the end of the last process.
        left: what was found afterwards that was not there before: processes, files of /dev/shm, temporary files.
    """

    codes: dict[int, int]
    output: str
    seconds: float
    left: list[str]


def launch(
    command: Sequence[object],
    *,
    deadline_seconds: float,
    temporary: Path,
    environment: Mapping[str, str | None] | None = None,
) -> Ended:
    """Run a launcher to its end; past the deadline everything is killed and the test fails."""
    token = uuid.uuid4().hex
    variables = {**_environment(temporary), _TOKEN: token}
    with _looking_for_remains(temporary) as remains:
        begin = time.monotonic()
        process = subprocess.Popen(
            [*map(str, command)],
            env=_merged(variables, environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            cwd=temporary,
        )
        try:
            output, _ = process.communicate(timeout=deadline_seconds)
        except subprocess.TimeoutExpired:
            _kill(_with_token(token))
            output, _ = process.communicate(timeout=10)
            raise AssertionError(f"still running after {deadline_seconds} s:\n{output[-8000:]}") from None
        seconds = time.monotonic() - begin
        remains += _survivors(lambda: _with_token(token))
    return Ended({0: process.returncode}, output, seconds, remains)


def launch_forked(
    script: str,
    *arguments: object,
    workers: int,
    deadline_seconds: float,
    temporary: Path,
    environment: Mapping[str, str | None] | None = None,
    patched: bool = False,
    abandoned: Sequence[int] = (),
) -> Ended:
    """Run a script of `scripts/` in forked workers.

    Args:
        script: file name in `scripts/`.
        arguments: its arguments.
        workers: how many.
        deadline_seconds: for the whole job.
        temporary: becomes their TMPDIR.
        environment: more variables; None removes one.
        patched: run it as `python -m bamboo_ds script` does.
        abandoned: ranks that will not end by themselves (stopped); killed when all others have ended.
    """
    _warm_up()
    base = {**_environment(temporary), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    reader, writer = os.pipe()
    begin = time.monotonic()
    with _looking_for_remains(temporary) as remains:
        pids = {}
        for rank in range(workers):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers}
            variables = {**base, **{name: str(value) for name, value in place.items()}}
            variables = _merged(variables, environment or {})
            pids[rank] = _fork(SCRIPTS / script, [*map(str, arguments)], variables, reader, writer, patched)
        os.close(writer)
        codes, output = _collect(pids, reader, begin + deadline_seconds, abandoned)
        seconds = time.monotonic() - begin
        remains += _survivors(lambda: [p for p in psutil.process_iter() if _session(p) in pids.values()])
    return Ended(codes, output, seconds, remains)


def _warm_up() -> None:
    warm_up()
    for name in _WARM:
        importlib.import_module(name)


def _environment(temporary: Path) -> dict[str, str]:
    temporary.mkdir(parents=True, exist_ok=True)
    more = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    return {**os.environ, **more}


def _merged(variables: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in {**variables, **changes}.items() if value is not None}


def _fork(
    script: Path, arguments: list[str], variables: dict[str, str], reader: int, writer: int, patched: bool
) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reader)
            _settle(writer, variables)
            code = _run(script, arguments, patched)
        finally:
            ctypes.pythonapi.Py_Exit(code)
    return pid


def _settle(writer: int, variables: dict[str, str]) -> None:
    """Make this fork look like a fresh interpreter under a launcher."""
    os.setsid()
    faulthandler.disable()  # that of pytest writes to the terminal
    atexit._clear()  # handlers and finalizers of the parent are not ours to run
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # die with the parent
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.excepthook, threading.excepthook = sys.__excepthook__, threading.__excepthook__
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None
    os.chdir(variables["TMPDIR"])


def _run(script: Path, arguments: list[str], patched: bool) -> int:
    sys.argv = [str(script), *arguments]
    try:
        if patched:
            importlib.import_module("bamboo_ds.__main__").main(sys.argv)
        else:
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


def _collect(
    pids: Mapping[int, int], reader: int, deadline: float, abandoned: Sequence[int]
) -> tuple[dict[int, int], str]:
    received: list[bytes] = []
    thread = threading.Thread(target=_read_all, args=(reader, received), daemon=True)
    thread.start()
    codes: dict[int, int] = {}
    while set(pids) - set(abandoned) - set(codes):
        if time.monotonic() > deadline:
            _end(pids, codes)
            thread.join(5)
            raise AssertionError(f"still running: {sorted(set(pids) - set(codes))}\n{_text(received)[-8000:]}")
        _reap(pids, codes)
        time.sleep(0.01)
    _end(pids, codes)
    thread.join(_BEQUEST_SECONDS)
    return codes, _text(received)


def _read_all(reader: int, received: list[bytes]) -> None:
    while chunk := os.read(reader, 1 << 16):
        received.append(chunk)
    os.close(reader)


def _text(received: Sequence[bytes]) -> str:
    return b"".join(received).decode(errors="replace")


def _reap(pids: Mapping[int, int], codes: dict[int, int]) -> None:
    for rank in set(pids) - set(codes):
        pid, status = os.waitpid(pids[rank], os.WNOHANG)
        if pid:
            codes[rank] = os.waitstatus_to_exitcode(status)


def _end(pids: Mapping[int, int], codes: dict[int, int]) -> None:
    for rank in set(pids) - set(codes):
        os.kill(pids[rank], signal.SIGKILL)
        os.waitpid(pids[rank], 0)


@contextlib.contextmanager
def _looking_for_remains(temporary: Path) -> Iterator[list[str]]:
    found: list[str] = []
    shared_before, before = set(shared_memory()), set(temporary.iterdir())
    yield found
    found += [f"/dev/shm/{name}" for name in shared_memory() if name not in shared_before]
    new = [path.name for path in temporary.iterdir() if path not in before]
    found += [f"temporary {name}" for name in new if not name.startswith(_NOT_OURS)]


def shared_memory() -> list[str]:
    """List files of /dev/shm but for those of tests that make some and run at the same time."""
    return [name for name in os.listdir("/dev/shm") if not name.startswith(MEMORY_OF_TESTS)]


def _with_token(token: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if _variable(process, _TOKEN) == token]


def _variable(process: psutil.Process, name: str) -> str | None:
    with contextlib.suppress(psutil.Error, OSError):
        return process.environ().get(name)
    return None


def _session(process: psutil.Process) -> int | None:
    with contextlib.suppress(OSError):
        return os.getsid(process.pid)
    return None


def _survivors(find: Callable[[], list[psutil.Process]]) -> list[str]:
    """Give processes a moment to end after their launcher, then name and kill those that live."""
    deadline = time.monotonic() + _BEQUEST_SECONDS
    while (alive := [process for process in find() if _lives(process)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    names = [f"process {process.pid}" for process in alive]
    _kill(alive)
    return names


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()

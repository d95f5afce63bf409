"""Forked workers: a job of several real processes that starts in milliseconds.

Importing torch, DeepSpeed and `torch._dynamo` costs five seconds of CPU per process. The trick: import them once in
this process (`warm_up`), then `fork` every worker from it. A fork copies no memory until it is written to, and a
worker starts with all modules loaded. The benches and the tests run everything through `run_workers`.

What a launcher gives is given here: the environment variables of a rank, a log per worker, a deadline after which
every worker is killed with its children, and death with the parent.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import logging
import os
import pickle
import random
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import bamboo_ds
from bamboo_ds.cli.bench.worker_process import STACK_DUMP_SIGNAL, be_worker

_STACK_DUMP_SECONDS = 0.3
_LOG_TAIL_BYTES = 20_000
_OTHER_LOG_CHARACTERS = 2_000
_PORTS = range(20_000, 32_000)  # below the ephemeral range, out of which gloo takes its own ports
_HEAVY_MODULES = ("torch", "torch.distributed.nn", "torch._dynamo", "deepspeed", "deepspeed.runtime.pipe.engine")


class WorkerError(RuntimeError):
    """A worker of a forked job failed; the message holds its traceback and the logs."""


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """What is left of one worker after it ended."""

    rank: int
    value: Any
    """What the target returned; None if it failed."""
    error: str | None
    """The traceback of the target, or a sentence about how the worker ended without a result."""
    exit_code: int
    """As `subprocess` counts: negative is the number of the signal that ended it."""
    log: str
    """The tail of what it wrote to stdout and stderr."""
    hung: bool = False
    """True if it was killed at the deadline."""


@functools.cache
def warm_up() -> None:
    """Import all that is heavy once, so that forked workers need not; idempotent.

    Also holds what every worker wants: one thread, the CPU accelerator, a quiet DeepSpeed logger, and a frozen garbage
    collector (a full collection would touch, and so copy, every page of what was imported). DeepSpeed's shared-memory
    op is forbidden by the import of `bamboo_ds`, for stock runs too: it would compile for a minute.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    modules = {name: importlib.import_module(name) for name in _HEAVY_MODULES}
    for name in bamboo_ds.__all__:
        getattr(bamboo_ds, name)  # they are imported when first asked for
    modules["torch"].set_num_threads(1)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    gc.collect()
    gc.freeze()


def run_workers(
    target: Callable[..., Any],
    world_size: int,
    *,
    args: Sequence[Any] = (),
    timeout_seconds: float,
    environment: Mapping[str, str | None] | None = None,
    exit_naturally: bool = False,
    grace_seconds: float | None = None,
) -> list[WorkerResult]:
    """Run `target(rank, *args)` in `world_size` forked processes and wait for all of them.

    Each sees RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and a MASTER_PORT that is free.

    Args:
        target: Any callable (closures too: nothing is pickled on the way in). Its value must pickle.
        world_size: The number of processes.
        args: Further positional arguments of the target.
        timeout_seconds: Deadline of the whole job. Workers then alive dump their stacks and are killed.
        environment: Further variables; None as a value removes one.
        exit_naturally: End a worker by finalizing its interpreter and running the C++ destructors, as a script's
            process does, instead of `os._exit`. Exit handlers inherited from this process do not run.
        grace_seconds: Once a worker has failed, the others get this long instead of the rest of the deadline.

    Returns:
        One result per rank, in order of rank; a failed worker is a result too (see `values`).
    """
    deadline = time.monotonic() + timeout_seconds
    base = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    workers: list[_Worker] = []
    try:
        for rank in range(world_size):
            variables = {**base, **_rank_variables(rank, world_size), **(environment or {})}
            inherited = [worker.reader for worker in workers]
            job = functools.partial(target, rank, *args)
            workers.append(_fork(rank, job, variables, inherited, exit_naturally))
        _wait(workers, deadline, grace_seconds)
        return [worker.result() for worker in workers]
    finally:
        for worker in workers:
            worker.end()


def values(results: Sequence[WorkerResult]) -> list[Any]:
    """Return the value of every worker, in order of rank.

    Raises:
        WorkerError: One failed; carries the first traceback (a failure of its own before one that is hung) and logs.
    """
    failed = sorted((result for result in results if result.error is not None), key=lambda result: result.hung)
    if not failed:
        return [result.value for result in results]
    lines = [f"worker {failed[0].rank} of {len(results)} failed:\n{failed[0].error}"]
    lines += [f"worker {other.rank} failed too: {(other.error or '').strip().splitlines()[-1]}" for other in failed[1:]]
    for result in results:
        if shown := (result.log if result is failed[0] else result.log[-_OTHER_LOG_CHARACTERS:]).strip():
            lines.append(f"--- log of worker {result.rank} ---\n{shown}")
    raise WorkerError("\n".join(lines))


@dataclass(slots=True)
class _Worker:
    """The parent's handles of one child."""

    rank: int
    process: int
    reader: int
    log: BinaryIO
    received: bytearray = field(default_factory=bytearray)
    exit_code: int | None = None
    hung: bool = False

    def poll(self) -> None:
        """Take what the pipe holds and note the end of the process."""
        self._drain()
        if self.exit_code is None:
            process, status = os.waitpid(self.process, os.WNOHANG)
            if process:
                self.exit_code = os.waitstatus_to_exitcode(status)
                self._drain()  # what it wrote between the two lines above

    def end(self) -> None:
        """Kill it with every process of its group and close the handles; idempotent."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process, signal.SIGKILL)
        self.reap()
        if self.reader >= 0:
            os.close(self.reader)
            self.reader = -1
        self.log.close()

    def reap(self) -> None:
        """Wait for the end of a process that was sent SIGKILL."""
        if self.exit_code is None:
            _, status = os.waitpid(self.process, 0)
            self.exit_code = os.waitstatus_to_exitcode(status)

    def result(self) -> WorkerResult:
        """Tell what is left of it, once it has ended."""
        value, error = None, None
        if self.received:
            value, error = _loads(bytes(self.received))
        if self.hung:
            error = f"hung: worker {self.rank} was still running at its deadline; its stacks are in its log"
        elif error is None and (self.exit_code or not self.received):
            error = f"worker {self.rank} ended {_describe(self.exit_code)}"
            error += " after its result" if self.received else " without a result"
        return WorkerResult(self.rank, value, error, self.exit_code or 0, self._tail(), self.hung)

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.reader, 1 << 20):
                self.received += chunk

    def _tail(self) -> str:
        size = os.fstat(self.log.fileno()).st_size
        start = max(0, size - _LOG_TAIL_BYTES)
        return os.pread(self.log.fileno(), size - start, start).decode(errors="replace")


def _loads(received: bytes) -> tuple[Any, str | None]:
    try:
        value, error = pickle.loads(received)
    except Exception as problem:
        return None, f"the result could not be read ({problem!r}); the worker was cut while it sent it"
    return value, error


def _describe(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"by {signal.Signals(-exit_code).name}"
    return f"with exit code {exit_code}"


def _rank_variables(rank: int, world_size: int) -> dict[str, str]:
    size = str(world_size)
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}


def free_port() -> int:
    """Return a port of this machine that is free now."""
    for port in random.Random(time.time_ns() ^ os.getpid()).sample(_PORTS, 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"none of 100 ports tried between {_PORTS.start} and {_PORTS.stop} is free")


def _wait(workers: Sequence[_Worker], deadline: float, grace_seconds: float | None) -> None:
    """Collect until every process has ended, or the deadline, at which the rest is killed."""
    failed = False
    while running := [worker for worker in workers if worker.exit_code is None]:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            _end_hung(running)
            return
        # A readable pipe means data or its end; 20 ms bounds the wait for a process whose pipe a child still holds.
        select.select([worker.reader for worker in running], [], [], min(remaining, 0.02))
        for worker in running:
            worker.poll()
        if grace_seconds is not None and not failed and any(worker.exit_code for worker in running):
            failed, deadline = True, min(deadline, time.monotonic() + grace_seconds)
        if any(worker.exit_code is None for worker in running):
            time.sleep(0.002)


def _end_hung(running: Sequence[_Worker]) -> None:
    for worker in running:
        worker.hung = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.process, STACK_DUMP_SIGNAL)
    time.sleep(_STACK_DUMP_SECONDS)
    for worker in running:
        worker.poll()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.process, signal.SIGKILL)
        worker.reap()


def _fork(
    rank: int, job: Callable[[], Any], variables: Mapping[str, str | None], inherited: Sequence[int], naturally: bool
) -> _Worker:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    log = tempfile.TemporaryFile(buffering=0, prefix=f"bamboo-worker-{rank}-")  # noqa: SIM115  # the worker owns it
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    process = os.fork()
    if process == 0:
        be_worker(job, variables, writer, log.fileno(), (reader, *inherited), parent, naturally)
    os.close(writer)
    with contextlib.suppress(OSError):  # the child does it too: whoever is first
        os.setpgid(process, process)
    return _Worker(rank, process, reader, log)

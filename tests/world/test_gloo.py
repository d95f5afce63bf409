"""Groups end when they are told to, whichever of their members is silent and whichever is gone."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as torch_distributed

from bamboo_ds.world.gloo import host_group, poison

SIZE, SECONDS = 4, 60.0


def member(folder: Path, rank: int) -> torch_distributed.ProcessGroupGloo:
    store = torch_distributed.FileStore(str(folder / "store"), SIZE)
    handle = host_group(store, rank, SIZE, timeout=timedelta(seconds=SECONDS), address="127.0.0.1")
    (folder / f"there-{rank}").touch()
    return handle


def be_there(folder: Path, rank: int) -> None:
    """Be a member that does nothing."""
    handle = member(folder, rank)
    time.sleep(SECONDS)
    del handle


def end_while_waiting(folder: Path, silent: int) -> None:
    """Be the member that ends its group while it waits for a silent one."""
    handle, errors = member(folder, 0), []
    assert appears(folder / "go", within_seconds=20)

    def wait() -> None:
        try:
            handle.recv([torch.empty(16)], silent, 1).wait()
        except RuntimeError as error:
            errors.append(str(error))

    blocked = threading.Thread(target=wait, daemon=True)
    blocked.start()
    time.sleep(0.2)
    (folder / "waits").touch()
    assert appears(folder / "gone", within_seconds=20)
    poison(handle, rank=0, size=SIZE)
    blocked.join(5)
    (folder / ("ended" if errors else "blocked")).touch()


def appears(path: Path, *, within_seconds: float) -> bool:
    deadline = time.monotonic() + within_seconds
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    return path.exists()


@contextlib.contextmanager
def forked(programs: list[Callable[[], None]]) -> Iterator[list[int]]:
    """Run each program in a fork: this process must not start the threads of gloo."""
    pids = []
    for program in programs:
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                program()
            os._exit(0)
        pids.append(pid)
    try:
        yield pids
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


@pytest.mark.parametrize("gone", [1, 2, 3])
def test_a_group_with_a_silent_member_ends_whoever_else_is_gone(tmp_path: Path, gone: int) -> None:
    silent = gone % 3 + 1
    idle = [functools.partial(be_there, tmp_path, rank) for rank in range(1, SIZE)]
    with forked([functools.partial(end_while_waiting, tmp_path, silent), *idle]) as pids:
        assert all(appears(tmp_path / f"there-{rank}", within_seconds=20) for rank in range(SIZE))
        for pid in pids[1:]:
            os.kill(pid, signal.SIGSTOP)
        (tmp_path / "go").touch()
        assert appears(tmp_path / "waits", within_seconds=20)
        os.kill(pids[gone], signal.SIGKILL)
        os.waitpid(pids[gone], 0)
        time.sleep(0.1)
        (tmp_path / "gone").touch()
        assert appears(tmp_path / "ended", within_seconds=10)

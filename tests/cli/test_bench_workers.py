"""The forked-worker harness itself: what it promises to every other test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from bamboo_ds.cli.bench.workers import WorkerError, WorkerResult, values

Run = Callable[..., list[WorkerResult]]


def is_running(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(process: int) -> bool:
    deadline = time.monotonic() + 5
    while is_running(process) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(process)


def test_each_worker_sees_its_rank_and_returns_its_value_in_order(workers: Run) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    results = workers(lambda rank: (rank, [os.environ[name] for name in names]), 3, timeout_seconds=10)
    assert values(results) == [(r, [str(r), str(r), "3", "3", "127.0.0.1"]) for r in range(3)]


def test_workers_form_a_gloo_group(workers: Run) -> None:
    def target(rank: int) -> float:
        import torch

        torch.distributed.init_process_group("gloo")
        total = torch.tensor([float(rank + 1)])
        torch.distributed.all_reduce(total)
        torch.distributed.destroy_process_group()
        return float(total)

    assert values(workers(target, 3, timeout_seconds=20)) == [6.0, 6.0, 6.0]


def test_environment_adds_and_removes_variables(workers: Run) -> None:
    def target(rank: int) -> tuple[str | None, str | None]:
        return os.environ.get("EXTRA"), os.environ.get("MASTER_PORT")

    results = workers(target, 1, timeout_seconds=10, environment={"EXTRA": "x", "MASTER_PORT": None})
    assert values(results) == [("x", None)]


def test_a_value_larger_than_a_pipe_arrives_whole(workers: Run) -> None:
    assert [len(value) for value in values(workers(lambda rank: bytes(3_000_000), 2, timeout_seconds=10))] == [
        3_000_000
    ] * 2


def test_a_failing_worker_gives_its_traceback_and_log(workers: Run) -> None:
    def target(rank: int) -> int:
        print(f"hello of {rank}")
        os.write(2, b"raw bytes\n")
        return 1 // rank

    results = workers(target, 2, timeout_seconds=10)
    assert (results[1].value, results[1].error, results[1].exit_code) == (1, None, 0)
    assert results[0].exit_code == 1
    assert "ZeroDivisionError" in (results[0].error or "")
    assert results[0].log == "hello of 0\nraw bytes\n"
    with pytest.raises(WorkerError, match=r"(?s)worker 0 of 2 failed.*ZeroDivisionError.*hello of 0"):
        values(results)


def test_a_hung_worker_is_killed_with_its_children_and_shows_where_it_was(workers: Run) -> None:
    def target(rank: int) -> int:
        if rank == 0:
            return 5
        print(subprocess.Popen(["sleep", "60"]).pid, flush=True)
        time.sleep(60)
        return 0

    started = time.monotonic()
    results = workers(target, 2, timeout_seconds=1)
    assert time.monotonic() - started < 5
    assert (results[0].value, results[0].hung) == (5, False)
    assert results[1].hung
    assert results[1].exit_code == -signal.SIGKILL
    grandchild, _, stacks = results[1].log.partition("\n")
    assert "test_bench_workers.py" in stacks
    assert "in target" in stacks
    assert wait_until_gone(int(grandchild))


def test_after_a_failure_the_others_get_their_grace_only(workers: Run) -> None:
    def target(rank: int) -> str:
        if rank == 0:
            raise RuntimeError("first")
        time.sleep(0.3 if rank == 1 else 60)
        return "done"

    started = time.monotonic()
    results = workers(target, 3, timeout_seconds=60, grace_seconds=1)
    assert time.monotonic() - started < 5
    assert [(result.value, result.hung) for result in results] == [(None, False), ("done", False), (None, True)]


def test_a_killed_worker_is_told_from_a_failing_one(workers: Run) -> None:
    results = workers(lambda rank: os.kill(os.getpid(), signal.SIGKILL), 1, timeout_seconds=10)
    assert results[0].exit_code == -signal.SIGKILL
    assert "SIGKILL without a result" in (results[0].error or "")


def test_a_natural_exit_finalizes_the_interpreter(workers: Run) -> None:
    def target(rank: int) -> int:
        import atexit

        atexit.register(lambda: print("farewell", flush=True))
        return 1

    results = workers(target, 1, timeout_seconds=20, exit_naturally=True)
    assert (results[0].value, results[0].exit_code, results[0].log) == (1, 0, "farewell\n")


def test_workers_die_with_their_parent() -> None:
    code = (
        "import os, time; from bamboo_ds.cli.bench.workers import run_workers\n"
        "def target(rank):\n    os.write(keep, b'%d\\n' % os.getpid()); time.sleep(60)\n"
        "keep = os.dup(1); run_workers(target, 2, timeout_seconds=60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    children = [int(parent.stdout.readline()) for _ in range(2)]
    parent.kill()
    parent.wait()
    assert all(wait_until_gone(child) for child in children)


def test_no_descriptor_is_left_in_the_parent(workers: Run) -> None:
    before = len(os.listdir("/proc/self/fd"))
    workers(lambda rank: None, 4, timeout_seconds=10)
    assert len(os.listdir("/proc/self/fd")) == before

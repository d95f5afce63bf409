"""The leak bench: that it would see a leak, and a short run for real."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import shared_memory

from bamboo_ds.cli.bench.leak import growth_of, measure, read_process, shared_files, slope
from bamboo_ds.cli.bench.workers import WorkerResult, values

Run = Callable[..., list[WorkerResult]]


def test_slope_is_that_of_a_line_whatever_its_level() -> None:
    assert slope([7.0 + 3.0 * step for step in range(50)]) == 3.0
    assert slope([5.0] * 10) == 0.0


def test_growth_compares_the_end_with_half_time() -> None:
    assert growth_of([1, 2, 9, 9]) == 0
    assert growth_of([1, 1, 9, 11]) == 2


def test_a_process_that_keeps_things_is_seen(workers: Run) -> None:
    def target(rank: int) -> tuple[int, int, bool]:
        before = read_process()
        kept = [os.dup(1), bytearray(os.urandom(20_000_000))]
        block = shared_memory.SharedMemory(create=True, size=4096)
        seen = f"/dev/shm/{block.name}" in shared_files()
        after = read_process()
        block.close()
        block.unlink()
        del kept
        return after.anonymous_bytes - before.anonymous_bytes, after.descriptors - before.descriptors, seen

    grown, descriptors, seen = values(workers(target, 1, timeout_seconds=20))[0]
    assert grown > 15_000_000
    assert descriptors >= 2
    assert seen


def test_a_short_real_run_leaves_no_thread_descriptor_or_shared_file(workers: Run) -> None:
    report, held = measure(20)
    assert {name: report[name] for name in ("thread_growth", "fd_growth", "shm_files_left")} == {
        "thread_growth": 0,
        "fd_growth": 0,
        "shm_files_left": 0,
    }
    assert len(held) == 4

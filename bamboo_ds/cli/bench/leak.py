"""`bamboo-ds bench leak`: a run of 200 steps holds memory, threads, file descriptors and /dev/shm flat.

What a process holds is not what it was given: garbage waits for its collector, freed blocks for the allocator, and code
is paged in from files when it first runs. So memory is read after a collection and `malloc_trim`, and as the anonymous
part of the resident set. What is left grows by less than a page a step by itself.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bamboo_ds.cli.bench.bamboo import build_bamboo_engine
from bamboo_ds.cli.bench.job import gpt_job
from bamboo_ds.cli.bench.report import JSON_OPTION, QUICK_OPTION, finish, reported_failure, table
from bamboo_ds.cli.bench.workers import run_workers, values, warm_up

STAGES, PIPELINES = 2, 2
STEPS, QUICK_STEPS = 200, 120
RSS_BOUND = 3072.0
"""Bytes per step: below the smallest activation that a step of this job could leave behind (4 KiB), above the noise of
fragmentation, DeepSpeed's own timers and our readings (0.3 to 1.6 KiB seen)."""
ENVIRONMENT = {"TORCH_FR_BUFFER_SIZE": "0"}
"""Turns torch's flight recorder off: it keeps the last 2,000 collectives, and fills up with 4 KiB a step until then."""
SHARED_MEMORY = "/dev/shm"
_SHARED_FILE = re.compile(rf"{SHARED_MEMORY}/\S+")


@dataclass(frozen=True, slots=True)
class Reading:
    """What a process holds at one moment."""

    anonymous_bytes: int
    threads: int
    descriptors: int


@dataclass(frozen=True, slots=True)
class Held:
    """What a worker held after every step, and the /dev/shm files it had open or mapped at any of them."""

    readings: list[Reading]
    shared_files: set[str]


def leak(as_json: bool = JSON_OPTION, quick: bool = QUICK_OPTION) -> None:
    """Train 200 steps and see what grows."""
    warm_up()
    with reported_failure():
        report, workers = measure(QUICK_STEPS if quick else STEPS)
    columns = ["worker", "memory MB", "bytes/step", "threads", "descriptors"]
    rows = [
        [rank, f"{held.readings[-1].anonymous_bytes / 1e6:.1f}", f"{slope_of(held):.0f}", *_ends(held)]
        for rank, held in enumerate(workers)
    ]
    caption = "threads and descriptors: at half time -> at the end"
    finish(report, [table("bench leak", columns, rows, caption=caption)], as_json=as_json)


def measure(steps: int) -> tuple[dict[str, Any], list[Held]]:
    """Train 2 stages x 2 pipelines and report what grew over the second half of the steps."""
    started, before = time.monotonic(), set(os.listdir(SHARED_MEMORY))
    seconds = 30.0 + steps
    results = run_workers(
        _train, STAGES * PIPELINES, args=(steps,), timeout_seconds=seconds, environment=ENVIRONMENT, grace_seconds=5.0
    )
    workers: list[Held] = values(results)
    used = set().union(*(held.shared_files for held in workers))
    left = [name for name in os.listdir(SHARED_MEMORY) if name not in before and f"{SHARED_MEMORY}/{name}" in used]
    growth = {
        "rss_growth_bytes_per_step": round(max(slope_of(held) for held in workers), 1),
        "thread_growth": max(growth_of([each.threads for each in held.readings]) for held in workers),
        "fd_growth": max(growth_of([each.descriptors for each in held.readings]) for held in workers),
        "shm_files_left": len(left),
    }
    ok = growth["rss_growth_bytes_per_step"] <= RSS_BOUND and not any(
        growth[name] > 0 for name in ("thread_growth", "fd_growth", "shm_files_left")
    )
    report = {
        "ok": ok,
        **growth,
        "steps": steps,
        "rss_bound_bytes_per_step": RSS_BOUND,
        "last": [asdict(held.readings[-1]) for held in workers],
        "seconds": round(time.monotonic() - started, 1),
    }
    return report, workers


def slope_of(held: Held) -> float:
    """Return the growth of memory in bytes per step: least squares over the second half of the steps."""
    return slope([reading.anonymous_bytes for reading in second_half(held.readings)])


def slope(values: Sequence[float]) -> float:
    """Return the least-squares slope of equally spaced values."""
    middle, mean = (len(values) - 1) / 2, sum(values) / len(values)
    spread = sum((index - middle) ** 2 for index in range(len(values)))
    return sum((index - middle) * (value - mean) for index, value in enumerate(values)) / spread


def growth_of(counts: Sequence[int]) -> int:
    """Return by how much a count is higher at the end than at half time."""
    return counts[-1] - counts[len(counts) // 2]


def second_half(readings: Sequence[Any]) -> Sequence[Any]:
    """Return the later half; the first one is warm-up (allocator, lazily built state, measured costs)."""
    return readings[len(readings) // 2 :]


def read_process() -> Reading:
    """Read this process from /proc, after it has given back what it does not need."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status") as status:
        kilobytes = next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))
    threads, descriptors = (len(os.listdir(f"/proc/self/{folder}")) for folder in ("task", "fd"))
    return Reading(kilobytes * 1024, threads, descriptors)


def shared_files() -> set[str]:
    """Return the /dev/shm files that this process has mapped or open."""
    with open("/proc/self/maps") as maps:
        found = set(_SHARED_FILE.findall(maps.read()))
    for name in os.listdir("/proc/self/fd"):
        target = os.path.realpath(f"/proc/self/fd/{name}")
        if target.startswith(SHARED_MEMORY):
            found.add(target)
    return found


def _train(rank: int, steps: int) -> Held:
    del rank  # the engine reads it from the environment
    job = gpt_job(dropout=0.1, tied=True, micro_batches=4, steps=steps)
    engine = build_bamboo_engine(job, num_stages=STAGES, redundancy="fit")
    held = Held([], set())
    for step in range(steps):
        engine.train_batch(job.batches(step, engine.micro_batch_range))
        held.readings.append(read_process())
        held.shared_files.update(shared_files())
    return held


def _ends(held: Held) -> list[str]:
    half, end = second_half(held.readings)[0], held.readings[-1]
    return [f"{half.threads} -> {end.threads}", f"{half.descriptors} -> {end.descriptors}"]

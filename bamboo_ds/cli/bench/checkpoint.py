"""`bamboo-ds bench checkpoint`: how long an asynchronous checkpoint holds training up, and how fast it is written.

Paced layers (they sleep for an accelerator, so that the writing finds idle cores as it would there) as 4 stages, 8
micro-batches; each layer has 1.6 MB of parameters and their state of Adam. A checkpoint is begun after every fifth
step. What is told:

* `stall_vs_step`: how much longer the step took that ends with the copy to host memory, than the steps before it in
  which nothing is written, in steps (median over checkpoints);
* `beside_vs_step`: likewise for the step after it, beside which the files are written;
* `write_bytes_per_second`: bytes of a whole checkpoint by the time from its beginning to its manifest (median).
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from bamboo_ds.cli.bench.report import JSON_OPTION, QUICK_OPTION, finish, reported_failure, rounded, table
from bamboo_ds.cli.bench.workers import run_workers, values, warm_up

STAGES, MICRO_BATCHES, ROWS, HIDDEN = 4, 8, 4, 640
FORWARD_SECONDS, BACKWARD_SECONDS = 0.010, 0.020
INTERVAL, WARM_STEPS = 5, 5
STALL_BOUND = 0.05
"""Longest that a step may be held up by a checkpoint, in steps."""


@dataclass(slots=True)
class Told:
    """What a worker tells.

    Attributes:
        ends: when each step ended (monotonic seconds).
        stalls: seconds for which each checkpoint held this worker up.
        written: for each checkpoint, bytes of this worker's part, and seconds until it was there; of the first worker,
            until the whole checkpoint was.
        errors: of checkpoints that failed.
    """

    ends: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    written: list[tuple[int, float]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def checkpoint(as_json: bool = JSON_OPTION, quick: bool = QUICK_OPTION) -> None:
    """Time steps with and without an asynchronous checkpoint, and the writing of it."""
    warm_up()
    count = 4 if quick else 20
    started = time.monotonic()
    with reported_failure(), tempfile.TemporaryDirectory(prefix="bamboo-checkpoint-") as folder:
        workers = run_workers(train, STAGES, args=(count, folder), timeout_seconds=60.0 + 10.0 * count)
        report = summarize(values(workers), whole=whole_checkpoints(folder))
    report["seconds"] = round(time.monotonic() - started, 1)
    rows = [[name, value] for name, value in report.items()]
    title = f"bench checkpoint, {STAGES} stages, {MICRO_BATCHES} micro-batches (paced layers: they sleep)"
    finish(report, [table(title, ["", "measured"], rows)], as_json=as_json)


def summarize(told: Sequence[Told], *, whole: int) -> dict[str, Any]:
    """Make the report.

    Args:
        told: by all workers.
        whole: checkpoints that are whole at the end.
    """
    ends = [max(moments) for moments in zip(*(one.ends for one in told), strict=True)]
    steps = [after - before for before, after in itertools.pairwise(ends)]  # steps[i] is step i + 1, from 0
    at = range(WARM_STEPS + INTERVAL - 2, len(steps) - 1, INTERVAL)  # those that end with a copy
    normal = [median(steps[i - INTERVAL + 2 : i]) for i in at]
    stall = median(steps[i] / usual - 1 for i, usual in zip(at, normal, strict=True))
    beside = median(steps[i + 1] / usual - 1 for i, usual in zip(at, normal, strict=True))
    written = [
        sum(size for size, _ in parts) / parts[0][1] for parts in zip(*(one.written for one in told), strict=True)
    ]
    errors = [error for one in told for error in one.errors]
    checkpoint_bytes = sum(one.written[-1][0] for one in told if one.written)
    return {
        "stall_vs_step": rounded(stall),
        "beside_vs_step": rounded(beside),
        "copy_seconds": rounded(median(max(stalls) for stalls in zip(*(one.stalls for one in told), strict=True))),
        "step_seconds": rounded(median(normal)),
        "checkpoint_bytes": checkpoint_bytes,
        "write_bytes_per_second": rounded(median(written)),
        "checkpoints": len(written),
        "errors": errors,
        "ok": stall <= STALL_BOUND and not errors and whole > 0,
    }


def whole_checkpoints(folder: str) -> int:
    """Return how many whole checkpoints are in a folder."""
    from bamboo_ds.checkpoint import find, open_storage

    return len(find(open_storage(folder)).whole)


def config(folder: str) -> dict[str, Any]:
    """Return the DeepSpeed config of the job."""
    return {
        "train_batch_size": ROWS * MICRO_BATCHES,
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "steps_per_print": 10**9,
        "bamboo": {
            "redundancy": "fit",
            "timeout_seconds": 60.0,
            "checkpoint": {"path": str(Path(folder)), "interval_steps": INTERVAL},
        },
    }


def train(rank: int, count: int, folder: str) -> Told:
    """Train as one worker."""
    import torch

    import bamboo_ds
    from bamboo_ds.models.paced import paced_layers

    del rank  # the environment says it
    layers = paced_layers(STAGES, HIDDEN, FORWARD_SECONDS, BACKWARD_SECONDS)
    module = bamboo_ds.BambooPipelineModule(
        layers=layers, num_stages=STAGES, loss_fn=torch.nn.functional.mse_loss, seed_layers=True
    )
    engine, *_ = bamboo_ds.initialize(model=module, config=config(folder))
    inputs = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1))
    told = Told()
    for _ in range(WARM_STEPS + count * INTERVAL + 2):
        engine.train_batch(itertools.repeat((inputs, inputs.roll(1, 1))))
        told.ends.append(time.monotonic())
    engine.close()
    told.stalls = engine.checkpoint_stalls
    told.written = [(report.bytes, report.seconds) for report in engine.checkpoint_reports if not report.error]
    told.errors = [report.error for report in engine.checkpoint_reports if report.error]
    return told

"""`bamboo-ds bench reconfigure`: how long a new epoch holds training up, and what has to travel for it.

A model with 200 MB of state (parameters and Adam's moments) is trained by real processes, one to a node, and reshaped
four times: a stage that was merged is filled, three losses leave one pipeline, a pipeline is cut anew, nodes that join
make it whole and give it a second. Of each new epoch is told:

* `stall_seconds`: for how long no worker trained: from the moment at which the first had stopped its work until the
  last had heard that all have what they need;
* `bytes_moved`: state that was received, of all workers together, and `bytes_minimum`: what the new places need and
  their workers did not have;
* `allowed_seconds`: 0.3 s, and twice the time in which the worker that receives most could have received it. The
  bandwidth for that is measured in the same run: of one connection over loopback, with as many others beside it as
  workers received, since all workers share the cores of this machine.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from bamboo_ds.cli.bench.job import Job
from bamboo_ds.cli.bench.report import JSON_OPTION, QUICK_OPTION, finish, progress, rounded, table, tails
from bamboo_ds.cli.bench.workers import run_workers, values, warm_up
from bamboo_ds.cli.local import LocalCluster
from bamboo_ds.config.source import CONFIG_VARIABLE, encoded
from bamboo_ds.elastic import keys

LAYERS, WIDTH, QUICK_WIDTH = 16, 1024, 256
MICRO_BATCHES, ROWS, STEPS = 4, 1, 7
LOSS_STEP = 2
RUNS = 3
STALL_SECONDS, TRANSFERS, EXCESS = 0.3, 2.0, 1.1
CASE_SECONDS = 120.0
PROBE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Change:
    """One change of shape.

    Attributes:
        before: stages and pipelines.
        after: likewise.
        lose: places (pipeline, stage) whose workers are killed in one step.
        spare: nodes that stand by from the beginning.
    """

    before: tuple[int, int]
    after: tuple[int, int]
    lose: tuple[tuple[int, int], ...] = ()
    spare: int = 0


CHANGES = (
    Change((4, 2), (4, 2), lose=((0, 1),), spare=1),
    Change((4, 2), (4, 1), lose=((0, 1), (0, 3), (1, 2))),
    Change((4, 1), (3, 1), lose=((0, 2),)),
    Change((3, 1), (4, 2), spare=5),
)


@dataclass(slots=True)
class Moved:
    """What one worker tells of the new epoch.

    Attributes:
        began: when it had stopped its work, on the machine's monotonic clock.
        ended: when it knew that all have what they need.
        received: bytes.
        lacked: bytes of what its place needs and it did not have.
        shape: of the plan in the end.
    """

    began: float = 0.0
    ended: float = 0.0
    received: int = 0
    lacked: int = 0
    shape: tuple[int, int] = (0, 0)


def reconfigure(as_json: bool = JSON_OPTION, quick: bool = QUICK_OPTION) -> None:
    """Reshape a running job in four ways and see how long it stalls."""
    warm_up()
    started = time.monotonic()
    width, runs = (QUICK_WIDTH, 1) if quick else (WIDTH, RUNS)
    todo = [change for change in CHANGES for _ in range(runs)]
    measured = [(change, measure(change, width=width)) for change in progress(todo, "reconfigure")]
    cases = [summary(change, [told for of, told in measured if of is change]) for change in CHANGES]
    columns = ["from", "to", "stall_seconds", "allowed_seconds", "bytes_moved", "bytes_minimum", "ok"]
    finish(
        {
            "ok": all(case["ok"] for case in cases),
            "state_bytes": LAYERS * unit_bytes(width),
            "bandwidth_bytes_per_second": rounded(bandwidth(1)),
            "cases": cases,
            "seconds": round(time.monotonic() - started, 1),
        },
        [table("bench reconfigure", columns, [[case[name] for name in columns] for case in cases])],
        as_json=as_json,
    )


def summary(change: Change, runs: Sequence[Sequence[Moved]]) -> dict[str, Any]:
    """Return what is printed of a change: the median run by its stall."""
    run = sorted(runs, key=stall)[len(runs) // 2]
    receivers = sum(one.received > 0 for one in run)
    most = max((one.received for one in run), default=0)
    moved, minimum = sum(one.received for one in run), sum(one.lacked for one in run)
    allowed = STALL_SECONDS + TRANSFERS * most / bandwidth(max(receivers, 1))
    return {
        "from": _shown(change.before),
        "to": _shown(change.after),
        "stall_seconds": rounded(stall(run)),
        "stall_seconds_of_all_runs": [rounded(stall(one)) for one in runs],
        "allowed_seconds": rounded(allowed),
        "bytes_moved": moved,
        "bytes_minimum": minimum,
        "most_bytes_of_a_worker": most,
        "receivers": receivers,
        "bandwidth_bytes_per_second": rounded(bandwidth(max(receivers, 1))),
        "ok": stall(run) <= allowed and moved <= EXCESS * minimum and {one.shape for one in run} == {change.after},
    }


def stall(run: Sequence[Moved]) -> float:
    """Return for how long nobody trained."""
    return max((one.ended for one in run), default=0.0) - min((one.began for one in run if one.began), default=0.0)


def _shown(shape: tuple[int, int]) -> str:
    return f"{shape[0]}x{shape[1]}"


def measure(change: Change, *, width: int) -> list[Moved]:
    """Run a job, break it or let it grow, and return what its workers tell.

    Raises:
        RuntimeError: the job did not end in order.
    """
    stages, pipelines = change.before
    with tempfile.TemporaryDirectory(prefix="bamboo-reconfigure-") as folder:
        cluster = LocalCluster(
            lambda: train(change, width),
            nodes=stages * pipelines + change.spare,
            start_workers=stages * pipelines,
            job="reconfigure",
            log_folder=Path(folder) / "logs",
            echo=False,
            environment={CONFIG_VARIABLE: encoded(config_of(change, width))},
        )
        with cluster:
            code, told = cluster.wait(CASE_SECONDS), cluster.results()
        if code != 0:
            raise RuntimeError(f"the job {change} ended with {code}:\n{tails(Path(folder))}")
    return [one for one in told.values() if one.ended]


# ---- the workers' side ---------------------------------------------------------------------------------------------


def job_of(width: int) -> Job:
    """Return what is trained: a stack of square layers."""
    import torch
    from deepspeed.pipe import LayerSpec
    from torch import nn

    def batch(step: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(1000 * step + micro_batch))
        return inputs, inputs.roll(1, 1)

    return Job(
        lambda: [LayerSpec(nn.Linear, width, width) for _ in range(LAYERS)],
        nn.functional.mse_loss, batch, ROWS, MICRO_BATCHES, STEPS, clipping=0.0,
    )  # fmt: skip


def config_of(change: Change, width: int) -> dict[str, Any]:
    """Return the DeepSpeed config, with the losses."""
    faults = [
        {"how": "kill", "step": LOSS_STEP, "pipeline": pipeline, "stage": stage, "instruction": 1}
        for pipeline, stage in change.lose
    ]
    most = max(change.before[1], change.after[1])
    return {**job_of(width).deepspeed_config(), "bamboo": {"pipelines": most, "fault_injection": faults}}


def train(change: Change, width: int) -> Moved:
    """Train as one worker, and tell of the last new epoch."""
    import bamboo_ds

    job, told = job_of(width), Moved()
    _note_epochs(told, unit_bytes=unit_bytes(width))
    module = bamboo_ds.BambooPipelineModule(
        layers=job.layers(),
        num_stages=max(change.before[0], change.after[0]),
        loss_fn=job.loss_fn,
        partition_method="uniform",
    )
    engine, *_ = bamboo_ds.initialize(
        model=module,
        config=config_of(change, width),
        training_data=list(range(STEPS * MICRO_BATCHES * ROWS)),
        collate_fn=lambda places: job.batch(*divmod(places[0], MICRO_BATCHES)),
    )
    _await_all(change)
    while engine.global_steps < job.steps:
        engine.train_batch()
    told.shape = engine.plan.num_stages, engine.plan.num_pipelines
    return told


def _note_epochs(told: Moved, *, unit_bytes: int) -> None:
    """Note what this worker has and needs when an epoch begins, and when it has begun."""
    from bamboo_ds.engine.reshape import Reshaping

    begin = Reshaping._begin_epoch

    def noting(self: Any, plan: Any, stopped: float) -> None:
        had = set(self._kept)
        begin(self, plan, stopped)
        report, needs = self.reshapes[-1], set(self._held_units())
        told.ended, told.received, told.lacked = time.monotonic(), report.received_bytes, len(needs - had) * unit_bytes
        told.began = stopped if had else 0.0  # one that waited has not stopped anything

    Reshaping._begin_epoch = noting  # type: ignore[method-assign]


def _await_all(change: Change) -> None:
    """Wait until all nodes are ready, so that those that join do so at once."""
    from bamboo_ds.world.joining import joined

    member, wanted = joined(), change.before[0] * change.before[1] + change.spare
    deadline = time.monotonic() + CASE_SECONDS
    while member is not None and len(member.store.list(keys.READY).entries) < wanted and time.monotonic() < deadline:
        time.sleep(0.05)


def unit_bytes(width: int) -> int:
    """Return the size of a layer's state: weights and bias, with two moments each, and two step counts."""
    return (width * width + width) * 12 + 2 * 4


@functools.cache
def bandwidth(connections: int) -> float:
    """Measure the bandwidth of one of so many busy connections over loopback, as state travels: bytes per second."""
    told = values(run_workers(_probe, 2 * connections, timeout_seconds=60))
    return statistics.median(told[1::2])


def _probe(rank: int) -> float:
    """Send to, or receive from, the neighbour; return the median bandwidth of some rounds."""
    import torch
    import torch.distributed as torch_distributed

    torch_distributed.init_process_group("gloo", timeout=timedelta(seconds=30))
    pairs = range(0, torch_distributed.get_world_size(), 2)
    groups = [torch_distributed.new_group([first, first + 1]) for first in pairs]
    room, seconds = torch.zeros(PROBE_BYTES, dtype=torch.uint8), []
    for _ in range(5):
        torch_distributed.barrier()
        started = time.monotonic()
        torch_distributed.broadcast(room, src=rank - rank % 2, group=groups[rank // 2])
        seconds.append(time.monotonic() - started)
    torch_distributed.barrier()
    torch_distributed.destroy_process_group()
    return PROBE_BYTES / statistics.median(seconds)

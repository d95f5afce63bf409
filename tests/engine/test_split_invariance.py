"""Losses, gradient norms and weights are those of one process, however the job is split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from bamboo_ds.cli.bench.workers import WorkerResult, values
from tests.engine.training import MODES, Training, batches, check, largest, sgd, single, train_one_process
from tests.engine.zoo import blocks, vectors

Run = Callable[..., list[WorkerResult]]
SHAPES = [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (1, 4), (3, 2), (4, 2), (1, 2)]
JOB = Training(lambda: blocks(8), vectors, optimizer=sgd, clipping=0.05)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_equals_one_process_and_clips_by_the_norm_over_all_stages(
    workers: Run, shape: tuple[int, int]
) -> None:
    outcomes = check(workers, JOB, shape)
    assert min(outcomes[0].norms) > 2 * JOB.clipping, "clipping must be active for this test to say anything"


@pytest.mark.parametrize("shape", [(3, 1), (2, 2)])
@pytest.mark.parametrize("redundancy", MODES)
def test_no_mode_of_redundancy_changes_a_number(workers: Run, shape: tuple[int, int], redundancy: str) -> None:
    check(workers, JOB, shape, redundancy=redundancy)


def test_clipping_is_1_when_the_key_is_absent_and_off_at_0(workers: Run) -> None:
    def big(step: int, micro_batch: int) -> tuple[torch.Tensor, ...]:
        inputs, labels = vectors(step, micro_batch)
        return inputs, 100 * labels

    by_default = replace(JOB, batch=big, clipping=1.0)
    assert "gradient_clipping" in by_default.deepspeed_config("off")
    outcomes = values(workers(_train_without_key, 2, args=(by_default,), timeout_seconds=60))
    assert all(outcome == single(train_one_process(by_default).losses) for outcome in outcomes)
    off = check(workers, replace(by_default, clipping=0.0), (2, 1))
    assert largest(off[0].losses, outcomes[0]) > 0.01


def _train_without_key(rank: int, job: Training) -> list[float]:
    import bamboo_ds

    module = bamboo_ds.BambooPipelineModule(
        job.layers(), num_stages=2, loss_fn=job.loss_fn, seed_layers=True, partition_method="uniform"
    )
    config = job.deepspeed_config("fit")
    del config["gradient_clipping"]
    engine, *_ = bamboo_ds.initialize(model=module, config=config, optimizer=job.optimizer)
    losses = [float(engine.train_batch(batches(job, engine, step))) for step in range(job.steps)]
    engine.close()
    return losses


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 10])
def test_any_number_of_micro_batches_averages_the_gradients(workers: Run, micro_batches: int) -> None:
    check(workers, replace(JOB, micro_batches=micro_batches), (3, 1))


def test_a_batch_cut_into_more_micro_batches_gives_the_same_losses() -> None:
    """Ties the reference itself to plain PyTorch: its micro-batches add up to one big batch."""
    job = replace(JOB, layers=lambda: blocks(4, 0.0), micro_batches=4, clipping=0.0)

    def whole(step: int, _: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.cat(side) for side in zip(*(vectors(step, m) for m in range(4)), strict=True))

    cut, uncut = train_one_process(job), train_one_process(replace(job, batch=whole, micro_batches=1))
    assert largest(cut.losses, uncut.losses) < 1e-6


@pytest.mark.parametrize("shape", [(2, 1), (3, 2)])
@pytest.mark.parametrize("clipping", [0.0, 0.05])
def test_bf16_equals_one_process_in_bf16(workers: Run, shape: tuple[int, int], clipping: float) -> None:
    """Master weights and sums are fp32; gradients are averaged once and dropped after each step."""

    def low(step: int, micro_batch: int) -> tuple[torch.Tensor, ...]:
        return tuple(part.bfloat16() for part in vectors(step, micro_batch))

    job = replace(JOB, batch=low, bf16=True, steps=6, clipping=clipping)
    check(workers, job, shape, loss_bound=1e-2, weight_bound=2e-2)

"""The one-process reference, against simpler loops, and against stock DeepSpeed where that is right."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bamboo_ds.cli.bench.job import gpt_job
from bamboo_ds.cli.bench.reference import train_one_process
from bamboo_ds.cli.bench.stock import train_stock
from bamboo_ds.cli.bench.workers import WorkerResult, values

Run = Callable[..., list[WorkerResult]]


def largest_difference(losses: list[float], expected: list[float]) -> float:
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(losses, expected, strict=True))


def whole_batch_loop(**settings: Any) -> list[float]:
    """Train without micro-batches, dropout, seeds or clipping of our own: one batch, torch's functions."""
    job = gpt_job(dropout=0.0, tied=False, micro_batches=3, steps=4, **settings)
    layers = []
    for index, spec in enumerate(job.layers()):
        torch.manual_seed(job.base_seed + index)
        layers.append(spec.build())
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.learning_rate, weight_decay=0.01, eps=1e-6)
    losses = []
    for step in range(job.steps):
        parts = [job.batch(step, micro_batch) for micro_batch in range(3)]
        inputs, labels = (torch.cat(side) for side in zip(*parts, strict=True))
        loss = job.loss_fn(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.clipping or math.inf)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("clipping", [0.0, 0.3])
def test_micro_batches_add_up_to_the_whole_batch(clipping: float) -> None:
    job = gpt_job(dropout=0.0, tied=False, micro_batches=3, steps=4, clipping=clipping)
    assert largest_difference(train_one_process(job).losses, whole_batch_loop(clipping=clipping)) < 1e-6


def test_clipping_at_the_tested_bound_is_active() -> None:
    free, clipped = (
        train_one_process(gpt_job(dropout=0.0, tied=True, micro_batches=5, steps=3, optimizer="SGD", clipping=bound))
        for bound in (0.0, 0.5)
    )
    assert largest_difference(free.losses, clipped.losses) > 1e-6


def test_dropout_depends_on_its_seed_only() -> None:
    first, again, other = (
        train_one_process(gpt_job(dropout=0.5, tied=True, micro_batches=2, steps=2, seed=seed)).losses
        for seed in (7, 7, 8)
    )
    assert first == again
    assert first != other


def test_a_tied_matrix_is_one_parameter_at_both_places() -> None:
    weights = train_one_process(gpt_job(dropout=0.0, tied=True, micro_batches=2, steps=2)).weights
    assert torch.equal(weights["0.weight"], weights["7.weight"])


def test_bf16_follows_fp32_and_keeps_small_updates_in_its_masters() -> None:
    fp32, bf16 = (
        train_one_process(
            gpt_job(dropout=0.0, tied=False, micro_batches=2, steps=8, learning_rate=2e-3, precision=precision)
        )
        for precision in ("fp32", "bf16")
    )
    assert all(value.dtype == torch.bfloat16 for value in bf16.weights.values())
    assert 0 < largest_difference(bf16.losses, fp32.losses) < 2e-2
    assert bf16.losses[-1] < bf16.losses[0] - 0.1


@pytest.mark.parametrize(("stages", "pipelines"), [(2, 1), (2, 2)])
def test_stock_deepspeed_agrees_without_clipping_and_dropout(workers: Run, stages: int, pipelines: int) -> None:
    job = gpt_job(dropout=0.0, tied=True, micro_batches=4, steps=3, clipping=0.0)
    outcomes = values(workers(train_stock, stages * pipelines, args=(job, stages), timeout_seconds=60))
    expected = train_one_process(job).losses
    assert max(largest_difference(outcome.losses, expected) for outcome in outcomes) < 1e-6

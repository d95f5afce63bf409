"""Losses, gradient norms and weights are those of one process, however the job is split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.engine.training import (
    MODES,
    Training,
    adam,
    assert_copies_equal,
    assert_equals_one_process,
    sgd,
    train,
    train_one_process,
)
from tests.engine.zoo import blocks, vectors

from bamboo_ds.cli.bench.workers import WorkerResult, values

Run = Callable[..., list[WorkerResult]]
SHAPES = [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (1, 4), (3, 2), (4, 2), (1, 2)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("clipping", [0.0, 0.05])
def test_every_shape_equals_one_process(workers: Run, shape: tuple[int, int], clipping: float) -> None:
    job = Training(lambda: blocks(8), vectors, clipping=clipping, optimizer=sgd)
    outcomes = values(workers(train, shape[0] * shape[1], args=(job, shape[0]), timeout_seconds=60))
    assert_equals_one_process(outcomes, train_one_process(job), exact=shape[1] == 1)
    assert_copies_equal(outcomes)

"""Stages are cut by the declared time of their layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bamboo_ds.cli.bench.workers import WorkerResult, values
from bamboo_ds.config.source import CONFIG_VARIABLE, encoded
from bamboo_ds.errors import ConfigError
from tests.engine.training import Training, build_engine, train, train_one_process
from tests.engine.zoo import blocks, vectors

Run = Callable[..., list[WorkerResult]]


def job(costs: list[float]) -> Training:
    return replace(Training(lambda: blocks(6), vectors), config={"bamboo": {"layer_costs": costs}})


def environment(of: Training) -> dict[str, str]:
    return {CONFIG_VARIABLE: encoded(of.deepspeed_config("fit"))}


def test_stages_take_equally_long(workers: Run) -> None:
    uneven = job([5, 1, 1, 1, 1, 1])

    def parts(rank: int) -> Any:
        engine = build_engine(uneven, 2, "fit")
        found = engine.module.parts
        engine.close()
        return found

    assert values(workers(parts, 2, environment=environment(uneven), timeout_seconds=60)) == [[0, 1, 6]] * 2


def test_a_job_that_is_cut_so_trains_the_same(workers: Run) -> None:
    uneven = job([5, 1, 1, 1, 1, 1])
    outcomes = values(workers(train, 2, args=(uneven, 2, "fit"), environment=environment(uneven), timeout_seconds=60))
    expected = train_one_process(uneven)
    assert [outcome.losses for outcome in outcomes] == [pytest.approx(expected.losses, rel=1e-6)] * 2


@pytest.mark.parametrize(
    ("costs", "known", "message"),
    [
        ([1, 1, 1], True, "bamboo.layer_costs has 3 entries for 6 layers: give one for each"),
        ([5, 1, 1, 1, 1, 1], False, "bamboo.layer_costs was not known when the script made its module"),
    ],
)
def test_costs_that_cannot_be_right_are_told(workers: Run, costs: list[float], known: bool, message: str) -> None:
    wrong = job(costs)

    def attempt(rank: int) -> str:
        try:
            build_engine(wrong, 2, "fit")
        except ConfigError as error:
            return str(error)
        return "no error"

    told = environment(wrong) if known else {}
    for found in values(workers(attempt, 2, environment=told, timeout_seconds=60)):
        assert message in found

"""Workers die while the job takes another shape: no hang, no wrong number, whatever they were at."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn

import bamboo_ds
from bamboo_ds.elastic.membership import Membership
from tests.engine.disturbed import kill
from tests.engine.entering import WIRE, Death, died, dying
from tests.engine.reshaped import Reshaped, ReshapedCluster, assert_as, assert_copies_equal
from tests.engine.test_failover import JOBS
from tests.engine.training import Outcome, Training, train_one_process
from tests.engine.zoo import Block

BOUND = 2e-6
Record = Callable[[str, object], None]


def job(steps: int = 8) -> Training:
    return replace(JOBS["dropout, clipping and Adam"], steps=steps, micro_batches=6)


@pytest.fixture(scope="module")
def reshaped(tmp_path_factory: pytest.TempPathFactory) -> ReshapedCluster:
    return ReshapedCluster(tmp_path_factory.mktemp("deaths"))


@pytest.fixture(scope="module")
def expected() -> Outcome:
    return train_one_process(job())


def fat() -> Training:
    """Return a job whose layers take a while to travel."""
    return replace(job(), layers=lambda: [LayerSpec(Heavy) for _ in range(6)])


class Heavy(Block):
    """Has four million bytes that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.ballast = nn.Parameter(torch.rand(1 << 20), requires_grad=False)


PHASES = {"decided": 0.005, "links forming": 0.02, "pairs forming": 0.01, WIRE: 0.05, "settling": 0.02}
"""Seconds after the beginning of each phase in which workers die."""


def death(draw: random.Random, turn: int, **more: Any) -> Death:
    """Return a death in an early or late phase of the first epoch after the one that the job began with."""
    phase = list(PHASES)[turn % len(PHASES)]
    return Death(1, phase, draw.uniform(0.0, PHASES[phase]), **more)


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(100))
def test_a_death_during_a_reshape_leads_to_another(
    reshaped: ReshapedCluster, expected: Outcome, seed: int, tmp_path: Path, record_property: Record
) -> None:
    draw = random.Random(seed)
    first = kill(draw.randrange(2), draw.randrange(4), before=draw.randrange(8), step=draw.randrange(1, 4))
    deaths = [death(draw, seed, number=draw.randrange(8))]
    results = reshaped.train(
        job(), (4, 2), [first], spare=2, around=lambda program: dying(program, deaths, tmp_path, message_seconds=0.01)
    )
    record_property("died", str(dict(died(tmp_path))))
    assert results, "nobody is left"
    assert_as(expected, results, bound=BOUND)
    assert_copies_equal(results)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(100))
def test_a_death_while_layers_travel_leaves_no_half_of_one(
    reshaped: ReshapedCluster, seed: int, tmp_path: Path, record_property: Record
) -> None:
    """Of one that sends or receives, with megabytes of a layer under way."""
    draw = random.Random(2000 + seed)
    first = kill(draw.randrange(2), draw.randrange(3), before=draw.randrange(8), step=draw.randrange(1, 4))
    deaths = [Death(1, WIRE, draw.uniform(0.0, 0.03), number=draw.randrange(6))]
    results = reshaped.train(fat(), (3, 2), [first], spare=1, around=lambda program: dying(program, deaths, tmp_path))
    record_property("died", str(dict(died(tmp_path))))
    assert_as(fat_expected(), results, bound=BOUND)
    assert_copies_equal(results)


@functools.cache
def fat_expected() -> Outcome:
    return train_one_process(fat())


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(100))
def test_a_death_of_one_that_joins_costs_the_others_nothing(
    reshaped: ReshapedCluster, expected: Outcome, seed: int, tmp_path: Path, record_property: Record
) -> None:
    draw = random.Random(1000 + seed)
    deaths = [death(draw, seed + number, number=number, late=True) for number in range(2)]
    results = reshaped.train(
        job(), (3, 1), spare=3, around=lambda program: dying(program, deaths, tmp_path, message_seconds=0.01)
    )
    record_property("died", str(dict(died(tmp_path))))
    assert len(results) == 3, "four are left, and one of them stands by"
    assert_as(expected, results, bound=BOUND)
    assert_copies_equal(results)


@pytest.mark.parametrize("early", [True, False])
def test_a_script_that_fails_where_it_came_late_harms_nobody_else(reshaped: ReshapedCluster, early: bool) -> None:
    """Say, as a package is missing on the new node; before or after the script has asked for anything of ours."""

    def broken(program: Callable[[], Reshaped]) -> Callable[[], Reshaped]:
        def run() -> Reshaped:
            seat = Membership.read()
            assert seat is not None
            if seat.worker == 3:
                if not early:
                    bamboo_ds.init_distributed()
                raise ModuleNotFoundError("No module named 'flash_attn'")
            return program()

        return run

    results = reshaped.train(job(steps=60), (3, 1), spare=1, around=broken, await_spare=False)
    assert len(results) == 3
    assert_as(train_one_process(job(steps=60)), results, bound=0.0)

"""Workers die while the job takes another shape: no hang, no wrong number, whatever they were at."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import bamboo_ds
from bamboo_ds.elastic.membership import Membership
from tests.engine.disturbed import kill
from tests.engine.reshaped import Reshaped, ReshapedCluster, assert_as, assert_copies_equal
from tests.engine.test_failover import JOBS
from tests.engine.training import Outcome, Training, train_one_process

BOUND = 2e-6


def job(steps: int = 8) -> Training:
    return replace(JOBS["dropout, clipping and Adam"], steps=steps, micro_batches=6)


@pytest.fixture(scope="module")
def reshaped(tmp_path_factory: pytest.TempPathFactory) -> ReshapedCluster:
    return ReshapedCluster(tmp_path_factory.mktemp("deaths"))


@pytest.fixture(scope="module")
def expected() -> Outcome:
    return train_one_process(job())


def dying_in_epoch(epoch: int, victims: dict[int, float], program: Callable[[], Reshaped]) -> Callable[[], Reshaped]:
    """Return a program whose victims kill themselves so many seconds after they begin to enter an epoch."""

    def run() -> Reshaped:
        from bamboo_ds.engine.reshape import Reshaping

        begin = Reshaping._begin_epoch

        def begin_and_die(self: Any, plan: Any, stopped: float) -> None:
            if plan.epoch == epoch and self._source.worker in victims:
                delay = victims[self._source.worker]
                threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
            begin(self, plan, stopped)

        Reshaping._begin_epoch = begin_and_die  # type: ignore[method-assign]
        return program()

    return run


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(100))
def test_a_death_during_a_reshape_leads_to_another(reshaped: ReshapedCluster, expected: Outcome, seed: int) -> None:
    draw = random.Random(seed)
    first = kill(draw.randrange(2), draw.randrange(4), before=draw.randrange(8), step=draw.randrange(1, 4))
    victims = {draw.randrange(10): draw.uniform(0.0, 0.4)}
    results = reshaped.train(
        job(), (4, 2), [first], spare=2, around=lambda program: dying_in_epoch(1, victims, program)
    )
    assert results, "nobody is left"
    assert_as(expected, results, bound=BOUND)
    assert_copies_equal(results)


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(100))
def test_a_death_of_one_that_joins_costs_the_others_nothing(
    reshaped: ReshapedCluster, expected: Outcome, seed: int
) -> None:
    draw = random.Random(1000 + seed)
    joiners = {3: draw.uniform(0.0, 0.4), 4: draw.uniform(0.0, 0.4)}
    results = reshaped.train(job(), (3, 1), spare=3, around=lambda program: dying_in_epoch(1, joiners, program))
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
                time.sleep(2.0)
                if not early:
                    bamboo_ds.init_distributed()
                raise ModuleNotFoundError("No module named 'flash_attn'")
            return program()

        return run

    results = reshaped.train(job(steps=60), (3, 1), spare=1, around=broken)
    assert len(results) == 3
    assert_as(train_one_process(job(steps=60)), results, bound=0.0)

"""Step times: those of the simulated schedules, plus what ends a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bamboo_ds.schedule import disturb, simulate, worker_orders
from bamboo_ds.simulator.constants import Constants
from bamboo_ds.simulator.models import built_in
from bamboo_ds.simulator.step_time import StepTimes
from tests.simulator.markets import SIMPLE, even

WHOLE = (0, 1, 2, 3)


def test_a_pipeline_takes_what_its_schedule_takes() -> None:
    workload = even(4)
    times = StepTimes(workload, SIMPLE, "fit")
    costs = workload.stage_costs(4)
    orders = worker_orders(4, micro_batches=5, redundancy="fit", costs=costs)
    assert times.pipeline_seconds(5, WHOLE) == simulate(orders, costs).step_seconds == (5 + 3) * 3
    merged = worker_orders(4, micro_batches=5, redundancy="fit", costs=costs, owners=(0, 0, 2, 3))
    assert times.pipeline_seconds(5, (0, 0, 2, 3)) == simulate(merged, costs).step_seconds > 24


@pytest.mark.parametrize("name", ["bert-large", "resnet-152", "alexnet"])
@pytest.mark.parametrize("zones", [False, True])
def test_redundant_forwards_that_fit_stretch_no_step(name: str, zones: bool) -> None:
    times = StepTimes(built_in(name), Constants(), "fit", zones)
    stages = times.workload.num_stages
    costs, latency = times.costs(stages), times.latency_seconds(stages)
    for micro_batches in (4, 17):
        for dead in ((), (0,), (2,), (1, stages - 2)):
            owners = tuple((stage - 1) % stages if stage in dead else stage for stage in range(stages))
            orders = worker_orders(stages, micro_batches=micro_batches, redundancy="fit", costs=costs, owners=owners)
            real = simulate(orders, costs, latency_seconds=latency).step_seconds
            assert times.pipeline_seconds(micro_batches, owners) == pytest.approx(real, rel=1e-9)


def test_the_largest_share_sets_the_pace() -> None:
    times = StepTimes(even(4, pipelines=3, micro_batches=10), SIMPLE, "off")
    assert times.whole_seconds(4, 3) == times.pipeline_seconds(4, WHOLE)


def test_modes_cost_what_their_schedules_cost() -> None:
    off, lazy, fit, eager = (
        StepTimes(even(4), SIMPLE, mode).whole_seconds(4, 1) for mode in ("off", "lflb", "fit", "eflb")
    )
    assert off == lazy == fit == 33
    assert eager == 38  # see `bamboo-ds schedule`


def test_a_reduction_is_a_ring_of_owners_and_shadows() -> None:
    workload = even(4, gradient_bytes=1000)
    slow = replace(SIMPLE, bandwidth=100.0)
    assert StepTimes(workload, slow, "off").end_seconds(4, 2) == pytest.approx(2 * 1 / 2 * 1000 / 100)
    assert StepTimes(workload, slow, "fit").end_seconds(4, 2) == pytest.approx(2 * 3 / 4 * 2000 / 100)
    assert StepTimes(workload, slow, "off").end_seconds(4, 1) == 0
    zoned = replace(slow, zone_bandwidth=50.0)
    assert StepTimes(workload, zoned, "off", zones=True).end_seconds(4, 2) == pytest.approx(20)


def test_a_commit_costs_each_pipeline_a_vote() -> None:
    constants = replace(SIMPLE, commit_seconds=0.5, commit_seconds_per_pipeline=0.1)
    assert StepTimes(even(4), constants, "off").end_seconds(4, 3) == pytest.approx(0.8)


def test_messages_take_latency_and_their_bytes() -> None:
    constants = replace(SIMPLE, bandwidth=100.0, latency_seconds=0.25)
    times = StepTimes(even(4, activation_bytes=50), constants, "off")
    assert times.latency_seconds(4) == pytest.approx(0.75)
    assert times.pipeline_seconds(1, WHOLE) == pytest.approx(4 * 3 + 6 * 0.75)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.99, 5.0])
def test_a_loss_costs_no_more_than_doing_the_step_again(stage: int, share: float) -> None:
    times = StepTimes(even(4), SIMPLE, "fit")
    extra = times.failover_seconds(8, 4, stage=stage, share=share)
    assert 0 < extra <= 1.2 * times.pipeline_seconds(8, (0, 0, 2, 3))


def test_a_loss_is_simulated_as_it_is_shown_by_the_schedule_command() -> None:
    times = StepTimes(even(3), SIMPLE, "lflb")
    # the middle of the step: the worker of stage 1 is lost while it runs its backward of micro-batch 1
    costs = even(3).stage_costs(3)
    found = times.failover_seconds(4, 3, stage=1, share=0.5)
    possible = [
        disturb(3, micro_batches=4, victim=1, before=before, costs=costs, redundancy="lflb") for before in range(4, 25)
    ]
    assert found in [max(one.step_seconds - one.plain_seconds, 0.0) for one in possible]


def test_noticing_a_loss_takes_time() -> None:
    late = replace(SIMPLE, detect_seconds=4.0, reroute_seconds=3.0)
    quick, slow = (StepTimes(even(4), constants, "fit") for constants in (SIMPLE, late))
    extras = [times.failover_seconds(8, 4, stage=2, share=0.9) for times in (quick, slow)]
    assert extras[1] > extras[0] + 3

"""The other ways to train, on traces that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bamboo_ds.simulator.coarse import CoarseJob, Way
from bamboo_ds.simulator.membership import instants
from bamboo_ds.simulator.peers import Checkpointing, Dropping, Replicas, Restarting
from bamboo_ds.simulator.step_time import StepTimes
from bamboo_ds.simulator.trace import Trace
from tests.simulator.markets import SIMPLE, even, story

TIMES = StepTimes(even(4, pipelines=4, micro_batches=8), SIMPLE, "off")
"""Without redundancy 2 stages do: 4 pipelines of 2 workers, 2 micro-batches each of 6 s a stage: 18 s."""

STEP = (2 + 1) * 6
FREE = Checkpointing(interval_seconds=100.0, stall_seconds=0.0)


def way(kind: Any, **options: Any) -> Way:
    return kind(TIMES, constants=SIMPLE, checkpointing=FREE, **options)  # type: ignore[no-any-return]


def play(way: Way, trace: Trace, *, write: float = 0.5) -> tuple[CoarseJob, dict[str, float]]:
    job = CoarseJob(way, checkpoint_seconds=100, write_seconds=write, record=True)
    job.play(instants(trace, warm_up_seconds=0), seconds=trace.seconds)
    found = {cause.value: seconds for cause, seconds in job.ledger.seconds.items() if seconds}
    assert sum(found.values()) == pytest.approx(trace.seconds)
    assert job.ledger.samples == pytest.approx(sum((end - start) * rate for start, end, rate in job.ledger.segments))
    return job, found


def test_undisturbed_restarting_trains_after_its_start() -> None:
    job, found = play(way(Restarting), story("0 +8", seconds=10 + 5 * STEP))
    assert (job.ledger.steps, job.roll_backs) == (5, 0)
    assert found == {"restart": 10, "training": 5 * STEP}


def test_a_loss_costs_the_work_since_the_checkpoint_and_a_restart() -> None:
    at = 10 + 8 * STEP + 7
    job, found = play(way(Restarting), story("0 +8", f"{at} -3", seconds=at + 10 + 3 * 24))
    # a checkpoint begins every 100 s and is whole half a second later: the last one at second 100, after 5 steps
    assert job.roll_backs == 1
    steps_before = job.ledger.steps - 3
    assert steps_before == 5
    assert found["lost"] == pytest.approx(7 + (8 - steps_before) * STEP)
    assert found["restart"] == 20


def test_losing_a_spare_node_changes_nothing() -> None:
    job, _ = play(way(Restarting), story("0 +9", "50 -8", seconds=300))
    assert job.reactions == 1  # its start


def test_varuna_takes_the_best_shape_and_moves_when_it_changes() -> None:
    morphing = way(Restarting, morphs=True)
    job, _ = play(morphing, story("0 +8", "100 +1", "150 -0", "200 -1", seconds=500))
    assert job.reactions == 3  # its start, and two losses; a ninth worker helps nobody
    plain, _ = play(way(Restarting), story("0 +6", "100 +1", "150 +1", seconds=400))
    assert plain.reactions == 2


def test_checkpoints_that_stop_training_cost_their_share() -> None:
    stalling = Restarting(TIMES, constants=SIMPLE, checkpointing=replace(FREE, stall_seconds=20.0))
    _, found = play(stalling, story("0 +8", seconds=1000))
    assert found["checkpoint"] / (found["checkpoint"] + found["training"]) == pytest.approx(1 / 6, rel=0.03)


def test_a_dropped_pipeline_costs_its_samples_only() -> None:
    at = 5 + 3 * STEP
    job, found = play(way(Dropping), story("0 +8", f"{at} -3", seconds=at + 5 + 4 * STEP))
    assert job.ledger.samples == 3 * 24 + 4 * 18
    assert found["reconfiguration"] == 10
    assert job.roll_backs == 0


def test_survivors_and_joiners_make_a_pipeline_again() -> None:
    job, _ = play(way(Dropping), story("0 +8", "50 -3", "100 +1", seconds=1000))
    assert job.reactions == 3
    assert job.ledger.segments[-1][2] == pytest.approx(24 / STEP)
    two, _ = play(way(Dropping), story("0 +8", "50 -0,3", seconds=1000))
    assert two.ledger.segments[-1][2] == pytest.approx(18 / STEP)  # the survivors of two broken ones make one


def test_without_any_pipeline_left_dropping_goes_back_to_a_checkpoint() -> None:
    job, found = play(way(Dropping), story("0 +8", "300 -0,2,4,6", seconds=1000))
    assert job.roll_backs == 1
    assert found["lost"] > 0
    waiting, _ = play(way(Dropping), story("0 +8", "300 -0,1,2,3,4,5,6,7", "400 +8", seconds=1000))
    assert waiting.roll_backs == 1


def test_replicas_use_all_nodes_in_unequal_pipelines() -> None:
    replicas = way(Replicas)
    replicas.change([], [f"n{index}" for index in range(7)])
    assert sorted(map(len, replicas._pipelines)) == [2, 2, 3]  # type: ignore[attr-defined]
    pace = replicas.pace
    assert pace is not None
    assert pace.samples == 24


def test_replicas_go_on_unless_a_layer_is_lost_everywhere() -> None:
    job, found = play(way(Replicas), story("0 +8", "100 -0,3", seconds=1000))
    assert job.roll_backs == 0
    assert found["reconfiguration"] == 5
    fatal, _ = play(way(Replicas), story("0 +8", "100 -0,2,4,6", seconds=1000))
    assert fatal.roll_backs == 1
    apart, _ = play(way(Replicas), story("0 +8", "100 -0,2,4,7", seconds=1000))
    assert apart.roll_backs == 0


@pytest.mark.parametrize("kind", [Restarting, Dropping, Replicas])
def test_one_node_is_too_few_for_all(kind: Any) -> None:
    job, found = play(way(kind), story("0 +1", seconds=100))
    assert job.ledger.samples == 0
    assert found["waiting"] == 100

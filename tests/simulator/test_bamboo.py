"""Bamboo on small traces, whose course can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_ds.plan.policy import Action
from bamboo_ds.simulator.ledger import Cause
from bamboo_ds.simulator.market import Market, generate
from tests.simulator.markets import SIMPLE, even, played, story

STEP = (4 + 3) * 3
"""Of 4 stages and 2 pipelines with 4 micro-batches each; one pipeline with 8 takes 33."""


def spent(job: object) -> dict[str, float]:
    found = job.ledger.seconds  # type: ignore[attr-defined]
    return {cause.value: seconds for cause, seconds in found.items() if seconds}


@pytest.mark.parametrize("kept", [False, True])
def test_without_losses_steps_follow_one_another(kept: bool) -> None:
    job = played(even(), story("0 +8", seconds=2 + 10 * STEP + 5), kept=kept)
    assert (job.ledger.steps, job.ledger.samples) == (10, 10 * 24)
    assert spent(job) == {"training": 10 * STEP + 5, "reconfiguration": 2}


@pytest.mark.parametrize("kept", [False, True])
def test_a_job_with_fewer_nodes_begins_when_patience_ends(kept: bool) -> None:
    job = played(even(), story("5 +5", "20 +1", seconds=50 + 2 + 33), kept=kept)
    assert spent(job) == {"waiting": 50, "reconfiguration": 2, "training": 33}
    assert job.ledger.steps == 1


@pytest.mark.parametrize("kept", [False, True])
def test_a_loss_makes_its_step_longer_and_the_next_ones_merged(kept: bool) -> None:
    trace = story("0 +8", f"{2 + STEP + 10} -2", seconds=1000)
    job = played(even(), trace, kept=kept)
    assert job.counts[Action.FAILOVER] == 1
    # 7 workers make no second pipeline: a merged one is better than one less
    assert job.counts[Action.RECONFIGURE] == 0
    found = spent(job)
    assert 0 < found["failover"] < STEP
    step = job._fleet.step
    assert step is not None
    (owners,) = step.merged.values()
    merged = job._paces.times.pipeline_seconds(4, owners)  # 4 micro-batches of 6 s for the worker of two stages
    assert 24 < merged < 33
    assert found["merged"] / (job.ledger.steps - 2) == pytest.approx(merged - STEP)
    assert sum(found.values()) == pytest.approx(1000)


@pytest.mark.parametrize("kept", [False, True])
def test_a_new_node_fills_the_merged_stage(kept: bool) -> None:
    job = played(even(state_bytes=100), story("0 +8", "30 -2", "200 +1", seconds=1000), kept=kept)
    assert (job.counts[Action.FAILOVER], job.counts[Action.RECONFIGURE]) == (1, 1)
    assert spent(job)["reconfiguration"] == pytest.approx(4)
    assert spent(job)["merged"] < 200


@pytest.mark.parametrize("kept", [False, True])
def test_a_transfer_takes_twice_the_bytes_over_the_bandwidth(kept: bool) -> None:
    slow = replace(SIMPLE, bandwidth=100.0, checkpoint_seconds=1e9)
    job = played(even(state_bytes=400), story("0 +8", "30 -2", "200 +1", seconds=1000), kept=kept, constants=slow)
    # the joiner needs two layers of 400 bytes
    assert spent(job)["reconfiguration"] == pytest.approx(2 + 2 + 2 * 800 / 100)


@pytest.mark.parametrize("kept", [False, True])
def test_neighbours_lost_at_once_cost_the_step(kept: bool) -> None:
    at = 2 + STEP + 10
    victims = "2,4" if not kept else "1,2"  # stages 1 and 2 of a pipeline, as each fleet places them
    job = played(even(), story("0 +8", f"{at} -{victims}", seconds=1000), kept=kept)
    assert (job.counts[Action.ABORT], job.counts[Action.RECONFIGURE], job.counts[Action.RESTORE]) == (1, 1, 0)
    found = spent(job)
    assert found["lost"] == 10
    assert found["reconfiguration"] == 4
    assert job.ledger.steps == 1 + int((1000 - at - 2) / 33)


@pytest.mark.parametrize(
    ("kept", "victims", "waited"),
    [
        (False, "2", 0),  # its neighbours report it
        (True, "2", 0),
        (False, "0", 50),  # the first to come coordinates
        (True, "0", 50),
        (False, "2,4", 50),  # neighbours
        (True, "1,2", 50),
        (False, "2,6", 0),  # of one pipeline, but no neighbours
        (True, "1,3", 0),
        (False, "2,3", 0),  # of two pipelines
        (True, "1,5", 0),
    ],
)
def test_a_loss_that_no_two_neighbours_report_is_known_when_its_lease_ends(
    kept: bool, victims: str, waited: int
) -> None:
    trace = story("0 +8", f"{2 + STEP + 10} -{victims}", seconds=400)
    late, at_once = (
        spent(played(even(), trace, kept=kept, constants=replace(SIMPLE, lease_seconds=seconds)))
        for seconds in (50.0, 0.0)
    )
    causes = ("failover", "reconfiguration")
    assert sum(late.get(cause, 0.0) - at_once.get(cause, 0.0) for cause in causes) == pytest.approx(waited)


@pytest.mark.parametrize("kept", [False, True])
def test_an_epoch_that_counts_on_a_dead_standby_is_aborted_when_its_lease_ends(kept: bool) -> None:
    slow = replace(SIMPLE, lease_seconds=100.0)
    # The spare n8 dies with n2, whose place it is given at the end of the step.
    trace = story("0 +8", "5 +1", "50 -2,8", seconds=1000)
    late, at_once = (played(even(), trace, kept=kept, constants=constants) for constants in (slow, SIMPLE))
    assert (at_once.counts[Action.ABORT], at_once.counts[Action.RECONFIGURE]) == (0, 0)
    assert (late.counts[Action.FAILOVER], late.counts[Action.ABORT], late.counts[Action.RECONFIGURE]) == (1, 1, 2)
    assert 100 - 2 * STEP < spent(late)["reconfiguration"] - spent(at_once)["reconfiguration"] < 100
    assert sum(spent(late).values()) == pytest.approx(1000)


def test_a_coordinator_without_a_stage_holds_up_the_commit() -> None:
    trace = story("0 +12", "40 -2", "400 -0", seconds=2000)  # the pipeline of n2 is dissolved, and n0 is of it
    workload = even(pipelines=3, micro_batches=12)
    late, at_once = (
        played(workload, trace, kept=True, constants=replace(SIMPLE, lease_seconds=seconds)) for seconds in (500.0, 0.0)
    )
    assert (late.counts[Action.FAILOVER], late.counts[Action.ABORT]) == (1, 0)
    assert 500 - (6 + 3) * 3 < spent(late)["failover"] - spent(at_once)["failover"] <= 500


@pytest.mark.parametrize("kept", [False, True])
def test_a_stage_that_nobody_holds_is_restored_from_a_checkpoint(kept: bool) -> None:
    constants = replace(SIMPLE, checkpoint_seconds=100.0, storage_bandwidth=100.0)
    trace = story("0 +8", "500 -0,1,2,3,4,5,6,7", "600 +8", seconds=2000)
    job = played(even(state_bytes=1000), trace, kept=kept, constants=constants)
    assert (job.counts[Action.ABORT], job.counts[Action.RESTORE]) == (1, 1)
    found = spent(job)
    assert found["waiting"] == 100
    assert found["restart"] == pytest.approx(2 + 4000 / (100 * 8))
    # a checkpoint begins every 100 s and is whole 5 s later
    lost_steps = (500 - 2) // STEP - (job.ledger.steps - int((2000 - 600 - found["restart"]) // STEP))
    assert 1 <= lost_steps <= 100 // STEP + 1
    assert found["lost"] == pytest.approx((500 - 2) % STEP + lost_steps * STEP)


@pytest.mark.parametrize("kept", [False, True])
def test_a_loss_before_the_epoch_has_settled_begins_yet_another(kept: bool) -> None:
    job = played(even(pipelines=2), story("0 +9", "1 -2", seconds=100), kept=kept)
    assert (job.counts[Action.ABORT], job.counts[Action.FAILOVER]) == (1, 0)
    assert spent(job)["reconfiguration"] == 1 + 2


@pytest.mark.parametrize("kept", [False, True])
def test_also_while_a_later_epoch_begins(kept: bool) -> None:
    slow = replace(SIMPLE, reconfigure_seconds=500.0)
    trace = story("0 +9", "530 -2", "800 -3", seconds=3000)  # the spare n8 takes a place from about 560 on, until 1060
    job = played(even(), trace, kept=kept, constants=slow)
    assert (job.counts[Action.FAILOVER], job.counts[Action.ABORT], job.counts[Action.RECONFIGURE]) == (1, 1, 2)


@pytest.mark.parametrize("kept", [False, True])
def test_too_few_nodes_wait_and_keep_their_state(kept: bool) -> None:
    workload = even(pipelines=2, min_stages=4)
    trace = story("0 +8", "100 -0,1,2,3,4", "300 +4", seconds=500)
    job = played(workload, trace, kept=kept)
    assert spent(job)["waiting"] == 200
    assert job.counts[Action.ABORT] == 1
    assert job.counts[Action.RECONFIGURE] + job.counts[Action.RESTORE] == 1


def test_a_standby_that_goes_is_missed_by_nobody() -> None:
    job = played(even(), story("0 +8", "5 +1", "50 -8", seconds=300))
    assert job.counts[Action.FAILOVER] == job.counts[Action.ABORT] == 0
    assert spent(job) == {"training": 298, "reconfiguration": 2}


@pytest.mark.parametrize("kept", [False, True])
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rate=st.floats(0.05, 0.95),
    zones=st.integers(1, 3),
    min_stages=st.integers(1, 4),
    delay=st.floats(1, 4000),
)
def test_all_time_has_a_cause_and_all_samples_a_step(
    kept: bool, seed: int, rate: float, zones: int, min_stages: int, delay: float
) -> None:
    workload = even(pipelines=3, micro_batches=7, min_stages=min_stages, state_bytes=10**6)
    market = Market(nodes=12, hours=2, rate=rate, zones=zones, delay_seconds=delay)
    trace = generate(market, seed=seed)
    constants = replace(
        SIMPLE, warm_up_seconds=20.0, detect_seconds=0.5, lease_seconds=30.0, reroute_seconds=1.0, storage_bandwidth=1e5
    )
    job = played(workload, trace, kept=kept, constants=constants)
    ledger = job.ledger
    assert sum(ledger.seconds.values()) == pytest.approx(trace.seconds, abs=1e-6)
    assert all(seconds >= -1e-6 for seconds in ledger.seconds.values()), ledger.seconds
    assert ledger.samples == pytest.approx(ledger.steps * workload.batch)
    rated = sum((end - start) * rate for start, end, rate in ledger.segments)
    assert rated == pytest.approx(ledger.samples, rel=1e-6, abs=workload.batch)
    assert ledger.seconds[Cause.TRAINING] >= ledger.steps * STEP * 0.4

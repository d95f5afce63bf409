"""A running job takes other shapes: every loss, norm and weight stays that of one process, and nobody restarts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bamboo_ds.cli.local import LocalCluster
from tests.elastic.clusters import eventually
from tests.engine.disturbed import kill
from tests.engine.reshaped import Reshaped, ReshapedCluster, assert_as, assert_copies_equal, undisturbed, with_data
from tests.engine.test_failover import JOBS
from tests.engine.training import Outcome, Training, build_engine, train_one_process

PLAIN = "dropout, clipping and Adam"


def job(name: str, *, steps: int = 6) -> Training:
    return replace(JOBS[name], steps=steps, micro_batches=6)


@pytest.fixture(scope="module")
def reshaped(tmp_path_factory: pytest.TempPathFactory) -> ReshapedCluster:
    return ReshapedCluster(tmp_path_factory.mktemp("reshaped"))


UNLIKE_ONE_PROCESS = {"running statistics", "a loss that draws", "a learning rate schedule"}
"""The reference has no schedule and draws no losses, and batch statistics magnify the last bit of a sum."""

NOISY = {"running statistics"}
"""A bias before a normalisation has gradients of rounding errors only, which Adam magnifies."""

_references: dict[str, Outcome] = {}


def reference(reshaped: ReshapedCluster, name: str) -> Outcome:
    """Return what one process trains; of the jobs that it does not know, an undisturbed run of one pipeline."""
    if name not in _references:
        unlike = name in UNLIKE_ONE_PROCESS
        _references[name] = undisturbed(reshaped.train(job(name), (4, 1))) if unlike else train_one_process(job(name))
    return _references[name]


def bound(name: str, *, pipelines: int) -> float:
    """Return how far losses may be off: sums over pipelines, or over a tied layer's uses, come out otherwise.

    So do batch statistics: their kernels round otherwise when another stage reads what they made.
    """
    return {"running statistics": 1e-5, "a tied layer": 2e-6}.get(name, 2e-6 if pipelines > 1 else 0.0)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", JOBS)
def test_a_thin_pipeline_is_cut_anew(reshaped: ReshapedCluster, name: str) -> None:
    results = reshaped.train(job(name), (4, 1), [kill(0, 2, before=9, step=1)])
    assert {outcome.shape for outcome in results.values()} == {(3, 1)}
    assert {outcome.epochs for outcome in results.values()} == {((1, 0),)}
    assert_as(reference(reshaped, name), results, bound=bound(name, pipelines=1), losses_only=name in NOISY)
    assert_copies_equal(results)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", JOBS)
def test_a_node_that_joins_fills_a_merged_stage(reshaped: ReshapedCluster, name: str) -> None:
    results = reshaped.train(job(name), (3, 1), [kill(0, 1, before=7, step=2)], spare=1)
    assert len(results) == 3
    assert {outcome.shape for outcome in results.values()} == {(3, 1)}
    assert_as(reference(reshaped, name), results, bound=bound(name, pipelines=1), losses_only=name in NOISY)
    assert_copies_equal(results)


@pytest.mark.parametrize("name", [PLAIN, "bf16", "a tied layer", "running statistics"])
def test_two_lost_neighbours_cost_a_step_begun_anew(reshaped: ReshapedCluster, name: str) -> None:
    faults = [kill(0, 1, before=8, step=2), kill(0, 2, before=8, step=2)]
    results = reshaped.train(job(name), (4, 2), faults)
    assert len(results) == 4
    assert {outcome.shape for outcome in results.values()} == {(4, 1)}
    assert_as(reference(reshaped, name), results, bound=bound(name, pipelines=2), losses_only=name in NOISY)
    assert_copies_equal(results)


def test_a_single_stage_has_no_shadow_but_the_other_pipeline_has_its_layers(reshaped: ReshapedCluster) -> None:
    results = reshaped.train(job(PLAIN), (1, 2), [kill(0, 0, before=3, step=2)])
    assert [outcome.shape for outcome in results.values()] == [(1, 1)]
    assert_as(train_one_process(job(PLAIN)), results, bound=bound(PLAIN, pipelines=2))


def test_a_worker_that_lost_its_place_comes_back_when_there_is_one_again(reshaped: ReshapedCluster) -> None:
    """Two pipelines become one, which leaves it without a place, and two again when nodes join."""
    joiners = 2

    def act(cluster: LocalCluster) -> None:
        eventually(lambda: reshaped.events("reshaped"), within_seconds=30, what="one pipeline is left")
        for _ in range(joiners):
            cluster.add()

    lost = [kill(1, 0, before=8, step=2), kill(1, 1, before=8, step=2)]
    results = reshaped.train(job(PLAIN, steps=60), (3, 2), lost, act=act)
    assert {outcome.shape for outcome in results.values()} == {(3, 2)}
    came_back = [outcome for outcome in results.values() if outcome.away]
    assert [(outcome.first, outcome.away[0]) for outcome in came_back] == [(0, 2)]
    assert sum(outcome.first > 0 for outcome in results.values()) == joiners
    assert_as(train_one_process(job(PLAIN, steps=60)), results, bound=bound(PLAIN, pipelines=2))


def test_a_job_that_is_told_to_keep_its_shape_does_as_long_as_it_can(reshaped: ReshapedCluster) -> None:
    still = replace(job(PLAIN), config={"bamboo": {"reconfigure": "needed"}})
    results = reshaped.train(still, (3, 1), [kill(0, 1, before=7, step=2)], spare=1)
    assert {outcome.epochs for outcome in results.values()} == {()}
    assert_as(train_one_process(job(PLAIN)), results, bound=0.0)


def test_a_job_that_has_lost_a_layer_goes_on_from_its_last_checkpoint(
    reshaped: ReshapedCluster, tmp_path: Path
) -> None:
    settings = {"path": str(tmp_path / "checkpoints"), "interval_steps": 2}
    saved = replace(job(PLAIN, steps=8), config={"bamboo": {"checkpoint": settings}})
    faults = [kill(0, 1, before=8, step=5), kill(0, 2, before=8, step=5)]
    results = reshaped.train(saved, (3, 1), faults, spare=2)
    assert {outcome.shape for outcome in results.values()} == {(3, 1)}
    assert_as(train_one_process(job(PLAIN, steps=8)), results, bound=0.0)
    assert min(outcome.first for outcome in results.values() if outcome.first) in (2, 4)


def test_a_job_whose_layers_are_gone_without_a_checkpoint_says_so(reshaped: ReshapedCluster) -> None:
    faults = [kill(0, 1, before=8, step=2), kill(0, 2, before=8, step=2)]
    told = r"StateLostError: layer\(s\) 4, 5 are held by no live worker.*bamboo\.checkpoint\.path.* Start the job again"
    with pytest.raises(AssertionError, match=told):
        reshaped.train(job(PLAIN), (3, 1), faults, spare=2)


@pytest.mark.sample(0)
def test_a_script_that_counts_its_own_steps_ends_with_the_others(reshaped: ReshapedCluster) -> None:
    faults = {"bamboo": {"fault_injection": [kill(0, 1, before=7, step=2)]}}
    counting = replace(job(PLAIN), config=faults)

    def program() -> Reshaped:
        engine = build_engine(with_data(counting), 3)
        outcome = Reshaped(first=engine.global_steps)
        for _ in range(counting.steps):
            loss = float(engine.train_batch())
            outcome.losses[engine.global_steps - 1] = loss
        engine.close()
        return outcome

    results = reshaped.train(counting, (3, 1), spare=1, around=lambda _: program)
    assert len(results) == 2, "one was lost, and the one that joined has no more steps to count"
    assert all(list(outcome.losses) == list(range(counting.steps)) for outcome in results.values())


def test_batches_of_a_users_iterator_are_drawn_again_when_a_step_is_begun_anew(reshaped: ReshapedCluster) -> None:
    """One pipeline goes, the other keeps its workers, so their iterators stay aligned; all train the same batches."""
    faults = [kill(1, stage, before=8, step=2) for stage in (1, 2)]
    wanted = replace(job(PLAIN), config={"bamboo": {"fault_injection": faults}})

    def program() -> Reshaped:
        engine = build_engine(wanted, 4)
        outcome = Reshaped(first=engine.global_steps)
        endless = (wanted.batch(0, 0) for _ in itertools.count())
        drawn = itertools.count()
        counted = (next(drawn) * 0 or batch for batch in endless)
        while engine.global_steps < wanted.steps:
            outcome.losses[engine.global_steps] = float(engine.train_batch(counted))
        outcome.weights = {"drawn": torch.tensor(next(drawn)), "draws": torch.tensor(engine._draws())}
        engine.close()
        return outcome

    results = reshaped.train(wanted, (4, 2), around=lambda _: program)
    assert len(results) == 4, "two stand by in the end"
    drawn = {int(one.weights["drawn"]) for one in results.values() if one.weights["draws"] and one.losses}
    # two steps of 3 micro-batches for each of two pipelines, then four of 6 for one
    assert max(drawn) == 2 * 3 + 4 * 6

"""Engines that train on `training_data`: the same samples in every shape, after changes, restores and losses."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from bamboo_ds.cli.bench.workers import WorkerResult, values
from bamboo_ds.elastic.processes import descendants, running
from bamboo_ds.engine.sampler import Position, Walk
from bamboo_ds.errors import ConfigError
from tests.engine.disturbed import Cluster, Fault, kill
from tests.engine.test_data import Augmented, Samples, sample, stacked
from tests.engine.test_failover import assert_undisturbed, die
from tests.engine.training import (
    SEED,
    OneProcess,
    Outcome,
    Training,
    build_engine,
    held_digests,
    largest,
    own_weights,
    single,
)
from tests.engine.zoo import blocks

Run = Callable[..., list[WorkerResult]]
LENGTH = 23


def shuffled(step: int, micro_batch: int) -> Any:
    """Return a micro-batch of a shuffled dataset: 5 of 2 samples each a step."""
    walk = Walk(LENGTH, seed=SEED, shuffle=True)
    begin = walk.after(Position(), samples=10 * step, batch=10)
    return stacked([sample(index) for index in walk.samples(begin, first=2 * micro_batch, count=2)])


def reading(dataset: Any, *, steps: int = 4, **keys: Any) -> Training:
    """Return a job that trains on a dataset."""
    return Training(
        lambda: blocks(6),
        shuffled,
        steps=steps,
        config={"bamboo": {"data": keys}},
        arguments=lambda _: {"training_data": dataset},
    )


SHUFFLED = reading(Samples(LENGTH), shuffle=True)


def train_data(rank: int, job: Training, num_stages: int, redundancy: str = "eflb") -> Outcome:
    """Train on the training data."""
    del rank
    engine, outcome = build_engine(job, num_stages, redundancy), Outcome()
    for _ in range(job.steps):
        step_on_data(engine, outcome)
    outcome.weights = own_weights(engine)
    engine.close()
    return outcome


def step_on_data(engine: Any, outcome: Outcome) -> None:
    outcome.losses.append(float(engine.train_batch()))
    outcome.norms.append(float(engine.get_global_grad_norm()))
    outcome.digests.append(held_digests(engine))


def losses(workers: Run, job: Training, shape: tuple[int, int]) -> list[float]:
    outcomes = values(workers(train_data, shape[0] * shape[1], args=(job, shape[0]), timeout_seconds=60))
    assert all(outcome.losses == outcomes[0].losses for outcome in outcomes)
    return outcomes[0].losses


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (2, 2), (1, 3)])
def test_a_shuffle_is_the_same_in_every_shape(workers: Run, shape: tuple[int, int]) -> None:
    """Four steps of 10 of 23 samples: nearly two epochs."""
    one = OneProcess(SHUFFLED)
    assert largest(losses(workers, SHUFFLED, shape), single([one.train_batch() for _ in range(4)])) <= 1e-6


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (2, 2)])
def test_worker_processes_change_nothing(workers: Run, shape: tuple[int, int]) -> None:
    """Not even what is random in the dataset."""
    one, two = (reading(Augmented(LENGTH), shuffle=True, num_workers=number) for number in (0, 2))
    assert losses(workers, one, shape) == losses(workers, two, shape)


def test_a_batch_that_changes_with_drop_last_loses_and_repeats_no_sample(workers: Run) -> None:
    """25 samples: two batches of 10, two of 6 (the second does not fit into the rest), one of 10."""

    def train_changing(rank: int) -> tuple[list[float], Position, str]:
        engine = build_engine(reading(Samples(25), drop_last=True), 2)
        found = []
        for count in (5, 5, 3, 3, 5):
            engine.set_train_batch_size(2 * count)
            found.append(float(engine.train_batch()))
        try:
            engine.set_train_batch_size(26)
        except ConfigError as error:
            refusal = str(error)
        assert engine.train_batch_size() == 10
        position = engine._data.position(engine.global_samples)
        engine.close()
        return found, position, refusal

    one, wanted = OneProcess(SHUFFLED), []
    for first, count in ((0, 5), (10, 5), (0, 3), (6, 3), (12, 5)):
        starts = range(first, first + 2 * count, 2)
        wanted.append(one.train_batch([stacked([sample(start), sample(start + 1)]) for start in starts]))
    for found, position, refusal in values(workers(train_changing, 2, timeout_seconds=60)):
        assert largest(found, single(wanted)) <= 1e-6
        assert position == Position(1, 22)
        assert "25 samples never fill a global batch of 26" in refusal


def test_a_restored_shuffle_goes_on_where_it_was(workers: Run, tmp_path: Path) -> None:
    def train_some(rank: int, load: bool) -> list[float]:
        engine = build_engine(SHUFFLED, 2)
        if load:
            engine.load_checkpoint(str(tmp_path))
        found = [float(engine.train_batch()) for _ in range(3)]
        if not load:
            engine.save_checkpoint(str(tmp_path))
            found = [float(engine.train_batch()) for _ in range(3)]
        engine.close()
        return found

    first, again = (values(workers(train_some, 2, args=(load,), timeout_seconds=60)) for load in (False, True))
    assert first == again


def children() -> int:
    return len(descendants(os.getpid(), running()))


def test_worker_processes_end_with_their_loader_and_their_engine(workers: Run) -> None:
    """Of three stages, the first and the last draw."""

    def train_counting(rank: int) -> tuple[int, list[int]]:
        engine, found = build_engine(reading(Samples(LENGTH), num_workers=2), 3), []
        for count in (5, 3, 4):
            engine.set_train_batch_size(2 * count)
            engine.train_batch()
            found.append(children())
        engine.close()
        return engine.stage_id, [*found, children()]

    found = dict(values(workers(train_counting, 3, timeout_seconds=60)))
    assert found == {0: [2, 2, 2, 0], 1: [0, 0, 0, 0], 2: [2, 2, 2, 0]}


@pytest.mark.parametrize(
    ("job", "named"),
    [
        (reading(Samples(0)), "training_data is empty"),
        (reading(Samples(9), drop_last=True), "9 samples never fill a global batch of 10"),
    ],
)
def test_data_that_cannot_be_read_is_refused_by_all_workers(workers: Run, job: Training, named: str) -> None:
    def build(rank: int) -> None:
        build_engine(job, 3)

    results = workers(build, 3, timeout_seconds=30, exit_naturally=True)
    assert all("ConfigError" in str(result.error) and named in str(result.error) for result in results)


# ---- losses --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> Mapping[int, Outcome]:
    """Give the run without losses."""
    return cluster.train(SHUFFLED, (3, 1), target=train_data)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_loss_changes_no_sample(
    cluster: Cluster, undisturbed: Mapping[int, Outcome], stage: int, num_workers: int
) -> None:
    """Whoever takes over the last stage opens the data in the middle of a step."""
    job = reading(Samples(LENGTH), shuffle=True, num_workers=num_workers)
    got = cluster.train(job, (3, 1), [kill(0, stage, before=9, step=2)], target=train_data)
    assert_undisturbed(got, undisturbed)


def lost_between(step: int) -> Callable[..., Outcome]:
    """Return what trains on the training data and loses the last stage before a step, not in it."""

    def target(rank: int, job: Training, num_stages: int, redundancy: str) -> Outcome:
        del rank
        engine, outcome = build_engine(job, num_stages, redundancy), Outcome()
        for number in range(job.steps):
            if number == step and engine.stage_id == num_stages - 1:
                die()
            step_on_data(engine, outcome)
        outcome.weights = own_weights(engine)
        return outcome

    return target


NEVER: Fault = kill(9, 9, before=0)
"""A fault that never comes, for the count of those who die by themselves."""


@pytest.mark.parametrize("step", [0, 2])
def test_a_loss_between_two_steps_changes_no_sample(
    cluster: Cluster, undisturbed: Mapping[int, Outcome], step: int
) -> None:
    """Not even before the first, when no batch has been drawn yet."""
    assert_undisturbed(cluster.train(SHUFFLED, (3, 1), [NEVER], target=lost_between(step)), undisturbed)


def evaluating(dies: bool) -> Callable[..., Outcome]:
    """Return what trains on the training data, evaluates after a step, and loses the last stage meanwhile."""

    def target(rank: int, job: Training, num_stages: int, redundancy: str) -> Outcome:
        del rank
        engine, outcome = build_engine(job, num_stages, redundancy), Outcome()
        for number in range(job.steps):
            step_on_data(engine, outcome)
            outcome.losses.append(float(engine.eval_batch(held_out(engine, dies=dies and number == 1))))
        outcome.weights = own_weights(engine)
        return outcome

    return target


def held_out(engine: Any, *, dies: bool) -> Iterator[Any]:
    for number in range(engine.micro_batches):
        if dies and number == 2 and engine.stage_id == engine.num_stages - 1:
            die()
        yield stacked([sample(1000 + 2 * number), sample(1001 + 2 * number)])


def test_a_loss_in_an_evaluation_leaves_the_training_data_where_it_was(cluster: Cluster) -> None:
    expected = cluster.train(SHUFFLED, (3, 1), target=evaluating(dies=False))
    assert_undisturbed(cluster.train(SHUFFLED, (3, 1), [NEVER], target=evaluating(dies=True)), expected)

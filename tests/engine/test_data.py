"""Every stage of a pipeline meets the same samples, pipelines meet other ones, and data that ends ends all workers."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from bamboo_ds.cli.bench.workers import WorkerResult, values
from bamboo_ds.errors import BambooError, ConfigError, DataExhaustedError
from bamboo_ds.plan.seeds import batch_seed
from tests.engine.training import SEED, OneProcess, Outcome, Training, build_engine, largest, linger, single
from tests.engine.zoo import WIDTH, blocks, vectors

Run = Callable[..., list[WorkerResult]]
SHAPES = [(1, 1), (2, 1), (3, 1), (2, 2), (1, 2), (3, 2)]
STEPS = 4


def sample(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
    return inputs, inputs.roll(1).tanh()


class Samples(Dataset[Any]):
    """As many samples as asked for."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index >= self.count:
            raise IndexError(index)
        return sample(index)


class Augmented(Samples):
    """Changes each sample at random, by all three generators."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, labels = super().__getitem__(index)
        return inputs + torch.randn(WIDTH) * 0.1 + random.random() + float(numpy.random.rand()), labels


class Stream(IterableDataset[Any]):
    """Samples without a length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return map(sample, range(self.count))


def stacked(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, labels = zip(*samples, strict=True)
    return torch.stack(inputs), torch.stack(labels)


def in_order(length: int, micro_batches: int) -> Callable[[int, int], Any]:
    """Return the batches of an endless walk through a dataset."""

    def batch(step: int, micro_batch: int) -> Any:
        start = 2 * (step * micro_batches + micro_batch)
        return stacked([sample(index % length) for index in (start, start + 1)])

    return batch


def train_on(rank: int, job: Training, num_stages: int, made: Callable[[], Any]) -> Outcome:
    """Train on `training_data` (what `made` makes), or on the iterator that it returns."""
    data, outcome = made(), Outcome()
    iterator = data if hasattr(data, "__next__") else None
    job = job if iterator is not None else replace(job, arguments=lambda _: {"training_data": data})
    engine = build_engine(job, num_stages)
    try:
        for _ in range(job.steps):
            outcome.losses.append(float(engine.train_batch(iterator)))
    except StopIteration as error:
        outcome.extra = type(error).__name__, str(error)
        linger(rank)
    engine.close()
    return outcome


def losses(workers: Run, job: Training, shape: tuple[int, int], made: Callable[[], Any]) -> list[float]:
    outcomes = values(workers(train_on, shape[0] * shape[1], args=(job, shape[0], made), timeout_seconds=60))
    assert all(outcome.losses == outcomes[0].losses for outcome in outcomes)
    return outcomes[0].losses


def expected(job: Training) -> list[float]:
    one = OneProcess(job)
    return single([one.train_batch() for _ in range(job.steps)])


JOB = Training(lambda: blocks(6), in_order(100, 5), steps=STEPS)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [100, 7])
def test_a_step_takes_the_same_samples_in_every_shape(workers: Run, shape: tuple[int, int], length: int) -> None:
    """7 samples are fewer than a batch of 10: the walk begins anew inside it."""
    job = replace(JOB, batch=in_order(length, 5))
    assert largest(losses(workers, job, shape, lambda: Samples(length)), expected(job)) <= 1e-6


@pytest.mark.parametrize("shape", [(2, 1), (3, 2)])
def test_an_iterable_dataset_gives_the_same_samples_in_every_shape(workers: Run, shape: tuple[int, int]) -> None:
    assert largest(losses(workers, JOB, shape, lambda: Stream(1000)), expected(JOB)) <= 1e-6


@pytest.mark.parametrize("shape", [(2, 1), (3, 2)])
def test_an_iterable_dataset_ends_training_on_all_workers(workers: Run, shape: tuple[int, int]) -> None:
    made = (train_on, shape[0] * shape[1])
    outcomes = values(workers(*made, args=(JOB, shape[0], lambda: Stream(23)), timeout_seconds=30))
    assert [len(outcome.losses) for outcome in outcomes] == [2] * len(outcomes)
    assert all(outcome.extra[0] == "DataExhaustedError" for outcome in outcomes)


@pytest.mark.parametrize("shape", [(3, 1), (2, 2)])
def test_random_augmentation_is_the_same_on_all_stages_and_in_every_shape(workers: Run, shape: tuple[int, int]) -> None:
    def batch(step: int, micro_batch: int) -> Any:
        seed = batch_seed(SEED, step=step, micro_batch=micro_batch)
        random.seed(seed)
        numpy.random.seed(seed & 0xFFFFFFFF)
        torch.manual_seed(seed)
        start = 2 * (step * 5 + micro_batch)
        return stacked([Augmented(100)[index] for index in (start, start + 1)])

    job = replace(JOB, batch=batch)
    assert largest(losses(workers, job, shape, lambda: Augmented(100)), expected(job)) <= 1e-6


def test_a_collate_function_of_the_users_own_is_used(workers: Run) -> None:
    def doubled(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, labels = stacked(samples)
        return 2 * inputs, labels

    def train_collated(rank: int) -> list[float]:
        job = replace(JOB, arguments=lambda _: {"training_data": Samples(100), "collate_fn": doubled})
        engine = build_engine(job, 2)
        found = [float(engine.train_batch()) for _ in range(STEPS)]
        engine.close()
        return found

    def batch(step: int, micro_batch: int) -> Any:
        inputs, labels = in_order(100, 5)(step, micro_batch)
        return 2 * inputs, labels

    assert values(workers(train_collated, 2, timeout_seconds=60)) == [expected(replace(JOB, batch=batch))] * 2


def test_a_batch_function_changes_what_the_iterator_yields(workers: Run) -> None:
    def train_transformed(rank: int) -> list[float]:
        engine = build_engine(replace(JOB, arguments=lambda _: {"training_data": Samples(100)}), 2)
        engine.set_batch_fn(lambda pair: (pair[0] * 3, pair[1]))
        found = [float(engine.train_batch()) for _ in range(STEPS)]
        engine.close()
        return found

    def batch(step: int, micro_batch: int) -> Any:
        inputs, labels = in_order(100, 5)(step, micro_batch)
        return 3 * inputs, labels

    assert values(workers(train_transformed, 2, timeout_seconds=60)) == [expected(replace(JOB, batch=batch))] * 2


@pytest.mark.parametrize("shape", [(2, 1), (2, 2)])
def test_the_batch_size_can_change_between_steps(workers: Run, shape: tuple[int, int]) -> None:
    """5 micro-batches, then 3, then 6: the samples go on where they were."""

    def train_growing(rank: int) -> list[float]:
        engine = build_engine(replace(JOB, arguments=lambda _: {"training_data": Samples(100)}), shape[0])
        found = []
        for count in (5, 3, 6):
            engine.set_train_batch_size(2 * count)
            assert engine.train_batch_size() == 2 * count
            found.append(float(engine.train_batch()))
        with pytest.raises(ConfigError, match="multiple of the micro-batch size"):
            engine.set_train_batch_size(7)
        engine.close()
        return found

    one, position, wanted = OneProcess(JOB), 0, []
    for count in (5, 3, 6):
        walk = in_order(100, 1)
        wanted.append(one.train_batch([walk(position + index, 0) for index in range(count)]))
        position += count
    for found in values(workers(train_growing, shape[0] * shape[1], timeout_seconds=60)):
        assert largest(found, single(wanted)) <= 1e-6


def test_an_iterator_can_be_set_once(workers: Run) -> None:
    def train_set(rank: int) -> list[float]:
        engine = build_engine(JOB, 2)
        engine.set_dataiterator(iter([JOB.batch(step, m) for step in range(STEPS) for m in range(5)]))
        found = [float(engine.train_batch()) for _ in range(STEPS)]
        engine.close()
        return found

    assert values(workers(train_set, 2, timeout_seconds=60)) == [expected(JOB)] * 2


# ---- shuffles ------------------------------------------------------------------------------------------------------


class Noted(TensorDataset):
    """Notes which samples are read."""

    def __init__(self, tensors: Any) -> None:
        super().__init__(*tensors)
        self.read: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return super().__getitem__(index)


def train_shuffled(rank: int, num_stages: int, disturbed: bool) -> tuple[int, int, list[int]]:
    """Train on an unseeded shuffle, after random draws that differ between workers."""
    from deepspeed.utils import RepeatingLoader

    data = Noted(stacked([sample(index) for index in range(64)]))
    engine = build_engine(replace(JOB, micro_batches=4), num_stages)
    if disturbed:
        torch.rand(1 + rank)
    iterator = iter(RepeatingLoader(DataLoader(data, batch_size=2, shuffle=True)))
    for _ in range(STEPS):
        engine.train_batch(iterator)
    engine.close()
    return engine.pipeline_id, engine.stage_id, data.read


@pytest.mark.parametrize("shape", [(2, 1), (3, 2)])
@pytest.mark.parametrize("disturbed", [False, True])
def test_an_unseeded_shuffle_is_the_same_for_inputs_and_labels_and_another_in_each_pipeline(
    workers: Run, shape: tuple[int, int], disturbed: bool
) -> None:
    found = values(workers(train_shuffled, shape[0] * shape[1], args=(shape[0], disturbed), timeout_seconds=60))
    read = {(pipeline, stage): indices for pipeline, stage, indices in found}
    for pipeline in range(shape[1]):
        assert read[pipeline, 0] == read[pipeline, shape[0] - 1]
        assert len(set(read[pipeline, 0])) == len(read[pipeline, 0]) == 2 * STEPS * 4 // shape[1]
        assert read[pipeline, 0] != sorted(read[pipeline, 0])
    assert shape[1] == 1 or read[0, 0] != read[1, 0]


@pytest.mark.parametrize("shape", [(2, 1), (3, 2)])
def test_other_samples_on_the_last_stage_end_all_workers(workers: Run, shape: tuple[int, int]) -> None:
    def train_wrong(rank: int) -> str:
        def batch(step: int, micro_batch: int) -> Any:
            return vectors(step, micro_batch + (100 if step == 1 and engine.stage_id > 0 and micro_batch > 1 else 0))

        engine = build_engine(JOB, shape[0])
        try:
            for step in range(STEPS):
                engine.train_batch(iter([batch(step, m) for m in engine.micro_batch_range]))
        except BambooError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            linger(rank)
        return "trained"

    found = values(workers(train_wrong, shape[0] * shape[1], timeout_seconds=30))
    assert all(error.startswith("DataMismatchError") and "micro-batch 2 of step 1" in error for error in found), found


# ---- ends ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("left", [0, 1, 2])
def test_data_that_ends_ends_all_workers_at_once(workers: Run, shape: tuple[int, int], left: int) -> None:
    """At the border of a step, after one of its micro-batches, or in its middle."""

    def train_out(rank: int) -> tuple[str, bool, float]:
        job = replace(JOB, micro_batches=6)
        engine = build_engine(job, shape[0])
        share = engine.micro_batch_range
        iterator = iter([job.batch(0, m) for m in share] + [job.batch(1, m) for m in share[:left]])
        engine.train_batch(iterator)
        started = time.monotonic()
        try:
            engine.train_batch(iterator)
        except StopIteration as error:
            result = (
                f"{type(error).__name__}: {error}",
                isinstance(error, DataExhaustedError),
                time.monotonic() - started,
            )
        else:
            result = "trained", False, 0.0
        linger(rank)
        return result

    for error, right, seconds in values(workers(train_out, shape[0] * shape[1], timeout_seconds=30)):
        assert right, error
        assert f"step 1 after {left} of" in error
        assert seconds < 5


def test_data_that_ends_in_one_pipeline_ends_the_others(workers: Run) -> None:
    def train_out(rank: int) -> str:
        engine = build_engine(JOB, 2)
        share = engine.micro_batch_range[: 1 if engine.pipeline_id == 1 else None]
        try:
            engine.train_batch(iter([JOB.batch(0, m) for m in share]))
        except StopIteration as error:
            return type(error).__name__
        finally:
            linger(rank)
        return "trained"

    assert values(workers(train_out, 4, timeout_seconds=30)) == ["DataExhaustedError"] * 4


@pytest.mark.parametrize(
    ("yielded", "named"), [(torch.ones(2), "Tensor"), (({"words": 1}, 2), "tensor or a tuple"), (None, "NoneType")]
)
def test_what_is_no_batch_is_named(workers: Run, yielded: Any, named: str) -> None:
    def train_odd(rank: int) -> None:
        build_engine(JOB, 2).train_batch(iter([yielded] * 5))

    results = workers(train_odd, 2, timeout_seconds=30, exit_naturally=True)
    assert all("ConfigError" in str(result.error) and named in str(result.error) for result in results)


def test_training_without_data_names_what_is_missing(workers: Run) -> None:
    def train_dry(rank: int) -> None:
        build_engine(JOB, 2).train_batch()

    results = workers(train_dry, 2, timeout_seconds=30, exit_naturally=True)
    assert all("give train_batch(data_iter=...) or initialize(training_data=...)" in str(r.error) for r in results)

"""Every sample once per epoch, whatever becomes of the job; and worker processes that change nothing but the speed."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby, islice
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

from bamboo_ds.config.data import DataConfig
from bamboo_ds.elastic.processes import descendants, running
from bamboo_ds.engine.loading import TrainingData
from bamboo_ds.engine.sampler import Position, Share
from bamboo_ds.errors import ConfigError
from bamboo_ds.module import seed_all
from bamboo_ds.plan import static_plan
from bamboo_ds.plan.seeds import batch_seed

SEED = 7


class Numbers(Dataset[int]):
    """Its samples are their indices."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """Numbers without a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def opened(dataset: Any, *, collate_fn: Any = list, timeout_seconds: float = 20.0, **keys: Any) -> TrainingData:
    return TrainingData(
        dataset,
        settings=DataConfig(**keys),
        seed=SEED,
        collate_fn=collate_fn,
        timeout_seconds=timeout_seconds,
    )


def share(micro_batches: int = 4, *, size: int = 2, step: int = 0, drawn: range | None = None) -> Share:
    """Return the share of a step, in a job whose batch was always the same."""
    return Share(
        step=step,
        samples=step * micro_batches * size,
        micro_batch_size=size,
        micro_batches=micro_batches,
        drawn=range(micro_batches) if drawn is None else drawn,
    )


def drawn_from(data: TrainingData, wanted: Share, *, count: int) -> list[Any]:
    data.tell(wanted)
    try:
        return list(islice(data.open(), count))
    finally:
        data.close()


def processes() -> list[int]:
    return [each.pid for each in descendants(os.getpid(), running())]


# ---- every sample once ---------------------------------------------------------------------------------------------


class Job:
    """A job that only draws: as many pipelines as it has at the moment, each with its own opening of the data."""

    def __init__(self, length: int, micro_batches: int, pipelines: int, **keys: Any) -> None:
        self.length, self.keys = length, keys
        self.step = self.samples = 0
        self.micro_batches, self.pipelines = micro_batches, pipelines
        self.history: list[list[int]] = []
        self.workers = [opened(Numbers(length), **keys) for _ in range(12)]
        self.reopen()

    def reopen(self, position: Position | None = None) -> None:
        plan = static_plan(world_size=self.pipelines, num_stages=1)
        self.iterators = []
        for number, worker in enumerate(self.workers):
            pipeline = number % self.pipelines
            drawn = plan.share(pipeline, micro_batches=self.micro_batches)
            worker.tell(replace(self.share(), drawn=drawn), position=position)
            if number < self.pipelines:
                self.iterators.append((worker.open(), len(drawn)))

    def share(self) -> Share:
        return replace(share(self.micro_batches, step=self.step), samples=self.samples)

    def train(self) -> None:
        draws = [draw for iterator, count in self.iterators for draw in islice(iterator, count)]
        self.history.append([sample for draw in draws for sample in draw])
        self.step += 1
        self.samples += 2 * self.micro_batches

    def abort(self) -> None:
        """Draw a part of a step in vain."""
        for iterator, count in self.iterators:
            list(islice(iterator, count // 2 + 1))
        self.reopen()

    def reshape(self, pipelines: int) -> None:
        self.pipelines = min(pipelines, self.micro_batches)
        self.reopen()

    def resize(self, micro_batches: int) -> None:
        if self.keys["drop_last"] and 2 * micro_batches > self.length:
            return
        self.micro_batches, self.pipelines = micro_batches, min(self.pipelines, micro_batches)
        self.reopen()

    def join(self, number: int) -> None:
        """Replace a worker by one that hears from another where training is."""
        position = self.workers[number - 1].position(self.samples)
        self.workers[number] = opened(Numbers(self.length), **self.keys)
        self.workers[number].tell(self.share(), position=position)
        self.reopen()

    def save(self) -> tuple[Any, ...]:
        return self.step, self.samples, self.micro_batches, self.workers[0].position(self.samples)

    def restore(self, saved: tuple[Any, ...]) -> None:
        self.step, self.samples, self.micro_batches, position = saved
        self.pipelines = min(self.pipelines, self.micro_batches)
        del self.history[self.step :]
        self.reopen(position)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), shuffle=st.booleans(), drop_last=st.booleans())
def test_every_sample_comes_once_per_epoch_whatever_becomes_of_the_job(
    data: st.DataObject, shuffle: bool, drop_last: bool
) -> None:
    micro_batches = data.draw(st.integers(1, 8))
    length = data.draw(st.integers(2 * micro_batches if drop_last else 1, 50))
    job = Job(length, micro_batches, data.draw(st.integers(1, micro_batches)), shuffle=shuffle, drop_last=drop_last)
    saved = job.save()
    for event in data.draw(st.lists(st.sampled_from(sorted(EVENTS)), min_size=5, max_size=30)):
        if event == "restore":
            job.restore(saved)
        elif event == "save":
            saved = job.save()
        else:
            EVENTS[event](job, data)
    assert_once_per_epoch(job, reference(job), drop_last=drop_last)


EVENTS = {
    "train": lambda job, _: job.train(),
    "train again": lambda job, _: job.train(),
    "abort": lambda job, _: job.abort(),
    "reshape": lambda job, data: job.reshape(data.draw(st.integers(1, 8))),
    "resize": lambda job, data: job.resize(data.draw(st.integers(1, 8))),
    "join": lambda job, data: job.join(data.draw(st.integers(1, 11))),
    "save": None,
    "restore": None,
}


def reference(job: Job) -> list[tuple[int, int]]:
    """Return (epoch, sample) in the order in which an undisturbed pipeline takes them, in batches of the same sizes."""
    found, epoch, offset = [], 0, 0
    for batch in map(len, job.history):
        if job.keys["drop_last"] and offset + batch > job.length:
            epoch, offset = epoch + 1, 0
        for _ in range(batch):
            if offset == job.length:
                epoch, offset = epoch + 1, 0
            found.append((epoch, order(job, epoch)[offset]))
            offset += 1
    return found


def order(job: Job, epoch: int) -> list[int]:
    """Return the samples of an epoch in one batch, as nothing but seed and epoch decide on it."""
    walk = opened(Numbers(job.length), **{**job.keys, "drop_last": False})
    walk.tell(replace(share(1, size=job.length), step=epoch), position=Position(epoch))
    return next(walk.open())


def assert_once_per_epoch(job: Job, wanted: list[tuple[int, int]], *, drop_last: bool) -> None:
    assert [sample for batch in job.history for sample in batch] == [sample for _, sample in wanted]
    epochs = [[sample for _, sample in epoch] for _, epoch in groupby(wanted, key=lambda pair: pair[0])]
    for samples in epochs:
        assert len(set(samples)) == len(samples)
    for samples in epochs[:-1]:
        assert drop_last or len(samples) == job.length


def test_a_checkpoint_without_a_position_goes_on_as_if_its_batch_had_always_been_the_same() -> None:
    data, again = (opened(Numbers(11), drop_last=True) for _ in range(2))
    whole = drawn_from(data, share(2, step=0), count=12)
    assert drawn_from(again, share(2, step=4), count=4) == whole[8:]
    assert drawn_from(again, share(2, step=1), count=2) == whole[2:4]


def test_the_seed_of_the_shuffle_is_that_of_the_job_unless_it_has_one() -> None:
    orders = [drawn_from(opened(Numbers(64), shuffle=True, seed=s), share(), count=8) for s in (None, SEED, 8)]
    assert orders[0] == orders[1] != orders[2]


# ---- worker processes ----------------------------------------------------------------------------------------------


class Augmented(Numbers):
    """Changes its samples at random, by all three generators."""

    def __getitem__(self, index: int) -> Any:
        return index + float(torch.rand(())) + random.random() + float(numpy.random.rand())


class AtOnce(Augmented):
    """Has a way of its own to read many samples."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [-self[index] for index in indices]


def masked(samples: list[Any]) -> Any:
    """Collate at random."""
    return [sample for sample in samples if random.random() < 0.7]


def by_the_worker(data: TrainingData, wanted: Share, *, count: int) -> list[Any]:
    """Draw as a worker does that draws itself: each micro-batch under its seed."""
    data.tell(wanted)
    iterator, found = data.open(), []
    for number in range(count):
        steps, index = divmod(number, len(wanted.drawn))
        seed_all(batch_seed(SEED, step=wanted.step + steps, micro_batch=wanted.drawn[index]))
        found.append(next(iterator))
    return found


@pytest.mark.parametrize("dataset", [Augmented(40), AtOnce(40)])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_worker_processes_draw_the_same_in_the_same_order(dataset: Any, num_workers: int) -> None:
    wanted = share(step=3, drawn=range(1, 4))
    one = by_the_worker(opened(dataset, collate_fn=masked, shuffle=True), wanted, count=20)
    data = opened(dataset, collate_fn=masked, shuffle=True, num_workers=num_workers)
    assert drawn_from(data, wanted, count=20) == one


def test_what_was_loaded_ahead_does_not_count() -> None:
    data = opened(Numbers(100), num_workers=2)
    first = drawn_from(data, share(), count=1)
    time.sleep(0.2)
    assert first + drawn_from(data, share(step=1), count=1) == [[0, 1], [8, 9]]


def test_no_process_is_left_when_the_data_is_opened_anew_or_closed() -> None:
    before, data = processes(), opened(Numbers(100), num_workers=2)
    for step in range(3):
        data.tell(share(step=step))
        iterator = data.open()
        next(iterator)
        assert len(processes()) == len(before) + 2
    data.close()
    data.close()
    assert processes() == before
    assert data.loader is None


def test_data_may_be_closed_while_its_processes_are_still_starting() -> None:
    data = opened(Numbers(100), num_workers=2)
    data.tell(share())
    for _ in range(30):
        data.open()
        data.close()


def test_data_may_be_closed_when_one_of_its_processes_has_died_with_their_lock_in_its_hands() -> None:
    data = opened(Numbers(100), num_workers=2)
    data.tell(share())
    iterator = data.open()
    lock = iterator._workers_done_event._cond
    assert lock.acquire(timeout=5)
    closing = threading.Thread(target=data.close, daemon=True)
    closing.start()
    closing.join(5)
    hung = closing.is_alive()
    lock.release()
    assert not hung


def test_a_link_that_the_worker_closes_ends_although_its_processes_live_on() -> None:
    """They are forks, and a connection ends when the last process has closed it."""
    listener = socket.create_server(("127.0.0.1", 0))
    ours, (theirs, _) = socket.create_connection(listener.getsockname()), listener.accept()
    data = opened(Numbers(100), num_workers=2)
    data.tell(share())
    next(data.open())
    ours.close()
    theirs.settimeout(5)
    assert theirs.recv(1) == b""
    assert len(processes()) >= 2
    data.close()
    listener.close()


def test_a_process_that_is_killed_ends_the_wait_for_it() -> None:
    class Slow(Numbers):
        def __getitem__(self, index: int) -> int:
            time.sleep(30 if index > 3 else 0)
            return index

    before, data = set(processes()), opened(Slow(100), num_workers=1, timeout_seconds=60)
    data.tell(share())
    iterator = data.open()
    assert [next(iterator), next(iterator)] == [[0, 1], [2, 3]]
    os.kill(next(iter(set(processes()) - before)), signal.SIGKILL)
    with pytest.raises(RuntimeError, match="worker"):
        next(iterator)
    data.close()


def test_a_process_that_takes_too_long_ends_the_wait_for_it_and_is_not_waited_for_at_the_end() -> None:
    class Stuck(Numbers):
        def __getitem__(self, index: int) -> int:
            time.sleep(20)
            return index

    data = opened(Stuck(100), num_workers=1, timeout_seconds=0.3)
    data.tell(share())
    with pytest.raises(RuntimeError, match="timed out"):
        next(data.open())
    started = time.monotonic()
    data.close()
    assert time.monotonic() - started < 2


def test_an_error_in_a_process_is_told_with_its_place() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> int:
            raise ValueError(f"sample {index} is broken")

    data = opened(Broken(100), num_workers=1)
    data.tell(share())
    with pytest.raises(ValueError, match=r"(?s)in DataLoader worker process 0.*sample 0 is broken"):
        next(data.open())
    data.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_opening_the_data_draws_no_random_number_of_the_script(num_workers: int) -> None:
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    drawn_from(opened(Numbers(100), shuffle=True, num_workers=num_workers), share(), count=8)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before[1:]


# ---- streams, and what is no data ----------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_stream_goes_on_where_it_was(step: int) -> None:
    found = drawn_from(opened(Stream(100)), share(step=step, drawn=range(1, 3)), count=4)
    assert found == [[8 * step + n, 8 * step + n + 1] for n in (2, 4, 10, 12)]


def test_a_stream_ends() -> None:
    assert drawn_from(opened(Stream(21), drop_last=True), share(step=1), count=100) == [
        [first, first + 1] for first in range(8, 20, 2)
    ]


def test_the_position_of_a_stream_is_its_samples() -> None:
    data = opened(Stream(21))
    data.tell(share(step=1))
    assert data.position(80) == Position(0, 80)


class Sizeless:
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "keys", "text"),
    [
        (Numbers(0), {}, "training_data is empty"),
        (Sizeless(), {}, "training_data is a Sizeless: give a dataset with __len__ and __getitem__"),
        (iter([1]), {}, "training_data is a list_iterator: give a dataset"),
        (Stream(9), {"shuffle": True}, "bamboo.data.shuffle = true: training_data is an IterableDataset"),
        (Stream(9), {"num_workers": 2}, "bamboo.data.num_workers = 2: training_data is an IterableDataset"),
    ],
)
def test_what_cannot_be_read_is_refused_with_what_to_do(dataset: Any, keys: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        opened(dataset, **keys)
    assert str(caught.value).startswith(text)


def test_a_batch_that_is_never_filled_is_refused() -> None:
    data = opened(Numbers(7), drop_last=True)
    with pytest.raises(ConfigError, match="7 samples never fill a global batch of 8"):
        data.tell(share())
    data.check(batch=7)


def test_a_list_is_a_dataset() -> None:
    assert drawn_from(opened(["a", "b", "c"]), share(1), count=2) == [["a", "b"], ["c", "a"]]

"""The training data of an engine: opened where training is, for one pipeline's share, and opened anew when that changes.

Worker processes of the `DataLoader` load ahead of training, so what they have drawn says nothing about where training
is: that is counted in committed samples only, and what was loaded ahead is thrown away when the data is opened anew.

They are forks of a worker that is connected to others. A connection ends when the last process lets go of it, so they
let go first thing: else the peers of a dead or closed link would wait for the end of a process that knows nothing of it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from bamboo_ds.config.data import DataConfig
from bamboo_ds.engine.sampler import Draw, Position, Share, ShareSampler, Walk
from bamboo_ds.errors import ConfigError
from bamboo_ds.module import seed_all

_INTERNET = (socket.AF_INET, socket.AF_INET6)


class TrainingData:
    """A dataset, and where in it training is.

    Args:
        dataset: of the map style, or of the iterable style (a stream), which every pipeline reads as a whole.
        settings: `bamboo.data`.
        seed: `bamboo.seed`.
        collate_fn: makes a micro-batch of samples; None: torch's default.
        timeout_seconds: how long a worker process may take for a micro-batch.

    Attributes:
        streams: whether the dataset is a stream, which cannot be opened in the middle.
        loader: what was opened last; None for a stream, or if nothing is open.

    Raises:
        ConfigError: the dataset is empty, has no length, or cannot be read as `bamboo.data` says.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        settings: DataConfig,
        seed: int,
        collate_fn: Callable[..., Any] | None,
        timeout_seconds: float,
    ) -> None:
        self._dataset, self._settings, self._seed, self._collate_fn = dataset, settings, seed, collate_fn
        self._timeout_seconds = timeout_seconds
        self.streams = isinstance(dataset, IterableDataset)
        self._walk = None if self.streams else _walk(dataset, settings, seed)
        if self.streams:
            _check_stream(settings)
        self.loader: DataLoader[Any] | None = None
        self._iterator: Any = None
        self._samples, self._position, self._batch = 0, Position(), 1

    def check(self, *, batch: int) -> None:
        """Refuse a size of the global batch that leaves nothing to train on.

        Raises:
            ConfigError: the dataset never fills it, and `drop_last` is on.
        """
        if self._walk is not None:
            self._walk.check(batch=batch)

    def position(self, samples: int) -> Position:
        """Return where training is after so many samples, taken in batches of the size that was last told.

        Fewer samples than were told of last mean that an earlier checkpoint was loaded without its position; then all
        samples count as taken in batches of that size.
        """
        told, position = (self._samples, self._position) if samples >= self._samples else (0, Position())
        if self._walk is None:
            return Position(0, samples)
        return self._walk.after(position, samples=samples - told, batch=self._batch)

    def tell(self, *, samples: int, batch: int, position: Position | None = None) -> None:
        """Say where training is, and how large batches are from there on; every worker does, drawing or not.

        Args:
            samples: consumed so far.
            batch: samples of a global batch.
            position: that these samples have led to, if a checkpoint or another worker says it. Absent: what follows
                from what was told before.
        """
        self.check(batch=batch)
        self._position = self.position(samples) if position is None else position
        self._samples, self._batch = samples, batch

    def open(self, share: Share) -> Iterator[Any]:
        """Return the micro-batches of a share, from where training is; what was open before is closed."""
        self.close()
        self.tell(samples=share.samples, batch=share.batch, position=self.position(share.samples))
        if self._walk is None:
            return self._stream(share)
        sampler = ShareSampler(self._walk, position=self._position, share=share, seed=self._seed)
        self.loader = self._in_processes(sampler) if self._settings.num_workers else self._here(sampler)
        self._iterator = iter(self.loader)
        return iter(self._iterator)

    def close(self) -> None:
        """End the worker processes; each ends the micro-batch that it is at."""
        iterator, self._iterator, self.loader = self._iterator, None, None
        if self._settings.num_workers and iterator is not None:
            iterator._shutdown_workers()  # torch offers nothing but to hope that nobody holds a reference

    def _here(self, sampler: ShareSampler) -> DataLoader[Any]:
        return DataLoader(
            self._dataset, batch_sampler=sampler, collate_fn=self._collate_fn, generator=_generator(self._seed)
        )

    def _in_processes(self, sampler: ShareSampler) -> DataLoader[Any]:
        return DataLoader(
            _Seeded(self._dataset),
            batch_sampler=sampler,
            collate_fn=self._collate_fn,
            num_workers=self._settings.num_workers,
            timeout=self._timeout_seconds,
            worker_init_fn=_settle,
            multiprocessing_context="fork",  # the others pickle the dataset and import everything anew
            generator=_generator(self._seed),
        )

    def _stream(self, share: Share) -> Iterator[Any]:
        """Yield one pipeline's share of a stream."""
        rest = _Rest(self._dataset, share.samples) if share.samples else self._dataset
        stream = iter(
            DataLoader(rest, batch_size=share.micro_batch_size, collate_fn=self._collate_fn, drop_last=True)
        )
        while whole := list(islice(stream, share.micro_batches)):
            yield from (whole[index] for index in share.drawn if index < len(whole))


def _walk(dataset: Any, settings: DataConfig, seed: int) -> Walk:
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"training_data is a {type(dataset).__name__}: give a dataset with __len__ and __getitem__, an "
            "IterableDataset, or an iterator of your own to train_batch(data_iter=...)"
        )
    if len(dataset) == 0:
        raise ConfigError("training_data is empty")
    order = seed if settings.seed is None else settings.seed
    return Walk(len(dataset), seed=order, shuffle=settings.shuffle, drop_last=settings.drop_last)


def _check_stream(settings: DataConfig) -> None:
    stream = "training_data is an IterableDataset, which"
    if settings.shuffle:
        raise ConfigError(
            f"bamboo.data.shuffle = true: {stream} says its order itself; shuffle inside of it, or give a dataset with "
            "__len__ and __getitem__"
        )
    if settings.num_workers:
        raise ConfigError(
            f"bamboo.data.num_workers = {settings.num_workers}: {stream} each process would read as a whole; leave it "
            "out, or give a dataset with __len__ and __getitem__"
        )


def _generator(seed: int) -> torch.Generator:
    """Return what a `DataLoader` draws the seeds of its workers from; else it takes from the script's generator."""
    return torch.Generator().manual_seed(seed)


def _settle(_: int) -> None:
    """Let go of what a worker process has inherited: connections to other machines, and the handler of SIGTERM."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        # Not closed, as whoever believes to own the number would then use, or close, the file that gets it next.
        with contextlib.suppress(OSError):
            if _is_connection(int(name)):
                os.dup2(nothing, int(name))
    os.close(nothing)


def _is_connection(descriptor: int) -> bool:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return False
    with socket.socket(fileno=os.dup(descriptor)) as found:
        return found.family in _INTERNET


class _Seeded(Dataset[Any]):
    """Draws each micro-batch under its seed, as the worker does that draws itself."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, draw: Draw) -> Any:
        seed_all(draw.seed)
        at_once = getattr(self._dataset, "__getitems__", None)
        return at_once(draw) if at_once else [self._dataset[index] for index in draw]


class _Rest(IterableDataset[Any]):
    """A stream without its beginning."""

    def __init__(self, dataset: Any, skipped: int) -> None:
        self._dataset, self._skipped = dataset, skipped

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._dataset), self._skipped, None)

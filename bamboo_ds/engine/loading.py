"""The training data of an engine: open where training is, for one pipeline's share, and opened anew when that changes.

Worker processes of the `DataLoader` load ahead of training, so what they have drawn says nothing about where training
is: that is counted in committed samples only, and what was loaded ahead is thrown away when the data is opened anew.

They are forks of a worker that is connected to others. A connection ends when the last process lets go of it, so they
let go first thing: else the peers of a link that is dead or closed would wait for processes that know nothing of it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils.signal_handling import _remove_worker_pids

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
        self._share: Share | None = None
        self._position = Position()

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
        share = self._told()
        if self._walk is None:
            return Position(0, samples)
        known, position = (share.samples, self._position) if samples >= share.samples else (0, Position())
        return self._walk.after(position, samples=samples - known, batch=share.batch)

    def tell(self, share: Share, *, position: Position | None = None) -> None:
        """Say where training is, and what is drawn from there on; every worker does, drawing or not.

        Args:
            share: of this pipeline.
            position: that `share.samples` have led to, if a checkpoint or another worker says it. Absent: what follows
                from what was told before.
        """
        self.check(batch=share.batch)
        if self._share is None:
            self._share = replace(share, samples=0)  # its batch has always been the same
        self._position = self.position(share.samples) if position is None else position
        self._share = share

    def open(self) -> Iterator[Any]:
        """Return the micro-batches of the share, from where training is; what was open before is closed."""
        self.close()
        if self._walk is None:
            return self._stream(self._told())
        sampler = ShareSampler(self._walk, position=self._position, share=self._told(), seed=self._seed)
        self.loader = self._in_processes(sampler) if self._settings.num_workers else self._here(sampler)
        self._iterator = iter(self.loader)
        iterator: Iterator[Any] = self._iterator
        return iterator

    def close(self) -> None:
        """End the worker processes at once, whatever they are at."""
        iterator, self._iterator, self.loader = self._iterator, None, None
        if self._settings.num_workers and iterator is not None:
            _kill(iterator)

    def _told(self) -> Share:
        assert self._share is not None, "nobody has told where training is"
        return self._share

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
            worker_init_fn=_let_go,
            multiprocessing_context="fork",  # the others pickle the dataset and import everything anew
            generator=_generator(self._seed),
        )

    def _stream(self, share: Share) -> Iterator[Any]:
        """Yield one pipeline's share of a stream."""
        rest = _Rest(self._dataset, share.samples) if share.samples else self._dataset
        stream = iter(DataLoader(rest, batch_size=share.micro_batch_size, collate_fn=self._collate_fn, drop_last=True))
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


def _let_go(_: int) -> None:
    """Let go of the connections to other machines that a worker process has inherited."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        # Not closed: whoever believes to own the number would use, or close, the file that gets it next.
        with contextlib.suppress(OSError):
            if _is_connection(int(name)):
                os.dup2(nothing, int(name))
    os.close(nothing)


def _is_connection(descriptor: int) -> bool:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return False
    with socket.socket(fileno=os.dup(descriptor)) as found:
        return found.family in _INTERNET


def _kill(iterator: Any) -> None:
    """End a loader's processes now. torch itself does when nobody holds the iterator, and waits for their last load."""
    _remove_worker_pids(id(iterator))  # or it takes their end for an error, which it raises wherever we are then
    iterator._worker_pids_set = False
    for process in iterator._workers:
        process.kill()
    # One may have died with the lock of their event in its hands, so torch would wait for it for ever to set that.
    iterator._workers_done_event = threading.Event()
    iterator._shutdown_workers()


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

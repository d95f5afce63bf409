"""Which samples of the training data a micro-batch holds: a pure function of (seed, epoch, position).

The training data is one endless stream of epochs, and a step takes the next `train_batch_size` samples of it. A
micro-batch of the global batch is a fixed slice of those, so neither the number of pipelines, nor who draws, nor what
was drawn before decides what it holds; after a failure, a join or a restore it is enough to know the position.

The trick of the shuffle is that nobody ever holds it: a permutation of 10**8 samples would be 800 MB on every worker
that draws, and seconds at every epoch's beginning. `Permutation` computes the place of any one sample instead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray
from torch.utils.data import Sampler

from bamboo_ds.errors import ConfigError
from bamboo_ds.plan.seeds import batch_seed

_ROUNDS = 12


@dataclass(frozen=True, slots=True)
class Position:
    """Where in the training data a step begins; `dataclasses.asdict` makes JSON of it.

    Attributes:
        epoch: whole passes before.
        offset: samples of this epoch that were consumed.
    """

    epoch: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Share:
    """What one pipeline draws from a moment on, until shape or batch change.

    Attributes:
        step: optimizer steps committed before.
        samples: consumed before by the whole job.
        micro_batch_size: samples per micro-batch.
        micro_batches: M of the global batch.
        drawn: indices in the global batch of this pipeline's micro-batches.
    """

    step: int
    samples: int
    micro_batch_size: int
    micro_batches: int
    drawn: range

    @property
    def batch(self) -> int:
        """Samples of the global batch."""
        return self.micro_batch_size * self.micro_batches


class Permutation:
    """A permutation of 0 .. length-1 that takes no memory.

    It is a Feistel network. A number is written as a pair (left, right) with 0 <= left < a and 0 <= right < b; a round
    adds a hash of one half to the other, modulo its range, which can be undone, whatever the hash is:

        left  <- left  + hash(right)  mod a        right <- right + hash(left)  mod b

    As a * b may exceed `length`, a result that is too large goes through the rounds again, until it is not. With a the
    root of `length`, few are.

    Args:
        length: how many numbers there are.
        seed: of the job's shuffles.
        epoch: which of them.
    """

    def __init__(self, length: int, *, seed: int, epoch: int) -> None:
        self._length = length
        self._left = math.isqrt(length - 1) + 1
        self._right = -(-length // self._left)
        # NumPy promises that these numbers stay the same in all its versions.
        self._keys = numpy.random.SeedSequence((seed, epoch)).generate_state(_ROUNDS, numpy.uint64).reshape(-1, 2)

    def __call__(self, numbers: NDArray[numpy.uint64]) -> NDArray[numpy.uint64]:
        """Return where the permutation takes each of some numbers."""
        found = self._mixed(numbers)
        while (outside := found >= self._length).any():
            found[outside] = self._mixed(found[outside])
        return found

    def _mixed(self, numbers: NDArray[numpy.uint64]) -> NDArray[numpy.uint64]:
        a, b = numpy.uint64(self._left), numpy.uint64(self._right)
        left, right = numbers // b, numbers % b
        for of_right, of_left in self._keys:
            left = (left + _hash(right, of_right) % a) % a
            right = (right + _hash(left, of_left) % b) % b
        return left * b + right


def _hash(numbers: NDArray[numpy.uint64], key: numpy.uint64) -> NDArray[numpy.uint64]:
    """Mix all bits of each number with a key (the finalizer of SplitMix64)."""
    mixed = numbers ^ key
    mixed = (mixed ^ (mixed >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> numpy.uint64(31))


@dataclass(frozen=True, slots=True)
class Walk:
    """The endless stream of epochs over a dataset.

    Without `drop_last` a batch may begin in one epoch and end in the next. With it, a batch that does not fit into the
    rest of an epoch begins the next one. What is left out depends on the batches that were taken, so where a step
    begins does not follow from the number of samples consumed if the size of batches has changed on the way; then
    somebody has to remember the position.

    Attributes:
        length: samples in the dataset, at least 1.
        seed: of the shuffles.
        shuffle: take each epoch in an order of its own, else in that of the dataset.
        drop_last: leave out of each epoch what does not fill a global batch.
    """

    length: int
    seed: int = 0
    shuffle: bool = False
    drop_last: bool = False

    def check(self, *, batch: int) -> None:
        """Refuse a batch that never fits into an epoch.

        Raises:
            ConfigError: the dataset is smaller, and `drop_last` is on.
        """
        if self.drop_last and batch > self.length:
            raise ConfigError(
                f"bamboo.data.drop_last = true leaves out all of the training data: {self.length} samples never fill "
                f"a global batch of {batch}. Lower train_batch_size, or leave drop_last out"
            )

    def after(self, position: Position, *, samples: int, batch: int) -> Position:
        """Return the position after so many more samples, taken in batches of one size.

        For a checkpoint that holds no position, take it from `Position()` on, with all samples consumed.
        """
        if not self.drop_last:
            return self._normal(position.epoch, position.offset + samples)
        batches, rest = divmod(samples, batch)
        fitting = max(self.length - position.offset, 0) // batch
        if batches <= fitting:
            return Position(position.epoch, position.offset + samples)
        epochs, before = divmod(batches - fitting - 1, self.length // batch)
        return Position(position.epoch + 1 + epochs, (before + 1) * batch + rest)

    def begin(self, position: Position, *, batch: int) -> Position:
        """Return where the batch that is due at a position begins."""
        if self.drop_last and position.offset + batch > self.length:
            return Position(position.epoch + 1)
        return self._normal(position.epoch, position.offset)

    def samples(self, begin: Position, *, first: int, count: int) -> list[int]:
        """Return the indices of some samples of the stream.

        Args:
            begin: where the batch begins.
            first: samples of the batch before the first of these.
            count: how many.
        """
        found: list[int] = []
        at = self._normal(begin.epoch, begin.offset + first)
        while len(found) < count:
            end = min(at.offset + count - len(found), self.length)
            found += self._in_epoch(at.epoch, range(at.offset, end))
            at = Position(at.epoch + 1)
        return found

    def _in_epoch(self, epoch: int, places: range) -> list[int]:
        if not self.shuffle:
            return list(places)
        permutation = Permutation(self.length, seed=self.seed, epoch=epoch)
        indices: list[int] = permutation(numpy.arange(places.start, places.stop, dtype=numpy.uint64)).tolist()
        return indices

    def _normal(self, epoch: int, offset: int) -> Position:
        epochs, offset = divmod(offset, self.length)
        return Position(epoch + epochs, offset)


class Draw(list[int]):
    """Indices of the samples of one micro-batch.

    Attributes:
        seed: under which they are drawn.
    """

    def __init__(self, samples: list[int], *, seed: int) -> None:
        super().__init__(samples)
        self.seed = seed


class ShareSampler(Sampler[list[int]]):
    """Yields, without end, the draws of one pipeline.

    Args:
        walk: through the dataset.
        position: where the first step begins.
        share: what the pipeline draws.
        seed: of the job, for what is random in a draw.
    """

    def __init__(self, walk: Walk, *, position: Position, share: Share, seed: int) -> None:
        self._walk, self._position, self._share, self._seed = walk, position, share, seed

    def __iter__(self) -> Iterator[list[int]]:
        share, position = self._share, self._position
        for step in itertools.count(share.step):
            begin = self._walk.begin(position, batch=share.batch)
            for micro_batch in share.drawn:
                yield self._draw(begin, step, micro_batch)
            position = self._walk.after(begin, samples=share.batch, batch=share.batch)

    def _draw(self, begin: Position, step: int, micro_batch: int) -> Draw:
        size = self._share.micro_batch_size
        samples = self._walk.samples(begin, first=micro_batch * size, count=size)
        return Draw(samples, seed=batch_seed(self._seed, step=step, micro_batch=micro_batch))

"""Draws micro-batches, and keeps those of the running step.

The first and the last stage of a pipeline both draw (one needs inputs, the other labels), and so does the shadow of
the first stage, which is the last. All draw micro-batch m under a seed of its position in training, so a shuffle or a
random crop comes out alike on each of them, seeded by the user or not; a checksum that travels through the pipeline
proves it.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bamboo_ds.engine.state import Value
from bamboo_ds.errors import ConfigError, DataExhaustedError, DataMismatchError
from bamboo_ds.module import seed_all, untouched_randomness
from bamboo_ds.plan.seeds import batch_seed

_DIGEST_BITS = 32


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch.

    Attributes:
        inputs: of the first stage, on the device.
        labels: of the last stage, on the device.
        digest: checksum of both; 0 where they were not in host memory.
    """

    inputs: Value
    labels: Any
    digest: int


class StepBatches:
    """The micro-batches of one step, drawn in order when first asked for.

    Args:
        iterator: the user's, or that of the training data; None on a worker that was given none.
        transform: `set_batch_fn`'s function.
        step: optimizer steps committed before.
        share: indices in the global batch of this pipeline's micro-batches.
        seed: the job's.
        device: where tensors go.
    """

    def __init__(
        self,
        iterator: Iterator[Any] | None,
        *,
        transform: Callable[[Any], Any] | None,
        step: int,
        share: range,
        seed: int,
        device: torch.device,
    ) -> None:
        self._iterator, self._transform, self._step, self._share = iterator, transform, step, share
        self._seed, self._device = seed, device
        self._drawn: list[Batch] = []
        self._raw: list[Any] = []

    def put_back(self) -> Iterator[Any] | None:
        """Return the iterator with what was drawn in front: the step is done again."""
        return self._iterator if self._iterator is None else itertools.chain(self._raw, self._iterator)

    def use(self, iterator: Iterator[Any] | None) -> None:
        """Draw from another iterator from now on."""
        self._iterator = iterator

    def batch(self, micro_batch: int) -> Batch:
        """Return a micro-batch of the share.

        Raises:
            DataExhaustedError: the data ended before it.
            ConfigError: there is no iterator, or it does not yield (inputs, labels).
        """
        while len(self._drawn) <= micro_batch:
            self._drawn.append(self._draw(len(self._drawn)))
        return self._drawn[micro_batch]

    def _draw(self, micro_batch: int) -> Batch:
        if self._iterator is None:
            raise ConfigError("no data: give train_batch(data_iter=...) or initialize(training_data=...)")
        with untouched_randomness():
            seed_all(batch_seed(self._seed, step=self._step, micro_batch=self._share[micro_batch]))
            try:
                raw = next(self._iterator)
            except StopIteration:
                raise DataExhaustedError(self._ended(micro_batch)) from None
            self._raw.append(raw)
            if self._transform is not None:
                raw = self._transform(raw)
        return self._placed(raw)

    def _ended(self, micro_batch: int) -> str:
        return (
            f"data ended in step {self._step} after {micro_batch} of this pipeline's {len(self._share)} micro-batches; "
            "this step was not taken. Stop here, or wrap the loader in deepspeed.utils.RepeatingLoader"
        )

    def _placed(self, raw: Any) -> Batch:
        if not isinstance(raw, tuple | list) or len(raw) < 2:
            raise ConfigError(f"the data iterator yielded {type(raw).__name__}; expected a pair (inputs, labels)")
        inputs = self._on_device(raw[0])
        if not all(isinstance(tensor, torch.Tensor) for tensor in (inputs if isinstance(inputs, tuple) else (inputs,))):
            raise ConfigError("the inputs of a batch must be a tensor or a tuple of tensors")
        return Batch(inputs=inputs, labels=self._on_device(raw[1]), digest=digest(raw[0], raw[1]))

    def _on_device(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().clone().to(self._device)
        if isinstance(value, tuple | list):
            return tuple(self._on_device(part) for part in value)
        return value


def digest(*values: Any) -> int:
    """Return a checksum in 1..2**32 of tensors in host memory, or 0 when one is elsewhere."""
    checksum = 0
    for value in _flat(values):
        if value.device.type != "cpu":
            return 0
        raw = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().data
        checksum = zlib.crc32(raw, zlib.crc32(repr((tuple(value.shape), value.dtype)).encode(), checksum))
    return checksum + 1


def check_same(first: int, last: int, *, step: int, micro_batch: int) -> None:
    """Refuse to train on inputs and labels of different samples.

    Raises:
        DataMismatchError: the checksums of first and last stage differ.
    """
    if first and last and first != last:
        raise DataMismatchError(
            f"the first and the last stage drew different samples for micro-batch {micro_batch} of step {step} "
            f"(checksums {first:#x} and {last:#x}): give both the same data in the same order (same files, same seed)"
        )


def _flat(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _flat(part)

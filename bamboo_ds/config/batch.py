"""Works out the global batch: ``train_batch_size = train_micro_batch_size_per_gpu x M``, whatever D is.

DeepSpeed's ``gradient_accumulation_steps`` counts per pipeline, so its rule needs D to divide M. Ours counts the
micro-batches of the whole global batch, M, which the pipelines share out; the pipelines may then come and go.
"""

from __future__ import annotations

from dataclasses import dataclass

from bamboo_ds.config.keys import Config, show, value_at
from bamboo_ds.errors import ConfigError

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The global batch of one step, in samples and micro-batches."""

    train_batch_size: int
    """Samples of the global batch."""

    micro_batch_size: int
    """Samples of one micro-batch."""

    micro_batches: int
    """M, the micro-batches of the whole global batch: all pipelines together."""


def resolve_batch_sizes(config: Config, pipelines: int) -> BatchSizes:
    """Resolve DeepSpeed's three batch keys; a key that is absent, null or ``"auto"`` follows from the others.

    Args:
        config: The DeepSpeed config.
        pipelines: D, the number of pipelines at start.

    Returns:
        Sizes with ``train_batch_size == micro_batch_size * micro_batches`` and ``micro_batches >= pipelines``.

    Raises:
        ConfigError: Shows the equation that does not hold, with its values.
    """
    train, micro, accumulation = (_positive(config, key) for key in (TRAIN, MICRO, ACCUMULATION))
    if train is not None and micro is not None:
        if accumulation is not None:
            _check_product(train, micro, accumulation, pipelines)
        sizes = BatchSizes(train, micro, _divide(train, micro, called=f"{MICRO} ({micro})"))
    elif train is not None:
        micro_batches = (accumulation or 1) * pipelines
        called = f"{ACCUMULATION} ({accumulation or 1}) x pipelines ({pipelines}) = {micro_batches}"
        sizes = BatchSizes(train, _divide(train, micro_batches, called=called), micro_batches)
    elif micro is not None:
        micro_batches = (accumulation or 1) * pipelines
        sizes = BatchSizes(micro * micro_batches, micro, micro_batches)
    else:
        raise ConfigError(f"no batch size: set {TRAIN} (samples per step), {MICRO}, or both")
    return _with_work_for_all(sizes, pipelines)


def batch_sizes_of(config: Config, micro_batches: int) -> BatchSizes:
    """Return the sizes in a job that has begun with M micro-batches, however many pipelines there are by now.

    Raises:
        ConfigError: the config is of another batch.
    """
    train, micro = _positive(config, TRAIN), _positive(config, MICRO)
    if micro is None:
        micro = _divide(train or 0, micro_batches, called=f"the {micro_batches} micro-batches of the job")
    if train is not None and train != micro * micro_batches:
        raise ConfigError(
            f"{TRAIN} ({train}) is not {MICRO} ({micro}) x the {micro_batches} micro-batches that the job began with"
        )
    return BatchSizes(micro * micro_batches, micro, micro_batches)


def _positive(config: Config, key: str) -> int | None:
    value = value_at(config, key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} = {show(value)}: must be a positive integer")
    return value


def _divide(train: int, divisor: int, *, called: str) -> int:
    quotient, rest = divmod(train, divisor)
    if rest:
        equation = f"{train} = {quotient} x {divisor} + {rest}"
        raise ConfigError(f"{TRAIN} ({train}) is not a multiple of {called}: {equation}")
    return quotient


def _check_product(train: int, micro: int, accumulation: int, pipelines: int) -> None:
    product = micro * accumulation * pipelines
    if train == product:
        return
    message = (
        f"{TRAIN} ({train}) is not {MICRO} ({micro}) x {ACCUMULATION} ({accumulation}) x pipelines ({pipelines}): "
        f"{micro} x {accumulation} x {pipelines} = {product}"
    )
    if train % micro == 0:
        message += (
            f"; leave {ACCUMULATION} out: {TRAIN} does not depend on the number of pipelines, "
            f"they share its {train} / {micro} = {train // micro} micro-batches"
        )
    raise ConfigError(message)


def _with_work_for_all(sizes: BatchSizes, pipelines: int) -> BatchSizes:
    if sizes.micro_batches >= pipelines:
        return sizes
    raise ConfigError(
        f"{TRAIN} ({sizes.train_batch_size}) / {MICRO} ({sizes.micro_batch_size}) = {sizes.micro_batches} "
        f"micro-batches for {pipelines} pipelines: {pipelines - sizes.micro_batches} would have none; "
        f"use a smaller micro-batch, a larger batch, or bamboo.pipelines = {sizes.micro_batches}"
    )

"""Writes the config that DeepSpeed is given: that of a job of one process which runs the whole global batch.

DeepSpeed never sees a peer. Its ``gradient_accumulation_steps`` is M, the micro-batches of the *global* batch, so it
scales every loss by 1/M and the sum over all pipelines is the mean. See "a world of one" in docs/design.md.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, Literal

from bamboo_ds.config.batch import ACCUMULATION, MICRO, TRAIN, BatchSizes
from bamboo_ds.config.keys import Config, is_on, show, value_at
from bamboo_ds.errors import ConfigError, UnsupportedFeatureError

Precision = Literal["fp32", "bf16", "fp16"]

GRADIENT_CLIPPING_DEFAULT = 1.0
"""DeepSpeed clips by this global norm when the key is absent; 0 switches clipping off."""

MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet")
PRECISION_BLOCKS = ("fp16", "bf16", "bfloat16")

FUSED_ADAM_ONLY = ("bias_correction", "set_grad_none")
"""Parameters of DeepSpeed's fused Adam which torch's does not take; at their defaults both do the same."""


def precision(config: Config) -> Precision:
    """Return the type of the layers' weights and activations.

    Raises:
        ConfigError: fp16 and bf16 are both enabled, or such a block is no object.
    """
    fp16, bf16 = _enabled(config, "fp16"), _enabled(config, _bf16_key(config))
    if fp16 and bf16:
        raise ConfigError(f"fp16.enabled and {_bf16_key(config)}.enabled are both true: choose one")
    return "fp16" if fp16 else "bf16" if bf16 else "fp32"


def gradient_clipping(config: Config) -> float:
    """Return the largest global gradient norm; 0.0 means that gradients are not clipped.

    Raises:
        ConfigError: The value is no finite number >= 0.
    """
    value = value_at(config, "gradient_clipping")
    if value is None:
        return GRADIENT_CLIPPING_DEFAULT
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ConfigError(f"gradient_clipping = {show(value)}: must be a number >= 0; 0 switches clipping off")
    return float(value)


def solo_config(config: Config, sizes: BatchSizes, *, reporter: bool, on_cpu: bool) -> dict[str, Any]:
    """Write the config for DeepSpeed's side of one worker.

    Args:
        config: The user's DeepSpeed config; it is not changed.
        sizes: The global batch, of which every worker is told as if it ran all of it.
        reporter: Whether this worker writes monitors and dumps for the whole job; the others must not.
        on_cpu: Whether the worker trains on the CPU, where DeepSpeed would compile its fused optimizers at start.

    Raises:
        UnsupportedFeatureError: The optimizer would have to be compiled at start.
    """
    world = copy.deepcopy(dict(config))
    world |= {TRAIN: sizes.train_batch_size, MICRO: sizes.micro_batch_size, ACCUMULATION: sizes.micro_batches}
    _drop_autos(world)
    _drop_gradient_type(world)
    if not reporter:
        _silence(world)
    if on_cpu:
        _keep_from_compiling(world)
    return world


def _bf16_key(config: Config) -> str:
    """Return the key DeepSpeed reads: the old spelling counts only where the new one is absent."""
    return "bf16" if value_at(config, "bf16") is not None else "bfloat16"


def _enabled(config: Config, key: str) -> bool:
    block = value_at(config, key)
    if block is not None and not isinstance(block, Mapping):
        raise ConfigError(f'{key} = {show(block)}: must be an object, such as {{"enabled": true}}')
    return is_on(value_at(config, f"{key}.enabled"))


def _drop_autos(world: dict[str, Any]) -> None:
    """Take out ``"auto"`` where DeepSpeed would read it as a value."""
    for key in ("gradient_clipping", *PRECISION_BLOCKS):
        if world.get(key) == "auto":
            del world[key]


def _drop_gradient_type(world: dict[str, Any]) -> None:
    """Take out ``grad_accum_dtype``: we accumulate in fp32 anyway, and without ZeRO DeepSpeed refuses the word."""
    if isinstance(world.get("data_types"), dict):
        world["data_types"].pop("grad_accum_dtype", None)


def _silence(world: dict[str, Any]) -> None:
    for monitor in MONITORS:
        if isinstance(world.get(monitor), dict):
            world[monitor]["enabled"] = False
    world["dump_state"] = False


def _keep_from_compiling(world: dict[str, Any]) -> None:
    """Choose optimizers that need no compiler: a compile takes a minute, and one that is killed blocks later starts."""
    name = value_at(world, "optimizer.type")
    if not isinstance(name, str):
        return
    if name.lower() in ("adam", "adamw"):
        _use_torch_adam(world["optimizer"])
    elif name.lower() in ("lamb", "lion"):
        raise UnsupportedFeatureError(
            f"optimizer.type = {show(name)}: DeepSpeed would compile it at start, and has no CPU version without "
            "offloading; on CPU use Adam, AdamW, Adagrad, SGD or another optimizer of torch.optim"
        )


def _use_torch_adam(optimizer: dict[str, Any]) -> None:
    params = optimizer["params"] = dict(optimizer.get("params") or {})
    if not params.setdefault("torch_adam", True):
        raise UnsupportedFeatureError(
            "optimizer.params.torch_adam = false: DeepSpeed would compile its fused Adam at start; on CPU leave it out"
        )
    if params.get("bias_correction", True) is not True:
        raise UnsupportedFeatureError(
            "optimizer.params.bias_correction = false: only the fused Adam can do that, which is not used on CPU"
        )
    for key in FUSED_ADAM_ONLY:
        params.pop(key, None)

"""Builds layers so that every holder of a layer starts with the same weights.

DeepSpeed draws the weights of a stage from whatever the random generator holds when it builds it, so they depend on
the partition. Here the generator is seeded before each layer, from its global index. What was drawn is then put back,
so building layers leaves no trace in the user's random numbers.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.module import LayerSpec, TiedLayerSpec
from torch import nn
from torch.overrides import TorchFunctionMode

from bamboo_ds.errors import ConfigError

LayerFunction = Callable[[Any], Any]


@dataclass(slots=True)
class StageLayers:
    """The layers of one stage on one worker.

    Attributes:
        stage: index of the stage.
        start: global index of its first layer.
        functions: what to call for each layer, in order.
        modules: the `nn.Module` behind each layer that has one, by global layer index.
        tied_keys: key of each tied layer, by global layer index.
    """

    stage: int
    start: int
    functions: list[LayerFunction] = field(default_factory=list)
    modules: dict[int, nn.Module] = field(default_factory=dict)
    tied_keys: dict[int, str] = field(default_factory=dict)


@contextlib.contextmanager
def untouched_randomness() -> Iterator[None]:
    """Put back the state of every random generator at the end."""
    before, of_torch = (random.getstate(), numpy.random.get_state()), _torch_states()
    try:
        yield
    finally:
        random.setstate(before[0])
        numpy.random.set_state(before[1])
        torch.set_rng_state(of_torch[0])
        if len(of_torch) > 1:
            get_accelerator().set_rng_state(of_torch[1])


def _torch_states() -> list[torch.Tensor]:
    """Return the states of torch's generators: of the host, and of the accelerator if there is one."""
    accelerator = get_accelerator()
    on_device = accelerator.device_name() != "cpu"
    return [torch.get_rng_state(), *([accelerator.get_rng_state()] if on_device else [])]


class Unfilled(TorchFunctionMode):
    """Leaves new parameters as memory was: what is drawn for them is overwritten before anybody reads it."""

    _DRAWS = frozenset(
        (
            torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.exponential_, torch.Tensor.bernoulli_,
            torch.Tensor.random_, torch.nn.init.uniform_, torch.nn.init.normal_, torch.nn.init.kaiming_uniform_,
        )
    )  # fmt: skip

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, unless it only fills a parameter."""
        given = kwargs or {}
        filled = args[0] if args else given.get("tensor")  # `torch.nn.init` names it
        if function in self._DRAWS and isinstance(filled, nn.Parameter):
            return filled
        return function(*args, **given)


def seed_all(seed: int) -> None:
    """Seed every random generator that a layer or a dataset may draw from."""
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        accelerator.manual_seed(seed)


def build_stage(
    specs: Sequence[Any],
    *,
    stage: int,
    bounds: tuple[int, int],
    tied: dict[str, nn.Module],
    seed_layer: Callable[[int], None],
    kept: Mapping[int, nn.Module] | None = None,
) -> StageLayers:
    """Build the layers of a stage.

    Args:
        specs: all layers of the model, as given to `PipelineModule`.
        stage: index of the stage.
        bounds: global indices of its first layer and of the one after its last.
        tied: tied modules of this worker by key; missing ones are built and added.
        seed_layer: seeds the generators for a global layer index.
        kept: untied layers that this worker has built before, by global layer index. If given, also empty, the state of
            all others comes from elsewhere.
    """
    kept, filled = kept or {}, kept is None
    layers = StageLayers(stage=stage, start=bounds[0])
    for index in range(*bounds):
        spec = specs[index]
        if isinstance(spec, TiedLayerSpec):
            _add_tied(layers, specs, index, tied, seed_layer, filled=filled)
        elif index in kept:
            _add(layers, index, kept[index])
        elif isinstance(spec, LayerSpec):
            _add(layers, index, _new(spec, partial(seed_layer, index), filled=filled))
        else:
            _add(layers, index, spec)
    return layers


def _new(spec: LayerSpec, seed: Callable[[], None], *, filled: bool) -> Any:
    """Build a layer. Its parameters need not be filled, unless it draws more: that must be as if all had been drawn."""
    seed()
    if not filled:
        before = _torch_states()
        with Unfilled():
            layer = spec.build()
        if all(map(torch.equal, before, _torch_states())):
            return layer
        seed()
    return spec.build()


def _add(layers: StageLayers, index: int, layer: Any) -> None:
    layers.functions.append(layer)
    if isinstance(layer, nn.Module):
        layers.modules[index] = layer


def _add_tied(
    layers: StageLayers,
    specs: Sequence[Any],
    index: int,
    tied: dict[str, nn.Module],
    seed_layer: Callable[[int], None],
    *,
    filled: bool,
) -> None:
    spec = specs[index]
    if spec.key not in tied:
        tied[spec.key] = _new(spec, partial(seed_layer, tied_uses(specs, spec.key)[0]), filled=filled)
    module = tied[spec.key]
    layers.functions.append(tied_function(specs, index, module))
    layers.modules[index] = module
    layers.tied_keys[index] = spec.key


class SavedUse:
    """A use of a tied module through its `forward_fn` that stands in checkpoints.

    DeepSpeed saves what has a `state_dict`, which a bare function has not: a layer that is always used through its
    `forward_fn` would be forgotten.
    """

    def __init__(self, module: nn.Module, forward_fn: Callable[[nn.Module, Any], Any]) -> None:
        self._module, self._forward_fn = module, forward_fn
        self.state_dict, self.load_state_dict = module.state_dict, module.load_state_dict
        self.named_parameters = module.named_parameters

    def __call__(self, value: Any) -> Any:
        """Run the use."""
        return self._forward_fn(self._module, value)


def tied_function(specs: Sequence[Any], index: int, module: nn.Module) -> LayerFunction:
    """Return what to call for a use of a tied module."""
    spec = specs[index]
    if spec.forward_fn is None:
        return module
    if index == saved_use(specs, spec.key):
        return SavedUse(module, spec.forward_fn)
    return partial(spec.forward_fn, module)


def tied_uses(specs: Sequence[Any], key: str) -> list[int]:
    """Return the global layer indices at which a tied layer is used."""
    return [index for index, spec in enumerate(specs) if isinstance(spec, TiedLayerSpec) and spec.key == key]


def saved_use(specs: Sequence[Any], key: str) -> int:
    """Return the use under whose index a tied layer is saved: the first that DeepSpeed would save, else the first."""
    uses = tied_uses(specs, key)
    return next((index for index in uses if specs[index].forward_fn is None), uses[0])


def refuse_hidden_ties(specs: Sequence[Any]) -> None:
    """Refuse parameters that sit in two layers at once: only `TiedLayerSpec` keeps them equal across stages.

    Raises:
        ConfigError: two layers given as modules share a parameter.
    """
    seen: dict[int, int] = {}
    for index, spec in enumerate(specs):
        if not isinstance(spec, nn.Module):
            continue
        for name, parameter in spec.named_parameters():
            first = seen.setdefault(id(parameter), index)
            if first != index:
                raise ConfigError(
                    f"layers {first} and {index} share the parameter {name!r}; "
                    "tie them with TiedLayerSpec, or they drift apart across stages"
                )

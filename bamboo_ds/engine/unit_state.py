"""Takes the state of a layer out of a worker, and puts it into another.

Optimizers are asked for no more than what torch promises of all of them: `state`, by parameter, with anything in it.
Nothing here knows Adam from another. (One exception: see `_steps_of_group`.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from bamboo_ds.checkpoint import UnitState, from_plain, to_plain
from bamboo_ds.checkpoint.state import BUFFER, EXTRA, MASTER, PARAMETER, STATE
from bamboo_ds.engine.gradients import Unit
from bamboo_ds.engine.precision import MixedPrecisionOptimizer, target_of
from bamboo_ds.errors import ConfigError
from bamboo_ds.world import local_device

Description = dict[str, Any]
"""What `describe` returns: plain data that JSON can tell."""


def take(unit: Unit, optimizer: Any) -> UnitState:
    """Return a unit's state: references to the very tensors that are trained, no copies.

    Args:
        unit: of this worker.
        optimizer: any of torch's or DeepSpeed's, a `MixedPrecisionOptimizer`, or None.

    Raises:
        ConfigError: the optimizer, or a module as its extra state, keeps something that is neither a tensor nor plain
            data.
    """
    tensors, values = weights_of(unit), _extras_of(unit)
    for name, parameter in unit.module.named_parameters():
        target = target_of(parameter, optimizer)
        if target is not parameter:
            tensors[MASTER + name] = target.detach()
        for key, value in _state_of(target, optimizer).items():
            if isinstance(value, torch.Tensor):
                tensors[f"{STATE}{name}/{key}"] = value.detach()
            else:
                values[f"{STATE}{name}/{key}"] = _plain(value, f"{STATE}{name}/{key}", unit=unit)
    return UnitState(name=unit.name, tensors=tensors, values=values)


def copy_to_host(state: UnitState, *, into: UnitState | None = None) -> UnitState:
    """Return a copy in host memory that training does not change. On an accelerator it is pinned, and whole on return.

    Tensors become contiguous.

    Args:
        state: wherever its tensors are.
        into: an earlier copy that nobody needs any more: its memory is used again. New memory costs more than copying.
    """
    old = {} if into is None else into.tensors
    copies = {key: _host_memory(tensor, old.get(key)) for key, tensor in state.tensors.items()}
    for key, tensor in state.tensors.items():
        copies[key].copy_(tensor, non_blocking=True)
    if local_device().type != "cpu":
        get_accelerator().synchronize()
    return UnitState(name=state.name, tensors=copies, values=json.loads(json.dumps(state.values)))


@torch.no_grad()
def put(unit: Unit, optimizer: Any, state: UnitState, *, given: bool = False) -> None:
    """Make a unit be in the given state: weights, buffers, masters, and all that modules and the optimizer know of it.

    Everything is checked before anything is changed. Tensors are copied. What the optimizer knows and the state does
    not is deleted; modules keep extra state that the given one lacks. Moments go where their parameter is; the scalars
    of an optimizer (step counts) stay on the host unless it says that it keeps them on the device.

    Args:
        unit: of this worker.
        optimizer: as for `take`; without one, what the state says of optimizers is left out.
        state: wherever its tensors are.
        given: whether nobody else has its tensors: then the optimizer keeps those that are where it wants them.

    Raises:
        ConfigError: the state is of another layer, of other shapes or dtypes, or of another optimizer.
    """
    _check_like(unit, optimizer, describe(state))
    for key, tensor in (weights_of(unit) | _masters_of(unit, optimizer)).items():
        if tensor.data_ptr() != state.tensors[key].data_ptr():  # else it was received in its place
            tensor.copy_(state.tensors[key])
    for key, module in _modules_with_more(unit).items():
        if key in state.values:
            module.set_extra_state(from_plain(state.values[key]))
    if optimizer is None:
        return
    for name, parameter in unit.module.named_parameters():
        _replace_state(target_of(parameter, optimizer), optimizer, _entries(state, name), given=given)


def describe(state: UnitState) -> Description:
    """Return what a receiver must know before the tensors come: names, dtypes, shapes and values."""
    tensors = {
        key: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        for key, tensor in state.tensors.items()
    }
    return {"name": state.name, "tensors": tensors, "values": state.values}


def empty_like(unit: Unit, description: Description, *, optimizer: Any = None) -> UnitState:
    """Return a state in host memory, its tensors not filled yet, into which the described one may be received.

    Args:
        unit: of this worker: what will be put into.
        description: by the sender.
        optimizer: as for `put`, so that what could not be put is refused before it is received.

    Raises:
        ConfigError: as for `put`.
    """
    _check_like(unit, optimizer, description)
    tensors = {
        key: _empty_on_host(torch.Size(meta["shape"]), getattr(torch, meta["dtype"]))
        for key, meta in description["tensors"].items()
    }
    return UnitState(name=unit.name, tensors=tensors, values=dict(description["values"]))


# ---- what there is here --------------------------------------------------------------------------------------------


def weights_of(unit: Unit) -> dict[str, torch.Tensor]:
    """Return parameters and buffers of a unit, by the keys of a `UnitState`: the very tensors that are trained."""
    parameters = {PARAMETER + name: parameter.detach() for name, parameter in unit.module.named_parameters()}
    return parameters | {BUFFER + name: buffer.detach() for name, buffer in unit.module.named_buffers()}


def _extras_of(unit: Unit) -> dict[str, Any]:
    return {
        key: to_plain(module.get_extra_state(), name=f"unit {unit.name}: {key} of {type(module).__name__}")
        for key, module in _modules_with_more(unit).items()
    }


def _modules_with_more(unit: Unit) -> dict[str, nn.Module]:
    """Return the modules that keep more than tensors, by the key of that: `extra/<key in a state_dict>`."""
    return {
        f"{EXTRA}{name}{'.' if name else ''}_extra_state": module
        for name, module in unit.module.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def _masters_of(unit: Unit, optimizer: Any) -> dict[str, torch.Tensor]:
    targets = {name: target_of(parameter, optimizer) for name, parameter in unit.module.named_parameters()}
    own = dict(unit.module.named_parameters())
    return {MASTER + name: target.detach() for name, target in targets.items() if target is not own[name]}


def _state_of(target: nn.Parameter, optimizer: Any) -> Mapping[str, Any]:
    if optimizer is None or target not in optimizer.state:
        return {}
    state: Mapping[str, Any] = optimizer.state[target]
    steps = _steps_of_group(target, optimizer)
    return state if steps is None else {**state, "step": steps}


def _steps_of_group(target: nn.Parameter, optimizer: Any) -> int | None:
    """Return the steps that DeepSpeed's FusedAdam has made of a parameter; None for other optimizers.

    It counts in the last parameter of each group only, for all of them. A layer that leaves the group would leave
    the count behind, or take it away from the others.
    """
    inner = optimizer.optimizer if isinstance(optimizer, MixedPrecisionOptimizer) else optimizer
    if type(inner).__name__ != "FusedAdam":
        return None
    return max(inner.state[one].get("step", 0) for one in _group_of(target, inner)["params"] if one in inner.state)


def _group_of(target: nn.Parameter, optimizer: Any) -> dict[str, Any]:
    return next((g for g in optimizer.param_groups if any(one is target for one in g["params"])), {})


def _plain(value: Any, key: str, *, unit: Unit) -> Any:
    """Return a value as JSON tells it."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        raise ConfigError(
            f"unit {unit.name}: the optimizer keeps {key!r} as {type(value).__name__}, which is neither a tensor nor "
            "plain data; layers cannot move with this optimizer"
        ) from None


def _host_memory(tensor: torch.Tensor, old: torch.Tensor | None) -> torch.Tensor:
    if old is not None and (old.shape, old.dtype) == (tensor.shape, tensor.dtype):
        return old
    return _empty_on_host(tensor.shape, tensor.dtype)


def _empty_on_host(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, pin_memory=local_device().type != "cpu")


# ---- what is put in ------------------------------------------------------------------------------------------------


def _check_like(unit: Unit, optimizer: Any, description: Description) -> None:
    """Refuse a state that does not fit."""
    if description["name"] != unit.name:
        raise ConfigError(f"unit {unit.name}: given the state of unit {description['name']}")
    here = weights_of(unit) | _masters_of(unit, optimizer)
    there = {
        key: (getattr(torch, meta["dtype"]), tuple(meta["shape"]))
        for key, meta in description["tensors"].items()
        if not key.startswith((MASTER, STATE) if optimizer is None else STATE)
    }
    keeping = _modules_with_more(unit)
    there |= {key: None for key in description["values"] if key.startswith(EXTRA) and key not in keeping}
    _check_weights(unit, {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in here.items()}, there)
    if optimizer is not None:
        _check_stepped(unit, optimizer, [*description["tensors"], *description["values"]])


def _check_weights(unit: Unit, here: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    for key, expected in here.items():
        if there.get(key, expected) != expected:
            found = "{}{}".format(*there[key])
            raise ConfigError(f"unit {unit.name}: {key} is {'{}{}'.format(*expected)}, the given state has {found}")
    if missing := sorted(here.keys() - there.keys()):
        raise ConfigError(f"unit {unit.name}: the given state lacks {', '.join(missing)}: it is of another model")
    if strange := sorted(there.keys() - here.keys()):
        raise ConfigError(f"unit {unit.name} has no {', '.join(strange)}: the given state is of another model")


def _check_stepped(unit: Unit, optimizer: Any, keys: list[str]) -> None:
    """Refuse optimizer state of a parameter that the optimizer does not step."""
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    parameters = dict(unit.module.named_parameters())
    for name in sorted({_named(key)[0] for key in keys if key.startswith(STATE)}):
        if name not in parameters or id(target_of(parameters[name], optimizer)) not in stepped:
            raise ConfigError(
                f"unit {unit.name}: the given state has optimizer state of parameter {name!r}, which this worker's "
                "optimizer does not step; give the optimizer the same parameters"
            )


def _named(key: str) -> tuple[str, str]:
    """Return parameter and key of `state/<name>/<key>`."""
    name, _, rest = key.removeprefix(STATE).rpartition("/")
    return name, rest


def _entries(state: UnitState, name: str) -> dict[str, Any]:
    """Return what a state says of one parameter."""
    told = state.values | state.tensors
    return {_named(key)[1]: value for key, value in told.items() if key.startswith(STATE) and _named(key)[0] == name}


def _replace_state(target: nn.Parameter, optimizer: Any, entries: Mapping[str, Any], *, given: bool) -> None:
    if not entries:
        optimizer.state.pop(target, None)
        return
    old, on_device = optimizer.state.get(target, {}), _keeps_scalars_on_device(target, optimizer)
    placed: dict[str, Any] = {}
    for key, value in entries.items():
        device = _device_of(key, value, target, on_device) if isinstance(value, torch.Tensor) else None
        kept = device is None or (given and value.device == device)
        placed[key] = value if kept else _copied(value, old.get(key), device=device)
    optimizer.state[target] = placed


def _keeps_scalars_on_device(target: nn.Parameter, optimizer: Any) -> bool:
    group = _group_of(target, optimizer)
    return bool(group.get("capturable") or group.get("fused"))


def _device_of(key: str, value: torch.Tensor, target: nn.Parameter, scalars_on_device: bool) -> torch.device:
    """Return where a tensor of the optimizer lives. A parameter may be a scalar too, and so are its moments then."""
    counts = value.dim() == 0 and (target.dim() > 0 or key == "step")
    return torch.device("cpu") if counts and not scalars_on_device else target.device


def _copied(value: torch.Tensor, old: Any, *, device: torch.device | None) -> torch.Tensor:
    """Return a copy; in the memory of the old one where that fits."""
    fits = isinstance(old, torch.Tensor) and (old.shape, old.dtype, old.device) == (value.shape, value.dtype, device)
    return (old if fits else torch.empty(value.shape, dtype=value.dtype, device=device)).copy_(value)

"""Between the layers of a worker and what a checkpoint keeps of them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from bamboo_ds.checkpoint import SavedGroup, SavedUnit, UnitState, to_plain
from bamboo_ds.checkpoint.state import BUFFER, EXTRA, MASTER, PARAMETER, STATE
from bamboo_ds.engine.gradients import Unit
from bamboo_ds.engine.parameters import GroupOf, as_in_group
from bamboo_ds.engine.precision import target_of
from bamboo_ds.engine.unit_state import copy_to_host, put, take
from bamboo_ds.errors import ConfigError

_WEIGHT = "weight/"


def saved_unit(unit: Unit, optimizer: Any, groups: Mapping[str, GroupOf], *, exclude_frozen: bool = False) -> SavedUnit:
    """Return what a checkpoint keeps of a unit: references, no copies.

    Args:
        unit: of this worker.
        optimizer: that steps it; None without one.
        groups: where its parameters stand in the optimizer, by the name that all workers share.
        exclude_frozen: leave frozen parameters out.
    """
    state, weights = take(unit, optimizer), dict(unit.module.state_dict())
    named = list(unit.module.named_parameters(remove_duplicate=False))
    frozen = {name for name, parameter in named if exclude_frozen and not parameter.requires_grad}
    weights = {name: value for name, value in weights.items() if name not in frozen}
    rest = {
        key: tensor
        for key, tensor in state.tensors.items()
        if not _is_in(weights, key, tensor) and key.removeprefix(PARAMETER) not in frozen
    }
    values = {key: value for key, value in state.values.items() if key.removeprefix(EXTRA) not in weights}
    return SavedUnit(weights, UnitState(unit.name, rest, values), _by_group(groups))


def _is_in(weights: Mapping[str, Any], key: str, tensor: torch.Tensor) -> bool:
    """Return whether a `state_dict` has a parameter or buffer under its own name: modules may say otherwise."""
    if not key.startswith((PARAMETER, BUFFER)):
        return False
    found = weights.get(key.removeprefix(PARAMETER).removeprefix(BUFFER))
    return (
        isinstance(found, torch.Tensor)
        and (found.dtype, found.shape, found.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        and found.data_ptr() == tensor.data_ptr()
    )


def _by_group(groups: Mapping[str, GroupOf]) -> tuple[SavedGroup, ...]:
    names: dict[int, list[str]] = {}
    for name, group in groups.items():
        names.setdefault(group.number, []).append(name)
    return tuple(SavedGroup(number, groups[members[0]].settings, tuple(members)) for number, members in names.items())


def on_host(saved: SavedUnit, *, into: SavedUnit | None = None) -> SavedUnit:
    """Return a copy in host memory. Weights that are one tensor under two names stay one.

    Args:
        saved: references.
        into: an earlier copy that nobody needs any more, whose memory is used again.
    """
    firsts: dict[tuple[Any, ...], str] = {}
    tensors = dict(saved.rest.tensors)
    first_of: dict[str, str] = {}
    for name, value in saved.weights.items():
        if isinstance(value, torch.Tensor):
            place = (value.data_ptr(), value.dtype, value.shape, value.stride()) if value.numel() else (name,)
            first_of[name] = firsts.setdefault(place, name)
            tensors[_WEIGHT + first_of[name]] = value
    old = None if into is None else UnitState(into.rest.name, {**into.rest.tensors, **_weights_of(into)})
    copies = copy_to_host(UnitState(saved.rest.name, tensors, saved.rest.values), into=old)
    weights = {
        name: copies.tensors[_WEIGHT + first_of[name]] if name in first_of else copy.deepcopy(value)
        for name, value in saved.weights.items()
    }
    rest = {key: tensor for key, tensor in copies.tensors.items() if not key.startswith(_WEIGHT)}
    return SavedUnit(weights, UnitState(saved.rest.name, rest, copies.values), saved.groups)


def _weights_of(saved: SavedUnit) -> dict[str, torch.Tensor]:
    """Return weights by key, each tensor once: two names may have stopped to be one tensor."""
    first = {
        id(value): name for name, value in reversed(list(saved.weights.items())) if isinstance(value, torch.Tensor)
    }
    return {_WEIGHT + name: saved.weights[name] for name in first.values()}


def groups_of_saved(saved: SavedUnit) -> dict[str, GroupOf]:
    """Return where a unit's parameters stood in the optimizer that stepped them."""
    return {name: GroupOf(group.number, group.settings) for group in saved.groups for name in group.names}


# ---- putting it back -----------------------------------------------------------------------------------------------


def whole_state(unit: Unit, saved: SavedUnit, *, strict: bool = True, frozen_too: bool = True) -> UnitState:
    """Return the state that a checkpoint has of a unit.

    Args:
        unit: of this worker.
        saved: of the checkpoint.
        strict: refuse weights that the unit does not have; else the unit's own stand in for those it lacks.
        frozen_too: whether the checkpoint has frozen parameters; else the unit's own stand in for them.

    Raises:
        ConfigError: it has others than the unit.
    """
    taken = take(unit, None)
    own, state = taken.tensors, _with_extras(saved.state(taken.tensors), saved, of=taken)
    strange = sorted(saved.weights.keys() - unit.module.state_dict().keys())
    if strict and strange:
        raise ConfigError(f"layer {unit.name} has no {', '.join(strange)}: the checkpoint is of another model")
    parameters = dict(unit.module.named_parameters())
    for key in own.keys() - state.tensors.keys():
        parameter = parameters.get(key.removeprefix(PARAMETER))
        if not strict or (not frozen_too and parameter is not None and not parameter.requires_grad):
            state.tensors[key] = own[key].clone()
    return state


def _with_extras(state: UnitState, saved: SavedUnit, *, of: UnitState) -> UnitState:
    """Return a state with the extra state of those modules that have some here: a `state_dict` has it among weights."""
    told = {
        key: to_plain(saved.weights[name], name=f"unit {state.name}: {key}")
        for key, name in ((key, key.removeprefix(EXTRA)) for key in of.values)
        if name in saved.weights
    }
    return UnitState(state.name, state.tensors, {**state.values, **told})


def put_saved(unit: Unit, optimizer: Any, state: UnitState) -> None:
    """Put the state of a checkpoint, read for this alone, into a unit; without an optimizer, its weights only.

    Raises:
        ConfigError: it does not fit.
    """
    if optimizer is None:
        tensors = {key: tensor for key, tensor in state.tensors.items() if not key.startswith((MASTER, STATE))}
        values = {key: value for key, value in state.values.items() if key.startswith(EXTRA)}
        state = UnitState(state.name, tensors, values)
    put(unit, optimizer, state, given=True)


def adopt_groups(held: Mapping[str, nn.Parameter], optimizer: Any, saved: Iterable[SavedUnit]) -> None:
    """Let the optimizer's groups have the settings that their parameters had: learning rates, weight decays, ...

    Args:
        held: parameters of this worker, by the name that all share.
        optimizer: whose groups they are in.
        saved: units of the checkpoint.

    Raises:
        ConfigError: parameters that are in one group here were in groups with different settings.
    """
    number_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    told: dict[int, tuple[str, Mapping[str, Any]]] = {}
    for name, settings in ((name, group.settings) for one in saved for group in one.groups for name in group.names):
        number = number_of.get(id(target_of(held[name], optimizer))) if name in held else None
        if number is None:
            continue
        first, before = told.setdefault(number, (name, settings))
        if before != settings:
            raise ConfigError(
                f"parameters {first} and {name} are in one group of the optimizer, but the checkpoint has them in "
                "groups with different settings; make the groups as they were, or load with load_optimizer_states=False"
            )
    for number, (_, settings) in told.items():
        optimizer.param_groups[number].update(as_in_group(settings, optimizer.param_groups[number]))

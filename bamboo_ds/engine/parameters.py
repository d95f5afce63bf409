"""Gives the optimizer the redundant parameters, each in the group that its owner put it in.

A shadow steps the layers of the next stage with the same numbers, so it needs the same learning rate and weight decay
for each. Users express those as parameter groups of their own stage's parameters; the workers tell one another which
parameter (by layer and name) is in which group.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from bamboo_ds.comm import Group
from bamboo_ds.engine.precision import MixedPrecisionOptimizer, target_of
from bamboo_ds.errors import ConfigError
from bamboo_ds.module import BambooPipelineModule

Groups = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Places:
    """How the parameters of the redundant stage stand in this worker's optimizer.

    Attributes:
        own_groups: number of the user's groups; those after them hold redundant parameters only.
        redundant: what the owner steps, in the order of its groups.
        group_of: index here of each of the owner's groups.
    """

    own_groups: int
    redundant: tuple[nn.Parameter, ...] = ()
    group_of: tuple[int, ...] = ()


def with_redundant(
    module: BambooPipelineModule, *, model_parameters: Any, optimizer: Any, world: Group
) -> tuple[list[Any], Places]:
    """Return the parameters for the optimizer: the user's choice for the own stage, the owner's for the redundant one.

    A client optimizer *instance* is extended in place.

    Args:
        module: the layers of this worker.
        model_parameters: as given to `initialize`: None, parameters, or groups of them.
        optimizer: as given to `initialize`: None, an instance, or a callable.
        world: the group of all workers.

    Returns:
        Parameters or groups to construct an optimizer with, and where the redundant ones are.

    Raises:
        ConfigError: a parameter is none of this stage's.
    """
    groups, client = _given(module, model_parameters, optimizer)
    told = {
        row["worker"]: row for row in map(json.loads, world.gather_bytes(json.dumps(_tell(module, groups)).encode()))
    }
    places = _add_redundant(module, groups, told, optimizer if client else None)
    return _constructible(groups, client=client), places


def without_redundant(
    module: BambooPipelineModule, *, model_parameters: Any, optimizer: Any
) -> tuple[list[Any], Places]:
    """Return the parameters for the optimizer of a worker that has no place yet: the user's choice for its layers.

    See `with_redundant`.
    """
    groups, client = _given(module, model_parameters, optimizer)
    return _constructible(groups, client=client), Places(own_groups=len(groups))


def _given(module: BambooPipelineModule, model_parameters: Any, optimizer: Any) -> tuple[Groups, bool]:
    """Return the user's groups, and whether they are those of a client optimizer."""
    client = isinstance(optimizer, torch.optim.Optimizer)
    groups = optimizer.param_groups if client else as_groups(model_parameters, module)
    _refuse_strangers(groups, module)
    return groups, client


def _constructible(groups: Groups, *, client: bool) -> list[Any]:
    """Return groups in the plainest form that an optimizer can be made of."""
    plain = len(groups) == 1 and not client and set(groups[0]) == {"params"}
    if not any(group["params"] for group in groups):
        # A stage without trainable parameters trains nothing but takes part in all else; torch wants at least one.
        groups[0]["params"] = [nn.Parameter(torch.zeros(0))]
    return parameters_of(groups) if plain else groups


@dataclass(frozen=True, slots=True)
class GroupOf:
    """Where a parameter stands in the optimizer of a worker that steps it.

    Attributes:
        number: index of its group there.
        settings: what else is in the group, at present.
    """

    number: int
    settings: Mapping[str, Any]


def groups_of(module: BambooPipelineModule, optimizer: Any) -> dict[str, GroupOf]:
    """Return the group of each held parameter that the optimizer steps, by the name that all workers share."""
    if optimizer is None:
        return {}
    told = [GroupOf(number, _settings(group)) for number, group in enumerate(optimizer.param_groups)]
    group_of = {id(p): told[number] for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    held = _held_names(module)
    targets = {name: id(target_of(parameter, optimizer)) for name, parameter in held.items()}
    return {name: group_of[target] for name, target in targets.items() if target in group_of}


def regroup(module: BambooPipelineModule, optimizer: Any, wanted: Mapping[str, GroupOf]) -> Places:
    """Let the optimizer step what is held now, each parameter in the group of `wanted`, and nothing else.

    In a group, parameters are in the order of layers. What was stepped before keeps its group and its state.

    Args:
        module: which layers are held now.
        optimizer: torch's, DeepSpeed's or a `MixedPrecisionOptimizer`; None does nothing.
        wanted: by name, for all held parameters that are to be stepped.
    """
    if optimizer is None:
        return Places(own_groups=0)
    held = _held_names(module)
    _dismiss(optimizer, keep={id(parameter) for parameter in held.values()})
    indices = {name: _index_of(optimizer, wanted[name]) for name in held if name in wanted}
    members: dict[int, list[nn.Parameter]] = {}
    for name, index in indices.items():
        members.setdefault(index, []).append(_admitted(optimizer, held[name]))
    for index, group in enumerate(optimizer.param_groups):
        group["params"] = members.get(index, [])
    redundant = own_names(module, module.redundant_stage) if module.redundant_stage is not None else {}
    used = sorted({wanted[name].number for name in redundant if name in wanted})
    by_group = [[name for name in redundant if name in wanted and wanted[name].number == number] for number in used]
    return Places(
        own_groups=len(optimizer.param_groups),
        redundant=tuple(redundant[name] for names in by_group for name in names),
        group_of=tuple(indices[names[0]] for names in by_group),
    )


def settings_of(optimizer: Any) -> list[dict[str, Any]]:
    """Return what stands in each group besides parameters, as JSON tells it."""
    return [] if optimizer is None else [_settings(group) for group in optimizer.param_groups]


def adopt_settings(optimizer: Any, told: Sequence[Mapping[str, Any]]) -> None:
    """Let the groups have the settings that `settings_of` told of another worker's; there may be more of them there."""
    if optimizer is None:
        return
    inner = _inner(optimizer)
    for number, settings in enumerate(told):
        if number < len(inner.param_groups):
            inner.param_groups[number].update(as_in_group(settings, inner.param_groups[number]))
        else:
            inner.add_param_group({**as_in_group(settings), "params": []})


def _held_names(module: BambooPipelineModule) -> dict[str, nn.Parameter]:
    """Return all held parameters by the name that all workers share, in the order of layers."""
    named = {name: p for stage in sorted(module.held_stages()) for name, p in own_names(module, stage).items()}
    return dict(sorted(named.items(), key=lambda item: int(item[0].partition(".")[0])))


def _dismiss(optimizer: Any, *, keep: set[int]) -> None:
    """Forget the parameters that are not held any more, and their state."""
    if isinstance(optimizer, MixedPrecisionOptimizer):
        gone = [(one, master) for one, master in optimizer.masters.items() if id(one) not in keep]
        for parameter, master in gone:
            optimizer.dismiss(parameter)
            optimizer.state.pop(master, None)
        keep = keep | {id(master) for master in optimizer.masters.values()}
    for parameter in [parameter for parameter in optimizer.state if id(parameter) not in keep]:
        del optimizer.state[parameter]


def _admitted(optimizer: Any, parameter: nn.Parameter) -> nn.Parameter:
    """Return what the optimizer steps for a parameter, which may be new to it."""
    if isinstance(optimizer, MixedPrecisionOptimizer) and parameter not in optimizer.masters:
        return optimizer.admit(parameter)
    return target_of(parameter, optimizer)


def _index_of(optimizer: Any, wanted: GroupOf) -> int:
    inner = _inner(optimizer)
    return _group_like(inner.param_groups, wanted.number, wanted.settings, inner)


def _inner(optimizer: Any) -> Any:
    return optimizer.optimizer if isinstance(optimizer, MixedPrecisionOptimizer) else optimizer


def as_groups(model_parameters: Any, module: BambooPipelineModule) -> Groups:
    """Return parameters in the form of groups; trainable ones of the own stage when None."""
    given: list[Any] = list(module.parameters()) if model_parameters is None else list(model_parameters)
    if given and isinstance(given[0], dict):
        return [{**group, "params": _trainable(group["params"])} for group in given]
    return [{"params": _trainable(given)}]


def _trainable(parameters: Any) -> list[nn.Parameter]:
    listed: list[Any] = (
        [parameters]
        if isinstance(parameters, torch.Tensor)
        else [p[1] if isinstance(p, tuple) else p for p in parameters]
    )
    return [parameter for parameter in listed if parameter.requires_grad]


def own_names(module: BambooPipelineModule, stage: int) -> dict[str, nn.Parameter]:
    """Return the parameters of a held stage by a name that all workers share.

    It is `<layer>.<name>`, with the first layer of the tie for a tied one.
    """
    first = module.tied_first_layers()
    names: dict[str, nn.Parameter] = {}
    tied = {id(module.tied_module(key)): index for key, index in first.items() if module.tied_module(key) is not None}
    for index, layer in sorted(module.layers_of(stage).items()):
        for name, parameter in layer.named_parameters():
            names.setdefault(f"{tied.get(id(layer), index)}.{name}", parameter)
    return names


def _refuse_strangers(groups: Groups, module: BambooPipelineModule) -> None:
    own = {id(parameter) for parameter in module.parameters()}
    strangers = sum(id(parameter) not in own for group in groups for parameter in group["params"])
    if strangers:
        raise ConfigError(
            f"{strangers} of the given parameters belong to no layer of this worker's stage {module.own_stage}; "
            "take them from model.parameters() after the module was built"
        )


def _tell(module: BambooPipelineModule, groups: Groups) -> dict[str, Any]:
    """Say which own parameters are in which group, in the user's order, and what else is in the group."""
    names = {id(parameter): name for name, parameter in own_names(module, module.own_stage).items()}
    return {
        "worker": module.worker,
        "members": [[names[id(p)] for p in group["params"]] for group in groups],
        "settings": [_settings(group) for group in groups],
    }


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is the same for all members of a group, as JSON tells it."""
    plain = {key: value for key, value in group.items() if key != "params" and _plain(value)}
    return json.loads(json.dumps(plain))


def _plain(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, bool | int | float | str)
        or (isinstance(value, tuple | list) and all(map(_plain, value)))
    )


def _add_redundant(
    module: BambooPipelineModule, groups: Groups, told: Mapping[int, dict[str, Any]], optimizer: Any
) -> Places:
    own_groups = len(groups)
    if module.redundant_stage is None:
        return Places(own_groups=own_groups)
    pipeline = module.plan.place(module.worker).pipeline
    owner = told[module.plan.owners[pipeline][module.redundant_stage]]
    held, mine = own_names(module, module.redundant_stage), {id(p) for p in module.redundant_parameters()}
    group_of, redundant = [], []
    for number, (members, settings) in enumerate(zip(owner["members"], owner["settings"], strict=True)):
        parameters = [held[name] for name in members]
        group_of.append(_group_like(groups, number, settings, optimizer))
        groups[group_of[-1]]["params"].extend(p for p in parameters if id(p) in mine)
        redundant += parameters
    return Places(own_groups=own_groups, redundant=tuple(redundant), group_of=tuple(group_of))


def _group_like(groups: Groups, number: int, settings: Mapping[str, Any], optimizer: Any) -> int:
    """Return the index of a group with the settings of the owner's: best at the same number, else any, else a new one.

    The number alone says nothing: stages may leave out a group that would be empty, or set their own learning rate.
    """
    alike = [index for index, group in enumerate(groups) if _settings(group) == settings]
    if not alike and optimizer is None:
        groups.append({**as_in_group(settings), "params": []})
    elif not alike:
        optimizer.add_param_group({**as_in_group(settings), "params": []})
    return number if number in alike else alike[0] if alike else len(groups) - 1


def as_in_group(settings: Mapping[str, Any], group: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return settings that JSON has told as an optimizer wants them: several numbers (betas) are mostly a tuple.

    Args:
        settings: of a group.
        group: the one that is to have them: what is a list there stays one.
    """
    return {
        key: tuple(value) if isinstance(value, list) and not isinstance(group.get(key), list) else value
        for key, value in settings.items()
    }


def parameters_of(groups: Iterable[Any]) -> list[nn.Parameter]:
    """Return the parameters of a list of parameters or groups, in order."""
    return [parameter for item in groups for parameter in (item["params"] if isinstance(item, dict) else [item])]

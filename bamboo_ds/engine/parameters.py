"""Gives the optimizer the redundant parameters, each in the group that its owner put it in.

A shadow steps the layers of the next stage with the same numbers, so it needs the same learning rate and weight
decay for each. Users express those as parameter groups of their own
stage's parameters; the workers tell one another which parameter (by layer and name) is in which group.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from bamboo_ds.comm import Group
from bamboo_ds.errors import ConfigError
from bamboo_ds.module import BambooPipelineModule

Groups = list[dict[str, Any]]


def with_redundant(module: BambooPipelineModule, *, model_parameters: Any, optimizer: Any, world: Group) -> list[Any]:
    """Return the parameters for the optimizer: the user's choice for the own stage, the owner's for the redundant one.

    A client optimizer *instance* is extended in place.

    Args:
        module: the layers of this worker.
        model_parameters: as given to `initialize`: None, parameters, or groups of them.
        optimizer: as given to `initialize`: None, an instance, or a callable.
        world: the group of all workers.

    Returns:
        Parameters or groups to construct an optimizer with.

    Raises:
        ConfigError: a parameter is none of this stage's.
    """
    client = isinstance(optimizer, torch.optim.Optimizer)
    groups = optimizer.param_groups if client else as_groups(model_parameters, module)
    plain = not client and all(set(group) == {"params"} for group in groups)
    _refuse_strangers(groups, module)
    told = {
        row["worker"]: row for row in map(json.loads, world.gather_bytes(json.dumps(_tell(module, groups)).encode()))
    }
    _add_redundant(module, groups, told, optimizer if client else None)
    if not any(group["params"] for group in groups):
        # A stage without trainable parameters trains nothing but takes part in all else; torch wants at least one.
        groups[0]["params"] = [nn.Parameter(torch.zeros(0))]
    return [parameter for group in groups for parameter in group["params"]] if plain and len(groups) == 1 else groups


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
    """Return the trainable parameters of a held stage by a name that all workers share.

    It is `<layer>.<name>`, with the first layer of the tie for a tied one.
    """
    first = module.tied_first_layers()
    names: dict[str, nn.Parameter] = {}
    tied = {id(module.tied_module(key)): index for key, index in first.items() if module.tied_module(key) is not None}
    for index, layer in sorted(module.layers_of(stage).items()):
        for name, parameter in layer.named_parameters():
            if parameter.requires_grad:
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
    """Say which own parameter is in which group, and what else is in the group."""
    number = {id(parameter): index for index, group in enumerate(groups) for parameter in group["params"]}
    names = own_names(module, module.own_stage)
    return {
        "worker": module.worker,
        "groups": {name: number[id(parameter)] for name, parameter in names.items() if id(parameter) in number},
        "settings": [{key: value for key, value in group.items() if _plain(value)} for group in groups],
    }


def _plain(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, bool | int | float | str)
        or (isinstance(value, tuple | list) and all(map(_plain, value)))
    )


def _add_redundant(
    module: BambooPipelineModule, groups: Groups, told: Mapping[int, dict[str, Any]], optimizer: Any
) -> None:
    if module.redundant_stage is None:
        return
    pipeline = module.plan.place(module.worker).pipeline
    owner = told[module.plan.owners[pipeline][module.redundant_stage]]
    mine = {id(parameter) for parameter in module.redundant_parameters()}
    for name, parameter in own_names(module, module.redundant_stage).items():
        if name in owner["groups"] and id(parameter) in mine:
            _group(groups, owner["groups"][name], owner["settings"], optimizer)["params"].append(parameter)


def _group(groups: Groups, number: int, settings: Groups, optimizer: Any) -> dict[str, Any]:
    """Return the group of a number; those that only the owner has are made here with its settings."""
    while len(groups) <= number:
        wanted = _as_tuples(settings[len(groups)])
        if optimizer is None:
            groups.append({**wanted, "params": []})
        else:
            optimizer.add_param_group({**wanted, "params": []})
    return groups[number]


def _as_tuples(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}


def parameters_of(groups: Iterable[Any]) -> list[nn.Parameter]:
    """Return the parameters of a list of parameters or groups, in order."""
    return [parameter for item in groups for parameter in (item["params"] if isinstance(item, dict) else [item])]

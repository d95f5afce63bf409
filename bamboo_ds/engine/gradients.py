"""Reduces gradients among all holders of a layer, out of place.

The gradient group of a stage is its owners in all pipelines plus their shadows: owners contribute, shadows contribute
zeros, all receive the sum, so original and replica step the same numbers. A tied layer is one unit, reduced among the
holders of all stages that use it: every parameter of it stays equal, whatever the user named. Local gradients stay as
they are until the commit, so that a reduction can be repeated without a member that died in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from bamboo_ds.comm import Group, Network
from bamboo_ds.engine.precision import LocalGradients
from bamboo_ds.module import BambooPipelineModule
from bamboo_ds.plan import Plan


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that one worker holds of one layer, or of one tied layer.

    Attributes:
        name: `<layer>` or `<first layer>:<key>`.
        module: their module.
        parameters: trainable ones, in the order of the module.
        owned: whether this worker contributes gradients and answers for the norm (else it is their shadow).
    """

    name: str
    module: nn.Module
    parameters: tuple[nn.Parameter, ...]
    owned: bool


def reductions_of(module: BambooPipelineModule) -> dict[str, frozenset[int]]:
    """Return the stages whose holders reduce together, by name of the reduction; the same on every worker."""
    stages = {stage_reduction(stage): frozenset({stage}) for stage in range(module.plan.num_stages)}
    return stages | {f"tied-{key}": users for key, users in module.tied_stages().items()}


def stage_reduction(stage: int) -> str:
    """Return the name of the reduction of a stage's untied layers."""
    return f"stage-{stage:04d}"


def units_of(module: BambooPipelineModule) -> dict[str, list[Unit]]:
    """Return the units that this worker holds, by name of their reduction."""
    units: dict[str, list[Unit]] = {}
    for stage in module.held_stages():
        owned = stage == module.own_stage
        units[stage_reduction(stage)] = [
            _unit(str(index), layer, owned) for index, layer in sorted(module.untied_layers(stage).items())
        ]
    first = module.tied_first_layers()
    for key, users in module.tied_stages().items():
        tied = module.tied_module(key)
        if tied is not None:
            units[f"tied-{key}"] = [_unit(f"{first[key]}:{key}", tied, module.own_stage in users)]
    return units


def _unit(name: str, module: nn.Module, owned: bool) -> Unit:
    return Unit(
        name=name, module=module, parameters=tuple(p for p in module.parameters() if p.requires_grad), owned=owned
    )


class Reduction:
    """The units of one gradient group, and their sums in flat buffers, one per dtype.

    Behind each buffer's gradients stands one number per parameter: how many members had a gradient. A parameter that
    none had keeps `None`, as it would in one process: an optimizer
    treats "no gradient" and "zero" differently.
    """

    def __init__(self, units: list[Unit], group: Group | None) -> None:
        self.units, self._group = units, group
        self._parameters = [parameter for unit in units for parameter in unit.parameters]
        self._owned = bool(units) and units[0].owned
        self._flat: dict[torch.dtype, torch.Tensor] = {}
        self._sums: dict[nn.Parameter, torch.Tensor | None] = {}

    def start(self, local: LocalGradients) -> Callable[[], None]:
        """Start to sum; call the result to wait for the sums."""
        if self._group is None:
            self._sums = {parameter: local.of(parameter) for parameter in self._parameters}
            return lambda: None
        waits = [self._group.start_sum(self._fill(dtype, local)) for dtype in self._dtypes()]
        return lambda: self._finish(waits)

    def _dtypes(self) -> list[torch.dtype]:
        """Dtypes of the gradients, in an order that all members share."""
        return sorted({_gradient_dtype(parameter) for parameter in self._parameters}, key=str)

    def _of_dtype(self, dtype: torch.dtype) -> list[nn.Parameter]:
        return [parameter for parameter in self._parameters if _gradient_dtype(parameter) == dtype]

    @torch.no_grad()
    def _fill(self, dtype: torch.dtype, local: LocalGradients) -> torch.Tensor:
        parameters = self._of_dtype(dtype)
        if dtype not in self._flat:
            size = sum(parameter.numel() for parameter in parameters) + len(parameters)
            self._flat[dtype] = torch.empty(size, dtype=dtype, device=parameters[0].device)
        flat = self._flat[dtype].zero_()
        if self._owned:
            for parameter, view, presence in self._views(flat, parameters):
                gradient = local.of(parameter)
                if gradient is not None:
                    view.copy_(gradient)
                    presence.fill_(1)
        return flat

    @staticmethod
    def _views(
        flat: torch.Tensor, parameters: list[nn.Parameter]
    ) -> list[tuple[nn.Parameter, torch.Tensor, torch.Tensor]]:
        views, offset, first_flag = [], 0, flat.numel() - len(parameters)
        for number, parameter in enumerate(parameters):
            views.append(
                (parameter, flat[offset : offset + parameter.numel()].view(parameter.shape), flat[first_flag + number])
            )
            offset += parameter.numel()
        return views

    def _finish(self, waits: list[Callable[[], None]]) -> None:
        for wait in waits:
            wait()
        for flat, parameters in ((self._flat[dtype], self._of_dtype(dtype)) for dtype in self._dtypes()):
            present = flat[flat.numel() - len(parameters) :].tolist()
            for (parameter, view, _), count in zip(self._views(flat, parameters), present, strict=True):
                self._sums[parameter] = view if count else None

    def sums(self) -> Mapping[nn.Parameter, torch.Tensor | None]:
        """Return the summed gradient of each parameter, fp32 for low-precision parameters."""
        return self._sums


def _gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    return torch.float32 if parameter.dtype in (torch.float16, torch.bfloat16) else parameter.dtype


class GradientReducer:
    """All reductions of one worker.

    Args:
        module: which layers it holds.
        network: the gradient groups.
    """

    def __init__(self, module: BambooPipelineModule, network: Network) -> None:
        self.reductions = [
            Reduction(units, network.reductions[name]) for name, units in sorted(units_of(module).items())
        ]
        self.own_parameters = [
            p for reduction in self.reductions for unit in reduction.units if unit.owned for p in unit.parameters
        ]

    def reduce(self, local: LocalGradients) -> None:
        """Sum every unit among its holders. All reductions run at once, so their order cannot deadlock.

        Raises:
            PeerLostError: a member is gone.
        """
        waits = [reduction.start(local) for reduction in self.reductions]
        for wait in waits:
            wait()

    def squared_norms(self) -> dict[str, float]:
        """Return the sum of squares of each owned unit's sum, in double precision."""
        owned = [(unit, reduction) for reduction in self.reductions for unit in reduction.units if unit.owned]
        norms = [_squared_norm(unit, reduction.sums()) for unit, reduction in owned]
        values = torch.stack(norms).tolist() if norms else []
        return {unit.name: value for (unit, _), value in zip(owned, values, strict=True)}

    def sums(self) -> list[tuple[nn.Parameter, torch.Tensor | None]]:
        """Return every held parameter with its summed gradient."""
        return [item for reduction in self.reductions for item in reduction.sums().items()]


@torch.no_grad()
def _squared_norm(unit: Unit, sums: Mapping[nn.Parameter, torch.Tensor | None]) -> torch.Tensor:
    device = unit.parameters[0].device if unit.parameters else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in unit.parameters:
        gradient = sums[parameter]
        if gradient is not None:
            total = total + gradient.double().square().sum()
    return total.cpu()


class Replicas:
    """Keeps what no gradient moves equal among holders.

    Everything is made equal once at the start, buffers at each commit that changed them.

    Args:
        module: which layers this worker holds.
        network: the gradient groups.
    """

    def __init__(self, module: BambooPipelineModule, network: Network) -> None:
        self._plan: Plan = module.plan
        self._stages = reductions_of(module)
        self._sources = {f"tied-{key}": stage for key, stage in module.tied_source_stages().items()}
        self._module = module
        self._network = network
        self._units = units_of(module)
        self._versions: dict[str, list[int]] = {}
        self._note_versions()

    @torch.no_grad()
    def synchronise(self) -> None:
        """Overwrite all parameters and buffers with those of the owner in pipeline 0."""
        for name, units in sorted(self._units.items()):
            for unit in units:
                self._follow(name, [*unit.module.parameters(), *unit.module.buffers()])
        self._note_versions()

    def changed(self) -> bool:
        """Return whether a buffer of an owned unit was written since the last look."""
        return any(
            self._versions[unit.name] != _versions(unit)
            for units in self._units.values()
            for unit in units
            if unit.owned
        )

    @torch.no_grad()
    def follow_buffers(self, stages: frozenset[int]) -> None:
        """Let the buffers of `stages` follow the owner in pipeline 0."""
        for name, units in sorted(self._units.items()):
            if self._stages[name] & stages:
                for unit in units:
                    self._follow(name, list(unit.module.buffers()))
        self._note_versions()

    def _follow(self, name: str, tensors: list[torch.Tensor]) -> None:
        group = self._network.reductions[name]
        if group is None:
            return
        source = self._plan.owners[0][self._sources.get(name, min(self._stages[name]))]
        for tensor in tensors:
            if tensor.numel() == 0:
                continue
            contiguous = tensor.detach().contiguous()
            raw = contiguous.reshape(-1).view(torch.uint8)
            group.broadcast(raw, source=source)
            if group.members[group.rank] != source:
                tensor.copy_(contiguous)

    def _note_versions(self) -> None:
        self._versions = {unit.name: _versions(unit) for units in self._units.values() for unit in units}


def _versions(unit: Unit) -> list[int]:
    return [buffer._version for buffer in unit.module.buffers()]

"""Reduces gradients among all holders of a layer, out of place.

The gradient group of a stage is its owners in all pipelines plus their shadows: owners contribute, shadows contribute
zeros, all receive the sum, so original and replica step the same numbers. A tied layer is one unit, reduced among the
holders of all stages that use it: every parameter of it stays equal, whatever the user named. Local gradients stay as
they are until the commit, so that a reduction can be repeated without a member that died in it.

The members of a group are *seats* (`Plan.seats`). A worker that took over a stage sits on two: it contributes each
stage's gradients from the seat where they came from before, so the group's size, its order and the bits of its sums
stay what they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from bamboo_ds.comm import Network, SeatGroup
from bamboo_ds.engine.precision import LocalGradients
from bamboo_ds.module import BambooPipelineModule
from bamboo_ds.plan import Seat
from bamboo_ds.world import local_device


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that one worker holds of one layer, or of one tied layer.

    Attributes:
        name: `<layer>` or `<first layer>:<key>`.
        module: their module.
        parameters: trainable ones, in the order of the module.
        stages: the stages of this worker, owned or shadowed, that use it.
    """

    name: str
    module: nn.Module
    parameters: tuple[nn.Parameter, ...]
    stages: frozenset[int]


def reductions_of(module: BambooPipelineModule) -> dict[str, frozenset[int]]:
    """Return the stages whose holders reduce together, by name of the reduction; the same on every worker."""
    stages = {stage_reduction(stage): frozenset({stage}) for stage in range(module.plan.num_stages)}
    return stages | {f"tied-{key}": users for key, users in module.tied_stages().items()}


def stage_reduction(stage: int) -> str:
    """Return the name of the reduction of a stage's untied layers."""
    return f"stage-{stage:04d}"


def units_of(module: BambooPipelineModule) -> dict[str, list[Unit]]:
    """Return the units that this worker holds, by name of their reduction."""
    held = frozenset(module.held_stages())
    units: dict[str, list[Unit]] = {}
    for stage in sorted(held):
        units[stage_reduction(stage)] = [
            _unit(str(index), layer, frozenset({stage})) for index, layer in sorted(module.untied_layers(stage).items())
        ]
    first = module.tied_first_layers()
    for key, users in module.tied_stages().items():
        tied = module.tied_module(key)
        if tied is not None:
            units[f"tied-{key}"] = [_unit(f"{first[key]}:{key}", tied, users & held)]
    return units


def _unit(name: str, module: nn.Module, stages: frozenset[int]) -> Unit:
    return Unit(
        name=name, module=module, parameters=tuple(p for p in module.parameters() if p.requires_grad), stages=stages
    )


class Reduction:
    """The units of one gradient group, and their sums in flat buffers, one per dtype.

    Behind each buffer's gradients stands one number per parameter: how many members had a gradient. A parameter that
    none had keeps `None`, as it would in one process: an optimizer treats "no gradient" and "zero" differently.

    Args:
        name: of the reduction.
        units: that this worker holds, of this reduction.
        network: where its group is.
    """

    def __init__(self, name: str, units: list[Unit], network: Network) -> None:
        self.name, self.units, self._network = name, units, network
        self._parameters = [parameter for unit in units for parameter in unit.parameters]
        self._flat: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._sums: dict[nn.Parameter, torch.Tensor | None] = {}
        self._started: tuple[SeatGroup, Callable[[], None]] | None = None

    def reset(self) -> None:
        """Forget the sums: a new step begins."""
        self._started = None

    def start(self, local: LocalGradients) -> Callable[[], None]:
        """Start to sum, unless this group has been asked in this step already; call the result to wait for the sums.

        A wait that was interrupted may be waited for again.
        """
        group = self._network.reduction(self.name)
        if self._started is None or self._started[0] is not group:
            buffers = {dtype: [self._fill(dtype, seat, local) for seat in group.seats] for dtype in self._dtypes()}
            waits = [group.start_sum(rows) for rows in buffers.values()]
            sums = {dtype: rows[0] for dtype, rows in buffers.items()}
            self._started = group, lambda: self._finish(sums, waits)
        return self._started[1]

    def _dtypes(self) -> list[torch.dtype]:
        """Dtypes of the gradients, in an order that all members share."""
        return sorted({_gradient_dtype(parameter) for parameter in self._parameters}, key=str)

    def _of_dtype(self, dtype: torch.dtype) -> list[nn.Parameter]:
        return [parameter for parameter in self._parameters if _gradient_dtype(parameter) == dtype]

    @torch.no_grad()
    def _fill(self, dtype: torch.dtype, seat: Seat, local: LocalGradients) -> torch.Tensor:
        """Return what a seat contributes: the gradients that came from the backwards of its stage."""
        parameters = self._of_dtype(dtype)
        key = seat.home, dtype
        if key not in self._flat:
            size = sum(parameter.numel() for parameter in parameters) + len(parameters)
            self._flat[key] = torch.empty(size, dtype=dtype, device=parameters[0].device)
        flat = self._flat[key].zero_()
        for parameter, view, presence in self._views(flat, parameters):
            gradient = local.of(seat.stage, parameter)
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

    def _finish(self, sums: Mapping[torch.dtype, torch.Tensor], waits: list[Callable[[], None]]) -> None:
        for wait in waits:
            wait()
        for dtype, flat in sums.items():
            parameters = self._of_dtype(dtype)
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
        self.reductions = [Reduction(name, units, network) for name, units in sorted(units_of(module).items())]
        self._network = network

    def parameters(self, stage: int) -> list[nn.Parameter]:
        """Return the trainable parameters that a held stage uses."""
        return [p for unit in self._units(stage) for p in unit.parameters]

    def begin_step(self) -> None:
        """Forget the sums of the step before."""
        for reduction in self.reductions:
            reduction.reset()

    def reduce(self, local: LocalGradients) -> None:
        """Sum every unit among its holders. All reductions run at once, so their order cannot deadlock.

        May be called again in a step: only groups that have lost a member since sum again.

        Raises:
            PeerLostError: a member is gone.
        """
        self._network.form_reductions(reduction.name for reduction in self.reductions)
        waits = [reduction.start(local) for reduction in self.reductions]
        for wait in waits:
            wait()

    def squared_norms(self, stage: int) -> dict[str, float]:
        """Return the sum of squares of each sum of a stage's units, in double precision."""
        used = [(unit, reduction) for reduction in self.reductions for unit in reduction.units if stage in unit.stages]
        norms = [_squared_norm(unit, reduction.sums()) for unit, reduction in used]
        values = torch.stack(norms).tolist() if norms else []
        return {unit.name: value for (unit, _), value in zip(used, values, strict=True)}

    def sums(self) -> list[tuple[nn.Parameter, torch.Tensor | None]]:
        """Return every held parameter with its summed gradient."""
        return [item for reduction in self.reductions for item in reduction.sums().items()]

    def _units(self, stage: int) -> Iterator[Unit]:
        return (unit for reduction in self.reductions for unit in reduction.units if stage in unit.stages)


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

    Everything is made equal once at the start. Buffers (BatchNorm's running statistics) follow the owner in pipeline 0
    in every step that changed them, before the vote: whoever dies afterwards, its shadow has them.

    Args:
        module: which layers this worker holds.
        network: the gradient groups.
    """

    def __init__(self, module: BambooPipelineModule, network: Network) -> None:
        self._stages = reductions_of(module)
        self._sources = {f"tied-{key}": stage for key, stage in module.tied_source_stages().items()}
        self._module, self._network = module, network
        self._units = units_of(module)
        self._buffered = [
            name for name, units in sorted(self._units.items()) if any(list(unit.module.buffers()) for unit in units)
        ]
        self._before: dict[torch.Tensor, torch.Tensor] = {}
        self._versions: dict[torch.Tensor, int] = {}
        self._following: dict[str, _Following] = {}

    @torch.no_grad()
    def synchronise(self) -> None:
        """Overwrite all parameters and buffers with those of the owner in pipeline 0."""
        for name, units in sorted(self._units.items()):
            group, source = self._network.reduction(name), self._source(name)
            for unit in units:
                for tensor in (*unit.module.parameters(), *unit.module.buffers()):
                    _Following(group, self._copies(group, tensor, source=source)).run()

    @torch.no_grad()
    def begin_step(self) -> None:
        """Keep a copy of all buffers: a step that is dropped, or a stage that is replayed, starts from it."""
        self._before = {buffer: buffer.clone() for name in self._buffered for buffer in self._buffers(name)}
        self._versions = {buffer: buffer._version for buffer in self._before}
        self._following = {}

    def changed(self, stage: int) -> bool:
        """Return whether a buffer of a held stage has been written in this step."""
        return any(self._versions.get(buffer) != buffer._version for buffer in self._buffers_of(stage))

    @property
    def followed(self) -> bool:
        """Whether buffers have begun to follow their owners in this step."""
        return bool(self._following)

    @torch.no_grad()
    def restore(self, stages: Iterable[int]) -> None:
        """Put the buffers of held stages back to where the step began."""
        for buffer in (buffer for stage in stages for buffer in self._buffers_of(stage)):
            if buffer in self._before:
                buffer.copy_(self._before[buffer])
                self._versions[buffer] = buffer._version

    def follow_buffers(self) -> None:
        """Let buffers that the owner in pipeline 0 changed in this step follow it.

        May be called again when a member is lost meanwhile: groups that are through do nothing, one that was
        interrupted goes on, one that has lost a member begins anew.

        Raises:
            PeerLostError: a member is gone.
        """
        for name in self._buffered:
            group = self._network.reduction(name)
            if name not in self._following or self._following[name].group is not group:
                self._following[name] = _Following(group, self._exchanges(name, group))
            self._following[name].run()

    @torch.no_grad()
    def _exchanges(self, name: str, group: SeatGroup) -> Iterator[Callable[[], None]]:
        """Ask the group whether the owner in pipeline 0 has written a buffer, and copy if so; yields each wait."""
        source = self._source(name)
        rows = [self._flag(seat.home == source and self.changed(seat.stage)) for seat in group.seats]
        yield group.start_sum(rows)
        if bool(rows[0]):
            for tensor in self._buffers(name):
                yield from self._copies(group, tensor, source=source)

    @staticmethod
    def _flag(raised: bool) -> torch.Tensor:
        return torch.tensor([float(raised)], device=local_device())

    def _source(self, name: str) -> int:
        """Return the seat whose copy counts: that of the stage's home in pipeline 0."""
        return self._module.plan.homes[0][self._sources.get(name, min(self._stages[name]))]

    def _buffers(self, name: str) -> list[torch.Tensor]:
        return [buffer for unit in self._units[name] for buffer in unit.module.buffers()]

    def _buffers_of(self, stage: int) -> list[torch.Tensor]:
        units = (unit for name in self._buffered for unit in self._units[name] if stage in unit.stages)
        return [buffer for unit in units for buffer in unit.module.buffers()]

    @staticmethod
    def _copies(group: SeatGroup, tensor: torch.Tensor, *, source: int) -> Iterator[Callable[[], None]]:
        """Overwrite a tensor with that of a seat; yields the wait."""
        if tensor.numel() == 0:
            return
        contiguous = tensor.detach().contiguous()
        yield group.start_broadcast(contiguous.reshape(-1).view(torch.uint8), source=source)
        if all(seat.home != source for seat in group.seats):
            tensor.copy_(contiguous)


class _Following:
    """A row of exchanges in one group, which may be interrupted and resumed.

    Args:
        group: the group.
        exchanges: starts one exchange after another; yields what waits for it.
    """

    def __init__(self, group: SeatGroup, exchanges: Iterator[Callable[[], None]]) -> None:
        self.group, self._exchanges = group, exchanges
        self._wait: Callable[[], None] | None = None

    def run(self) -> None:
        """Go on to the end."""
        while True:
            if self._wait is None:
                self._wait = next(self._exchanges, None)
            if self._wait is None:
                return
            self._wait()
            self._wait = None

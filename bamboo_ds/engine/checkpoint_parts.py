"""What a checkpoint consists of, and which of it this worker writes.

Weights lie in DeepSpeed's own files, so stock DeepSpeed reads them. What else a layer needs lies beside them by layer
and parameter name, so it follows the layer wherever that is trained next. `bamboo_ds.checkpoint.manifest` draws it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.pipe.module import LayerSpec, TiedLayerSpec
from torch import nn

from bamboo_ds.checkpoint import (
    Closing,
    Held,
    Manifest,
    Part,
    SavedUnit,
    UnitFiles,
    layer_name,
    stage_name,
    unit_name,
    write_rest,
    write_weights,
    writers,
)
from bamboo_ds.checkpoint.storage import Sink
from bamboo_ds.engine.common import CommonState
from bamboo_ds.engine.gradients import Unit, stage_reduction, units_of
from bamboo_ds.engine.parameters import GroupOf, groups_of
from bamboo_ds.engine.precision import MixedPrecisionOptimizer
from bamboo_ds.engine.saved_units import saved_unit
from bamboo_ds.engine.stock_checkpoints import StockCheckpoints
from bamboo_ds.engine.unit_state import take
from bamboo_ds.module.layers import saved_use

WriteFile = Callable[[Sink], None]


class CheckpointParts(StockCheckpoints):
    """The part of the engine that knows what to write."""

    @property
    def _is_first(self) -> bool:
        """Whether this is the worker that does what one does for all."""
        return self._source.worker == min(self.plan.workers)

    def _units_to_write(self) -> dict[str, Unit]:
        """Return the units that this worker writes: of those of its stages, its share among the pipelines."""
        mine: dict[str, Unit] = {}
        for stage in self.owned_stages:
            units, owners = self._units_of_stage(stage), self.plan.stage_owners(stage)
            chosen = writers({name: Held(owners, take(unit, self.optimizer).bytes) for name, unit in units.items()})
            mine |= {name: unit for name, unit in units.items() if chosen[name] == self._source.worker}
        return mine

    def _units_of_stage(self, stage: int) -> dict[str, Unit]:
        """Return the units that the owners of a stage write: its layers, and the ties that it is the first to use."""
        by_reduction, ties = units_of(self.module), self.module.tied_stages()
        first = [f"tied-{key}" for key, users in ties.items() if min(users) == stage]
        found = [*by_reduction[stage_reduction(stage)], *(unit for name in first for unit in by_reduction[name])]
        return {unit.name: unit for unit in found}

    def _all_units(self) -> frozenset[str]:
        """Return the names of all units of the model, held here or not."""
        untied = [
            str(index)
            for index, spec in enumerate(self.module._layer_specs)
            if isinstance(spec, LayerSpec | nn.Module) and not isinstance(spec, TiedLayerSpec)
        ]
        return frozenset([*untied, *(f"{index}:{key}" for key, index in self.module.tied_first_layers().items())])

    def _saved_units(self, *, exclude_frozen: bool = False) -> dict[str, SavedUnit]:
        """Return the state of the units that this worker writes: references, no copies."""
        groups = groups_of(self.module, self.optimizer)
        return {
            name: saved_unit(unit, self.optimizer, _of_unit(groups, name), exclude_frozen=exclude_frozen)
            for name, unit in self._units_to_write().items()
        }

    def _part(self, tag: str, saved: Mapping[str, SavedUnit], stages: Mapping[int, WriteFile]) -> Part:
        """Return what this worker writes.

        Args:
            tag: of the checkpoint.
            saved: the units that it writes.
            stages: what writes DeepSpeed's files of stages.
        """
        files = {stage_name(stage): write for stage, write in stages.items()}
        units: dict[str, UnitFiles] = {}
        for name, one in saved.items():
            has_rest = one.rest.tensors or one.rest.values or one.groups
            weights = layer_name(self._file_index(name)) if one.weights else ""
            units[name] = UnitFiles(weights, unit_name(name) if has_rest else "", self._source.worker)
            if units[name].weights:
                files[units[name].weights] = partial(_write_weights, one)
            if units[name].rest:
                files[units[name].rest] = partial(_write_rest, one)
        return Part(tag, self._source.worker, files, units)

    def _file_index(self, unit: str) -> int:
        """Return the layer under whose index DeepSpeed keeps the weights of a unit."""
        layer, _, key = unit.partition(":")
        return saved_use(self.module._layer_specs, key) if key else int(layer)

    def _stage_files(self, client_state: Mapping[str, Any]) -> dict[int, WriteFile]:
        """Return what writes DeepSpeed's files of the stages that this worker owns in pipeline 0, as they are now.

        That of a stage that was taken over is without optimizer state.
        """
        return {
            stage: partial(_write_pickle, {**self._stage_file(optimizer=stage == self.stage_id), **client_state})
            for stage in (self.owned_stages if self.pipeline_id == 0 else ())
        }

    def _copied_stage_files(self) -> dict[int, WriteFile]:
        """Return what writes these files as they are now, whatever training does meanwhile; without optimizer state."""
        if self.pipeline_id != 0:
            return {}
        file = io.BytesIO()
        _write_pickle(self._stage_file(optimizer=False), file)
        return dict.fromkeys(self.owned_stages, partial(_write_bytes, file.getvalue()))

    def _closing(self, tag: str, *, latest: bool, common: Mapping[str, Any], keep: int | None = None) -> Closing:
        """Return what the first worker needs to know to write the manifest."""
        manifest = Manifest(
            tag=tag,
            step=self.global_steps,
            samples=self.global_samples,
            num_stages=self.num_stages,
            num_pipelines=self.plan.num_pipelines,
            parts=tuple(self.module.parts),
            periodic=keep is not None,
            common={**asdict(CommonState.of(self)), "optimizer": self._optimizer_kind(), **common},
        )
        return Closing(manifest, self.plan.workers, self._all_units(), latest=latest, keep=keep)

    def _optimizer_kind(self) -> str:
        """Return the name of the optimizer's class: another one cannot use its state."""
        optimizer = self.optimizer
        if optimizer is None:
            return "none"
        return type(optimizer.optimizer if isinstance(optimizer, MixedPrecisionOptimizer) else optimizer).__name__


def _of_unit(groups: Mapping[str, GroupOf], unit: str) -> dict[str, GroupOf]:
    layer = unit.partition(":")[0]
    return {name: group for name, group in groups.items() if name.partition(".")[0] == layer}


def _write_weights(saved: SavedUnit, sink: Sink) -> None:
    write_weights(sink, saved.weights)


def _write_rest(saved: SavedUnit, sink: Sink) -> None:
    write_rest(sink, saved)


def _write_bytes(data: bytes, sink: Sink) -> None:
    sink.write(data)


def _write_pickle(state: Any, sink: Sink) -> None:
    torch.save(state, sink)  # type: ignore[arg-type]  # it wants no more than these two methods

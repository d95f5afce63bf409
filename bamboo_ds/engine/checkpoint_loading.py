"""`load_checkpoint`: DeepSpeed's meaning, for any shape of the job.

All workers load the same checkpoint, or none does: what one finds to be damaged, no other takes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.utils import logger
from torch import nn

from bamboo_ds.checkpoint import (
    DamagedError,
    Manifest,
    SavedUnit,
    Storage,
    choose,
    choose_or_tell,
    from_plain,
    open_storage,
    read_manifest,
    read_unit,
    stage_name,
)
from bamboo_ds.engine.checkpoint_saving import PICKLED, CheckpointSaving, DroppedError
from bamboo_ds.engine.parameters import own_names
from bamboo_ds.engine.precision import MixedPrecisionOptimizer
from bamboo_ds.engine.sampler import Position
from bamboo_ds.engine.saved_units import adopt_groups, put_saved, whole_state
from bamboo_ds.errors import ConfigError
from bamboo_ds.world import world_of_one

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")

Agree = Callable[[Callable[[], str]], list[str]]
"""Lets every worker do some work and say a row; returns the rows that are not empty, the same to all."""


@dataclass(frozen=True, slots=True)
class _How:
    """The arguments of `load_checkpoint` that say what is loaded."""

    load_module_strict: bool = True
    load_optimizer_states: bool = True
    load_lr_scheduler_states: bool = True
    load_module_only: bool = False


class CheckpointLoading(CheckpointSaving):
    """The part of the engine that loads when it is told to."""

    _came_later: bool = False
    """Whether this worker came when the others were training, and has all from them."""

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[Any, Any]:
        """Load a checkpoint, whatever shape it was saved in; every worker calls it.

        See `deepspeed.DeepSpeedEngine.load_checkpoint`. Without a tag it is the one that `latest` names; if that is
        damaged, the newest whole one. A worker that came when the others were training has all from them: it is given
        what the script had saved, and loads nothing.

        Raises:
            ConfigError: the checkpoint does not exist, is damaged, or is of another model.
        """
        if custom_load_fn is not None:
            raise ConfigError("load_checkpoint(custom_load_fn=...) is not supported with pipelines")
        how = _How(load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only)
        with self._guarded(), world_of_one(quiet=self.global_rank != 0):
            if self._came_later:
                return self._seen_later(load_dir, tag)
            while True:
                # Who comes with another epoch before anybody has trained is about to load as well.
                with contextlib.suppress(DroppedError):
                    return self._load(load_dir, tag, how)

    def _load(self, load_dir: str, tag: str | None, how: _How) -> tuple[Any, Any]:
        storage, damaged = open_storage(load_dir), dict[str, str]()
        while True:
            chosen = self._chosen(storage, tag, damaged, agree=self._in_round)
            if chosen is None:
                logger.warning(f"load_checkpoint: there is no `latest` in {load_dir}: nothing is loaded")
                return None, None
            manifest = manifest_of(storage, chosen)
            if manifest is None:
                return self._load_from_stock(load_dir, chosen, how)
            read = self._read(storage, manifest, list(self._held_units()), damaged, agree=self._in_round)
            if read is not None:
                self._put(manifest, read, how)
                return _path_of(load_dir, manifest, self.stage_id), _client_state_of(storage, manifest, self.stage_id)
            if tag is not None:
                raise ConfigError(f"checkpoint {load_dir}/{tag} is damaged: {damaged[tag]}")

    def _seen_later(self, load_dir: str, tag: str | None) -> tuple[Any, Any]:
        storage = open_storage(load_dir)
        chosen = choose(storage, tag, {})
        manifest = None if chosen is None else manifest_of(storage, chosen)
        if chosen is None or manifest is None:
            return (None, None) if chosen is None else (os.path.join(load_dir, chosen, stage_name(0)), {})
        return _path_of(load_dir, manifest, self.stage_id), _client_state_of(storage, manifest, self.stage_id)

    def _chosen(self, storage: Storage, tag: str | None, damaged: Mapping[str, str], *, agree: Agree) -> str | None:
        """Return the tag that the first worker chooses: they might not all see the same at the same moment."""
        row = agree(lambda: json.dumps(choose_or_tell(storage, tag, damaged)) if self._is_first else "")[0]
        chosen, error = json.loads(row)
        if error:
            raise ConfigError(error)
        return None if chosen is None else str(chosen)

    def _read(
        self, storage: Storage, manifest: Manifest, units: list[str], damaged: dict[str, str], *, agree: Agree
    ) -> dict[str, SavedUnit] | None:
        """Read the units that this worker needs; None if some worker finds the checkpoint to be damaged."""
        if manifest.units.keys() != self._all_units():
            raise ConfigError(
                f"checkpoint {storage.path}/{manifest.tag} is of another model: it has {len(manifest.units)} layers "
                f"with modules, this one has {len(self._all_units())}"
                f"{_differences(manifest.units.keys(), self._all_units())}"
            )
        read: dict[str, SavedUnit] = {}

        def work() -> str:
            try:
                read.update({name: read_unit(storage, manifest, name) for name in units})
            except (DamagedError, OSError) as error:
                return f"worker {self._source.worker} finds that {error}"
            return ""

        reasons = agree(work)
        if not reasons:
            return read
        damaged[manifest.tag] = reasons[0]
        logger.warning(f"checkpoint {storage.path}/{manifest.tag} cannot be used: {reasons[0]}")
        return None

    def _load_from_stock(self, load_dir: str, tag: str, how: _How) -> tuple[Any, Any]:
        loaded = self._load_stock(
            load_dir,
            tag,
            load_module_strict=how.load_module_strict,
            load_optimizer_states=how.load_optimizer_states,
            load_lr_scheduler_states=how.load_lr_scheduler_states,
            load_module_only=how.load_module_only,
        )
        self._set_training_data(self.training_data)
        return loaded

    # ---- taking over what was read -----------------------------------------------------------------------------

    def _put(self, manifest: Manifest, read: Mapping[str, SavedUnit], how: _How) -> None:
        units, common = self._held_units(), manifest.common
        with_optimizer = how.load_optimizer_states and not how.load_module_only and self.optimizer is not None
        if with_optimizer:
            self._check_optimizer(manifest)
        frozen_too = not common.get("without_frozen", False)
        states = {
            name: whole_state(unit, read[name], strict=how.load_module_strict, frozen_too=frozen_too)
            for name, unit in units.items()
        }
        for name, unit in units.items():
            put_saved(unit, self.optimizer if with_optimizer else None, states[name])
        if with_optimizer:
            adopt_groups(self._held_parameters_by_name(), self.optimizer, read.values())
            self._adopt_scaler(common)
        elif isinstance(self.optimizer, MixedPrecisionOptimizer):
            self.optimizer.refresh_masters()
        self._adopt_common(common, how)

    def _check_optimizer(self, manifest: Manifest) -> None:
        saved, ours = manifest.common["optimizer"], self._optimizer_kind()
        if saved != ours:
            raise ConfigError(
                f"checkpoint {manifest.tag} was saved with the optimizer {saved}, this job has {ours}: use the same, "
                "or load with load_optimizer_states=False"
            )

    def _held_parameters_by_name(self) -> dict[str, nn.Parameter]:
        held = [own_names(self.module, stage) for stage in self.module.held_stages()]
        return {name: parameter for names in held for name, parameter in names.items()}

    def _adopt_scaler(self, common: Mapping[str, Any]) -> None:
        scaler = self.optimizer.loss_scaler if isinstance(self.optimizer, MixedPrecisionOptimizer) else None
        if scaler is not None and common["scaler"] is not None:
            vars(scaler).update(from_plain(common["scaler"]))

    def _adopt_common(self, common: Mapping[str, Any], how: _How) -> None:
        position = None
        if not how.load_module_only:
            for name in _COUNTERS:
                setattr(self, name, common["counters"][name])
            position = Position(*common["position"]) if common["position"] else None
            if how.load_lr_scheduler_states and self.lr_scheduler is not None and common["scheduler"] is not None:
                self.lr_scheduler.load_state_dict(from_plain(common["scheduler"]))
        self._set_training_data(self.training_data, position=position)

    def _set_training_data(self, training_data: Any, *, position: Position | None = None) -> None:
        """Draw from the training data where training is."""
        raise NotImplementedError  # the engine has the data


def manifest_of(storage: Storage, tag: str) -> Manifest | None:
    """Return the manifest of a checkpoint that was found whole a moment ago; None if it is stock DeepSpeed's."""
    try:
        return read_manifest(storage, tag)
    except DamagedError as error:
        raise ConfigError(f"checkpoint {storage.path}/{tag} is damaged: {error}") from None


def _differences(theirs: Any, ours: Any) -> str:
    only = [f"only there: {', '.join(sorted(theirs - ours)[:5])}"] if theirs - ours else []
    only += [f"only here: {', '.join(sorted(ours - theirs)[:5])}"] if ours - theirs else []
    return f" ({'; '.join(only)})" if only else ""


def _client_state_of(storage: Storage, manifest: Manifest, stage: int) -> Any:
    told = manifest.common.get("client_state", {})
    if told != PICKLED:
        return from_plain(told)
    # It holds objects of the script's own, so it is read as DeepSpeed reads it: only load what you trust.
    name = stage_name(min(stage, manifest.num_stages - 1))
    state = torch.load(io.BytesIO(storage.read(f"{manifest.tag}/{name}")), map_location="cpu", weights_only=False)
    return {key: value for key, value in state.items() if key not in ("module", "optimizer", "lr_scheduler")}


def _path_of(load_dir: str, manifest: Manifest, stage: int) -> str:
    return os.path.join(load_dir, manifest.tag, stage_name(min(stage, manifest.num_stages - 1)))

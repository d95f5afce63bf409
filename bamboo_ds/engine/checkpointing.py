"""`save_checkpoint` and `load_checkpoint`: DeepSpeed's meaning, for any shape of the job.

All workers take part, and go on together: each waits, in rounds of the commit, until all have written, or have read
what they need. A worker that is lost meanwhile changes no more than who does what.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from deepspeed.utils import logger
from torch import nn

from bamboo_ds.checkpoint import (
    Closing,
    DamagedError,
    Manifest,
    SavedUnit,
    Storage,
    UnitState,
    await_notes,
    check_whole,
    close,
    find,
    from_plain,
    latest,
    open_storage,
    read_manifest,
    read_unit,
    remove_manifest,
    stage_name,
    to_plain,
    write_part,
)
from bamboo_ds.engine.background_checkpoints import BackgroundCheckpoints
from bamboo_ds.engine.common import CommonState
from bamboo_ds.engine.gradients import Unit
from bamboo_ds.engine.parameters import GroupOf, own_names
from bamboo_ds.engine.precision import MixedPrecisionOptimizer
from bamboo_ds.engine.sampler import Position
from bamboo_ds.engine.saved_units import adopt_groups, groups_of_saved, put_saved, whole_state
from bamboo_ds.errors import ConfigError, StateLostError
from bamboo_ds.world import world_of_one

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_PICKLED = "pickled"

Agree = Callable[[Callable[[], str]], list[str]]
"""Lets every worker do some work and say a row; returns the rows that are not empty, the same for all."""


class _DroppedError(Exception):
    """Another epoch has begun while a checkpoint was written: who has come with it knows nothing of it."""


@dataclass(frozen=True, slots=True)
class _How:
    """The arguments of `load_checkpoint` that say what is loaded."""

    load_module_strict: bool = True
    load_optimizer_states: bool = True
    load_lr_scheduler_states: bool = True
    load_module_only: bool = False


@dataclass(frozen=True, slots=True)
class Restored:
    """What a worker has read of a checkpoint, to go on from there.

    Attributes:
        tag: of the checkpoint.
        step: optimizer steps committed.
        states: of the units that were asked for, by name.
        groups: where their parameters stood in an optimizer, by the name that all workers share.
        common: counters, schedules and settings.
    """

    tag: str
    step: int
    states: Mapping[str, UnitState]
    groups: Mapping[str, GroupOf]
    common: CommonState


class Checkpointing(BackgroundCheckpoints):
    """The part of the engine that saves and loads when it is told to."""

    _came_later: bool = False
    """Whether this worker came when the others were training, and has all from them."""

    # ---- saving ------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save a checkpoint; every worker calls it. See `deepspeed.DeepSpeedEngine.save_checkpoint`.

        It exists when all of it is written. `save_dir` may be `s3://bucket/prefix`.

        Returns:
            Whether it was saved. It was not if another epoch began meanwhile: who has come with it knows nothing of
            this call.
        """
        client_state = client_state or {}
        tag = str(tag) if tag is not None else f"global_step{self.global_steps}"
        common = {"client_state": _client_state(client_state), "without_frozen": exclude_frozen_parameters}

        def write() -> str:
            saved = self._saved_units(exclude_frozen=exclude_frozen_parameters)
            write_part(storage, self._part(tag, saved, self._stage_files(client_state, optimizer=True)))
            return ""

        with self._guarded(), world_of_one(quiet=self.global_rank != 0):
            storage = open_storage(save_dir)
            try:
                self._adopt_or_drop()
                self._agree_on(tag, storage)
                self._in_round(write)
                closing = self._closing(tag, latest=save_latest, common=common)
                self._in_round(lambda: self._close(storage, closing))
            except _DroppedError:
                logger.warning(f"checkpoint {tag} was not finished: another epoch has begun ({self.plan.cause})")
                return False
        return True

    def _in_round(self, work: Callable[[], str]) -> list[str]:
        """Do some work and say a row of it; wait until all have. See `Agree`.

        When a worker is lost meanwhile, all do their work again: it may be shared out otherwise now.
        """
        while True:
            with self._through_plan_changes(self._adopt_or_drop):
                return self._committer.share("" if self._committer.decided() else work())

    def _adopt_or_drop(self) -> None:
        epoch = self.plan.epoch
        self._adopt_newest()
        if self.plan.epoch != epoch:
            raise _DroppedError

    def _agree_on(self, tag: str, storage: Storage) -> None:
        """See that all mean the same, and that no checkpoint looks whole while it is overwritten."""
        told = [json.loads(row) for row in self._in_round(lambda: json.dumps([tag, self._is_there(storage, tag)]))]
        if len(tags := {row[0] for row in told}) > 1:
            raise ConfigError(f"save_checkpoint(tag=...): workers give different tags: {', '.join(sorted(tags))}")
        if any(row[1] for row in told):
            self._in_round(lambda: self._remove(storage, tag))

    def _is_there(self, storage: Storage, tag: str) -> bool:
        try:
            return self._is_first and read_manifest(storage, tag) is not None
        except DamagedError:
            return True

    def _remove(self, storage: Storage, tag: str) -> str:
        if self._is_first:
            remove_manifest(storage, tag)
        return ""

    def _close(self, storage: Storage, closing: Closing) -> str:
        if self._is_first:
            notes = await_notes(storage, closing, given_up=lambda: False, timeout_seconds=self.bamboo.timeout_seconds)
            close(storage, closing, notes)
        return ""

    # ---- loading -----------------------------------------------------------------------------------------------

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
                with contextlib.suppress(_DroppedError):
                    return self._load(load_dir, tag, how)

    def _load(self, load_dir: str, tag: str | None, how: _How) -> tuple[Any, Any]:
        storage, damaged = open_storage(load_dir), dict[str, str]()
        while True:
            chosen = self._chosen(storage, tag, damaged, agree=self._in_round)
            if chosen is None:
                logger.warning(f"load_checkpoint: there is no `latest` in {load_dir}: nothing is loaded")
                return None, None
            manifest = _manifest(storage, chosen)
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
        chosen = _choose(storage, tag, {})
        manifest = None if chosen is None else _manifest(storage, chosen)
        if chosen is None or manifest is None:
            return (None, None) if chosen is None else (os.path.join(load_dir, chosen, stage_name(0)), {})
        return _path_of(load_dir, manifest, self.stage_id), _client_state_of(storage, manifest, self.stage_id)

    def _chosen(self, storage: Storage, tag: str | None, damaged: Mapping[str, str], *, agree: Agree) -> str | None:
        """Return the tag that the first worker chooses: they might not all see the same at the same moment."""
        row = agree(lambda: json.dumps(_choose_or_tell(storage, tag, damaged)) if self._is_first else "")[0]
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
            put_saved(unit, self.optimizer if with_optimizer else None, read[name], states[name])
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

    # ---- when nobody alive has a layer -------------------------------------------------------------------------

    def _restored(self, units: Mapping[str, Unit]) -> Restored:
        """Read what the newest whole checkpoint of `bamboo.checkpoint.path` has of the units that this worker needs.

        All workers of the plan call it, in an epoch that is not settled. Nothing is put anywhere yet.

        Raises:
            StateLostError: there is none.
            PlanChangedError: as from every wait.
        """
        settings = self.bamboo.checkpoint
        if settings is None:
            raise StateLostError("there are no checkpoints: bamboo.checkpoint.path would say where they are")
        storage, damaged = open_storage(settings.path), dict[str, str]()
        while True:
            row = self._in_world(lambda: json.dumps(_newest_but(storage, damaged)) if self._is_first else "")[0]
            tag, reasons = json.loads(row)
            manifest = None if tag is None else _manifest(storage, tag)
            if manifest is None:
                raise StateLostError(f"there is no whole checkpoint in {settings.path}{reasons}")
            read = self._read(storage, manifest, list(units), damaged, agree=self._in_world)
            if read is not None:
                return self._restored_from(manifest, read, units)

    def _in_world(self, work: Callable[[], str]) -> list[str]:
        """See `Agree`; for an epoch that is not settled, in which there are no rounds yet."""
        return [row.decode() for row in self.network.world.gather_bytes(work().encode()) if row]

    @staticmethod
    def _restored_from(manifest: Manifest, read: Mapping[str, SavedUnit], units: Mapping[str, Unit]) -> Restored:
        known = {one.name for one in fields(CommonState)}
        return Restored(
            tag=manifest.tag,
            step=manifest.step,
            states={name: whole_state(unit, read[name]) for name, unit in units.items()},
            groups={name: group for one in read.values() for name, group in groups_of_saved(one).items()},
            common=CommonState(**{name: value for name, value in manifest.common.items() if name in known}),
        )


# ---- which one -----------------------------------------------------------------------------------------------------


def _manifest(storage: Storage, tag: str) -> Manifest | None:
    """Return the manifest of a checkpoint that was found whole a moment ago; None if it is stock DeepSpeed's."""
    try:
        return read_manifest(storage, tag)
    except DamagedError as error:
        raise ConfigError(f"checkpoint {storage.path}/{tag} is damaged: {error}") from None


def _choose_or_tell(storage: Storage, tag: str | None, damaged: Mapping[str, str]) -> tuple[str | None, str]:
    """Return what is chosen, or why nothing can be."""
    try:
        return _choose(storage, tag, damaged), ""
    except (DamagedError, OSError) as error:
        return None, str(error)


def _choose(storage: Storage, tag: str | None, damaged: Mapping[str, str]) -> str | None:
    """Return the checkpoint to load; None if nothing says that there is one.

    Raises:
        DamagedError: none that could be meant is whole.
    """
    named = latest(storage) if tag is None else tag
    if named is not None and named not in damaged:
        reason = _why_not_whole(storage, named)
        if reason is None:
            return named
        if tag is not None:
            raise DamagedError(f"checkpoint {storage.path}/{tag} cannot be loaded: {reason}")
        logger.warning(f"checkpoint {storage.path}/{named}, which `latest` names, cannot be used: {reason}")
    newest, reasons = _newest_but(storage, damaged)
    if newest is None and (named is not None or damaged):
        raise DamagedError(f"there is no whole checkpoint in {storage.path}{reasons}")
    return newest


def _why_not_whole(storage: Storage, tag: str) -> str | None:
    """Return what is wrong with a checkpoint; None if nothing is, as far as can be seen without reading all of it."""
    try:
        manifest = read_manifest(storage, tag)
        if manifest is not None:
            check_whole(storage, manifest)
            return None
    except DamagedError as error:
        return str(error)
    files = storage.sizes(tag)
    if not files:
        return "it does not exist"
    # Stock DeepSpeed's has no manifest; one of ours without a manifest was not finished.
    return "it has no manifest: it was not finished" if any(name.startswith("bamboo_") for name in files) else None


def _newest_but(storage: Storage, damaged: Mapping[str, str]) -> tuple[str | None, str]:
    """Return the newest whole checkpoint that was not found to be damaged, and what is wrong with the others."""
    found = find(storage)
    for tag, reason in found.skipped.items():
        logger.warning(f"checkpoint {storage.path}/{tag} is skipped: {reason}")
    wrong = "".join(f"; {tag}: {reason}" for tag, reason in sorted({**found.skipped, **damaged}.items()))
    return next((one.tag for one in found.whole if one.tag not in damaged), None), wrong


def _differences(theirs: Any, ours: Any) -> str:
    only = [f"only there: {', '.join(sorted(theirs - ours)[:5])}"] if theirs - ours else []
    only += [f"only here: {', '.join(sorted(ours - theirs)[:5])}"] if ours - theirs else []
    return f" ({'; '.join(only)})" if only else ""


# ---- what the script saves beside ----------------------------------------------------------------------------------


def _client_state(state: Mapping[str, Any]) -> Any:
    """Return a script's own state as JSON tells it; a mark where it cannot, as it is in DeepSpeed's file too."""
    try:
        return to_plain(dict(state), name="client_state")
    except ConfigError:
        return _PICKLED


def _client_state_of(storage: Storage, manifest: Manifest, stage: int) -> Any:
    told = manifest.common.get("client_state", {})
    if told != _PICKLED:
        return from_plain(told)
    # It holds objects of the script's own, so it is read as DeepSpeed reads it: only load what you trust.
    name = stage_name(min(stage, manifest.num_stages - 1))
    state = torch.load(io.BytesIO(storage.read(f"{manifest.tag}/{name}")), map_location="cpu", weights_only=False)
    return {key: value for key, value in state.items() if key not in ("module", "optimizer", "lr_scheduler")}


def _path_of(load_dir: str, manifest: Manifest, stage: int) -> str:
    return os.path.join(load_dir, manifest.tag, stage_name(min(stage, manifest.num_stages - 1)))

"""Checkpoints in DeepSpeed's files, for a job of the same shape.

Each stage's owner in pipeline 0 writes what stock DeepSpeed's would: one file per layer and one per stage, with the
optimizer state of the stage's own parameters only. A worker reads its own stage's file, and that of the stage it
shadows for its redundant layers.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from bamboo_ds.engine.evaluation import Evaluation
from bamboo_ds.engine.parameters import Places
from bamboo_ds.engine.precision import MixedPrecisionOptimizer, target_of
from bamboo_ds.errors import ConfigError
from bamboo_ds.world import world_of_one

_SHAPE = "bamboo_shape"


class Checkpointing(Evaluation):
    """The saving and loading part of the engine."""

    _places: Places

    def _name_checkpoint_files(self) -> None:
        """Name and write files as DeepSpeed does for this stage: owners in pipeline 0 write."""
        self.checkpoint_mp_rank, self.mp_world_size = self.stage_id, self.num_stages
        self.save_non_zero_checkpoint = self.pipeline_id == 0

    def save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save a checkpoint; every worker calls it. See `deepspeed.DeepSpeedEngine.save_checkpoint`.

        `latest` is written when all files are complete.
        """
        tag = str(tag) if tag is not None else f"global_step{self.global_steps}"
        with self._guarded():
            self._agree_on(tag)
            with world_of_one(quiet=self.global_rank != 0):
                os.makedirs(os.path.join(save_dir, tag), exist_ok=True)
                super().save_checkpoint(
                    save_dir,
                    tag=tag,
                    client_state=client_state or {},
                    save_latest=False,
                    exclude_frozen_parameters=exclude_frozen_parameters,
                )
            self.network.world.barrier()
            if save_latest and self.global_rank == 0:
                _write_whole(os.path.join(save_dir, "latest"), tag)
            self.network.world.barrier()
        return True

    def _agree_on(self, tag: str) -> None:
        tags = {row.decode() for row in self.network.world.gather_bytes(tag.encode())}
        if len(tags) > 1:
            raise ConfigError(f"save_checkpoint(tag=...): workers give different tags: {', '.join(sorted(tags))}")

    def _common_checkpoint_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state: dict[str, Any] = super()._common_checkpoint_state(*args, **kwargs)
        state["optimizer"] = self._stage_state()
        state["dp_world_size"], state["mp_world_size"] = self.plan.num_pipelines, self.num_stages
        state[_SHAPE] = {"parts": list(self.module.parts)}
        return state

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
        """Load a checkpoint of the same shape; every worker calls it. See `deepspeed.DeepSpeedEngine.load_checkpoint`.

        Raises:
            ConfigError: it was saved with other stages.
        """
        if custom_load_fn is not None:
            raise ConfigError("load_checkpoint(custom_load_fn=...) is not supported with pipelines")
        with self._guarded(), world_of_one(quiet=self.global_rank != 0):
            tag = tag if tag is not None else _latest(load_dir)
            if tag is None:
                return super().load_checkpoint(load_dir, tag)  # warns as DeepSpeed does
            own = self._read_stage(load_dir, tag, self.stage_id)
            self._check_shape(own, load_dir, tag)
            self._check_layers(os.path.join(load_dir, tag))
            loaded = super().load_checkpoint(
                load_dir,
                tag=tag,
                load_module_strict=load_module_strict,
                load_optimizer_states=False,
                load_lr_scheduler_states=load_lr_scheduler_states,
                load_module_only=load_module_only,
            )
            self._load_held(load_dir, tag, own, load_optimizer_states and not load_module_only)
        self._set_training_data(self.training_data)
        return loaded

    def _read_stage(self, load_dir: str, tag: str, stage: int) -> dict[str, Any]:
        """Read the file of a stage."""
        path = self._get_ckpt_name(load_dir, tag, mp_placeholder=f"{stage:02d}")
        if not os.path.exists(path):
            raise ConfigError(
                f"checkpoint {os.path.join(load_dir, tag)} has no file {os.path.basename(path)}: it does not exist, "
                f"is incomplete, or was saved with fewer than {self.num_stages} stages"
            )
        # DeepSpeed pickles configs and loss scalers into this file, so it is read as DeepSpeed reads it: only load
        # what you trust.
        return torch.load(path, map_location="cpu", weights_only=False)

    def _check_shape(self, saved: dict[str, Any], load_dir: str, tag: str) -> None:
        parts, stages = saved.get(_SHAPE, {}).get("parts"), saved.get("mp_world_size")
        if stages != self.num_stages or (parts is not None and parts != list(self.module.parts)):
            raise ConfigError(
                f"checkpoint {os.path.join(load_dir, tag)} was saved with {stages} stages "
                f"(layer bounds {parts or 'unknown'}), this job has {self.num_stages} "
                f"(bounds {list(self.module.parts)}); loading into another shape is not supported yet"
            )

    def _check_layers(self, folder: str) -> None:
        """Refuse a checkpoint that lacks a layer of the own stage."""
        for index, layer in enumerate(self.module.forward_funcs):
            if hasattr(layer, "load_state_dict") and not self.module.ckpt_layer_path_list(folder, index):
                name = os.path.basename(self.module.ckpt_layer_path(folder, index))
                raise ConfigError(f"checkpoint {folder} has no file {name}: it is incomplete, or of another model")

    def _load_held(self, load_dir: str, tag: str, own: dict[str, Any], load_optimizer_states: bool) -> None:
        """Load the redundant layers, and the optimizer state of all held ones."""
        self.network.world.barrier()
        self._replicas.synchronise()
        if isinstance(self.optimizer, MixedPrecisionOptimizer):
            self.optimizer.refresh_masters()
        if not load_optimizer_states or self.optimizer is None:
            return
        own_targets = [target for group in self._own_targets() for target in group]
        self._load_stage_state(own["optimizer"], own_targets, range(self._places.own_groups))
        if self.module.redundant_stage is not None:
            saved = self._read_stage(load_dir, tag, self.module.redundant_stage)
            targets = [target_of(parameter, self.optimizer) for parameter in self._places.redundant]
            self._load_stage_state(saved["optimizer"], targets, self._places.group_of)
        if isinstance(self.optimizer, MixedPrecisionOptimizer):
            self.optimizer.cast_masters()

    # ---- optimizer state of one stage --------------------------------------------------------------------------

    def _stage_state(self) -> dict[str, Any] | None:
        """Return the optimizer state of the own stage as its `state_dict` would be without redundant layers."""
        if self.optimizer is None:
            return None
        targets = self._own_targets()
        order = {id(target): index for index, target in enumerate(target for group in targets for target in group)}
        state = {order[id(target)]: value for target, value in self.optimizer.state.items() if id(target) in order}
        groups = [
            {
                **{key: value for key, value in group.items() if key != "params"},
                "params": [order[id(target)] for target in members],
            }
            for group, members in zip(self.optimizer.param_groups, targets, strict=False)
        ]
        plain = {"state": state, "param_groups": groups}
        if not isinstance(self.optimizer, MixedPrecisionOptimizer):
            return plain
        masters = [target.detach().clone() for group in targets for target in group]
        return {"optimizer_state_dict": plain, "masters": masters, "loss_scaler": self.optimizer.loss_scaler}

    def _own_targets(self) -> list[list[nn.Parameter]]:
        """Return what the optimizer steps for the own stage: the user's groups in their order, as DeepSpeed saves."""
        own = {id(target_of(parameter, self.optimizer)) for parameter in self.module.parameters()}
        groups = self.optimizer.param_groups[: self._places.own_groups]
        return [[target for target in group["params"] if id(target) in own] for group in groups]

    def _load_stage_state(self, saved: dict[str, Any], targets: list[nn.Parameter], group_of: Sequence[int]) -> None:
        """Put a stage's saved state into the optimizer, parameter by parameter.

        Args:
            saved: by its owner.
            targets: what is stepped here for that stage, in the owner's order.
            group_of: index here of each of the owner's groups.
        """
        plain = self._plain_state(saved)
        indices = [index for group in plain["param_groups"] for index in group["params"]]
        if len(indices) != len(targets) or len(plain["param_groups"]) != len(group_of):
            raise ConfigError(
                f"the checkpoint holds optimizer state of {len(indices)} parameters in "
                f"{len(plain['param_groups'])} groups where this job has {len(targets)} in {len(group_of)}; "
                "give the optimizer the same parameters, or load with load_optimizer_states=False"
            )
        for target, index in zip(targets, indices, strict=True):
            if index in plain["state"]:
                self.optimizer.state[target] = {
                    key: _placed(value, target) for key, value in plain["state"][index].items()
                }
        for number, settings in zip(group_of, plain["param_groups"], strict=True):
            self.optimizer.param_groups[number].update({k: v for k, v in settings.items() if k != "params"})
        if isinstance(self.optimizer, MixedPrecisionOptimizer):
            self._load_masters(targets, saved)

    def _plain_state(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Return the part of a saved state that is the wrapped optimizer's."""
        mixed = isinstance(self.optimizer, MixedPrecisionOptimizer)
        if mixed != ("masters" in saved) or not (mixed or "param_groups" in saved):
            raise ConfigError(
                "the checkpoint's optimizer state is of another precision, or of DeepSpeed's own bf16 or fp16 "
                "optimizer; load with load_optimizer_states=False"
            )
        return saved["optimizer_state_dict"] if mixed else saved

    @torch.no_grad()
    def _load_masters(self, targets: list[nn.Parameter], saved: dict[str, Any]) -> None:
        for target, master in zip(targets, saved["masters"], strict=True):
            target.copy_(master)
        if saved["loss_scaler"] is not None:
            self.optimizer.loss_scaler = saved["loss_scaler"]


def _placed(value: Any, target: nn.Parameter) -> Any:
    """Copy a saved value; moments go where their parameter is, step counts stay on the host."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone() if value.dim() == 0 else value.clone().to(target.device)


def _latest(load_dir: str) -> str | None:
    path = os.path.join(load_dir, "latest")
    if not os.path.isfile(path):
        return None
    with open(path) as file:
        return file.read().strip()


def _write_whole(path: str, text: str) -> None:
    """Write a small file so that it is there whole or not at all."""
    with tempfile.NamedTemporaryFile("w", dir=os.path.dirname(path) or ".", delete=False) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)

"""Reads stock DeepSpeed's checkpoints, and writes the file of a stage in which it looks for optimizer state.

In such a checkpoint the weights belong to layers, so they fit any number of stages; the optimizer state belongs to a
stage, and counts its parameters instead of naming them, so it fits the same stages only. A worker reads its own
stage's file, and that of the stage it shadows for its redundant layers.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from bamboo_ds.engine.evaluation import Evaluation
from bamboo_ds.engine.parameters import Places
from bamboo_ds.engine.precision import MixedPrecisionOptimizer, target_of
from bamboo_ds.errors import ConfigError

_SHAPE = "bamboo_shape"


class StockCheckpoints(Evaluation):
    """The part of the engine that knows DeepSpeed's checkpoints."""

    _places: Places

    def _name_checkpoint_files(self) -> None:
        """Name files as DeepSpeed does for this stage."""
        self.checkpoint_mp_rank, self.mp_world_size = self.stage_id, self.num_stages

    # ---- the file of a stage -----------------------------------------------------------------------------------

    def _stage_file(self, *, optimizer: bool) -> dict[str, Any]:
        """Return what DeepSpeed keeps of this worker's stage; without its optimizer's state where that is elsewhere."""
        state = self._common_checkpoint_state(None, False, False)
        state["optimizer"] = self._stage_state() if optimizer else None
        state["dp_world_size"], state["mp_world_size"] = self.plan.num_pipelines, self.num_stages
        state[_SHAPE] = {"parts": list(self.module.parts)}
        return state

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

    # ---- loading -----------------------------------------------------------------------------------------------

    def _load_stock(
        self,
        load_dir: str,
        tag: str,
        *,
        load_module_strict: bool,
        load_optimizer_states: bool,
        load_lr_scheduler_states: bool,
        load_module_only: bool,
    ) -> tuple[Any, Any]:
        """Load a checkpoint that has no manifest of ours; see `deepspeed.DeepSpeedEngine.load_checkpoint`.

        Raises:
            ConfigError: its optimizer state was asked for, and it was saved with other stages.
        """
        with_optimizer = load_optimizer_states and not load_module_only and self.optimizer is not None
        own = self._read_stage(load_dir, tag, self.stage_id if with_optimizer else 0)
        if with_optimizer:
            self._check_shape(own, load_dir, tag)
        self._check_layers(os.path.join(load_dir, tag))
        loaded: tuple[Any, Any] = super().load_checkpoint(
            load_dir,
            tag=tag,
            load_module_strict=load_module_strict,
            load_optimizer_states=False,
            load_lr_scheduler_states=load_lr_scheduler_states,
            load_module_only=load_module_only,
        )
        self._load_held(load_dir, tag, own, with_optimizer)
        return loaded

    def _read_stage(self, load_dir: str, tag: str, stage: int) -> dict[str, Any]:
        """Read the file of a stage."""
        path = self._get_ckpt_name(load_dir, tag, mp_placeholder=f"{stage:02d}")
        if not os.path.exists(path):
            raise ConfigError(
                f"checkpoint {os.path.join(load_dir, tag)} has no file {os.path.basename(path)}: it does not exist, "
                f"is incomplete, or was saved with fewer than {self.num_stages} stages (then its weights can be loaded "
                "with load_optimizer_states=False)"
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
                f"(bounds {list(self.module.parts)}), and stock DeepSpeed's optimizer state fits the same stages only; "
                "load with load_optimizer_states=False"
            )

    def _check_layers(self, folder: str) -> None:
        """Refuse a checkpoint that lacks a layer of the own stage."""
        for index, layer in enumerate(self.module.forward_funcs):
            if hasattr(layer, "load_state_dict") and not self.module.ckpt_layer_path_list(folder, index):
                name = os.path.basename(self.module.ckpt_layer_path(folder, index))
                raise ConfigError(f"checkpoint {folder} has no file {name}: it is incomplete, or of another model")

    def _load_held(self, load_dir: str, tag: str, own: dict[str, Any], with_optimizer: bool) -> None:
        """Load the redundant layers, and the optimizer state of all held ones."""
        self.network.world.barrier()
        self._replicas.synchronise()
        if isinstance(self.optimizer, MixedPrecisionOptimizer):
            self.optimizer.refresh_masters()
        if not with_optimizer:
            return
        own_targets = [target for group in self._own_targets() for target in group]
        self._load_stage_state(own["optimizer"], own_targets, range(self._places.own_groups))
        if self.module.redundant_stage is not None:
            saved = self._read_stage(load_dir, tag, self.module.redundant_stage)
            targets = [target_of(parameter, self.optimizer) for parameter in self._places.redundant]
            self._load_stage_state(saved["optimizer"], targets, self._places.group_of)
        if isinstance(self.optimizer, MixedPrecisionOptimizer):
            self.optimizer.cast_masters()

    def _load_stage_state(self, saved: Any, targets: list[nn.Parameter], group_of: Sequence[int]) -> None:
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

    def _plain_state(self, saved: Any) -> dict[str, Any]:
        """Return the part of a saved state that is the wrapped optimizer's."""
        mixed = isinstance(self.optimizer, MixedPrecisionOptimizer)
        if saved is None or mixed != ("masters" in saved) or not (mixed or "param_groups" in saved):
            raise ConfigError(
                "the checkpoint holds no optimizer state, or that of another precision or of DeepSpeed's own bf16 or "
                "fp16 optimizer; load with load_optimizer_states=False"
            )
        plain: dict[str, Any] = saved["optimizer_state_dict"] if mixed else saved
        return plain

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

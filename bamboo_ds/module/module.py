"""A `PipelineModule` that builds its own stage and, off the module tree, the redundant layers of the next.

DeepSpeed sees a world of one, so its module would hold all layers. `_partition_layers` is where a stage is chosen,
and there the plan's stage is put in. The redundant layers are kept off the tree: `parameters()`, parameter counts and
checkpoints then show the own stage only, as users and DeepSpeed expect.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from deepspeed.runtime import utils as deepspeed_utils
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.pipe.module import PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipelineParallelGrid, ProcessTopology
from torch import nn
from torch.utils.checkpoint import checkpoint

from bamboo_ds.errors import ConfigError, UnsupportedFeatureError
from bamboo_ds.module.grid import PlanGrid
from bamboo_ds.module.layers import (
    StageLayers,
    build_stage,
    refuse_hidden_ties,
    saved_use,
    seed_all,
    tied_function,
    untouched_randomness,
)
from bamboo_ds.module.seat import Cut, declared_costs, take_seat
from bamboo_ds.plan import Plan
from bamboo_ds.plan.partition import balanced_parts
from bamboo_ds.plan.seeds import initial_seed
from bamboo_ds.world import World, init_distributed, local_device, world_of_one

SeedOfLayer = Callable[[int], int]

_STATE_BYTES = 16  # of a parameter: itself, a master or gradient, and two moments
_STOCK_CHECKPOINTS = (checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint)


class BambooPipelineModule(PipelineModule):
    """A drop-in for `deepspeed.pipe.PipelineModule`, with its constructor.

    Layers given as `LayerSpec` start from a seed per global layer index, so the weights do not depend on the number
    of stages.

    Args:
        layers: the model as a sequence of `LayerSpec`, `TiedLayerSpec`, modules or functions.
        num_stages: P; alternatively `topology`.
        topology: a DeepSpeed topology with the axes `pipe` and `data`.
        loss_fn: `loss_fn(outputs, labels)`; absent: the last layer returns the loss.
        seed_layers: draw the weights of layer i under the seed `base_seed + i`.
        seed_fn: seeds the generators, with `seed_layers`.
        base_seed: see `seed_layers`.
        partition_method: `"parameters"`, `"uniform"` or `"type:REGEX"`.
        activation_checkpoint_interval: layers per checkpointed block; 0 for none.
        activation_checkpoint_func: a checkpoint function of your own; DeepSpeed's two mean torch's non-reentrant
            checkpoint here.
        checkpointable_layers: names of the layer classes that may be checkpointed.
        dynamic_shape: accepted; shapes may always change here.

    Raises:
        ConfigError: fewer layers than stages, or parameters shared without `TiedLayerSpec`.
        InfeasiblePlanError: the workers do not make whole pipelines.
        UnsupportedFeatureError: the topology has a third axis.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], None] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpointing.checkpoint,
        checkpointable_layers: list[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        world = init_distributed()
        specs = list(layers)
        refuse_hidden_ties(specs)
        self._initial_seed = torch.initial_seed()
        stages = stages_of(num_stages, topology)
        _refuse_empty_stages(len(specs), stages)
        self._be_cut(specs, partition_method, declared_costs(len(specs)))
        self._take_place(world, stages, pipelines_of(topology))
        with world_of_one(quiet=world.rank != 0):
            super().__init__(
                specs,
                topology=PipeDataParallelTopology(num_pp=1, num_dp=1),
                loss_fn=loss_fn,
                seed_layers=seed_layers,
                seed_fn=seed_fn,
                base_seed=base_seed,
                partition_method=partition_method,
                activation_checkpoint_interval=activation_checkpoint_interval,
                activation_checkpoint_func=activation_checkpoint_func,
                checkpointable_layers=checkpointable_layers,
                dynamic_shape=dynamic_shape,
            )
        self.answer_truly()

    # ---- place -------------------------------------------------------------------------------------------------

    def _be_cut(self, specs: list[Any], method: str, costs: Sequence[float]) -> None:
        self._layer_specs, self._method, self._costs = specs, method.lower(), costs
        self._weights: list[int] | None = None

    @property
    def layer_costs(self) -> tuple[float, ...]:
        """The declared time of each layer (`bamboo.layer_costs`), by which stages are cut; empty without."""
        return tuple(self._costs)

    def _cut(self) -> Cut:
        counts = self._layer_weights() if self._method == "parameters" else None
        return Cut(
            num_layers=len(self._layer_specs),
            parts_for=self.parts_for,
            costs=self._costs or counts,
            bytes=None if counts is None else [count * _STATE_BYTES for count in counts],
        )

    def _take_place(self, world: World, num_stages: int, pipelines: int | None, *, built: bool = False) -> None:
        self.plan, self.spec = take_seat(
            world, num_stages=num_stages, pipelines=pipelines, cut=self._cut(), built=built
        )
        self.worker = world.worker
        self.own_stage = self.plan.place(self.worker).stage
        self.owned_stages: tuple[int, ...] = (self.own_stage,)
        self.redundant_stage: int | None = None
        self._redundant: StageLayers | None = None
        self._tied: dict[str, nn.Module] = {}

    def answer_truly(self) -> None:
        """Let `mpu()`, `topology()` and the stage attributes speak of the plan instead of DeepSpeed's world of one."""
        self._grid = PlanGrid(self.plan, worker=self.worker)
        self._topo = self._grid.topology()
        self.num_stages, self.stage_id = self.plan.num_stages, self.own_stage
        self.global_rank, self.world_size = self._grid.global_rank, self._grid.world_size

    def solo_grid(self) -> Any:
        """Return the grid of DeepSpeed's world of one, for the construction of its engine."""
        with world_of_one(quiet=True):
            return PipelineParallelGrid(topology=PipeDataParallelTopology(num_pp=1, num_dp=1))

    # ---- building ----------------------------------------------------------------------------------------------

    def _partition_layers(self, method: str = "uniform") -> None:
        self._take_parts()

    def _take_parts(self) -> None:
        self.parts = list(self.plan.parts or self.parts_for(self.plan.num_stages))
        self._set_bounds(self.parts[self.own_stage], self.parts[self.own_stage + 1])

    def parts_for(self, stages: int) -> tuple[int, ...]:
        """Return the layer bounds of so many stages, as the partition method gives them.

        Raises:
            ConfigError: there is no such method.
        """
        bounds: Sequence[int]
        if self._costs:
            bounds = balanced_parts(self._costs, stages)
        elif self._method == "uniform":
            bounds = deepspeed_utils.partition_uniform(num_items=len(self._layer_specs), num_parts=stages)
        else:
            bounds = deepspeed_utils.partition_balanced(weights=self._layer_weights(), num_parts=stages)
        return tuple(int(bound) for bound in bounds)

    def _layer_weights(self) -> list[int]:
        """Return what the partition balances, by layer. To count parameters is to build each layer once."""
        if self._weights is None:
            self._weights = self._weigh()
        return self._weights

    def _weigh(self) -> list[int]:
        if self._method == "parameters":
            with untouched_randomness():
                return [int(count) for count in self._count_layer_params()]
        if self._method.startswith("type:"):
            chosen = set(self._find_layer_type(self._method.split(":", 1)[1]))
            return [int(index in chosen) for index in range(len(self._layer_specs))]
        raise ConfigError(f"partition_method = {self._method!r}: use 'parameters', 'uniform' or 'type:REGEX'")

    def _build(self, kept: Mapping[int, nn.Module] | None = None) -> None:
        self._own = self._build_stage(self.own_stage, kept)
        for index, layer in self._own.modules.items():
            if index in self._own.tied_keys:
                self.tied_modules[self._own.tied_keys[index]] = layer
                self.tied_weight_attrs[self._own.tied_keys[index]] = self._layer_specs[index].tied_weight_attr
            else:
                self.add_module(str(index), layer)
                self.fwd_map[str(index)] = index - self._own.start
        self.forward_funcs = self._own.functions
        for parameter in self.parameters():
            parameter.ds_pipe_replicated = False

    def _build_stage(self, stage: int, kept: Mapping[int, nn.Module] | None = None) -> StageLayers:
        bounds = (self.parts[stage], self.parts[stage + 1])
        with untouched_randomness():
            return build_stage(
                self._layer_specs, stage=stage, bounds=bounds, tied=self._tied, seed_layer=self._seed_layer, kept=kept
            )

    def _seed_layer(self, index: int) -> None:
        if not self.seed_layers:
            seed_all(initial_seed(self._initial_seed, layer=index))
        elif self.seed_fn is not None:
            self.seed_fn(self.base_seed + index)
        else:
            deepspeed_utils.set_random_seed(self.base_seed + index)

    def hold_redundant_layers(self, kept: Mapping[int, nn.Module] | None = None) -> None:
        """Build the layers of the next stage, if there is one, off the module tree.

        Args:
            kept: layers that this worker has built before, by global layer index.
        """
        self.redundant_stage, self._redundant = self.plan.redundant_stage(self.own_stage), None
        if self.redundant_stage is None:
            return
        self._redundant = self._build_stage(self.redundant_stage, kept)
        for layer in self._redundant.modules.values():
            layer.to(local_device())
        for parameter in self.redundant_parameters():
            parameter.ds_pipe_replicated = True  # type: ignore[attr-defined]

    def move(self, plan: Plan, *, redundancy: bool, dtype: torch.dtype | None) -> None:
        """Take this worker's place in a plan of a new epoch.

        Layers that it holds already stay the objects that they are. Those of other stages are let go; new ones are
        built, and hold nothing of worth until their state has come.

        Args:
            plan: in which this worker has a place.
            redundancy: whether to hold the layers of the next stage as well.
            dtype: of the floating-point parameters; None to leave them.
        """
        kept, tied = self._built(), dict(self._tied)
        self.plan, self.own_stage = plan, plan.place(self.worker).stage
        self.owned_stages = tuple(place.stage for place in plan.places(self.worker))
        self._take_parts()
        self._clear()
        self._tied = {key: module for key, module in tied.items() if self._uses_tied(key, redundancy=redundancy)}
        self.redundant_stage = self._redundant = None
        self._build(kept)
        if redundancy:
            self.hold_redundant_layers(kept)
        self.to(device=local_device())
        if dtype is not None:
            _cast([*self.parameters(), *self.redundant_parameters()], dtype)
        self.train(self.training)
        self.answer_truly()

    def _built(self) -> dict[int, nn.Module]:
        """Return the untied modules that this worker holds, by global layer index."""
        return {index: layer for stage in self.held_stages() for index, layer in self.untied_layers(stage).items()}

    def _clear(self) -> None:
        """Take the own stage off the module tree."""
        for name in [*self.fwd_map, *(str(index) for index in self._own.modules)]:
            self._modules.pop(name, None)
        self.fwd_map.clear()
        self.tied_modules.clear()
        self.tied_weight_attrs.clear()

    def _uses_tied(self, key: str, *, redundancy: bool) -> bool:
        redundant = self.plan.redundant_stage(self.own_stage) if redundancy else None
        return not self.tied_stages()[key].isdisjoint({self.own_stage, redundant})

    def follow(self, plan: Plan) -> None:
        """Adopt a newer version of the epoch's plan: layers held for a lost neighbour may become owned.

        They stay off the module tree; what is owned is in `owned_stages`, the own stage first.
        """
        self.plan = plan
        self.owned_stages = tuple(place.stage for place in plan.places(self.worker))
        for parameter in self.redundant_parameters():
            parameter.ds_pipe_replicated = len(self.owned_stages) == 1  # type: ignore[attr-defined]
        self.answer_truly()

    def cast_redundant_layers(self, dtype: torch.dtype) -> None:
        """Cast the floating-point parameters of the redundant layers, as DeepSpeed casts those of the module."""
        _cast(self.redundant_parameters(), dtype)

    # ---- what is held ------------------------------------------------------------------------------------------

    def layers_of(self, stage: int) -> dict[int, nn.Module]:
        """Return the modules of a held stage by global layer index (a tied module at each index it is used)."""
        return dict(self._stage(stage).modules)

    def held_stages(self) -> tuple[int, ...]:
        """Return the own stage and, where held, the redundant one."""
        return (self.own_stage,) if self.redundant_stage is None else (self.own_stage, self.redundant_stage)

    def redundant_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the redundant layers that no own layer shares, each once."""
        own = {id(parameter) for parameter in self.parameters()}
        held = {} if self._redundant is None else self._redundant.modules
        unique = {id(parameter): parameter for layer in held.values() for parameter in layer.parameters()}
        return [parameter for key, parameter in unique.items() if key not in own]

    def tied_stages(self) -> dict[str, frozenset[int]]:
        """Return the stages that use each tied layer."""
        stages: dict[str, set[int]] = {}
        for index, spec in enumerate(self._layer_specs):
            if isinstance(spec, TiedLayerSpec):
                stages.setdefault(spec.key, set()).add(self.stage_owner(index))
        return {key: frozenset(users) for key, users in stages.items()}

    def stage_owner(self, layer_idx: int) -> int:
        """Return the stage of a layer by the present cut: while it moves, `num_stages` is still that of the last."""
        return bisect_right(self.parts, layer_idx) - 1

    def tied_first_layers(self) -> dict[str, int]:
        """Return the global index of the first layer of each tie."""
        first: dict[str, int] = {}
        for index, spec in enumerate(self._layer_specs):
            if isinstance(spec, TiedLayerSpec):
                first.setdefault(spec.key, index)
        return first

    def tied_source_stages(self) -> dict[str, int]:
        """Return the stage of each tie whose copy counts where copies may differ: that which reads checkpoints."""
        return {key: self.stage_owner(saved_use(self._layer_specs, key)) for key in self.tied_first_layers()}

    def untied_layers(self, stage: int) -> dict[int, nn.Module]:
        """Return the modules of a held stage that are not tied, by global layer index."""
        layers = self._stage(stage)
        return {index: module for index, module in layers.modules.items() if index not in layers.tied_keys}

    def tied_module(self, key: str) -> nn.Module | None:
        """Return this worker's one copy of a tied module; None when it holds none."""
        return self._tied.get(key)

    def _stage(self, stage: int) -> StageLayers:
        if stage == self.own_stage:
            return self._own
        if self._redundant is not None and stage == self._redundant.stage:
            return self._redundant
        raise ConfigError(f"worker {self.worker} holds the stages {self.held_stages()}, not {stage}")

    def train(self, mode: bool = True) -> BambooPipelineModule:
        """Set training mode on the own and the redundant layers."""
        super().train(mode)
        held = {} if self._redundant is None else self._redundant.modules
        for layer in held.values():
            layer.train(mode)
        return self

    # ---- running -----------------------------------------------------------------------------------------------

    def forward(self, forward_input: Any) -> Any:
        """Run the own stage, without seeding its layers."""
        return self.run_stage(self.own_stage, forward_input)

    def run_stage(self, stage: int, inputs: Any, *, seed_of: SeedOfLayer | None = None) -> Any:
        """Run the layers of a held stage.

        Args:
            stage: own or redundant stage.
            inputs: a tensor or a tuple of tensors.
            seed_of: the seed under which a layer (global index) runs; None leaves the generators alone.

        Returns:
            A tensor or a tuple of tensors.
        """
        functions = self._stage(stage).functions
        interval = self.activation_checkpoint_interval
        if interval == 0 or not torch.is_grad_enabled():
            return self._run_block(stage, 0, len(functions), seed_of, inputs)
        for start in range(0, len(functions), interval):
            stop = min(start + interval, len(functions))
            block = partial(self._run_block, stage, start, stop, seed_of)
            blocked = inputs if isinstance(inputs, tuple) else (inputs,)
            inputs = (
                self._checkpointed(block, *blocked)
                if self._is_checkpointable(functions[start:stop])
                else block(*blocked)
            )
        return inputs

    def _run_block(self, stage: int, start: int, stop: int, seed_of: SeedOfLayer | None, *inputs: Any) -> Any:
        layers = self._stage(stage)
        value = inputs[0] if len(inputs) == 1 else inputs
        for position in range(start, stop):
            self.curr_layer = layers.start + position
            if seed_of is not None:
                seed_all(seed_of(self.curr_layer))
            value = layers.functions[position](value)
        return value

    def _checkpointed(self, block: Callable[..., Any], *inputs: Any) -> Any:
        """Recompute the block in backward; its layers seed themselves, so the generators' state need not be kept."""
        if self.activation_checkpoint_func in _STOCK_CHECKPOINTS:
            return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)
        return self.activation_checkpoint_func(block, *inputs)


def stages_of(num_stages: int | None, topology: ProcessTopology | None) -> int:
    """Return P from the two ways in which DeepSpeed takes it."""
    if topology is None and num_stages is None:
        raise ConfigError("give num_stages or topology")
    if topology is None:
        return int(num_stages or 0)
    sliced = [axis for axis in topology.get_axis_names() if axis not in ("pipe", "data") and topology.get_dim(axis) > 1]
    if sliced:
        raise UnsupportedFeatureError(
            f"topology with the axis {sliced[0]!r} (tensor slicing) is not supported: use the axes 'pipe' and 'data'"
        )
    return int(topology.get_dim("pipe"))


def pipelines_of(topology: ProcessTopology | None) -> int | None:
    """Return D as a topology gives it."""
    return None if topology is None else max(int(topology.get_dim("data")), 1)


def _refuse_empty_stages(count: int, stages: int) -> None:
    if count < stages:
        raise ConfigError(
            f"{count} layers cannot fill {stages} stages: give at least one layer per stage or fewer stages"
        )


def adopt(model: PipelineModule, world: World) -> BambooPipelineModule:
    """Turn a module that stock DeepSpeed has built into ours, keeping its class name and its parameters.

    DeepSpeed tests class names, so the new class has the name of the old one.
    """
    if isinstance(model, BambooPipelineModule):
        return model
    topology = model.topology()
    _refuse_empty_stages(len(model._layer_specs), stages_of(None, topology))
    refuse_hidden_ties(model._layer_specs)
    kind = type(model)
    model.__class__ = type(kind.__name__, (BambooPipelineModule, kind), {"__doc__": kind.__doc__})
    adopted: BambooPipelineModule = model
    adopted._initial_seed = torch.initial_seed()
    adopted.parts = [int(bound) for bound in adopted.parts]
    adopted._be_cut(adopted._layer_specs, _method_behind(adopted), ())
    adopted._take_place(world, topology.get_dim("pipe"), topology.get_dim("data"), built=True)
    adopted.tied_comms = {}
    adopted._own = _described(adopted)
    adopted.answer_truly()
    return adopted


def _cast(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    for parameter in parameters:
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def _method_behind(model: BambooPipelineModule) -> str:
    """Return the partition method that stock DeepSpeed, which does not keep it, has used."""
    for method in ("parameters", "uniform"):
        model._be_cut(model._layer_specs, method, ())
        if model.parts_for(len(model.parts) - 1) == tuple(model.parts):
            return method
    return "parameters"


def _described(model: BambooPipelineModule) -> StageLayers:
    """Describe the stage that stock DeepSpeed has built."""
    layers = StageLayers(stage=model.own_stage, start=model._local_start, functions=model.forward_funcs)
    for index, function in enumerate(model.forward_funcs, start=model._local_start):
        spec = model._layer_specs[index]
        if isinstance(spec, TiedLayerSpec):
            layers.modules[index], layers.tied_keys[index] = model.tied_modules[spec.key], spec.key
            model._tied[spec.key] = model.tied_modules[spec.key]
            model.forward_funcs[index - model._local_start] = tied_function(
                model._layer_specs, index, model.tied_modules[spec.key]
            )
        elif isinstance(function, nn.Module):
            layers.modules[index] = function
    return layers

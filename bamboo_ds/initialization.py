"""Wires config -> plan -> module -> engine; the only place that knows all of them."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.utils import logger

from bamboo_ds.comm import Network
from bamboo_ds.config import (
    BambooConfig,
    BatchSizes,
    bamboo_block,
    batch_sizes_of,
    check_supported,
    flat_settings,
    load_deepspeed_config,
    resolve_batch_sizes,
    solo_config,
)
from bamboo_ds.engine import BambooPipelineEngine, Places, with_redundant, without_redundant
from bamboo_ds.engine.commit import Committer, ExchangeCommitter, StoreCommitter
from bamboo_ds.engine.gradients import reductions_of
from bamboo_ds.errors import ConfigError, InfeasiblePlanError, PlanChangedError, UnsupportedFeatureError
from bamboo_ds.module import BambooPipelineModule, adopt
from bamboo_ds.module.seat import check_shape, launched_spec, refuse_late_costs, refuse_late_settings
from bamboo_ds.plan import Plan, PlanSource, StaticPlanSource
from bamboo_ds.plan.job import JobSettings
from bamboo_ds.plan.standby import BEFORE_ALL
from bamboo_ds.world import Guard, World, host_agent, init_distributed, shared_settings, world_of_one

_stock_initialize = deepspeed.initialize
_instances = itertools.count()


def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """Make an engine; the arguments and the result are those of `deepspeed.initialize`.

    A `PipelineModule` whose config has a `bamboo` block gets a `BambooPipelineEngine`; everything else goes to
    DeepSpeed unchanged.

    Returns:
        `(engine, optimizer, training_dataloader, lr_scheduler)`.

    Raises:
        ConfigError: the config or an argument cannot be right.
        UnsupportedFeatureError: the config asks for something Bamboo refuses by name.
        InfeasiblePlanError: the workers do not make whole pipelines.
    """
    found = _config(args, config, config_params)
    block = bamboo_block(found)
    if block is None or not isinstance(model, PipelineModule):
        _refuse_module_without_block(model)
        if block is not None and model is not None:
            logger.warning(f"the `bamboo` block is ignored: {type(model).__name__} is no PipelineModule")
        return _stock_initialize(
            args=args, model=model, optimizer=optimizer, model_parameters=model_parameters,
            training_data=training_data, lr_scheduler=lr_scheduler,
            distributed_port=distributed_port, mpu=mpu, dist_init_required=dist_init_required, collate_fn=collate_fn,
            config=config,
            mesh_param=mesh_param, config_params=config_params,
        )  # fmt: skip
    _refuse_arguments(model, mpu, mesh_param)
    check_supported(found)
    world = init_distributed(block.timeout_seconds)
    engine = _engine(
        adopt(model, world), found, block, world, args=args, optimizer=optimizer, model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler, collate_fn=collate_fn, dist_init_required=dist_init_required,
    )  # fmt: skip
    engine._configure_python_gc()
    # A full collection over all that torch and DeepSpeed have loaded takes up to a second, in the middle of some step.
    gc.freeze()
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _config(args: Any, config: Any, config_params: Any) -> dict[str, Any]:
    given = (config, config_params, getattr(args, "deepspeed_config", None), getattr(args, "deepscale_config", None))
    return load_deepspeed_config(args, config, config_params) if any(value is not None for value in given) else {}


def _refuse_module_without_block(model: Any) -> None:
    if isinstance(model, BambooPipelineModule):
        raise ConfigError(
            'a BambooPipelineModule needs a `bamboo` block in the DeepSpeed config; `"bamboo": {}` takes every default'
        )


def _refuse_arguments(model: Any, mpu: Any, mesh_param: Any) -> None:
    if isinstance(model, DualPipeVModule):
        raise UnsupportedFeatureError("DualPipeVModule is not supported with a `bamboo` block: use PipelineModule")
    if mpu is not None or mesh_param is not None:
        raise UnsupportedFeatureError(
            "initialize(mpu=..., mesh_param=...) is not supported with a pipeline: leave both out"
        )


def _engine(
    model: BambooPipelineModule,
    config: dict[str, Any],
    block: BambooConfig,
    world: World,
    *,
    optimizer: Any,
    model_parameters: Any,
    **rest: Any,
) -> BambooPipelineEngine:
    _check_bounds(model.plan, block, world)
    refuse_late_costs(block, cut_by=model.layer_costs)
    instance = next(_instances)
    world = _hosting(model, config, block, world, instance)
    source: PlanSource = world.member or StaticPlanSource(model.plan, worker=world.worker)
    failures = world.failures(source.current, scope=f"engine-{instance}", timeout_seconds=block.timeout_seconds)
    opened = ExitStack()
    with Guard(failures, lambda _: opened.close()):
        sizes = _batch_sizes(model, config, block, world, instance)
        connect = functools.partial(_network, model, source, block, world, instance, failures.check)
        groups = _group_count(optimizer)
        network, parameters, places = _first_place(model, source, block, connect, model_parameters, optimizer)
        _refuse_outgrown_schedule(rest["lr_scheduler"], before=groups, now=_group_count(optimizer))
        if network is not None:
            opened.callback(network.close)
        quiet = model.global_rank != 0
        solo = _solo_config(config, sizes, reporter=not quiet)
        with world_of_one(quiet=quiet):
            parsed = DeepSpeedConfig(solo, model.solo_grid())
        return BambooPipelineEngine(
            model=model, bamboo=block, sizes=sizes, source=source, network=network, connect=connect, failures=failures,
            committer=_committer(network, world, instance),
            places=places, optimizer=optimizer, model_parameters=parameters, config=solo, config_class=parsed, **rest,
        )  # fmt: skip


def _network(
    model: BambooPipelineModule,
    source: PlanSource,
    block: BambooConfig,
    world: World,
    instance: int,
    alarm: Callable[[], None],
    plan: Plan,
    row: bytes | None = None,
) -> Network:
    """Return the network of a plan in which the module has taken its place, not formed yet; hang out a row for all."""
    return Network(
        source,
        plan=plan,
        backing=world.store,
        instance=instance,
        reductions=reductions_of(model),
        redundancy=block.redundancy != "off",
        timeout_seconds=block.timeout_seconds,
        alarm=alarm,
        address=world.address,
        row=row,
    )


def _first_place(
    model: BambooPipelineModule,
    source: PlanSource,
    block: BambooConfig,
    connect: Callable[..., Network],
    model_parameters: Any,
    optimizer: Any,
) -> tuple[Network | None, list[Any], Places]:
    """Take the place that the module was built for, with the redundant layers and the links that belong to it.

    A worker that has no place, or whose plan is replaced meanwhile, begins with its own layers only: it waits for
    a newer plan, in which it is sent what it lacks.
    """
    given = {"model_parameters": model_parameters, "optimizer": optimizer}
    if model.plan.number != source.current().number:
        return None, *without_redundant(model, **given)
    if block.redundancy != "off":
        model.hold_redundant_layers()
    with contextlib.suppress(PlanChangedError), ExitStack() as opened:
        network = connect(model.plan)
        opened.callback(network.close)
        network.form()
        parameters, places = with_redundant(model, world=network.world, **given)
        opened.pop_all()
        return network, parameters, places
    return None, *without_redundant(model, **given)


def _hosting(
    model: BambooPipelineModule, config: dict[str, Any], block: BambooConfig, world: World, instance: int
) -> World:
    """Let the workers of a stock launcher host their agents, once a process, if the config says where etcd is."""
    if world.member is None:
        spec = launched_spec(world, model.plan, block, num_layers=len(model._layer_specs))
        shape = {name: str(getattr(spec, name)) for name in ("num_stages", "num_layers", "pipelines")}
        settings = {**shared_settings(flat_settings(config)), **shape}
        world = host_agent(world, block=block, settings=settings, spec=spec, engine=instance)
    if world.spec is not None and model.spec is None:
        check_shape(world.spec, model.plan)
        model.spec = world.spec
    return world


def _check_bounds(plan: Plan, block: BambooConfig, world: World) -> None:
    """Hold the shape of a plan against the config; in a cluster `bamboo.pipelines` is an upper bound only."""
    wanted = block.pipelines
    if wanted is not None and (plan.num_pipelines > wanted or (world.member is None and plan.num_pipelines != wanted)):
        raise InfeasiblePlanError(
            f"{world.size} workers make {plan.num_pipelines} pipeline(s) of {plan.num_stages} stages, "
            f"but bamboo.pipelines = {wanted}: "
            f"start {wanted * plan.num_stages} workers or leave bamboo.pipelines out"
        )
    if plan.num_stages < block.min_stages:
        raise InfeasiblePlanError(f"num_stages = {plan.num_stages} is below bamboo.min_stages = {block.min_stages}")


def _batch_sizes(
    model: BambooPipelineModule, config: dict[str, Any], block: BambooConfig, world: World, instance: int
) -> BatchSizes:
    """Return the global batch. In a cluster, hold this worker's config against the job's, which has its M already."""
    if world.member is None:
        return resolve_batch_sizes(config, model.plan.num_pipelines)
    if model.spec is not None:
        refuse_late_settings(model.spec, block)
    # A standby may be the first to publish, too, as long as the job has the shape that it begins with.
    comes_late = model.plan.epoch == BEFORE_ALL and world.member.current().epoch > 0
    ours = None if comes_late else resolve_batch_sizes(config, model.plan.num_pipelines)
    settings = JobSettings(
        world.worker, shared_settings(flat_settings(config)), None if ours is None else ours.micro_batches
    )
    told = world.member.check_settings(instance, settings).micro_batches
    return ours or batch_sizes_of(config, told or model.plan.num_pipelines)


def _committer(network: Network | None, world: World, instance: int) -> Committer:
    placed = cast(Network, network)  # a committer without one is given one before it is asked
    if world.member is None:
        return ExchangeCommitter(placed)
    return StoreCommitter(placed, world.member, engine=instance)


def _group_count(optimizer: Any) -> int:
    return len(optimizer.param_groups) if isinstance(optimizer, torch.optim.Optimizer) else 0


def _refuse_outgrown_schedule(lr_scheduler: Any, *, before: int, now: int) -> None:
    """Refuse a schedule that would leave a group of redundant parameters at its first learning rate."""
    if lr_scheduler is not None and not callable(lr_scheduler) and now > before:
        raise ConfigError(
            f"lr_scheduler was made for an optimizer with {before} parameter groups, but the layers this worker holds "
            f"for the next stage are in {now}: give the optimizer the same groups on every worker (empty ones are "
            "fine), or give lr_scheduler as a callable"
        )


def _solo_config(config: dict[str, Any], sizes: Any, *, reporter: bool) -> dict[str, Any]:
    solo = solo_config(config, sizes, reporter=reporter, on_cpu=get_accelerator().device_name() == "cpu")
    # Recomputed blocks seed their own layers, and torch's non-reentrant checkpoint takes any inputs and outputs.
    solo["pipeline"] = {**(solo.get("pipeline") or {}), "use_reentrant": False}
    return solo

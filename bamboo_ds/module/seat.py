"""Finds a worker's place: from its rank where the job is fixed, from the cluster's plan where workers come and go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bamboo_ds.config import BambooConfig, bamboo_block, early_config, resolve_batch_sizes
from bamboo_ds.config.batch import ACCUMULATION, MICRO, TRAIN
from bamboo_ds.config.keys import value_at
from bamboo_ds.errors import ConfigError
from bamboo_ds.plan import Plan, static_plan
from bamboo_ds.plan.job import JobSpec
from bamboo_ds.world import World


@dataclass(frozen=True, slots=True)
class Cut:
    """How a module is cut into stages.

    Attributes:
        num_layers: of the whole model.
        parts_for: returns the layer bounds of so many stages.
        costs: of each layer; None where layers count alike.
        bytes: of each layer's state, roughly; None where nobody has counted.
    """

    num_layers: int
    parts_for: Callable[[int], tuple[int, ...]]
    costs: Sequence[float] | None = None
    bytes: Sequence[int] | None = None


def take_seat(
    world: World, *, num_stages: int, pipelines: int | None, cut: Cut, built: bool = False
) -> tuple[Plan, JobSpec | None]:
    """Return the plan under which this worker's module is built; in a cluster, wait for it.

    Args:
        world: this process among the others.
        num_stages: P that the script asks for.
        pipelines: D that the script asks for; None for as many as the workers make.
        cut: how the module is cut.
        built: whether stock DeepSpeed has built the stage of this worker's rank already.

    Returns:
        The plan, which has a place for this worker or is one to build by until it has (`plan.standby`), and the
        specification that the cluster agreed on (None in a fixed job).

    Raises:
        InfeasiblePlanError: a fixed number of workers does not make whole pipelines.
        RefusedError: the cluster's job is another one.
        SystemExit: the job is over and this worker was never needed.
    """
    if world.member is None:
        return static_plan(world_size=world.size, num_stages=num_stages, pipelines=pipelines), None
    if world.spec is not None:
        check_shape(world.spec, static_plan(world_size=world.size, num_stages=num_stages, pipelines=pipelines))
        return world.member.current(), world.spec
    spec = _spec(world, num_stages=num_stages, pipelines=pipelines, cut=cut)
    if built:
        spec = replace(spec, launched=_plan_of_ranks(world, num_stages=num_stages, pipelines=pipelines))
    return world.member.take_seat(spec), spec


def launched_spec(world: World, plan: Plan, block: BambooConfig, *, num_layers: int) -> JobSpec:
    """Return the specification of a job whose workers a stock launcher has placed."""
    return JobSpec(
        publisher=world.worker,
        num_stages=plan.num_stages,
        num_layers=num_layers,
        pipelines=plan.num_pipelines,
        min_stages=block.min_stages,
        redundancy=block.redundancy,
        launched=plan,
        reconfigure=block.reconfigure,
    )


def check_shape(spec: JobSpec, plan: Plan) -> None:
    """Check that a model has the stages of the job's plan, where the launcher's ranks give it.

    Raises:
        ConfigError: it has others.
    """
    launched = spec.launched
    if launched is not None and plan.homes != launched.owners:
        raise ConfigError(
            f"this model makes {plan.num_stages} stages x {plan.num_pipelines} pipelines, but the job's plan, which "
            f"began with the first engine, has {launched.num_stages} x {launched.num_pipelines}: with `bamboo.etcd` "
            "all pipeline models of a script have the same shape"
        )


def refuse_late_settings(spec: JobSpec, block: BambooConfig) -> None:
    """Refuse a config that would have changed the plan, had it been known when the plan was made.

    Raises:
        ConfigError: names the key.
    """
    for name in ("min_stages", "redundancy", "reconfigure"):
        if getattr(spec, name) != getattr(block, name):
            raise ConfigError(
                f"bamboo.{name} = {getattr(block, name)!r}, but the plan was made for {getattr(spec, name)!r}: the "
                "config was not known when the script made its module. Start it with `bamboo-ds run --config FILE`, "
                "or with `--deepspeed_config FILE` among the script's arguments"
            )


def _spec(world: World, *, num_stages: int, pipelines: int | None, cut: Cut) -> JobSpec:
    config = early_config()
    block = bamboo_block(config or {}) or BambooConfig()
    micro_batches = _micro_batches(config)
    bounds = [bound for bound in (pipelines, block.pipelines, micro_batches) if bound is not None]
    shapes = range(min(block.min_stages, num_stages), num_stages + 1)
    return JobSpec(
        publisher=world.worker,
        num_stages=num_stages,
        num_layers=cut.num_layers,
        pipelines=min(bounds, default=None),
        min_stages=block.min_stages,
        redundancy=block.redundancy,
        partitions={stages: cut.parts_for(stages) for stages in shapes},
        layer_costs=tuple(map(float, cut.costs or ())),
        layer_bytes=tuple(cut.bytes or ()),
        micro_batches=micro_batches,
        reconfigure=block.reconfigure,
    )


def refuse_late_costs(block: BambooConfig, *, cut_by: tuple[float, ...]) -> None:
    """Refuse costs that would have cut the module, had they been known when it was built.

    Raises:
        ConfigError: the module was cut by others, or by none.
    """
    if block.layer_costs and block.layer_costs != cut_by:
        raise ConfigError(
            "bamboo.layer_costs was not known when the script made its module, so the stages are cut otherwise. Start "
            "it with `bamboo-ds run --config FILE`, or with `--deepspeed_config FILE` among the script's arguments"
        )


def declared_costs(num_layers: int) -> tuple[float, ...]:
    """Return `bamboo.layer_costs`, if the config is known before the script hands it over.

    Raises:
        ConfigError: there is not one for each layer.
    """
    costs = (bamboo_block(early_config() or {}) or BambooConfig()).layer_costs
    if costs and len(costs) != num_layers:
        raise ConfigError(f"bamboo.layer_costs has {len(costs)} entries for {num_layers} layers: give one for each")
    return costs


def _micro_batches(config: dict[str, object] | None) -> int | None:
    """Return M where it does not depend on D: no pipeline may be without work."""
    if config is None or value_at(config, TRAIN) is None or value_at(config, MICRO) is None:
        return None
    return resolve_batch_sizes({**config, ACCUMULATION: None}, 1).micro_batches


def _plan_of_ranks(world: World, *, num_stages: int, pipelines: int | None) -> Plan:
    """Return the plan that stock DeepSpeed's ranks stand for, in worker ids."""
    ranked = static_plan(world_size=world.size, num_stages=num_stages, pipelines=pipelines)
    ids = world.member.roster.workers if world.member is not None else range(world.size)
    return Plan(owners=tuple(tuple(ids[rank] for rank in owners) for owners in ranked.owners))

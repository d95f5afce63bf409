"""The plan: who owns which stage of which pipeline.

Immutable and numbered: `epoch` grows with every reconfiguration, `version` with every failover inside an epoch.
Everything that a worker
needs to know about the others follows from it by pure functions.
"""

from __future__ import annotations

from dataclasses import dataclass

from bamboo_ds.errors import InfeasiblePlanError


@dataclass(frozen=True, slots=True)
class Plan:
    """Who owns which stage of which pipeline.

    Attributes:
        owners: worker ids by pipeline and stage: `owners[pipeline][stage]`.
        epoch: number of reconfigurations before this plan.
        version: number of failovers inside this epoch.
    """

    owners: tuple[tuple[int, ...], ...]
    epoch: int = 0
    version: int = 0

    @property
    def num_stages(self) -> int:
        """P, the stages of each pipeline."""
        return len(self.owners[0])

    @property
    def num_pipelines(self) -> int:
        """D, the pipelines."""
        return len(self.owners)

    @property
    def workers(self) -> tuple[int, ...]:
        """Ids of all workers with a stage, ascending."""
        return tuple(sorted({worker for pipeline in self.owners for worker in pipeline}))

    def place(self, worker: int) -> Place:
        """Return the pipeline and stage that a worker owns.

        Raises:
            InfeasiblePlanError: the worker has no stage in this plan.
        """
        for pipeline, owners in enumerate(self.owners):
            if worker in owners:
                return Place(pipeline=pipeline, stage=owners.index(worker))
        raise InfeasiblePlanError(
            f"worker {worker} has no stage in the plan of epoch {self.epoch}; its workers are {self.workers}"
        )

    def shadow_stage(self, stage: int) -> int:
        """Return the stage whose worker holds the redundant layers of `stage`."""
        return (stage - 1) % self.num_stages

    def redundant_stage(self, stage: int) -> int | None:
        """Return the stage that the worker of `stage` shadows; None in a pipeline of one stage, which has no shadow."""
        return (stage + 1) % self.num_stages if self.num_stages > 1 else None

    def stage_owners(self, stage: int) -> tuple[int, ...]:
        """Return the owners of a stage, by pipeline."""
        return tuple(owners[stage] for owners in self.owners)

    def holders(self, stages: frozenset[int], *, redundancy: bool) -> tuple[int, ...]:
        """Return the ids of all workers that hold layers of any of `stages`, ascending.

        These are the owners and, with redundancy, their shadows.
        """
        held_by = set(stages)
        if redundancy and self.num_stages > 1:
            held_by |= {self.shadow_stage(stage) for stage in stages}
        return tuple(sorted({worker for stage in held_by for worker in self.stage_owners(stage)}))

    def share(self, pipeline: int, *, micro_batches: int) -> range:
        """Return which of the M micro-batches of a global batch a pipeline trains.

        Shares are contiguous and differ by at most one micro-batch, so D need not divide M.
        """
        return range(
            pipeline * micro_batches // self.num_pipelines, (pipeline + 1) * micro_batches // self.num_pipelines
        )


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker stands in a plan."""

    pipeline: int
    stage: int


def static_plan(*, world_size: int, num_stages: int, pipelines: int | None = None) -> Plan:
    """Return the plan of a job whose workers are all there from the start.

    Ranks are laid out as DeepSpeed's `PipeDataParallelTopology` does: rank = stage * D + pipeline, so that
    neighbours in rank (usually on
    one node) hold the same stage of different pipelines and a lost node never takes neighbouring stages.

    Args:
        world_size: number of workers.
        num_stages: P.
        pipelines: D; None for as many as the workers make.

    Raises:
        InfeasiblePlanError: the workers do not make whole pipelines.
    """
    if num_stages < 1:
        raise InfeasiblePlanError(f"num_stages = {num_stages}: a pipeline has at least one stage")
    count = pipelines if pipelines is not None else max(world_size // num_stages, 1)
    if world_size != count * num_stages:
        raise InfeasiblePlanError(_misfit(world_size, num_stages, count, pipelines))
    return Plan(
        owners=tuple(tuple(stage * count + pipeline for stage in range(num_stages)) for pipeline in range(count))
    )


def _misfit(world_size: int, num_stages: int, count: int, pipelines: int | None) -> str:
    source = "bamboo.pipelines" if pipelines is not None else "workers // stages"
    whole = max(world_size // num_stages, 1)
    remedy = f"start {whole * num_stages} or {(whole + 1) * num_stages} workers"
    if pipelines is not None:
        remedy = f"start {count * num_stages} workers or leave bamboo.pipelines out"
    return (
        f"{world_size} workers do not make {count} whole pipeline(s) ({source}) of {num_stages} stages: "
        f"{count} x {num_stages} = {count * num_stages}, not {world_size}; {remedy}"
    )

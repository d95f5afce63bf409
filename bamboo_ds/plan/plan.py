"""The plan: who owns which stage of which pipeline.

Immutable and numbered: `epoch` grows with every reconfiguration, `version` with every failover inside an epoch.
Everything that a worker needs to know about the others follows from it by pure functions.

The trick is that what a worker *holds* follows from where it was placed when the epoch began, its home: the stage of
its home and the next one. A failover changes who owns a stage, never who holds it.
"""

from __future__ import annotations

from dataclasses import dataclass

from bamboo_ds.errors import InfeasiblePlanError

NOBODY = -1
"""In place of an owner: the stage is lost. Only an aborted plan, under which nobody trains, has such stages."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Who owns which stage of which pipeline.

    Attributes:
        owners: worker ids by pipeline and stage: `owners[pipeline][stage]`. After a failover a worker owns two stages.
        epoch: number of reconfigurations before this plan.
        version: number of changes inside this epoch.
        homes: owners at version 0 of this epoch, which decide what a worker holds. Empty means the same as `owners`.
        dead: ids of all workers ever declared dead. They must stop at once, and their ids never return.
        aborted: whether the step cannot be finished, as a stage is lost or a worker was before all had their layers:
            everyone drops its work and awaits a new epoch.
        from_checkpoint: whether this epoch begins from the last checkpoint, as no live worker held some stage.
        cause: why this plan replaced the one before, for people.
        parts: layer bounds of the stages in this epoch, P + 1 of them; empty where the module cuts itself by its own
            method.
    """

    owners: tuple[tuple[int, ...], ...]
    epoch: int = 0
    version: int = 0
    homes: tuple[tuple[int, ...], ...] = ()
    dead: frozenset[int] = frozenset()
    aborted: bool = False
    from_checkpoint: bool = False
    cause: str = ""
    parts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.homes:
            object.__setattr__(self, "homes", self.owners)

    @property
    def number(self) -> tuple[int, int]:
        """Epoch and version: of two plans of a job, the one with the larger number is the newer."""
        return self.epoch, self.version

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
        return tuple(sorted(set().union(*self.owners) - {NOBODY}))

    def place(self, worker: int) -> Place:
        """Return the home of a worker: the stage that it owns from the beginning of the epoch.

        Raises:
            InfeasiblePlanError: the worker has no stage in this plan.
        """
        for pipeline, owners in enumerate(self.owners):
            if worker in owners:
                return Place(pipeline=pipeline, stage=self.homes[pipeline].index(worker))
        raise InfeasiblePlanError(
            f"worker {worker} has no stage in the plan of epoch {self.epoch}; its workers are {self.workers}"
        )

    def places(self, worker: int) -> tuple[Place, ...]:
        """Return all places that a worker owns: its home first, then the stages it took over.

        Raises:
            InfeasiblePlanError: the worker has no stage in this plan.
        """
        home = self.place(worker)
        owned = (stage for stage, owner in enumerate(self.owners[home.pipeline]) if owner == worker)
        return (home, *(Place(pipeline=home.pipeline, stage=stage) for stage in owned if stage != home.stage))

    def held_stages(self, worker: int, *, redundancy: bool) -> frozenset[int]:
        """Return the stages whose layers a worker has: that of its home and, with redundancy, the next one.

        Raises:
            InfeasiblePlanError: the worker has no stage in this plan.
        """
        home = self.place(worker).stage
        redundant = self.redundant_stage(home) if redundancy else None
        return frozenset({home}) if redundant is None else frozenset({home, redundant})

    def neighbours(self, worker: int, *, redundancy: bool) -> tuple[int, ...]:
        """Return the ids of the workers next to a worker in its pipeline, ascending.

        With redundancy the last stage is next to stage 0, whose shadow it holds: both are in one gradient group.

        Raises:
            InfeasiblePlanError: the worker has no stage in this plan.
        """
        owners = self.owners[self.place(worker).pipeline]
        edges = [(stage, stage + 1) for stage in range(self.num_stages - 1)]
        if redundancy and self.num_stages > 1:
            edges.append((self.num_stages - 1, 0))
        pairs = [{owners[left], owners[right]} for left, right in edges]
        return tuple(sorted({other for pair in pairs if worker in pair for other in pair} - {worker, NOBODY}))

    def lost_places(self) -> tuple[Place, ...]:
        """Return the places without an owner; there are none unless the plan is aborted."""
        return tuple(
            Place(pipeline=pipeline, stage=stage)
            for pipeline, owners in enumerate(self.owners)
            for stage, owner in enumerate(owners)
            if owner == NOBODY
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

    def owner_stages(self, pipeline: int) -> tuple[int, ...]:
        """Return the home stage of the owner of each stage of a pipeline."""
        homes = self.homes[pipeline]
        return tuple(homes.index(owner) for owner in self.owners[pipeline])

    def holders(self, stages: frozenset[int], *, redundancy: bool) -> tuple[int, ...]:
        """Return the ids of all workers that hold layers of any of `stages`, ascending.

        These are the live workers whose home it is and, with redundancy, their shadows.
        """
        held_by = set(stages)
        if redundancy and self.num_stages > 1:
            held_by |= {self.shadow_stage(stage) for stage in stages}
        return tuple(sorted({homes[stage] for homes in self.homes for stage in held_by} - self.dead))

    def seats(self, stages: frozenset[int], *, redundancy: bool) -> tuple[Seat, ...]:
        """Return the seats of the gradient group of `stages`: one per home that holds any of them, by its place.

        A seat outlives its worker. The seat of a dead worker is taken by whoever owns its stage now; where it sat only
        as the shadow of the next stage, by the owner of that. So a group keeps its size and order in an epoch, and a
        sum its bits. The order is that of places, not of ids: which worker was given which place changes no sum.

        Raises:
            InfeasiblePlanError: the plan is aborted: nobody can take a seat.
        """
        if self.aborted:
            raise InfeasiblePlanError(f"the plan {self.epoch}.{self.version} is aborted: nobody trains under it")
        held_by = set(stages)
        if redundancy and self.num_stages > 1:
            held_by |= {self.shadow_stage(stage) for stage in stages}
        seats = []
        for pipeline, homes in enumerate(self.homes):
            for stage in sorted(held_by):
                wanted = stage if stage in stages else (stage + 1) % self.num_stages
                taker = homes[stage] if homes[stage] not in self.dead else self.owners[pipeline][wanted]
                seats.append(Seat(home=homes[stage], stage=stage, worker=taker))
        return tuple(seats)

    def share(self, pipeline: int, *, micro_batches: int) -> range:
        """Return which of the M micro-batches of a global batch a pipeline trains.

        Shares are contiguous and differ by at most one micro-batch, so D need not divide M.
        """
        return range(
            pipeline * micro_batches // self.num_pipelines, (pipeline + 1) * micro_batches // self.num_pipelines
        )


@dataclass(frozen=True, slots=True)
class Seat:
    """One member of a gradient group.

    Attributes:
        home: id of the worker that had it when the epoch began.
        stage: home stage of that worker, whose gradients the seat contributes (zeros if the group is of other stages).
        worker: id of the worker that sits there now.
    """

    home: int
    stage: int
    worker: int


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

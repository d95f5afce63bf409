"""What the coordinator knows when it decides: the nodes whose lease lives, and the bounds of the job."""

from __future__ import annotations

from dataclasses import dataclass, field

from bamboo_ds.errors import ConfigError
from bamboo_ds.plan.model import Model


@dataclass(frozen=True, slots=True)
class Worker:
    """One training process and where it runs."""

    id: int
    node: str
    zone: str


@dataclass(frozen=True, slots=True)
class Node:
    """One instance, as its agent registers it.

    Attributes:
        name: unique in the job.
        zone: where it runs; neighbours of a pipeline go to different zones as far as possible.
        workers: ids of its workers that run. An id is never used again, not for the process that replaces a dead one
            either.
        address: at which other nodes reach it.
        spot: whether the cloud may take it away.
    """

    name: str
    zone: str
    workers: tuple[int, ...]
    address: str = ""
    spot: bool = True


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of a plan: P stages, D pipelines."""

    num_stages: int
    num_pipelines: int

    def __str__(self) -> str:
        return f"{self.num_stages} stages x {self.num_pipelines} pipelines"


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the job allows, and for which model.

    Attributes:
        num_stages: upper bound of P.
        pipelines: upper bound of D: the smaller of `bamboo.pipelines` and M; None for as many as the workers fill.
        min_stages: lower bound of P.
        redundancy: whether shadows hold redundant layers.
        model: what is known of the model.
    """

    num_stages: int
    pipelines: int | None = None
    min_stages: int = 1
    redundancy: bool = True
    model: Model = field(default_factory=Model)

    def __post_init__(self) -> None:
        if not 1 <= self.min_stages <= self.num_stages:
            raise ConfigError(
                f"bamboo.min_stages = {self.min_stages}: must be between 1 and the stages of the model, "
                f"{self.num_stages}"
            )
        if self.pipelines is not None and self.pipelines < 1:
            raise ConfigError(f"bamboo.pipelines = {self.pipelines}: must be at least 1")

    def shape(self, workers: int) -> Shape | None:
        """Return the largest shape for this many workers: D shrinks before P. None when they are too few."""
        stages = min(self.num_stages, workers)
        if stages < self.min_stages:
            return None
        pipelines = workers // stages
        return Shape(stages, pipelines if self.pipelines is None else min(pipelines, self.pipelines))


@dataclass(frozen=True, slots=True)
class Cluster:
    """The nodes whose lease lives, in any order.

    Raises:
        ConfigError: two nodes have one name, or two workers one id.
    """

    bounds: Bounds
    nodes: tuple[Node, ...] = ()

    def __post_init__(self) -> None:
        seen: set[int] = set()
        for node in self.nodes:
            for worker in node.workers:
                if worker in seen:
                    raise ConfigError(f"worker id {worker} of node {node.name} is taken: ids are unique in a job")
                seen.add(worker)
        names = [node.name for node in self.nodes]
        if len(set(names)) < len(names):
            raise ConfigError(f"node names must be unique in a job, not {sorted(names)}: give each agent its own name")

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All workers of these nodes, by ascending id."""
        workers = [Worker(id=id_, node=node.name, zone=node.zone) for node in self.nodes for id_ in node.workers]
        return tuple(sorted(workers, key=lambda worker: worker.id))

    def live(self, gone: frozenset[int] = frozenset()) -> tuple[Worker, ...]:
        """Return the workers that are not among `gone`, by ascending id."""
        return tuple(worker for worker in self.workers if worker.id not in gone)

"""What all workers of a job must agree on before they train: who begins, and the job's specification.

The first worker publishes the specification, the others hold theirs against it. A worker with another model or config
is refused by the name of what differs: it would train something else under the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bamboo_ds.errors import ConfigError
from bamboo_ds.plan.cluster import Bounds
from bamboo_ds.plan.model import Model
from bamboo_ds.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Roster:
    """The workers that begin a job; an index in `workers` is a rank until there is a plan.

    Attributes:
        workers: ids, ascending.
        cause: why it was closed, for people.
    """

    workers: tuple[int, ...]
    cause: str = ""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The geometry of a job, known when its first `BambooPipelineModule` is made.

    Attributes:
        publisher: the worker that says so; not compared.
        num_stages: upper bound of P.
        num_layers: of the whole model.
        pipelines: upper bound of D; None for as many as the workers fill.
        min_stages: lower bound of P.
        redundancy: `bamboo.redundancy`.
        launched: the plan that a stock launcher's ranks give; None with our own agent, where placement is free.
        partitions: layer bounds by P, for each P from `min_stages` to `num_stages`; see `Model` for this and the next.
            Empty: the module cuts itself by its own method.
        layer_costs: of each layer. They are compared, so all workers must find the same: declare or count them.
        layer_bytes: of each layer. They serve to estimate and are not compared: a device may pad its state.
        micro_batches: M; None while it is unknown.
        reconfigure: `bamboo.reconfigure`.
    """

    publisher: int
    num_stages: int
    num_layers: int
    pipelines: int | None = None
    min_stages: int = 1
    redundancy: str = "fit"
    launched: Plan | None = None
    partitions: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    layer_costs: tuple[float, ...] = ()
    layer_bytes: tuple[int, ...] = ()
    micro_batches: int | None = None
    reconfigure: str = "auto"

    @property
    def bounds(self) -> Bounds:
        """What the job allows its plans.

        Raises:
            ConfigError: `min_stages`, `pipelines` or what is said of the layers cannot be right.
        """
        return Bounds(
            num_stages=self.num_stages,
            pipelines=self.pipelines,
            min_stages=self.min_stages,
            redundancy=self.redundancy != "off",
            model=Model(self.partitions, self.layer_costs, self.layer_bytes, self.micro_batches),
        )

    def check(self, other: JobSpec) -> None:
        """Check that another worker's specification is this one.

        Raises:
            ConfigError: names what differs.
        """
        for name in _COMPARED:
            _compare(name, getattr(self, name), getattr(other, name), publisher=self.publisher)


@dataclass(frozen=True, slots=True)
class JobSettings:
    """The DeepSpeed config of a job, flat: `{"optimizer.params.lr": "0.001"}`; published when an engine is made.

    Attributes:
        publisher: the worker that says so; not compared.
        settings: JSON text of each value, by dotted key.
        micro_batches: M, as the job began with it; not compared, as it may follow from how many pipelines there were.
    """

    publisher: int
    settings: Mapping[str, str] = field(default_factory=dict)
    micro_batches: int | None = None

    def check(self, other: JobSettings) -> None:
        """Check that another worker's config is this one.

        Raises:
            ConfigError: names the first key that differs.
        """
        for key in sorted(self.settings.keys() | other.settings.keys()):
            _compare(key, self.settings.get(key), other.settings.get(key), publisher=self.publisher)


_COMPARED = (
    "num_stages", "num_layers", "pipelines", "min_stages", "redundancy", "launched", "partitions", "layer_costs",
    "micro_batches", "reconfigure",
)  # fmt: skip


def _compare(name: str, job: object, ours: object, *, publisher: int) -> None:
    if job != ours:
        raise ConfigError(
            f"{name} = {_shown(ours)} here, but {_shown(job)} in the job (as worker {publisher} published): "
            "run the same script with the same config on all nodes, or give this job another name"
        )


def _shown(value: object) -> str:
    return "absent" if value is None else str(value)

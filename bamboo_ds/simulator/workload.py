"""What is trained: a model as layers with costs and sizes, and how it is cut into stages and batches.

Costs are declared, measured by `bamboo-ds profile`, or those of the paper's models (`models`). Only sums over a stage
matter, and stages are cut by the same function as in the job (`plan.partition`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from bamboo_ds.errors import ConfigError
from bamboo_ds.plan.model import Model
from bamboo_ds.plan.partition import balanced_parts
from bamboo_ds.schedule.costs import StageCosts

__all__ = ["Layer", "Workload", "read_workload"]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer, for one micro-batch.

    Attributes:
        name: for people.
        forward_seconds: of its forward; likewise `backward_seconds`.
        activation_bytes: of its output, which travels if a stage ends here.
        gradient_bytes: what is reduced over the pipelines.
        state_bytes: what moves with it: parameters, fp32 masters, optimizer state.
    """

    name: str
    forward_seconds: float
    backward_seconds: float
    activation_bytes: int = 0
    gradient_bytes: int = 0
    state_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("forward_seconds", "backward_seconds", "activation_bytes", "gradient_bytes", "state_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ConfigError(f"layer {self.name}: {name} = {value!r} must be 0 or more, and finite")


@dataclass(frozen=True)
class Workload:
    """A model and how it is trained.

    Attributes:
        name: for people.
        layers: in order.
        micro_batch_samples: samples of a micro-batch.
        micro_batches: M, of the global batch.
        num_stages: upper bound of P.
        pipelines: upper bound of D.
        min_stages: lower bound of P.
        on_demand_stages: P on machines that stay, where nothing is redundant: the paper gives pipelines on spot
            instances one and a half times the stages.
        source: where the figures come from.
        cut_by: cost of each layer by which the job cuts its stages, if it declares one (`bamboo.layer_costs`).

    Raises:
        ConfigError: names the value that cannot be right.
    """

    name: str
    layers: tuple[Layer, ...]
    micro_batch_samples: int
    micro_batches: int
    num_stages: int
    pipelines: int
    min_stages: int = 1
    on_demand_stages: int = 0
    source: str = ""
    cut_by: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.cut_by) not in (0, len(self.layers)):
            raise ConfigError(
                f"workload {self.name}: cut_by has {len(self.cut_by)} entries for {len(self.layers)} layers: give one "
                "for each"
            )
        if not self.on_demand_stages:
            object.__setattr__(self, "on_demand_stages", max(round(self.num_stages / 1.5), 1))
        for name in ("micro_batch_samples", "micro_batches", "pipelines", "min_stages"):
            if not getattr(self, name) >= 1:
                raise ConfigError(f"workload {self.name}: {name} = {getattr(self, name)} must be at least 1")
        for name in ("num_stages", "on_demand_stages"):
            if not self.min_stages <= getattr(self, name) <= len(self.layers):
                raise ConfigError(
                    f"workload {self.name}: {name} = {getattr(self, name)} must be from min_stages = "
                    f"{self.min_stages} to the number of layers, {len(self.layers)}"
                )
        if self.micro_batches < self.pipelines:
            raise ConfigError(
                f"workload {self.name}: micro_batches = {self.micro_batches} are too few for {self.pipelines} "
                "pipelines: each trains at least one"
            )

    @property
    def batch(self) -> int:
        """Samples of a global batch."""
        return self.micro_batch_samples * self.micro_batches

    @property
    def most_workers(self) -> int:
        """P x D: the fleet is never larger."""
        return self.num_stages * self.pipelines

    @cached_property
    def model(self) -> Model:
        """What the policy knows of it."""
        costs = self.cut_by or tuple(layer.forward_seconds + layer.backward_seconds for layer in self.layers)
        stages = range(self.min_stages, max(self.num_stages, self.on_demand_stages) + 1)
        return Model(
            partitions={count: balanced_parts(costs, count) for count in stages},
            layer_costs=costs,
            layer_bytes=tuple(int(layer.state_bytes) for layer in self.layers),
            micro_batches=self.micro_batches,
        )

    def sums(self, num_stages: int, what: str) -> tuple[float, ...]:
        """Return the sum of one of a layer's figures over each of P stages."""
        values = [getattr(layer, what) for layer in self.layers]
        return tuple(sum(values[start:stop]) for start, stop in pairwise(self.model.parts(num_stages)))

    def stage_costs(self, num_stages: int) -> StageCosts:
        """Return what a micro-batch costs each of P stages."""
        forward = tuple(max(seconds, 1e-9) for seconds in self.sums(num_stages, "forward_seconds"))
        backward = tuple(max(seconds, 1e-9) for seconds in self.sums(num_stages, "backward_seconds"))
        return StageCosts(forward, backward, redundant=(*forward[1:], forward[0]))

    def borders(self, num_stages: int) -> tuple[int, ...]:
        """Return the bytes that travel from each of P stages to the next."""
        return tuple(int(self.layers[stop - 1].activation_bytes) for stop in self.model.parts(num_stages)[1:-1])

    def resized(self, *, num_stages: int | None = None, pipelines: int | None = None) -> Workload:
        """Return it for other bounds of P and D; each pipeline keeps its share of the batch."""
        stages, count = num_stages or self.num_stages, pipelines or self.pipelines
        return replace(
            self,
            num_stages=stages,
            pipelines=count,
            micro_batches=max(round(self.micro_batches / self.pipelines * count), count),
            min_stages=min(self.min_stages, stages),
            on_demand_stages=self.on_demand_stages if num_stages is None else 0,
        )

    def write(self, path: Path) -> None:
        """Write it as JSON, for `read_workload`."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def read_workload(path: Path) -> Workload:
    """Read a workload that `bamboo-ds profile` or a person wrote.

    Raises:
        ConfigError: names the file and what is wrong in it.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the workload {path}: {error}") from None
    try:
        layers = tuple(Layer(**_known(Layer, layer)) for layer in found.pop("layers"))
        return Workload(layers=layers, cut_by=tuple(found.pop("cut_by", ())), **_known(Workload, found))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (AttributeError, KeyError, TypeError) as error:
        wanted = ", ".join(field.name for field in fields(Workload))
        raise ConfigError(f"{path}: a workload is one object with {wanted}: {error}") from None


def _known(kind: type[Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a record.

    Raises:
        ConfigError: there are others.
    """
    unknown = sorted(set(found) - {field.name for field in fields(kind)})
    if unknown:
        raise ConfigError(f"unknown key(s) {', '.join(unknown)} of a {kind.__name__.lower()}")
    return dict(found)

"""What the policy knows of the model: how it is cut for each number of stages, and what its layers cost and weigh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from bamboo_ds.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Model:
    """The model as plans see it. What is unknown is left empty; all stages then count alike.

    Attributes:
        partitions: layer bounds by P: stage s has the layers from `partitions[P][s]` to before `partitions[P][s + 1]`.
        layer_costs: forward and backward time of each layer, in any unit.
        layer_bytes: state of each layer that moves with it: parameters, buffers, optimizer state.
        micro_batches: M, of the global batch.
    """

    partitions: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    layer_costs: tuple[float, ...] = ()
    layer_bytes: tuple[int, ...] = ()
    micro_batches: int | None = None

    def __post_init__(self) -> None:
        for stages, parts in self.partitions.items():
            if len(parts) != stages + 1 or parts[0] != 0 or any(left > right for left, right in pairwise(parts)):
                raise ConfigError(
                    f"partitions[{stages}] = {parts}: give the {stages + 1} ascending layer bounds of {stages} "
                    "stages, from 0 to the number of layers"
                )
        counts = {f"partitions[{stages}] ends at": parts[-1] for stages, parts in self.partitions.items()}
        counts |= {f"{name} has": len(values) for name, values in self._by_layer().items() if values}
        if len(set(counts.values())) > 1:
            told = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise ConfigError(f"all must be of the same layers: {told}; give one entry for each layer of the model")
        for name, values in self._by_layer().items():
            if not all(0 <= value < float("inf") for value in values):
                raise ConfigError(f"{name} = {values}: each must be 0 or more, and finite")
        if self.micro_batches is not None and self.micro_batches < 1:
            raise ConfigError(f"micro_batches = {self.micro_batches}: a batch has at least 1")

    def parts(self, num_stages: int) -> tuple[int, ...]:
        """Return the layer bounds for P stages; empty when they are unknown."""
        return self.partitions.get(num_stages, ())

    def stage_costs(self, parts: tuple[int, ...], *, num_stages: int) -> tuple[float, ...]:
        """Return the share of each stage in the time of one micro-batch; they add up to 1.

        Args:
            parts: layer bounds of the stages; empty when they are unknown.
            num_stages: P.
        """
        total = sum(self.layer_costs)
        if not parts or total <= 0:
            return (1 / num_stages,) * num_stages
        return tuple(sum(self.layer_costs[start:stop]) / total for start, stop in pairwise(parts))

    def _by_layer(self) -> dict[str, tuple[float, ...]]:
        return {"layer_costs": self.layer_costs, "layer_bytes": self.layer_bytes}

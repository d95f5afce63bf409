"""What the operations of a pipeline cost, stage by stage: the only input of timing and placement besides the shape."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bamboo_ds.errors import ScheduleError


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Seconds per micro-batch, indexed by the stage of the worker.

    Args:
        forward: Forward of the worker's own stage.
        backward: Backward of the worker's own stage.
        redundant: Forward of the redundant layers on the worker, those of stage (s + 1) % stages.

    Raises:
        ScheduleError: When the lengths differ, or a cost is not a finite number above zero.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    redundant: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuse costs that would make placement meaningless."""
        lengths = {len(self.forward), len(self.backward), len(self.redundant)}
        if len(lengths) != 1 or 0 in lengths:
            raise ScheduleError(f"stage costs need one value per stage and kind, got {self}")
        for name in ("forward", "backward", "redundant"):
            for stage, cost in enumerate(getattr(self, name)):
                if not (math.isfinite(cost) and cost > 0):
                    raise ScheduleError(f"{name} cost of stage {stage} is {cost}: must be finite and above 0")

    @property
    def stages(self) -> int:
        """Number of stages of the pipeline."""
        return len(self.forward)

    @classmethod
    def uniform(
        cls, stages: int, *, forward: float = 1.0, backward: float = 2.0, redundant: float | None = None
    ) -> StageCosts:
        """Return equal costs for all stages; a redundant forward costs a forward unless told otherwise."""
        chosen = forward if redundant is None else redundant
        return cls((forward,) * stages, (backward,) * stages, (chosen,) * stages)

"""The training schedule: DeepSpeed's 1F1B in clock order, plus redundant forwards where they cost least."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

from deepspeed.runtime.pipe.schedule import TrainSchedule

from bamboo_ds.errors import ScheduleError
from bamboo_ds.schedule.costs import StageCosts
from bamboo_ds.schedule.instructions import Instruction, OptimizerStep, ReduceGrads, expand
from bamboo_ds.schedule.operations import clock_order, validate
from bamboo_ds.schedule.windows import Redundancy, worker_orders


class BambooTrainSchedule(TrainSchedule):
    """One training step of one worker.

    `steps()` yields one list of instructions per operation, the last list is `[ReduceGrads(), OptimizerStep()]`.
    Lists are fresh at each call, instructions are shared and must not be changed.

    Args:
        micro_batches: Micro-batches of this pipeline in the step.
        stages: Number of stages of the pipeline.
        stage_id: The worker's own stage.
        owned: All stages that the worker runs, `stage_id` among them; more than one after a failover.
        redundancy: Where redundant forwards run: `"off"` and `"lflb"` nowhere, `"fit"` in predicted idle windows
            only, `"eflb"` for every micro-batch before the worker's own backward of it.
        costs: Seconds per operation of every stage; None while unknown (`"fit"` then places nothing).

    Raises:
        ScheduleError: When a number is out of range, the mode is unknown, or the costs are of another shape.
    """

    micro_batches: int
    stages: int
    stage_id: int
    owned: tuple[int, ...]

    def __init__(
        self,
        micro_batches: int,
        stages: int,
        stage_id: int,
        *,
        owned: Iterable[int] | None = None,
        redundancy: Redundancy = "off",
        costs: StageCosts | None = None,
    ) -> None:
        super().__init__(micro_batches, stages, stage_id)
        self.owned = validate((stage_id,) if owned is None else owned, stages=stages, micro_batches=micro_batches)
        if stage_id not in self.owned:
            raise ScheduleError(f"owned={self.owned} lacks the worker's own stage_id={stage_id}")
        self._instructions = _steps(micro_batches, stages, stage_id, self.owned, redundancy, costs)

    def steps(self) -> Iterator[list[Instruction]]:
        """Yield the instructions of the step, operation by operation."""
        for instructions in self._instructions:
            yield list(instructions)
        yield [ReduceGrads(), OptimizerStep()]

    def num_pipe_buffers(self) -> int:
        """Return the most micro-batches of one owned stage that are in flight at once."""
        return max(min(self.stages - stage, self.micro_batches) for stage in self.owned)


@lru_cache(maxsize=8)
def _steps(
    micro_batches: int,
    stages: int,
    stage_id: int,
    owned: tuple[int, ...],
    redundancy: Redundancy,
    costs: StageCosts | None,
) -> tuple[tuple[Instruction, ...], ...]:
    if owned == (stage_id,):
        orders = worker_orders(stages, micro_batches=micro_batches, redundancy=redundancy, costs=costs)
        order = orders[stage_id]
    else:
        # A merged worker has used its redundant layers up, so there is nothing to run redundantly.
        order = clock_order(owned, stages=stages, micro_batches=micro_batches)
    return tuple(expand(operation, stages=stages, owned=owned) for operation in order)

"""The training schedule: DeepSpeed's 1F1B in clock order, plus redundant forwards where they cost least."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from deepspeed.runtime.pipe.schedule import TrainSchedule

from bamboo_ds.errors import ScheduleError
from bamboo_ds.schedule.costs import StageCosts
from bamboo_ds.schedule.instructions import Instruction, OptimizerStep, ReduceGrads, from_word
from bamboo_ds.schedule.operations import owned_by, validate, validate_owners
from bamboo_ds.schedule.windows import Redundancy, worker_orders
from bamboo_ds.schedule.words import expand


class BambooTrainSchedule(TrainSchedule):
    """One training step of one worker.

    `steps()` yields one list of instructions per operation, the last list is `[ReduceGrads(), OptimizerStep()]`.
    Lists are fresh at each call, instructions are shared and must not be changed.

    Args:
        micro_batches: Micro-batches of this pipeline in the step.
        stages: Number of stages of the pipeline.
        stage_id: The worker's home stage.
        owned: All stages that the worker runs, its home among them; None for what `owners` says.
        owners: By stage, the home stage of the worker that owns it: after a failover of stage s its shadow's home,
            s - 1, stands at s. None while every stage that is not in `owned` has its own.
        redundancy: Where redundant forwards run: `"off"` and `"lflb"` nowhere, `"fit"` in predicted idle windows
            only, `"eflb"` for every micro-batch before the worker's own backward of it; only ever on workers that
            could take over the next stage (`operations.shadowed_stage`).
        costs: Seconds per operation of every stage; None while unknown (`"fit"` then places nothing).

    Raises:
        ScheduleError: When a number is out of range, the mode is unknown, the costs are of another shape, or the
            worker does not own its home, or not what `owned` says.
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
        owners: Sequence[int] | None = None,
        redundancy: Redundancy = "off",
        costs: StageCosts | None = None,
    ) -> None:
        super().__init__(micro_batches, stages, stage_id)
        given = validate((stage_id,) if owned is None else owned, stages=stages, micro_batches=micro_batches)
        if owners is None:
            owners = [stage_id if stage in given else stage for stage in range(stages)]
        owning = validate_owners(owners, stages=stages)
        self.owned = owned_by(stage_id, owners=owning)
        if stage_id not in self.owned or (owned is not None and given != self.owned):
            raise ScheduleError(f"owned={given}, owners={owning}: not those of the worker of stage_id={stage_id}")
        self._instructions = _steps(micro_batches, stage_id, owning, redundancy, costs)

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
    micro_batches: int, stage_id: int, owners: tuple[int, ...], redundancy: Redundancy, costs: StageCosts | None
) -> tuple[tuple[Instruction, ...], ...]:
    stages, owned = len(owners), owned_by(stage_id, owners=owners)
    orders = worker_orders(stages, micro_batches=micro_batches, redundancy=redundancy, costs=costs, owners=owners)
    return tuple(tuple(map(from_word, expand(operation, stages=stages, owned=owned))) for operation in orders[stage_id])

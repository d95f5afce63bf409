"""The evaluation schedule: forwards only, in clock order, sends right after the compute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

from deepspeed.runtime.pipe.schedule import InferenceSchedule

from bamboo_ds.errors import ScheduleError
from bamboo_ds.schedule.instructions import Instruction, from_word
from bamboo_ds.schedule.operations import Kind, clock_order, validate
from bamboo_ds.schedule.words import expand


class BambooInferenceSchedule(InferenceSchedule):
    """The forwards of one worker over a number of micro-batches.

    Args:
        micro_batches: Micro-batches to evaluate in this pipeline.
        stages: Number of stages of the pipeline.
        stage_id: The worker's own stage.
        owned: All stages that the worker runs, `stage_id` among them.

    Raises:
        ScheduleError: When a number is out of range.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int, *, owned: Iterable[int] | None = None) -> None:
        super().__init__(micro_batches, stages, stage_id)
        self.owned = validate((stage_id,) if owned is None else owned, stages=stages, micro_batches=micro_batches)
        if stage_id not in self.owned:
            raise ScheduleError(f"owned={self.owned} lacks the worker's own stage_id={stage_id}")

    def steps(self) -> Iterator[list[Instruction]]:
        """Yield the instructions of each forward."""
        for instructions in _steps(self.micro_batches, self.stages, self.owned):
            yield list(instructions)

    def num_pipe_buffers(self) -> int:
        """Return how many micro-batches a stage holds at once: one, as its send follows its forward at once."""
        return 1


@lru_cache(maxsize=8)
def _steps(micro_batches: int, stages: int, owned: tuple[int, ...]) -> tuple[tuple[Instruction, ...], ...]:
    order = clock_order(owned, stages=stages, micro_batches=micro_batches)
    forwards = (operation for operation in order if operation.kind is Kind.FORWARD)
    return tuple(tuple(map(from_word, expand(operation, stages=stages, owned=owned))) for operation in forwards)

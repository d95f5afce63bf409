"""The rest of the running step for the worker that takes over a lost stage."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from deepspeed.runtime.pipe.schedule import PipeSchedule

from bamboo_ds.errors import ScheduleError
from bamboo_ds.schedule.instructions import Instruction, OptimizerStep, ReduceGrads, from_word, to_word
from bamboo_ds.schedule.takeover import Takeover


class FailoverSchedule(PipeSchedule):
    """What a shadow runs instead of the rest of its schedule, from the loss of the next stage's worker to the step.

    `takeover` tells the order and why. What the engine must know:
    - Nothing in `done` comes again; the lost stage starts from nothing, whatever the victim had done.
    - Between the two stages nothing is sent. A forward or backward hands its result over in memory to the operation of
      the other stage that reads it; if that one is done already, the result is not needed. It replaces a message that
      was received and not yet used, and has its bits. Messages of the victim that were not yet received are dropped.
    - So the outputs of the home stage stay until the commit; and in a pipeline of two stages whose first is lost, the
      backward of stage 0 may read a gradient that the worker itself had sent: it is in its journal.
    - `PromoteForward` follows no receive, and no load but that of the labels: it has what its redundant forward had.
    - `RecvGrad` of the lost stage receives from the successor *all* gradients of the step, those that it had sent to
      the victim too.
    - `SendActivation` of the lost stage begins with the first activation that the successor lacks.

    Args:
        micro_batches: Micro-batches of this pipeline in the step.
        stages: Number of stages of the pipeline.
        stage_id: The shadow's home stage.
        victim: The stage taken over, (stage_id + 1) % stages.
        done: The shadow's instructions of this step that are done, its redundant forwards among them. With
            `ReduceGrads` among them the reduction is given up and comes again; do not fail over in mid-step where the
            sums of the lost stage have arrived, as then nothing was lost.
        held_by_successor: How many activations of the lost stage its successor has received in this step, read or
            not; zero when there is no other successor (the last stage is lost, or the pipeline has two stages).

    Raises:
        ScheduleError: When these do not belong together.
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
        victim: int,
        done: Collection[Instruction],
        held_by_successor: int = 0,
    ) -> None:
        super().__init__(micro_batches, stages, stage_id)
        self._takeover = Takeover(
            home=stage_id,
            stages=stages,
            micro_batches=micro_batches,
            done=frozenset(map(to_word, done)),
            held_by_successor=held_by_successor,
        )
        if victim != self._takeover.victim:
            raise ScheduleError(
                f"victim={victim}: the worker of stage {stage_id} is the shadow of stage {self._takeover.victim}"
            )
        self.owned = self._takeover.owned

    def steps(self) -> Iterator[list[Instruction]]:
        """Yield the instructions of the rest of the step, operation by operation."""
        for words in self._takeover.steps:
            yield list(map(from_word, words))
        yield [ReduceGrads(), OptimizerStep()]

    def num_pipe_buffers(self) -> int:
        """Return the most micro-batches of one owned stage that are in flight at once."""
        return self._takeover.most_in_flight()

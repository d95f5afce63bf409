"""The instructions of a Bamboo schedule: DeepSpeed's classes, made values.

DeepSpeed's instructions compare by identity and name a pipeline *buffer*. Ours are subclasses (so `isinstance`
against DeepSpeed's classes holds) that name a *stage* and a *micro-batch* and compare and hash by them. A stage is
needed because after a failover one worker runs several stages; a micro-batch is needed because redundant work and
the journal outlive any buffer slot.

The engine runs an instruction with `method(**instruction.kwargs)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from deepspeed.runtime.pipe import schedule as stock

from bamboo_ds.errors import ScheduleError
from bamboo_ds.schedule.words import Word


class _Value:
    """Equality and hash by class and arguments."""

    kwargs: dict[str, int]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Value):
            return NotImplemented
        return type(self) is type(other) and self.kwargs == other.kwargs

    def __hash__(self) -> int:
        return hash((type(self), *self.kwargs.values()))


class MicroBatchInstruction(_Value, stock.BufferOpInstruction):
    """An instruction about one micro-batch of one stage.

    Args:
        stage: The stage that the instruction is about (for a message: the stage at this end of the link).
        micro_batch: Index in this pipeline's share of the step; also the `buffer_id`.
    """

    stage: int
    micro_batch: int
    buffer_id: int

    def __init__(self, *, stage: int, micro_batch: int) -> None:
        super().__init__(buffer_id=micro_batch, stage=stage, micro_batch=micro_batch)
        # DeepSpeed calls the engine's method with kwargs; ours take no buffer_id.
        self.kwargs = {"stage": stage, "micro_batch": micro_batch}


class LoadMicroBatch(MicroBatchInstruction, stock.LoadMicroBatch):
    """Load the inputs (first stage) or the labels (last stage) of a micro-batch."""


class ForwardPass(MicroBatchInstruction, stock.ForwardPass):
    """Run the layers of a stage; on the last stage also the loss."""


class BackwardPass(MicroBatchInstruction, stock.BackwardPass):
    """Run the backward of a stage and accumulate its gradients."""


class SendActivation(MicroBatchInstruction, stock.SendActivation):
    """Send the outputs of `stage` to `stage` + 1; never blocks."""


class RecvActivation(MicroBatchInstruction, stock.RecvActivation):
    """Wait for the inputs of `stage` from `stage` - 1."""


class SendGrad(MicroBatchInstruction, stock.SendGrad):
    """Send the gradients of the inputs of `stage` to `stage` - 1; never blocks."""


class RecvGrad(MicroBatchInstruction, stock.RecvGrad):
    """Wait for the gradients of the outputs of `stage` from `stage` + 1."""


class RedundantForward(MicroBatchInstruction):
    """Run the forward of the redundant layers, those of the *next* stage, and keep what backward would need (FRC).

    `stage` is the stage whose layers run: (own stage + 1) % stages. For stage > 0 it reads the worker's own outputs
    of the micro-batch, possibly after its own backward of it (a window at the end of the step); for stage 0 it reads
    the input batch alone, possibly before the worker's own `LoadMicroBatch` of it. It stops before the loss.
    """


class PromoteForward(MicroBatchInstruction):
    """Take the redundant forward of a micro-batch as the forward of `stage`, whose owner was lost.

    The worker owns the stage now. Nothing is computed but, on the last stage, the loss, which a redundant forward
    leaves out; there a `LoadMicroBatch` of the labels comes first.
    """


class ReduceGrads(_Value, stock.ReduceGrads):
    """Reduce the gradients of all owned and redundant stages among their holders.

    Tied gradients are part of it: a tied layer is reduced among all stages that hold it, so there is no
    `ReduceTiedGrads`.
    """

    def __init__(self) -> None:
        super().__init__()


class OptimizerStep(_Value, stock.OptimizerStep):
    """Commit the step and let the optimizer use the reduced gradients."""

    def __init__(self) -> None:
        super().__init__()


Instruction: TypeAlias = MicroBatchInstruction | ReduceGrads | OptimizerStep


CLASSES: Mapping[str, type[MicroBatchInstruction] | type[ReduceGrads] | type[OptimizerStep]] = {
    "L": LoadMicroBatch,
    "F": ForwardPass,
    "B": BackwardPass,
    "R": RedundantForward,
    "P": PromoteForward,
    "SA": SendActivation,
    "RA": RecvActivation,
    "SG": SendGrad,
    "RG": RecvGrad,
    "REDUCE": ReduceGrads,
    "STEP": OptimizerStep,
}
"""By the letters of the text form."""

_LETTERS = {instruction: letters for letters, instruction in CLASSES.items()}


def from_word(word: Word) -> Instruction:
    """Return the instruction that a word stands for."""
    chosen = CLASSES[word.letters]
    if issubclass(chosen, MicroBatchInstruction):
        return chosen(stage=word.stage, micro_batch=word.micro_batch)
    return chosen()


def to_word(instruction: Instruction) -> Word:
    """Return the plain value of an instruction.

    Raises:
        ScheduleError: When it is none of ours, such as an instruction of stock DeepSpeed.
    """
    letters = _LETTERS.get(type(instruction))
    if letters is None:
        raise ScheduleError(f"{instruction!r} has no text form: it is no instruction of bamboo_ds.schedule")
    return Word(letters, **instruction.kwargs)

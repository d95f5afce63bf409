"""The text form of instructions, both ways: `2F0` is the forward of stage 2 for micro-batch 0.

    L load   F forward   SA send activation   RA receive activation   R redundant forward (of the stage named)
             B backward  SG send gradient     RG receive gradient     REDUCE, STEP end a training step

A schedule is one line per operation: the instructions of one step of the schedule, separated by blanks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from bamboo_ds.errors import ScheduleError
from bamboo_ds.schedule.instructions import (
    BackwardPass,
    ForwardPass,
    Instruction,
    LoadMicroBatch,
    MicroBatchInstruction,
    OptimizerStep,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    RedundantForward,
    SendActivation,
    SendGrad,
)

_CLASSES: dict[str, type[MicroBatchInstruction]] = {
    "L": LoadMicroBatch,
    "F": ForwardPass,
    "B": BackwardPass,
    "R": RedundantForward,
    "SA": SendActivation,
    "RA": RecvActivation,
    "SG": SendGrad,
    "RG": RecvGrad,
}
_LETTERS: dict[type[Instruction], str] = {instruction: letters for letters, instruction in _CLASSES.items()}
_ENDS: dict[str, type[ReduceGrads] | type[OptimizerStep]] = {"REDUCE": ReduceGrads, "STEP": OptimizerStep}
_WORDS: dict[type[Instruction], str] = {instruction: word for word, instruction in _ENDS.items()}
_PATTERN = re.compile(r"(\d+)([A-Z]+)(\d+)", re.ASCII)


def parse(text: str) -> Instruction:
    """Return the instruction that a text such as `2SA0` or `STEP` stands for.

    Raises:
        ScheduleError: When the text is no instruction.
    """
    if text in _ENDS:
        return _ENDS[text]()
    match = _PATTERN.fullmatch(text)
    if match is None or match[2] not in _CLASSES:
        raise ScheduleError(
            f"{text!r} is no instruction: expected <stage><{'|'.join(_CLASSES)}><micro-batch> or {' or '.join(_ENDS)}"
        )
    return _CLASSES[match[2]](stage=int(match[1]), micro_batch=int(match[3]))


def format(instruction: Instruction) -> str:
    """Return the text form of an instruction.

    Raises:
        ScheduleError: When it is none of ours, such as an instruction of stock DeepSpeed.
    """
    kind = type(instruction)
    if kind in _WORDS:
        return _WORDS[kind]
    if kind not in _LETTERS:
        raise ScheduleError(f"{instruction!r} has no text form: it is no instruction of bamboo_ds.schedule")
    return "{stage}{letters}{micro_batch}".format(letters=_LETTERS[kind], **instruction.kwargs)


def parse_steps(text: str) -> list[list[Instruction]]:
    """Return the steps of a schedule from one line each; empty lines are skipped."""
    return [[parse(word) for word in line.split()] for line in text.splitlines() if line.strip()]


def format_steps(steps: Iterable[Sequence[Instruction]]) -> str:
    """Return the steps of a schedule, one line each."""
    return "\n".join(" ".join(format(instruction) for instruction in step) for step in steps)

"""The text form of instructions, both ways; its letters are listed in `words`.

A schedule is one line per operation: the instructions of one step of the schedule, separated by blanks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bamboo_ds.schedule.instructions import Instruction, from_word, to_word
from bamboo_ds.schedule.words import parse_word


def parse(text: str) -> Instruction:
    """Return the instruction that a text such as `2SA0` or `STEP` stands for.

    Raises:
        ScheduleError: When the text is no instruction.
    """
    return from_word(parse_word(text))


def format(instruction: Instruction) -> str:
    """Return the text form of an instruction.

    Raises:
        ScheduleError: When it is none of ours, such as an instruction of stock DeepSpeed.
    """
    return str(to_word(instruction))


def parse_steps(text: str) -> list[list[Instruction]]:
    """Return the steps of a schedule from one line each; empty lines are skipped."""
    return [[parse(word) for word in line.split()] for line in text.splitlines() if line.strip()]


def format_steps(steps: Iterable[Sequence[Instruction]]) -> str:
    """Return the steps of a schedule, one line each."""
    return "\n".join(" ".join(format(instruction) for instruction in step) for step in steps)

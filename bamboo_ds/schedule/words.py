"""Instructions as plain values: the letters of the text form, a stage, a micro-batch.

    L load   F forward   SA send activation   RA receive activation   R redundant forward (of the stage named)
             B backward  SG send gradient     RG receive gradient     P promote a redundant forward to a forward
    REDUCE, STEP end a training step

`2F0` is the forward of stage 2 for micro-batch 0. DeepSpeed's classes (`instructions`) are made from words; whatever
reasons about instructions (failover, pictures, the command line) needs words only and loads no DeepSpeed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

from bamboo_ds.errors import ScheduleError
from bamboo_ds.schedule.operations import Kind, Operation

LETTERS = ("L", "F", "B", "R", "P", "SA", "RA", "SG", "RG")
_COMPUTES = frozenset(kind.value for kind in Kind)
_ENDS = ("REDUCE", "STEP")
_PATTERN = re.compile(r"(\d+)([A-Z]+)(\d+)", re.ASCII)


class Word(NamedTuple):
    """One instruction; `stage` and `micro_batch` are -1 for the two that end a step."""

    letters: str
    stage: int = -1
    micro_batch: int = -1

    def __str__(self) -> str:
        """Return the text form, such as `2SA0`."""
        return self.letters if self.stage < 0 else f"{self.stage}{self.letters}{self.micro_batch}"


REDUCE, STEP = (Word(end) for end in _ENDS)


def parse_word(text: str) -> Word:
    """Return the word that a text such as `2SA0` or `STEP` stands for.

    Raises:
        ScheduleError: When the text is no instruction.
    """
    if text in _ENDS:
        return Word(text)
    match = _PATTERN.fullmatch(text)
    if match is None or match[2] not in LETTERS:
        raise ScheduleError(
            f"{text!r} is no instruction: expected <stage><{'|'.join(LETTERS)}><micro-batch> or {' or '.join(_ENDS)}"
        )
    return Word(match[2], int(match[1]), int(match[3]))


def expand(operation: Operation, *, stages: int, owned: Collection[int]) -> tuple[Word, ...]:
    """Return an operation with the loads and messages around it, sends right after the compute.

    Args:
        operation: What to compute.
        stages: Number of stages of the pipeline.
        owned: The stages of this worker; between two of them nothing is sent, tensors are handed over in memory.
    """
    kind, stage, micro_batch = operation
    around = {Kind.FORWARD: _forward, Kind.BACKWARD: _backward, Kind.PROMOTED: _promoted, Kind.REDUNDANT: _redundant}
    return tuple(Word(letters, stage, micro_batch) for letters in around[kind](stage, stages, owned))


def computed(words: Iterable[Word]) -> Operation | None:
    """Return the operation among the instructions of one group, None when there are loads and messages only."""
    kinds = [Operation(Kind(letters), stage, m) for letters, stage, m in words if letters in _COMPUTES]
    return kinds[0] if kinds else None


def _redundant(stage: int, stages: int, owned: Collection[int]) -> list[str]:
    return ["R"]


def _forward(stage: int, stages: int, owned: Collection[int]) -> list[str]:
    letters = ["F"]
    if stage > 0 and stage - 1 not in owned:
        letters.insert(0, "RA")
    if stage in (0, stages - 1):
        letters.insert(0, "L")
    if stage < stages - 1 and stage + 1 not in owned:
        letters.append("SA")
    return letters


def _promoted(stage: int, stages: int, owned: Collection[int]) -> list[str]:
    """Inputs were those of the redundant forward; only the loss of the last stage needs more, its labels."""
    letters = ["L", "P"] if stage == stages - 1 else ["P"]
    return [*letters, "SA"] if stage < stages - 1 and stage + 1 not in owned else letters


def _backward(stage: int, stages: int, owned: Collection[int]) -> list[str]:
    letters = ["B"]
    if stage < stages - 1 and stage + 1 not in owned:
        letters.insert(0, "RG")
    if stage > 0 and stage - 1 not in owned:
        letters.append("SG")
    return letters

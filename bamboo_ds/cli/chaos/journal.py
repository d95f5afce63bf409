"""What the workers of a chaos run write down, and how it is read while they do.

All append to one file: a line is written in one piece or, by a worker that is killed, not at all. A second file says
after which step they end; it may come while they train.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

__all__ = ["Journal", "Pass", "StepLine"]


class Pass(NamedTuple):
    """A forward or backward of a micro-batch; moments are of `time.time()`."""

    kind: str
    stage: int
    micro_batch: int
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class StepLine:
    """A step that a worker has seen committed.

    Attributes:
        step: number of the step, from 0.
        loss: mean of its global batch.
        at: `time.time()` of its end, at this worker.
        worker: its id.
        stages: of the plan at the end of the step; `pipelines` likewise.
        pipeline: of the worker; this and the next are there only if the job is `timed`.
        computed: `time.time()` when this worker began to reduce the step's gradients, having computed its own.
        passes: its forwards and backwards.
    """

    step: int
    loss: float
    at: float
    worker: int
    stages: int
    pipelines: int
    pipeline: int = -1
    computed: float = 0.0
    passes: tuple[Pass, ...] = ()


class Journal:
    """The file of all steps.

    Args:
        folder: that all workers reach.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._last = folder / "steps.jsonl", folder / "last_step"
        self._offset, self._rest = 0, b""

    def write(self, line: StepLine) -> None:
        """Append a line."""
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, json.dumps(asdict(line)).encode() + b"\n")
        finally:
            os.close(file)

    def read(self) -> list[StepLine]:
        """Return the lines that were not returned before."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        return [_read(line) for line in lines]

    @property
    def steps(self) -> float:
        """How many steps to train: infinity as long as nobody has said."""
        try:
            return int(self._last.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return math.inf

    def end_after(self, steps: int) -> None:
        """Say how many steps to train: at least two more than anybody has begun."""
        draft = self._last.with_suffix(".draft")
        draft.write_text(str(steps), encoding="utf-8")
        draft.replace(self._last)


def _read(line: bytes) -> StepLine:
    found = json.loads(line)
    return StepLine(**{**found, "passes": tuple(Pass(*each) for each in found.get("passes", ()))})

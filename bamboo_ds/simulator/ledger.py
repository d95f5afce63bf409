"""Where the time of a job goes, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

__all__ = ["WORK", "Cause", "Checkpoints", "Ledger", "Pace"]


class Cause(str, Enum):
    """What time is spent on."""

    TRAINING = "training"
    """Steps, as long as they take without redundancy and with every stage on a worker of its own."""
    REDUNDANCY = "redundancy"
    """What redundant forwards and the reduction of redundant gradients add to a step."""
    MERGED = "merged"
    """What steps take longer as a worker runs two stages."""
    CHECKPOINT = "checkpoint"
    """Steps that wait for a checkpoint."""
    FAILOVER = "failover"
    """Noticing losses, taking over, and computing again."""
    LOST = "lost"
    """Work that was done and thrown away: steps dropped, and steps since the checkpoint that was restored."""
    RECONFIGURATION = "reconfiguration"
    """No step runs while layers move."""
    RESTART = "restart"
    """No step runs while processes start, or a checkpoint is read."""
    WAITING = "waiting"
    """Too few nodes, or the job has not begun."""


WORK = (Cause.TRAINING, Cause.REDUNDANCY, Cause.MERGED, Cause.CHECKPOINT)
"""What a step consists of: lost as a whole when the step is."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What one step takes, by cause, and gives."""

    training: float
    redundancy: float = 0.0
    merged: float = 0.0
    checkpoint: float = 0.0
    samples: float = 0.0

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.training + self.redundancy + self.merged + self.checkpoint


@dataclass(slots=True)
class Ledger:
    """Time by cause, and samples.

    Attributes:
        record: whether to keep `segments`.
        seconds: by cause.
        samples: trained and not lost.
        steps: likewise.
        segments: (from, to, samples per second), where steps ran that were not lost again.
    """

    record: bool = False
    seconds: dict[Cause, float] = field(default_factory=lambda: dict.fromkeys(Cause, 0.0))
    samples: float = 0.0
    steps: int = 0
    segments: list[tuple[float, float, float]] = field(default_factory=list)

    def spend(self, cause: Cause, seconds: float) -> None:
        """Note time in which no step was finished."""
        self.seconds[cause] += seconds

    def train(self, pace: Pace, steps: int, *, since: float) -> None:
        """Note finished steps."""
        self.seconds[Cause.TRAINING] += pace.training * steps
        self.seconds[Cause.REDUNDANCY] += pace.redundancy * steps
        self.seconds[Cause.MERGED] += pace.merged * steps
        self.seconds[Cause.CHECKPOINT] += pace.checkpoint * steps
        self.samples += pace.samples * steps
        self.steps += steps
        if self.record and steps:
            self.segments.append((since, since + pace.seconds * steps, pace.samples / pace.seconds))


@dataclass(frozen=True, slots=True)
class _Saved:
    """What the ledger held when a checkpoint was begun, and when the checkpoint is whole."""

    trained_until: float
    whole_at: float
    samples: float
    steps: int
    work: tuple[float, ...]


class Checkpoints:
    """Periodic checkpoints, and going back to the last whole one.

    Args:
        ledger: of the job.
        interval_seconds: between two that begin, but none begins before the last is whole.
        write_seconds: from its beginning until it is whole.
    """

    def __init__(self, ledger: Ledger, *, interval_seconds: float, write_seconds: float) -> None:
        self._ledger = ledger
        self.write_seconds = write_seconds
        self._interval = max(interval_seconds, write_seconds)
        self._whole = self._newest = _Saved(0.0, 0.0, 0.0, 0, (0.0,) * len(WORK))
        self._due = 0.0

    def note(self, pace: Pace, steps: int, *, since: float) -> None:
        """Begin the checkpoints that fall into steps which the ledger has just noted."""
        end = since + pace.seconds * steps
        if end < self._due:
            return
        # Only the last one that is whole by the end and the newest one can matter.
        last = self._due + int((end - self._due) / self._interval) * self._interval
        for moment in (last - self._interval, last):
            if moment >= self._due:
                done = max(min(int((moment - since) / pace.seconds), steps), 0)
                self._begin(moment, pace, steps_after=steps - done, trained_until=since + done * pace.seconds)
        self._due = last + self._interval

    def _begin(self, moment: float, pace: Pace, *, steps_after: int, trained_until: float) -> None:
        """Save what the ledger held so many steps ago."""
        if self._newest.whole_at <= moment:
            self._whole = self._newest
        parts = (pace.training, pace.redundancy, pace.merged, pace.checkpoint)
        ledger = self._ledger
        work = (ledger.seconds[cause] - part * steps_after for cause, part in zip(WORK, parts, strict=True))
        samples = ledger.samples - pace.samples * steps_after
        self._newest = _Saved(
            trained_until, moment + self.write_seconds, samples, ledger.steps - steps_after, tuple(work)
        )

    def roll_back(self, now: float) -> None:
        """Lose what was trained since the last checkpoint that is whole: its time becomes lost time."""
        saved = self._newest if self._newest.whole_at <= now else self._whole
        for cause, seconds in zip(WORK, saved.work, strict=True):
            self._ledger.seconds[Cause.LOST] += self._ledger.seconds[cause] - seconds
            self._ledger.seconds[cause] = seconds
        self._ledger.samples, self._ledger.steps = saved.samples, saved.steps
        self._ledger.segments = [
            (start, min(end, saved.trained_until), rate)
            for start, end, rate in self._ledger.segments
            if start < saved.trained_until
        ]
        self._whole = self._newest = saved
        self._due = now

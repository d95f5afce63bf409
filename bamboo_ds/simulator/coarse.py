"""Plays a trace with a way to train that is told by two things: its pace, and what a change of nodes leads to.

This is for comparison with Bamboo; nothing of it is a rule of ours.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from bamboo_ds.simulator.ledger import Cause, Checkpoints, Ledger, Pace
from bamboo_ds.simulator.membership import Instant

__all__ = ["CoarseJob", "Reaction", "Way"]


@dataclass(frozen=True, slots=True)
class Reaction:
    """What a change of nodes leads to, besides the loss of the running step.

    Attributes:
        seconds: for which no step runs.
        cause: of that.
        rolls_back: whether the last checkpoint is restored.
    """

    seconds: float
    cause: Cause
    rolls_back: bool = False


class Way(Protocol):
    """A way to train on nodes that come and go."""

    def change(self, gone: Collection[str], joined: Collection[str]) -> Reaction | None:
        """React to nodes that are lost and ready; None when that changes nothing."""
        ...

    @property
    def pace(self) -> Pace | None:
        """What a step takes and gives now; None with too few nodes."""
        ...


class CoarseJob:
    """A job that plays a trace in one way.

    Args:
        way: how it trains.
        checkpoint_seconds: between two checkpoints that begin.
        write_seconds: until one is whole.
        record: whether the ledger keeps segments for a picture.

    Attributes:
        ledger: where the time went.
        reactions: how many changes led to something.
        roll_backs: how many of them to a checkpoint.
    """

    def __init__(self, way: Way, *, checkpoint_seconds: float, write_seconds: float, record: bool = False) -> None:
        self.ledger = Ledger(record)
        self.reactions = self.roll_backs = 0
        self._way = way
        self._checkpoints = Checkpoints(self.ledger, interval_seconds=checkpoint_seconds, write_seconds=write_seconds)
        self._now = 0.0  # time is accounted for until here; while a step runs, until its beginning
        self._resume_at, self._stall = math.inf, Cause.WAITING
        self._pace: Pace | None = None

    def play(self, instants: Sequence[Instant], *, seconds: float) -> Ledger:
        """Play a whole trace and return where the time went."""
        for instant in instants:
            self._advance(instant.seconds)
            reaction = self._way.change(instant.gone, [node.node for node in instant.joined])
            if reaction is not None:
                self._react(reaction, at=instant.seconds)
        self._advance(seconds)
        if self._pace is not None:
            self.ledger.spend(Cause.TRAINING, seconds - self._now)
        return self.ledger

    def _advance(self, until: float) -> None:
        """Let time pass; a step that does not end before `until` goes on."""
        if self._pace is None:
            self._pass(min(until, self._resume_at))
            if self._resume_at <= until:
                self._pace, self._resume_at = self._way.pace, math.inf
        if self._pace is not None:
            steps = int((until - self._now) / self._pace.seconds + 1e-9)
            self._train(self._pace, steps)

    def _pass(self, until: float) -> None:
        self.ledger.spend(self._stall, until - self._now)
        self._now = until

    def _train(self, pace: Pace, steps: int) -> None:
        if steps > 0:
            self.ledger.train(pace, steps, since=self._now)
            self._checkpoints.note(pace, steps, since=self._now)
            self._now += steps * pace.seconds

    def _react(self, reaction: Reaction, *, at: float) -> None:
        self.reactions += 1
        if self._pace is not None:
            self.ledger.spend(Cause.LOST, at - self._now)
            self._now = at
        self._pace = None
        if reaction.rolls_back:
            self.roll_backs += 1
            self._checkpoints.roll_back(at)
        waits = self._way.pace is None
        self._stall = Cause.WAITING if waits else reaction.cause
        self._resume_at = math.inf if waits else at + reaction.seconds

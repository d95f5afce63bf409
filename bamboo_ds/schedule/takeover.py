"""What the shadow of a lost worker has left to do in the running step.

The worker of stage h, its home, takes over stage s = (h + 1) % P. Of the victim's work in this step nothing is left but
the activations that its successor has received: its gradients are gone, and what it sent back to its shadow is computed
again (to the same bits) and handed over in memory. So all forwards and backwards of s are still to do, besides what the
shadow has not yet done of h. Nobody else's instructions change.

The order. Everything runs by the clock (see `operations`), so lost backwards come first, in micro-batch order, and
workers cannot wait for each other in a circle: every message goes from a smaller to a larger clock. Only what waits for
nobody is moved before all clocks: the gradient of a backward that is done, and the activations that the successor lacks
and that exist, as the redundant forward is done. A redundant forward that is done is promoted in the place of the
forward it replaces.

Recomputed forwards could run later, each right before its backward, or those that the successor awaits before all
others. Simulated steps of either differ from this by a few permille in the mean: the worker of two stages is slowest
in its pipeline and rarely idle, whatever its order. And this one keeps the forwards of a stage in micro-batch order, so
that buffers which a forward changes, such as running means, end with the bits of the undisturbed step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from bamboo_ds.errors import ScheduleError
from bamboo_ds.schedule.operations import Kind, Operation, clock, clock_order
from bamboo_ds.schedule.words import STEP, Word, computed, expand

_FIRST, _AT_ONCE = -2, -1
"""They come before every clock."""


class _Key(NamedTuple):
    """The place in the order: by clock, then by stage; by micro-batch for what is sent at once."""

    clock: int
    rank: int


@dataclass(frozen=True)
class Takeover:
    """A shadow at the moment when it takes over the next stage.

    Args:
        home: The shadow's own stage.
        stages: Number of stages of the pipeline, at least two.
        micro_batches: Micro-batches of this pipeline in the step.
        done: The shadow's instructions of this step that are done, a beginning of its own order.
        held_by_successor: How many activations of the lost stage its successor has received in this step, read or
            not; zero when there is no other successor (the last stage is lost, or the pipeline has two stages).

    Raises:
        ScheduleError: When these do not belong together.
    """

    home: int
    stages: int
    micro_batches: int
    done: frozenset[Word]
    held_by_successor: int = 0

    def __post_init__(self) -> None:
        """Refuse what no shadow can be in."""
        if self.stages < 2 or not 0 <= self.home < self.stages or self.micro_batches < 1:
            raise ScheduleError(
                f"home={self.home}, stages={self.stages}, micro_batches={self.micro_batches}: no stage to take over"
            )
        strangers = sorted(str(word) for word in self.done if word == STEP or word.stage not in self._known(word))
        if strangers:
            raise ScheduleError(
                f"done has {', '.join(strangers)}: not of a step in progress at the worker of stage {self.home}"
            )
        possible = self.micro_batches if self.sends else 0
        if not 0 <= self.held_by_successor <= possible:
            raise ScheduleError(
                f"held_by_successor={self.held_by_successor}: must be 0..{possible}, "
                f"stage {self.victim} of {self.stages} is lost and micro_batches={self.micro_batches}"
            )

    def _known(self, word: Word) -> tuple[int, ...]:
        return (self.victim,) if word.letters == "R" else (-1, self.home)

    @property
    def victim(self) -> int:
        """The stage taken over."""
        return (self.home + 1) % self.stages

    @property
    def owned(self) -> tuple[int, ...]:
        """Both stages."""
        return tuple(sorted((self.home, self.victim)))

    @property
    def sends(self) -> bool:
        """Whether another worker reads the outputs of the lost stage."""
        return self.victim < self.stages - 1 and self.victim + 1 != self.home

    @cached_property
    def steps(self) -> tuple[tuple[Word, ...], ...]:
        """What is left to do, one group of instructions per operation; without the end of the step."""
        keyed = sorted([*self._own(), *self._lost()])
        return tuple(words for _, words in keyed)

    def most_in_flight(self) -> int:
        """Return the most micro-batches of one of the two stages between forward and backward, from now on."""
        held: Counter[int] = Counter()
        for letters, stage, _ in self.done:
            held[stage] += {"F": 1, "B": -1}.get(letters, 0)
        most = max(held.values(), default=0)
        for operation in filter(None, map(computed, self.steps)):
            held[operation.stage] += -1 if operation.kind is Kind.BACKWARD else 1
            most = max(most, held[operation.stage])
        return most

    def _own(self) -> Iterator[tuple[_Key, tuple[Word, ...]]]:
        """Yield what is left of the home stage."""
        for operation in clock_order((self.home,), stages=self.stages, micro_batches=self.micro_batches):
            words = tuple(word for word in self._expand(operation) if word not in self.done)
            if computed(words):
                yield self._by_clock(operation), words
            elif words:  # only its message is missing
                yield _Key(_FIRST, self.home), words

    def _lost(self) -> Iterator[tuple[_Key, tuple[Word, ...]]]:
        """Yield all of the lost stage."""
        at_once = self._at_once()
        for micro_batch in range(self.micro_batches):
            forward = Operation(Kind.FORWARD, self.victim, micro_batch)
            promoted, backward = forward._replace(kind=Kind.PROMOTED), forward._replace(kind=Kind.BACKWARD)
            words = self._expand(promoted if micro_batch in self._redundant else forward)
            if micro_batch < self.held_by_successor:
                words = tuple(word for word in words if word.letters != "SA")
            yield _Key(_AT_ONCE, micro_batch) if micro_batch in at_once else self._by_clock(forward), words
            yield self._by_clock(backward), self._expand(backward)

    def _at_once(self) -> range:
        """Return the micro-batches whose activations exist and can be sent, none out of order."""
        end = self.held_by_successor
        while self.sends and end in self._redundant:
            end += 1
        return range(self.held_by_successor, end)

    @cached_property
    def _redundant(self) -> frozenset[int]:
        return frozenset(word.micro_batch for word in self.done if word.letters == "R")

    def _by_clock(self, operation: Operation) -> _Key:
        return _Key(clock(operation, stages=self.stages), operation.stage)

    def _expand(self, operation: Operation) -> tuple[Word, ...]:
        return expand(operation, stages=self.stages, owned=self.owned)

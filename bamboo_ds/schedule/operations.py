"""What a worker computes, and the one clock that orders it.

An `Operation` is a forward, a backward or a redundant forward of one stage for one micro-batch. Instructions
(`bamboo_ds.schedule.instructions`) are an operation plus the messages around it; everything that reasons about
time, windows or pictures needs the operation only and so needs neither torch nor DeepSpeed.

The trick is the clock: with F(s, m) at clock 2m + s and B(s, m) at clock 2m + 2P - 1 - s every dependency points to
a larger clock, and one stage sorted by it is exactly 1F1B. So workers which run the operations of whatever stages
they own in clock order can never wait for each other in a circle, as long as sends do not block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from bamboo_ds.errors import ScheduleError


class Kind(str, Enum):
    """The kinds of computation, named by the letter of the text form.

    A promoted forward is a redundant one that its worker takes for its own after the loss of the owner: it computes
    nothing but, on the last stage, the loss.
    """

    FORWARD = "F"
    BACKWARD = "B"
    REDUNDANT = "R"
    PROMOTED = "P"


class Operation(NamedTuple):
    """One computation: `kind` of the layers of `stage` for `micro_batch`.

    The stage of a redundant forward is the stage whose layers run, not the stage of the worker that runs them.
    """

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        """Return the text form, such as `2F0`: forward of stage 2, micro-batch 0."""
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


def shadow_of(stage: int, *, stages: int) -> int:
    """Return the stage whose worker holds the redundant layers of `stage`."""
    return (stage - 1) % stages


def clock(operation: Operation, *, stages: int) -> int:
    """Return the tick at which 1F1B runs a forward or a backward.

    Raises:
        ScheduleError: For a redundant or promoted forward, which has no fixed tick.
    """
    kind, stage, micro_batch = operation
    if kind is Kind.FORWARD:
        return 2 * micro_batch + stage
    if kind is Kind.BACKWARD:
        return 2 * micro_batch + 2 * stages - 1 - stage
    raise ScheduleError(f"{operation} has no clock: only forwards and backwards have, others are placed beside them")


def clock_order(owned: Iterable[int], *, stages: int, micro_batches: int) -> tuple[Operation, ...]:
    """Return the forwards and backwards of the owned stages in the order in which one worker runs them.

    Args:
        owned: The stages of one worker; usually one, more after a failover.
        stages: Number of stages of the pipeline.
        micro_batches: Number of micro-batches of the step.

    Raises:
        ScheduleError: When a number is out of range.
    """
    return _clock_order(validate(owned, stages=stages, micro_batches=micro_batches), stages, micro_batches)


def is_sourced(operation: Operation, *, before: Sequence[Operation]) -> bool:
    """Return whether a redundant forward could run after the operations `before` of the same worker.

    It reads the worker's own output of the micro-batch; that of stage 0 reads the input batch, which is always there.
    """
    return operation.stage == 0 or Operation(Kind.FORWARD, operation.stage - 1, operation.micro_batch) in before


def validate(owned: Iterable[int], *, stages: int, micro_batches: int) -> tuple[int, ...]:
    """Return the owned stages, sorted and without repetition, or raise ScheduleError when a number is out of range."""
    if stages < 1 or micro_batches < 1:
        raise ScheduleError(f"stages={stages}, micro_batches={micro_batches}: both must be at least 1")
    chosen = tuple(sorted(set(owned)))
    if not chosen or chosen[0] < 0 or chosen[-1] >= stages:
        raise ScheduleError(f"owned={chosen}: must name at least one stage, each in 0..{stages - 1}")
    return chosen


def validate_owners(owners: Sequence[int] | None, *, stages: int) -> tuple[int, ...]:
    """Return the owner of every stage, named by its home stage; None means that every stage has its own.

    Raises:
        ScheduleError: When there is not one for each stage, or one does not own its home.
    """
    chosen = tuple(range(stages)) if owners is None else tuple(owners)
    if len(chosen) != stages or any(not 0 <= owner < stages or chosen[owner] != owner for owner in chosen):
        raise ScheduleError(
            f"owners={chosen}: must name for each of {stages} stages the home stage of its owner, who owns its home too"
        )
    return chosen


def owned_by(worker: int, *, owners: Sequence[int]) -> tuple[int, ...]:
    """Return the stages of the worker whose home stage is `worker`."""
    return tuple(stage for stage, owner in enumerate(owners) if owner == worker)


def shadowed_stage(worker: int, *, owners: Sequence[int]) -> int | None:
    """Return the stage that a worker could take over if its owner were lost, None if it could not.

    A merged worker has used its redundant layers up; and what a merged worker owns cannot be taken over, as nobody
    holds its second stage. Redundant forwards make sense for the others only.
    """
    stage = (worker + 1) % len(owners)
    apart = stage != worker and owned_by(worker, owners=owners) == (worker,)
    return stage if apart and owned_by(stage, owners=owners) == (stage,) else None


@lru_cache(maxsize=64)
def _clock_order(owned: tuple[int, ...], stages: int, micro_batches: int) -> tuple[Operation, ...]:
    operations = [
        Operation(kind, stage, micro_batch)
        for kind in (Kind.FORWARD, Kind.BACKWARD)
        for stage in owned
        for micro_batch in range(micro_batches)
    ]
    return tuple(sorted(operations, key=lambda operation: (clock(operation, stages=stages), operation.stage)))

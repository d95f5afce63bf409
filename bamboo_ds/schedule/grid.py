"""The picture of a step: a row per worker, a column per unit of time.

    0  F0 F1 r0 .  B0--- .  B1---
    1  .  F0 B0--- F1 B1--- r0 .

`F` forward, `B` backward, `r` redundant forward, each with its micro-batch and as wide as it lasts; `.` idle. `f` and
`b` are of another stage than the worker's home, one that it has taken over; `x` is where a worker was lost.
Times are rounded to columns, so the picture is approximate where costs are no multiples of the unit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from bamboo_ds.schedule.costs import StageCosts
from bamboo_ds.schedule.operations import Kind, Operation
from bamboo_ds.schedule.timing import Event, Timeline

_LETTERS = {Kind.FORWARD: "F", Kind.BACKWARD: "B"}
_LETTERS_ELSEWHERE = {Kind.FORWARD: "f", Kind.BACKWARD: "b", Kind.REDUNDANT: "r", Kind.PROMOTED: "p"}
_MOST_COLUMNS_OF_CHEAPEST = 2
_MOST_COLUMNS_OF_DEAREST = 20


@dataclass(frozen=True, slots=True)
class Cell:
    """A stretch of one row: an operation or, with `kind` None, one column of none; `text` has the full width."""

    kind: Kind | None
    text: str


@dataclass(frozen=True, slots=True)
class Row:
    """One worker's part of the picture."""

    worker: int
    cells: tuple[Cell, ...]


def column_seconds(costs: StageCosts) -> float:
    """Return how much time one column stands for.

    The cheapest operation takes one column, or two if only then all others take whole columns; otherwise the others
    are rounded. However short the cheapest is, the dearest takes no more than 20 columns, so that a step stays
    readable; what is shorter than half a column may then not show.
    """
    values = (*costs.forward, *costs.backward, *costs.redundant)
    least, readable = min(values), max(values) / _MOST_COLUMNS_OF_DEAREST
    parts = math.lcm(*(Fraction(value / least).limit_denominator(100).denominator for value in values))
    return max(least / parts if parts <= _MOST_COLUMNS_OF_CHEAPEST else least, readable)


def cell_width(timeline: Timeline) -> int:
    """Return how many characters one column takes: the longest label and a blank."""
    labels = (_label(event.operation, worker) for worker, events in timeline.events.items() for event in events)
    return max(map(len, labels), default=1) + 1


def rows(timeline: Timeline, *, unit_seconds: float, lost_seconds: Mapping[int, float] | None = None) -> list[Row]:
    """Return the picture as cells, for a caller that colours them.

    Args:
        timeline: What ran when.
        unit_seconds: What one column stands for, see `column_seconds`.
        lost_seconds: When workers were lost, by worker.
    """
    width = cell_width(timeline)
    columns = _column(timeline.step_seconds, unit_seconds)
    lost = {worker: _column(seconds, unit_seconds) for worker, seconds in (lost_seconds or {}).items()}
    return [
        Row(worker, tuple(_cells(worker, events, columns, lost.get(worker), unit_seconds, width)))
        for worker, events in sorted(timeline.events.items())
    ]


def grid(timeline: Timeline, *, unit_seconds: float = 1.0, lost_seconds: Mapping[int, float] | None = None) -> str:
    """Return the picture as text, a line per worker.

    Args:
        timeline: What ran when.
        unit_seconds: What one column stands for, see `column_seconds`.
        lost_seconds: When workers were lost, by worker.
    """
    return as_text(rows(timeline, unit_seconds=unit_seconds, lost_seconds=lost_seconds))


def as_text(drawn: Iterable[Row]) -> str:
    """Return rows as text, a line each."""
    return "\n".join(f"{row.worker}  {''.join(cell.text for cell in row.cells)}".rstrip() for row in drawn)


def _label(operation: Operation, worker: int) -> str:
    at_home = operation.stage == worker and operation.kind in _LETTERS
    return f"{(_LETTERS if at_home else _LETTERS_ELSEWHERE)[operation.kind]}{operation.micro_batch}"


def _column(seconds: float, unit_seconds: float) -> int:
    return math.floor(seconds / unit_seconds + 0.5 + 1e-9)


def _cells(
    worker: int, events: tuple[Event, ...], columns: int, lost: int | None, unit_seconds: float, width: int
) -> Iterator[Cell]:
    free = 0
    for operation, start, finish in events:
        first, end = _column(start, unit_seconds), _column(finish, unit_seconds)
        yield from _idle(first - free, width)
        if end > first:
            yield Cell(operation.kind, _label(operation, worker).ljust((end - first) * width - 1, "-") + " ")
        free = end
    yield from _idle((columns if lost is None else lost) - free, width)
    if lost is not None:
        yield Cell(None, "x".ljust(width))


def _idle(columns: int, width: int) -> Iterator[Cell]:
    for _ in range(columns):
        yield Cell(None, ".".ljust(width))

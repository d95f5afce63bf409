"""The picture of a step: a row per worker, a column per unit of time.

    0  F0 F1 r0 .  B0--- .  B1---
    1  .  F0 B0--- F1 B1--- r0 .

`F` forward, `B` backward, `r` redundant forward, each with its micro-batch and as wide as it lasts; `.` idle.
Times are rounded to columns, so the picture is approximate where costs are no multiples of the unit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from bamboo_ds.schedule.costs import StageCosts
from bamboo_ds.schedule.operations import Kind, Operation
from bamboo_ds.schedule.timing import Event, Timeline

_LETTERS = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.REDUNDANT: "r"}
_MOST_COLUMNS_OF_CHEAPEST = 2
_MOST_COLUMNS_OF_DEAREST = 20


@dataclass(frozen=True, slots=True)
class Cell:
    """A stretch of one row: an operation or, with `kind` None, one idle column; `text` has the full width."""

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
    labels = (_label(event.operation) for events in timeline.events.values() for event in events)
    return max(map(len, labels), default=1) + 1


def rows(timeline: Timeline, *, unit_seconds: float) -> list[Row]:
    """Return the picture as cells, for a caller that colours them.

    Args:
        timeline: What ran when.
        unit_seconds: What one column stands for, see `column_seconds`.
    """
    width = cell_width(timeline)
    columns = _column(timeline.step_seconds, unit_seconds)
    return [
        Row(worker, tuple(_cells(events, columns, unit_seconds, width)))
        for worker, events in sorted(timeline.events.items())
    ]


def grid(timeline: Timeline, *, unit_seconds: float = 1.0) -> str:
    """Return the picture as text, a line per worker.

    Args:
        timeline: What ran when.
        unit_seconds: What one column stands for, see `column_seconds`.
    """
    lines = (
        f"{row.worker}  {''.join(cell.text for cell in row.cells)}" for row in rows(timeline, unit_seconds=unit_seconds)
    )
    return "\n".join(line.rstrip() for line in lines)


def _label(operation: Operation) -> str:
    return f"{_LETTERS[operation.kind]}{operation.micro_batch}"


def _column(seconds: float, unit_seconds: float) -> int:
    return math.floor(seconds / unit_seconds + 0.5 + 1e-9)


def _cells(events: tuple[Event, ...], columns: int, unit_seconds: float, width: int) -> Iterator[Cell]:
    free = 0
    for operation, start, finish in events:
        first, end = _column(start, unit_seconds), _column(finish, unit_seconds)
        yield from _idle(first - free, width)
        if end > first:
            yield Cell(operation.kind, _label(operation).ljust((end - first) * width - 1, "-") + " ")
        free = end
    yield from _idle(columns - free, width)


def _idle(columns: int, width: int) -> Iterator[Cell]:
    for _ in range(columns):
        yield Cell(None, ".".ljust(width))

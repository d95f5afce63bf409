"""Workers trade places two by two as long as the layout is safer for it, or as safe with less to move.

The trick: a worker taken off the board takes what it does to the score along, and brings it back where it is put. So a
trade is two lifts and two puts, and costs the same however large the cluster is.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice

from bamboo_ds.plan.cluster import Worker
from bamboo_ds.plan.layouts import Grid
from bamboo_ds.plan.moving import Moving

TRADES = 5000
"""How many trades are tried: all that are possible in clusters of up to about 70 workers."""


def traded(grid: Grid, *, workers: Sequence[Worker], moving: Moving) -> Grid:
    """Return the layout after all trades that help, also with workers that have no place.

    Args:
        grid: the layout to begin with.
        workers: all that may be placed.
        moving: what each worker lacks for each stage.
    """
    board, left, helped = _Board(grid, workers=workers, moving=moving), TRADES, True
    while helped:
        tried = [board.trade_if_better(place, other) for place, other in islice(_pairs(board), left)]
        left, helped = left - len(tried), any(tried)
    return board.grid


def _pairs(board: _Board) -> Iterator[tuple[int, int]]:
    """Yield whom each worker that has a reason to may trade with; first those who have one as well or have no place."""
    willing = [place for place in range(board.places) if not board.is_content(place)]
    first = {*willing, *range(board.places, len(board.at))}
    for others in (first, set(range(board.places)) - first):
        for place in willing:
            if not board.is_content(place):
                yield from ((place, other) for other in sorted(others) if other != place)


class _Board:
    """A layout under change, which knows at any time its faults and what it moves.

    Attributes:
        at: worker by place, pipeline by pipeline; behind them the workers without a place.
        places: how many places there are.
        score: faults, then bytes to move: less is better.
    """

    def __init__(self, grid: Grid, *, workers: Sequence[Worker], moving: Moving) -> None:
        placed = [worker for pipeline in grid for worker in pipeline]
        spare = set(workers).difference(placed)
        self._num_stages, self._lacks = len(grid[0]), {worker.id: moving.row(worker.id) for worker in workers}
        self._stages: dict[str, Counter[int]] = defaultdict(Counter)
        self.places, self.score = len(placed), [0, 0, 0, 0]
        self.at: list[Worker | None] = [None] * self.places
        self.at += [worker for worker in workers if worker in spare]
        self._next = [self._around(place) for place in range(self.places)]
        for place, worker in enumerate(placed):
            self._put(place, worker)

    @property
    def grid(self) -> Grid:
        """The layout."""
        placed = [worker for worker in self.at[: self.places] if worker is not None]
        return tuple(
            tuple(placed[start : start + self._num_stages]) for start in range(0, self.places, self._num_stages)
        )

    def is_content(self, place: int) -> bool:
        """Return whether nothing is wrong with the worker at a place."""
        worker = self.at[place]
        if worker is None or self._lacks[worker.id][place % self._num_stages]:
            return False
        if len(self._stages[worker.node]) > 1:
            return False
        return all(other is None or other.zone != worker.zone for other in self._neighbours(place))

    def trade_if_better(self, place: int, other: int) -> bool:
        """Let two workers trade places, and take it back unless the layout is better for it."""
        before = list(self.score)
        self._trade(place, other)
        if self.score < before:
            return True
        self._trade(place, other)
        return False

    def _trade(self, place: int, other: int) -> None:
        left, right = self._lift(place), self._lift(other)
        self._put(place, right)
        self._put(other, left)

    def _lift(self, place: int) -> Worker:
        worker = self.at[place]
        assert worker is not None
        self._count(place, worker, sign=-1)
        self.at[place] = None
        return worker

    def _put(self, place: int, worker: Worker) -> None:
        self._count(place, worker, sign=1)
        self.at[place] = worker

    def _count(self, place: int, worker: Worker, *, sign: int) -> None:
        """Add what a worker at a place does to the score, or take it off; neighbours that are lifted do not count."""
        if place >= self.places:
            return
        for other in self._neighbours(place):
            if other is not None:
                self.score[0] += sign * (other.node == worker.node)
                self.score[1] += sign * (other.zone == worker.zone)
        stage, stages = place % self._num_stages, self._stages[worker.node]
        spread = max(len(stages) - 1, 0)
        stages[stage] += sign
        if not stages[stage]:
            del stages[stage]
        self.score[2] += max(len(stages) - 1, 0) - spread
        self.score[3] += sign * self._lacks[worker.id][stage]

    def _neighbours(self, place: int) -> list[Worker | None]:
        """Return who stands next to a place in its ring."""
        return [self.at[other] for other in self._next[place]]

    def _around(self, place: int) -> tuple[int, ...]:
        """Return the places next to one in its ring: two, or one where they are the same."""
        stage = place % self._num_stages
        around = {place - stage + (stage + step) % self._num_stages for step in (-1, 1)}
        return tuple(sorted(around - {place}))

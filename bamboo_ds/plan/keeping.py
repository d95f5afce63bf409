"""Which of the layouts that are equally safe moves the fewest bytes.

A layout says which places must be apart; who of many stands at a place is still free. Three things are tried:

* Everybody stays: the stages go to whoever lacks least, whatever the nodes. That is the least that can move at all, and
  often it is as safe as any layout. Else:
* A node's places in a layout go to whichever node of that zone lacks least for them: an assignment problem. Nothing
  about a layout's faults changes, as nodes of one zone only trade names. Nor does it when all rings turn.
* From the best of these, workers trade places two by two as long as that is safer, or as safe with less to move.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bamboo_ds.plan.cluster import Shape, Worker
from bamboo_ds.plan.layouts import Grid, faults
from bamboo_ds.plan.moving import Moving
from bamboo_ds.plan.trading import traded

TURNS = 1000
"""How many workers are assigned anew, all turns of a layout together: large clusters get fewer turns."""

BEST = 3
"""How many of the refilled layouts are worth trading in."""

Spot = tuple[int, int]
"""Pipeline and stage."""


def warm_up() -> None:
    """Load what assignments are solved with; else the first call does, which takes about half a second."""
    _assigned([[0]])


def fewest_bytes(starts: Sequence[Grid], *, workers: Sequence[Worker], shape: Shape, moving: Moving) -> Grid:
    """Return a layout with no more faults than the given ones, and no more to move than the first of them.

    Args:
        starts: layouts with equal faults.
        workers: all that may be placed, by ascending id.
        shape: of the layouts.
        moving: what each worker lacks for each stage.
    """
    most_faults, most_bytes = _score(starts[0], moving)
    stayed = _stayed(workers, shape=shape, moving=moving)
    if faults(stayed) <= most_faults:
        return stayed
    turned = [grid for start in starts for grid in _turned(start, turns=max(TURNS // len(workers), 1))]
    filled = dict.fromkeys(_refilled(grid, workers=workers, moving=moving) for grid in turned)
    found = [*sorted(filled, key=lambda grid: _score(grid, moving))[:BEST], stayed]
    found += [traded(grid, workers=workers, moving=moving) for grid in found]
    scores = ((*_score(grid, moving), index) for index, grid in enumerate(found))
    *_, best = min(score for score in scores if score[0] <= most_faults and score[1] <= most_bytes)
    return found[best]


def _score(grid: Grid, moving: Moving) -> tuple[tuple[int, int, int], int]:
    """Return the faults of a layout, and the bytes that it moves: less is better."""
    return faults(grid), moving.total([worker.id for worker in pipeline] for pipeline in grid)


def _turned(grid: Grid, *, turns: int) -> Iterator[Grid]:
    """Yield a layout with its rings turned: neighbours stay neighbours, and nodes at one stage stay together."""
    for turn in range(min(turns, len(grid[0]))):
        yield tuple(pipeline[turn:] + pipeline[:turn] for pipeline in grid)


def _assigned(matrix: Any) -> list[tuple[int, int]]:
    """Return pairs (row, column) of least total cost: each column gets a row, if there are enough."""
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(matrix)
    return list(zip(rows.tolist(), columns.tolist(), strict=True))


# ---- nodes trade names -----------------------------------------------------------------------------------------------


def _refilled(grid: Grid, *, workers: Sequence[Worker], moving: Moving) -> Grid:
    """Give the places of each node to the node of its zone that lacks least for them."""
    spots: dict[str, list[Spot]] = defaultdict(list)
    for pipeline, row in enumerate(grid):
        for stage, worker in enumerate(row):
            spots[worker.node].append((pipeline, stage))
    filled: dict[Spot, Worker] = {}
    for nodes in _interchangeable(workers):
        wanted = [spots[node] for node in nodes if node in spots]
        for index, taken in _nodes_assigned(list(nodes.values()), wanted, moving):
            filled |= _seated(list(nodes.values())[index], wanted[taken], moving)
    return tuple(tuple(filled[pipeline, stage] for stage in range(len(row))) for pipeline, row in enumerate(grid))


def _interchangeable(workers: Iterable[Worker]) -> list[dict[str, list[Worker]]]:
    """Return the workers by node, the nodes of each zone apart."""
    zones: dict[str, dict[str, list[Worker]]] = defaultdict(lambda: defaultdict(list))
    for worker in workers:
        zones[worker.zone][worker.node].append(worker)
    return list(zones.values())


def _nodes_assigned(nodes: list[list[Worker]], wanted: list[list[Spot]], moving: Moving) -> list[tuple[int, int]]:
    """Return which node gets which places. Nodes and places of one kind have one price, which is found once."""
    prices: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}
    kinds = [tuple(sorted(moving.kind(worker.id) for worker in node)) for node in nodes]
    stages = [tuple(sorted(stage for _, stage in spots)) for spots in wanted]
    for kind in set(kinds):
        for stood in set(stages):
            prices[kind, stood] = _price(kind, stood, moving)
    return _assigned([[prices[kind, stood] for stood in stages] for kind in kinds]) if stages else []


def _price(kinds: tuple[int, ...], stages: tuple[int, ...], moving: Moving) -> float:
    """Return what the workers of a node lack for these stages; infinite if they are too few."""
    if len(kinds) < len(stages):
        return float("inf")
    lacks = [[moving.table[kind][stage] for stage in stages] for kind in kinds]
    if len(stages) == 1:
        return min(lacks)[0]
    return sum(lacks[row][column] for row, column in _assigned(lacks))


def _seated(node: list[Worker], spots: list[Spot], moving: Moving) -> dict[Spot, Worker]:
    """Return which worker of a node stands at which of its places."""
    lacks = [[moving.row(worker.id)[stage] for _, stage in spots] for worker in node]
    pairs = _assigned(lacks) if len(node) > 1 else [(0, 0)]
    return {spots[column]: node[row] for row, column in pairs}


# ---- everybody stays -------------------------------------------------------------------------------------------------


def _stayed(workers: Sequence[Worker], *, shape: Shape, moving: Moving) -> Grid:
    """Return a layout with the least that can move; in their stage, workers stay in their pipeline if they can."""
    import numpy as np

    lacks = np.array(moving.table)[[moving.kind(worker.id) for worker in workers]]
    columns: list[list[Worker]] = [[] for _ in range(shape.num_stages)]
    for row, place in _assigned(np.repeat(lacks, shape.num_pipelines, axis=1)):
        columns[place // shape.num_pipelines].append(workers[row])
    by_stage = [_by_pipeline(column, moving) for column in columns]
    return tuple(tuple(column[pipeline] for column in by_stage) for pipeline in range(shape.num_pipelines))


def _by_pipeline(column: list[Worker], moving: Moving) -> list[Worker]:
    """Return the workers of a stage by pipeline."""
    staying: dict[int, Worker] = {}
    for worker in column:
        home = moving.homes.get(worker.id)
        if home is not None and home.pipeline < len(column):
            staying.setdefault(home.pipeline, worker)
    kept = {worker.id for worker in staying.values()}
    others = iter(worker for worker in column if worker.id not in kept)
    return [staying[pipeline] if pipeline in staying else next(others) for pipeline in range(len(column))]

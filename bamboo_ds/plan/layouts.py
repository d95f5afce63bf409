"""Layouts that are safe: a lost node or zone should never take two neighbours of a pipeline.

Neighbours are meant in a ring, as the last stage shadows stage 0. In order of priority: neighbours on different nodes
(always, where it can be done), in different zones (as often as can be), the workers of a node at the same stage of
different pipelines.

The trick: lay the workers out by zone and node, so that each of them is a run, and deal the list out to the pipelines
like cards. Every pipeline then gets an even share of every zone and node. In a pipeline, put the largest run first and
fill stages 0, 2, 4, ..., then 1, 3, 5, ...: members of a run that fills at most half of the ring are never adjacent,
and a larger one has as few adjacent pairs as can be.

::

    zones a a a b b c, P = 6      ranks   0 1 2 3 4 5   ->   ring   a b a b a c
                                  stages  0 2 4 1 3 5
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from bamboo_ds.plan.cluster import Shape, Worker

Grid = tuple[tuple[Worker, ...], ...]
"""Workers by pipeline and stage."""

Chunk = list[Worker]


def faults(grid: Grid) -> tuple[int, int, int]:
    """Count what is wrong with a layout, worst first.

    Returns:
        Neighbours on one node; neighbours in one zone; how often the workers of a node stand at yet another stage.
    """
    ring = [pair for pipeline in grid for pair in _neighbours(pipeline)]
    stages: dict[str, set[int]] = defaultdict(set)
    for pipeline in grid:
        for stage, worker in enumerate(pipeline):
            stages[worker.node].add(stage)
    return (
        sum(left.node == right.node for left, right in ring),
        sum(left.zone == right.zone for left, right in ring),
        sum(len(used) - 1 for used in stages.values()),
    )


def _neighbours(pipeline: Sequence[Worker]) -> Iterator[tuple[Worker, Worker]]:
    yield from pairwise(pipeline)
    if len(pipeline) > 2:
        yield pipeline[-1], pipeline[0]


def layouts(ordered: Sequence[Worker], *, shape: Shape) -> Iterator[Grid]:
    """Make the plainest layout, the one that keeps nodes whole, and the one that keeps neighbours furthest apart."""
    yield _dealt(ordered, shape=shape)
    whole = _choose(ordered, shape=shape, whole_nodes=True)
    yield tuple(_ring(pipeline) for pipeline in _dealt(_runs(whole, width=shape.num_pipelines), shape=shape))
    even = _choose(ordered, shape=shape, whole_nodes=False)
    ranked = _dealt(_runs(even, width=shape.num_pipelines), shape=shape)
    yield tuple(_ring(_runs(pipeline, width=1)) for pipeline in ranked)


def _dealt(workers: Sequence[Worker], *, shape: Shape) -> Grid:
    """Deal the first workers out to the pipelines, like cards: to each its first, then to each its second, ..."""
    slots, width = shape.num_stages * shape.num_pipelines, shape.num_pipelines
    return tuple(tuple(workers[pipeline:slots:width]) for pipeline in range(width))


def _ring(ranked: Sequence[Worker]) -> tuple[Worker, ...]:
    """Put the first workers at stages 0, 2, 4, ... and the others between them."""
    stages = len(ranked)
    order = [*range(0, stages, 2), *range(1, stages, 2)]
    by_stage = dict(zip(order, ranked, strict=True))
    return tuple(by_stage[stage] for stage in range(stages))


def _choose(ordered: Sequence[Worker], *, shape: Shape, whole_nodes: bool) -> list[Worker]:
    """Return the workers that get a place.

    Of no node more than can be kept apart, half of each ring, if the others fill the rest; zones give even shares.

    Args:
        ordered: workers to choose from.
        shape: what to fill.
        whole_nodes: prefer all workers of a node over exactly even shares.
    """
    slots = shape.num_stages * shape.num_pipelines
    most = max(shape.num_stages // 2, 1) * shape.num_pipelines
    nodes = _by_node(ordered)
    usable = sum(len(node[:most]) for node in nodes)
    queues: dict[str, list[Chunk]] = defaultdict(list)
    for node in nodes:
        queues[node[0].zone] += [node[:most]] if whole_nodes else [[worker] for worker in node[:most]]
    surplus = sorted((rank, worker.id, worker) for node in nodes for rank, worker in enumerate(node[most:]))
    return _even_shares(queues, slots=min(slots, usable)) + [worker for *_, worker in surplus[: max(slots - usable, 0)]]


def _even_shares(queues: dict[str, list[Chunk]], *, slots: int) -> list[Worker]:
    """Take the next chunk of the zone that has given least, until all slots have a worker."""
    chosen: list[Worker] = []
    given: Counter[str] = Counter()
    while len(chosen) < slots:
        zone = min((zone for zone, queue in queues.items() if queue), key=lambda zone: (given[zone], zone))
        chunk = queues[zone].pop(0)[: slots - len(chosen)]
        given[zone] += len(chunk)
        chosen += chunk
    return chosen


def _runs(workers: Sequence[Worker], *, width: int) -> list[Worker]:
    """Order workers so that every zone and, in it, every node is one run; larger zones come first."""
    zones: dict[str, list[Worker]] = defaultdict(list)
    for worker in workers:
        zones[worker.zone].append(worker)
    ordered: list[Worker] = []
    for zone in sorted(zones, key=lambda zone: (-len(zones[zone]), zone)):
        ordered += _packed(_by_node(zones[zone]), offset=len(ordered), width=width)
    return ordered


def _packed(nodes: list[Chunk], *, offset: int, width: int) -> list[Worker]:
    """Put nodes one after another so that as many as possible lie within one column of `width` workers.

    Nodes larger than a column come first: a run that fills half of a ring must begin it.
    """
    ordered: list[Worker] = []
    left = list(nodes)
    while left:
        room = width - (offset + len(ordered)) % width
        large = [node for node in left if len(node) > width]
        fitting = [node for node in left if len(node) <= room]
        node = (large or fitting or left)[0]
        left.remove(node)
        ordered += node
    return ordered


def _by_node(workers: Sequence[Worker]) -> list[Chunk]:
    """Group workers by node, larger nodes first."""
    nodes: dict[str, Chunk] = defaultdict(list)
    for worker in workers:
        nodes[worker.node].append(worker)
    return sorted(nodes.values(), key=lambda node: (-len(node), node[0].node))

"""Placement is as good as trying every possibility, on clusters small enough for that, and golden on real ones."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_ds.errors import InfeasiblePlanError
from bamboo_ds.plan import static_plan
from bamboo_ds.plan.cluster import Shape, Worker
from bamboo_ds.plan.layouts import Grid, faults
from bamboo_ds.plan.placement import arrange


def layout(workers: list[Worker], shape: Shape) -> Grid:
    by_id = {worker.id: worker for worker in workers}
    return tuple(tuple(by_id[id_] for id_ in row) for row in arrange(workers, shape=shape))


def in_turn(nodes: int, *, each: int, zones: int) -> list[Worker]:
    return [Worker(n * each + w, f"n{n:03}", "abcdef"[n % zones]) for n in range(nodes) for w in range(each)]


def adjacent(grid: Grid) -> tuple[int, int]:
    """Count neighbours in the ring that share a node, and a zone, pair by pair of stages."""
    nodes = zones = 0
    for row in grid:
        pairs = {frozenset({s, (s + 1) % len(row)}) for s in range(len(row))}
        for left, right in (tuple(pair) for pair in pairs if len(pair) == 2):
            nodes += row[left].node == row[right].node
            zones += row[left].zone == row[right].zone
    return nodes, zones


@st.composite
def small_clusters(draw: st.DrawFn) -> tuple[list[Worker], Shape]:
    """At most six places, so that all layouts can be tried; nodes and zones of any sizes."""
    shape = Shape(*draw(st.sampled_from([(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1), (5, 1), (6, 1)])))
    spare = 0 if shape.num_stages * shape.num_pipelines == 6 else 1
    count = shape.num_stages * shape.num_pipelines + draw(st.integers(0, spare))
    zone_of = draw(st.lists(st.sampled_from("abc"), min_size=count, max_size=count))
    nodes = draw(st.lists(st.integers(0, count - 1), min_size=count, max_size=count))
    return [Worker(id_, f"n{node}", zone_of[node]) for id_, node in enumerate(nodes)], shape


@settings(max_examples=150, deadline=None)
@given(small_clusters())
def test_no_other_layout_keeps_neighbours_further_apart(case: tuple[list[Worker], Shape]) -> None:
    workers, shape = case
    width = shape.num_stages
    best = min(
        adjacent(tuple(order[d * width : (d + 1) * width] for d in range(shape.num_pipelines)))
        for order in permutations(workers, width * shape.num_pipelines)
    )
    assert adjacent(layout(workers, shape)) == best


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 9), st.integers(1, 5), st.data())
def test_neighbours_never_share_a_node_when_nodes_are_small_enough(
    stages: int, pipelines: int, data: st.DataObject
) -> None:
    """Half of each ring is the most that one node can have; if that fills the places, it is kept."""
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=2, max_size=30))
    most = stages // 2 * pipelines
    while sum(min(size, most) for size in sizes) < stages * pipelines:
        sizes.append(data.draw(st.integers(1, 6)))
    zones = data.draw(st.lists(st.sampled_from("abc"), min_size=len(sizes), max_size=len(sizes)))
    ids = iter(data.draw(st.permutations(range(sum(sizes)))))
    workers = [Worker(next(ids), f"n{n}", zones[n]) for n, size in enumerate(sizes) for _ in range(size)]
    grid = layout(workers, Shape(stages, pipelines))
    assert adjacent(grid)[0] == faults(grid)[0] == 0
    assert len({worker.id for row in grid for worker in row}) == stages * pipelines


@settings(deadline=None)
@given(st.permutations(in_turn(7, each=2, zones=3)))
def test_the_order_of_registration_does_not_matter(workers: list[Worker]) -> None:
    assert arrange(workers, shape=Shape(4, 3)) == arrange(in_turn(7, each=2, zones=3), shape=Shape(4, 3))


@pytest.mark.parametrize(
    ("nodes", "each", "zones", "shape"),
    [
        (8, 1, 3, Shape(4, 2)),
        (12, 1, 3, Shape(4, 3)),
        (8, 1, 2, Shape(4, 2)),
        (8, 4, 3, Shape(4, 8)),
        (4, 2, 2, Shape(4, 2)),
        (48, 1, 3, Shape(12, 4)),
        (7, 1, 3, Shape(7, 1)),
    ],
)
def test_usual_clusters_have_no_fault(nodes: int, each: int, zones: int, shape: Shape) -> None:
    assert faults(layout(in_turn(nodes, each=each, zones=zones), shape)) == (0, 0, 0)


def test_eight_nodes_in_three_zones() -> None:
    grid = layout(in_turn(8, each=1, zones=3), Shape(4, 2))
    assert ["".join(worker.zone for worker in row) for row in grid] == ["abac", "babc"]


def test_the_workers_of_a_node_stand_at_one_stage() -> None:
    grid = layout(in_turn(4, each=2, zones=2), Shape(4, 2))
    assert [[worker.node for worker in row] for row in grid] == [["n000", "n001", "n002", "n003"]] * 2


@pytest.mark.parametrize(
    ("sizes", "zones", "shape", "same_zone"),
    [
        ([1, 2, 1], "abc", Shape(2, 2), 0),
        ([1, 2, 1], "aab", Shape(2, 2), 1),
        ([2, 3, 2], "cab", Shape(2, 3), 0),
        ([2, 2, 1, 1], "aaaa", Shape(2, 3), 3),
        ([1, 2, 2, 2], "baab", Shape(2, 3), 0),
        ([1, 3, 2, 3, 3], "abacb", Shape(4, 3), 0),
    ],
)
def test_the_workers_of_a_node_stay_at_one_stage_whatever_came_first(
    sizes: list[int], zones: str, shape: Shape, same_zone: int
) -> None:
    places = [(f"n{n}", zones[n]) for n, size in enumerate(sizes) for _ in range(size)]
    workers = [Worker(id_, node, zone) for id_, (node, zone) in enumerate(places)]
    grid = layout(workers, shape)
    spread = {(worker.node, stage) for row in grid for stage, worker in enumerate(row)}
    assert len(spread) == len({node for node, _ in spread})
    assert adjacent(grid) == (0, same_zone)
    assert faults(grid) == (0, same_zone, 0)


def test_two_nodes_of_four_alternate() -> None:
    grid = layout(in_turn(2, each=4, zones=2), Shape(4, 2))
    assert [[worker.node for worker in row] for row in grid] == [["n000", "n001"] * 2] * 2


def test_one_node_is_laid_out_as_deepspeed_does() -> None:
    workers = [Worker(id_, "host", "zone") for id_ in range(12)]
    assert arrange(workers, shape=Shape(4, 3)) == static_plan(world_size=12, num_stages=4).owners


def test_a_zone_that_is_too_large_is_left_standby() -> None:
    workers = [Worker(id_, f"n{id_}", "a" if id_ < 6 else "b") for id_ in range(8)]
    grid = layout(workers, Shape(4, 1))
    assert [worker.zone for worker in grid[0]] == ["a", "b"] * 2


def test_too_few_workers_are_counted() -> None:
    with pytest.raises(InfeasiblePlanError, match="4 stages x 2 pipelines need 8 workers, there are 7"):
        arrange(in_turn(7, each=1, zones=3), shape=Shape(4, 2))

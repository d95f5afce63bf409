"""The fleet for thousands of nodes decides as the policy does, and places workers nearly as well."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_ds.plan.cluster import Cluster, Node, Shape
from bamboo_ds.plan.membership import Cause, Loss
from bamboo_ds.plan.plan import Plan
from bamboo_ds.plan.policy import Lost, decide
from bamboo_ds.plan.reshape import Costs, aborting_workers, weigh
from bamboo_ds.simulator.comparison import Comparison
from bamboo_ds.simulator.constants import Constants
from bamboo_ds.simulator.kept import KeptFleet
from bamboo_ds.simulator.market import Market, generate
from bamboo_ds.simulator.membership import instants
from bamboo_ds.simulator.models import built_in
from bamboo_ds.simulator.precedents import Dead, Precedents, _danger, owners_of
from bamboo_ds.simulator.workload import Layer, Workload
from tests.simulator.markets import bounds_of, even, fleet_of, job_of, names, story


def lopsided(stages: int, rows: int, micro_batches: int, seed: int) -> Workload:
    """Return a workload whose stages cost differently."""
    draw = random.Random(seed)
    layers = tuple(Layer(str(index), draw.choice([1.0, 1.0, 1.5, 3.0]), 2.0) for index in range(stages))
    workload = even(stages, pipelines=rows + 2, micro_batches=max(micro_batches, rows + 2))
    return replace(workload, layers=layers)


def plan_of(rows: int, stages: int, dead: dict[int, Dead], parts: tuple[int, ...]) -> Plan:
    """Return a plan after these losses, by the policy itself."""
    homes = tuple(tuple(range(row * stages, (row + 1) * stages)) for row in range(rows))
    plan = Plan(owners=homes, parts=parts)
    gone = [homes[row][stage] for row, stages_ in dead.items() for stage in stages_]
    if not gone:
        return plan
    nodes = tuple(Node(str(worker), "", (worker,)) for home in homes for worker in home if worker not in gone)
    bounds = bounds_of(even(stages, pipelines=rows, micro_batches=rows))
    after = decide(Cluster(bounds, nodes), plan, Lost(tuple(Loss(worker, Cause.LEASE, "") for worker in gone))).plan
    assert after is not None
    return after


@st.composite
def worn(draw: st.DrawFn) -> tuple[int, int, dict[int, Dead], int, int]:
    """Draw P, D, dead homes that are not next to each other, M and a seed."""
    stages, rows = draw(st.integers(2, 7)), draw(st.integers(1, 7))
    dead: dict[int, Dead] = {}
    for row in draw(st.lists(st.integers(0, rows - 1), unique=True, max_size=rows)):
        chosen: set[int] = set()
        for stage in draw(st.lists(st.integers(0, stages - 1), min_size=1, max_size=3)):
            if not {(stage - 1) % stages, (stage + 1) % stages} & chosen:
                chosen.add(stage)
        dead[row] = frozenset(chosen)
    return stages, rows, dead, draw(st.integers(1, 30)), draw(st.integers(0, 9))


@settings(max_examples=300, deadline=None)
@given(case=worn(), joined=st.integers(0, 8))
def test_precedents_say_what_the_policy_says(case: tuple[int, int, dict[int, Dead], int, int], joined: int) -> None:
    stages, rows, dead, micro_batches, seed = case
    workload = lopsided(stages, rows, micro_batches, seed)
    bounds = bounds_of(workload)
    plan = plan_of(rows, stages, dead, bounds.model.parts(stages))
    assert not plan.aborted
    live = len(plan.workers) + joined
    shape = bounds.shape(live)
    assert shape is not None
    costs = Costs(step_seconds=20.0)
    precedents = Precedents(bounds, costs=Costs())
    expected = weigh(plan, shape=shape, bounds=bounds, costs=costs, workers=live).reshape
    assert precedents.reshape(stages, rows, dead, shape, 20.0) == expected
    assert precedents.reshape(stages, rows, dict(reversed(dead.items())), shape, 20.0) == expected


@settings(max_examples=100, deadline=None)
@given(case=worn())
def test_dead_homes_are_as_dangerous_as_the_policy_finds(case: tuple[int, int, dict[int, Dead], int, int]) -> None:
    stages, rows, dead, *_ = case
    aborting = aborting_workers(plan_of(rows, stages, dead, ()), redundancy=True)
    assert len(aborting) == sum(_danger(homes, stages) for homes in dead.values())


@settings(max_examples=100, deadline=None)
@given(case=worn())
def test_owners_and_aborts_are_the_policys(case: tuple[int, int, dict[int, Dead], int, int]) -> None:
    stages, rows, dead, *_ = case
    plan = plan_of(rows, stages, dead, ())
    precedents = Precedents(bounds_of(even(stages, pipelines=rows, micro_batches=rows)), costs=Costs())
    for row, homes in dead.items():
        assert owners_of(stages, homes) == plan.owner_stages(row)
        for stage in range(stages):
            if stage in homes:
                continue
            more = plan_of(rows, stages, {**dead, row: homes | {stage}}, ())
            assert precedents.aborts(stages, homes, frozenset({stage}), settled=True) == more.aborted
            assert precedents.aborts(stages, homes, frozenset({stage}), settled=False)


def test_two_neighbours_in_every_pipeline_leave_a_stage_with_nobody() -> None:
    precedents = Precedents(bounds_of(even(4)), costs=Costs())
    assert precedents.has_unheld_stages(4, 2, {0: frozenset({1, 2}), 1: frozenset({1, 2})})
    assert not precedents.has_unheld_stages(4, 2, {0: frozenset({1, 2}), 1: frozenset({2, 3})})
    assert not precedents.has_unheld_stages(4, 2, {0: frozenset({1, 2}), 1: frozenset({1})})


def test_rows_stay_and_gaps_are_filled_from_other_zones() -> None:
    trace = story("0 +14", seconds=1000, zones=["a", "b", "c"])
    fleet = fleet_of(even(4, pipelines=3), kept=True)
    assert isinstance(fleet, KeptFleet)
    fleet.join(trace.events)
    assert fleet.begin(waited_seconds=99).action.value == "start"
    before = [list(row) for row in fleet._rows]
    zones = {event.node: event.zone for event in trace.events}
    assert all(zones[row[stage]] != zones[row[stage - 1]] for row in before for stage in range(4))
    victim = before[1][2]
    fleet.lose([victim], settled=True)
    assert fleet.boundary(step_seconds=20.0).action.value == "reconfigure"
    after = [list(row) for row in fleet._rows]
    changed = [(row, stage) for row in range(3) for stage in range(4) if before[row][stage] != after[row][stage]]
    assert changed == [(1, 2)]
    assert zones[after[1][2]] not in {zones[after[1][1]], zones[after[1][3]]}


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000))
def test_everybody_has_one_place_or_is_spare(seed: int) -> None:
    workload = even(4, pipelines=4, micro_batches=9)
    trace = generate(Market(nodes=16, hours=2, rate=0.7, zones=2, delay_seconds=200), seed=seed)
    fleet = fleet_of(workload, kept=True)
    assert isinstance(fleet, KeptFleet)
    job, there = job_of(workload, fleet), set()
    for instant in instants(trace, warm_up_seconds=0):
        job._advance(instant.seconds)
        if instant.gone:
            job._lose(instant)
        if instant.joined:
            job._join(instant)
        there = (there - set(instant.gone)) | {event.node for event in instant.joined}
        spare = [node for nodes in fleet._spare._by_zone.values() for node in nodes]
        placed = (
            [node for row, nodes in enumerate(fleet._rows) for stage, node in fleet._alive(row)] if fleet._rows else []
        )
        assert sorted(spare + placed) == sorted(there), names(trace.events)
        assert fleet._places == {
            node: (row, stage) for row in range(len(fleet._rows)) for stage, node in fleet._alive(row)
        }
        assert len(spare) == len(fleet._spare)


def test_both_fleets_come_to_about_the_same() -> None:
    workload = built_in("bert-large").resized(pipelines=3)
    found = {}
    for kept in (False, True):
        comparison = Comparison(workload, constants=Constants(), redundancy="lflb", kept=kept)
        traces = [generate(Market(nodes=36, hours=12, rate=0.2, zones=1), seed=seed) for seed in range(6)]
        found[kept] = [comparison.run(trace, "bamboo").figures for trace in traces]
    for name, tolerance in (("throughput", 0.01), ("reconfigurations", 0.15), ("failovers", 0.15)):
        real, kept_ = (fmean(getattr(figures, name) for figures in found[each]) for each in (False, True))
        assert kept_ == pytest.approx(real, rel=tolerance), name


def test_shapes_follow_the_bounds() -> None:
    fleet = fleet_of(even(4, pipelines=2), kept=True)
    assert fleet.step is None
    fleet.join(story("0 +9", seconds=1).events)
    fleet.begin(waited_seconds=99)
    assert fleet.step is not None
    assert fleet.step.shape == Shape(4, 2)
    fleet.lose([f"n{index}" for index in range(6)], settled=True)
    fleet.boundary(step_seconds=None)
    assert fleet.step is not None
    assert fleet.step.shape == Shape(3, 1)

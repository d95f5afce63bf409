"""Who is where: shares, shadows, holders."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo_ds.errors import InfeasiblePlanError
from bamboo_ds.plan import Place, Plan, StaticPlanSource, static_plan

STAGES, PIPELINES = st.integers(1, 8), st.integers(1, 6)


def plan_of(stages: int, pipelines: int) -> Plan:
    return static_plan(world_size=stages * pipelines, num_stages=stages)


def test_ranks_are_laid_out_as_deepspeed_does() -> None:
    assert plan_of(4, 2).owners == ((0, 2, 4, 6), (1, 3, 5, 7))


@given(STAGES, PIPELINES)
def test_every_worker_has_one_place(stages: int, pipelines: int) -> None:
    plan = plan_of(stages, pipelines)
    assert plan.workers == tuple(range(stages * pipelines))
    places = [plan.place(worker) for worker in plan.workers]
    assert sorted(places, key=lambda place: (place.pipeline, place.stage)) == [
        Place(pipeline=d, stage=s) for d in range(pipelines) for s in range(stages)
    ]
    assert all(plan.owners[place.pipeline][place.stage] == worker for worker, place in enumerate(places))


@given(STAGES, PIPELINES, st.integers(0, 40))
def test_shares_are_a_partition_and_differ_by_at_most_one(stages: int, pipelines: int, extra: int) -> None:
    plan, micro_batches = plan_of(stages, pipelines), pipelines + extra
    shares = [plan.share(pipeline, micro_batches=micro_batches) for pipeline in range(pipelines)]
    assert [m for share in shares for m in share] == list(range(micro_batches))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert min(map(len, shares)) >= 1


@given(st.integers(2, 8), PIPELINES)
def test_each_stage_is_shadowed_by_the_worker_before_it(stages: int, pipelines: int) -> None:
    plan = plan_of(stages, pipelines)
    for stage in range(stages):
        assert plan.redundant_stage(plan.shadow_stage(stage)) == stage
        assert plan.shadow_stage(stage) == (stage - 1 if stage else stages - 1)
        holders = plan.holders(frozenset({stage}), redundancy=True)
        assert set(holders) == {*plan.stage_owners(stage), *plan.stage_owners(plan.shadow_stage(stage))}
        assert list(holders) == sorted(holders)
        assert plan.holders(frozenset({stage}), redundancy=False) == tuple(sorted(plan.stage_owners(stage)))


def test_a_pipeline_of_one_stage_has_no_shadow() -> None:
    plan = plan_of(1, 3)
    assert plan.redundant_stage(0) is None
    assert plan.holders(frozenset({0}), redundancy=True) == (0, 1, 2)


@pytest.mark.parametrize(
    ("world_size", "num_stages", "pipelines", "equation"),
    [
        (5, 2, None, "2 x 2 = 4, not 5; start 4 or 6 workers"),
        (1, 2, None, "1 x 2 = 2, not 1; start 2 or 4 workers"),
        (6, 2, 2, "2 x 2 = 4, not 6; start 4 workers or leave bamboo.pipelines out"),
        (4, 0, None, "num_stages = 0"),
    ],
)
def test_workers_that_make_no_whole_pipelines_are_counted(
    world_size: int, num_stages: int, pipelines: int | None, equation: str
) -> None:
    with pytest.raises(InfeasiblePlanError) as caught:
        static_plan(world_size=world_size, num_stages=num_stages, pipelines=pipelines)
    assert equation in str(caught.value)


def test_a_stranger_has_no_place() -> None:
    with pytest.raises(InfeasiblePlanError, match="worker 9 has no stage"):
        plan_of(2, 2).place(9)


def test_a_static_plan_never_changes() -> None:
    source = StaticPlanSource(plan_of(2, 1), worker=1)
    source.check(source.current())
    assert (source.worker, source.current()) == (1, plan_of(2, 1))


@given(STAGES, PIPELINES, st.randoms())
def test_the_order_of_seats_depends_on_places_and_not_on_who_was_given_them(
    stages: int, pipelines: int, chance: random.Random
) -> None:
    """A sum of floats depends on its order: two runs of a job, whose workers came in another order, shall be equal."""
    ids = list(range(stages * pipelines))
    chance.shuffle(ids)
    plan = plan_of(stages, pipelines)
    shuffled = Plan(owners=tuple(tuple(ids[worker] for worker in row) for row in plan.owners))
    wanted = frozenset({0, stages - 1})
    assert [ids[seat.home] for seat in plan.seats(wanted, redundancy=True)] == [
        seat.home for seat in shuffled.seats(wanted, redundancy=True)
    ]

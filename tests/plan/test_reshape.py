"""When a running job begins a new epoch: the stories of the cluster, and the numbers that decide each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bamboo_ds.plan import Plan, static_plan
from bamboo_ds.plan.cluster import Bounds, Cluster, Node, Shape
from bamboo_ds.plan.failover import fail_over
from bamboo_ds.plan.membership import Cause, Loss
from bamboo_ds.plan.model import Model
from bamboo_ds.plan.policy import Action, Boundary, Lost, PlanDecision, decide
from bamboo_ds.plan.reshape import Costs, aborting_workers, fatal_workers, step_cost, weigh


def bounds_of(stages: int = 4, pipelines: int | None = 2, least: int = 1, **model: object) -> Bounds:
    return Bounds(stages, pipelines, least, model=Model(**model))  # type: ignore[arg-type]


def cluster_of(bounds: Bounds, workers: set[int]) -> Cluster:
    """One worker a node, zones in turn."""
    return Cluster(bounds, tuple(Node(f"n{w:02}", "abc"[w % 3], (w,)) for w in sorted(workers)))


def worn(stages: int, pipelines: int, *victims: int) -> tuple[Plan, set[int]]:
    """Return a plan that has lost workers (rank = stage * D + pipeline), and who lives."""
    plan = static_plan(world_size=stages * pipelines, num_stages=stages)
    after = fail_over(plan, victims, redundancy=True) if victims else plan
    assert not after.aborted
    return after, set(plan.workers) - set(victims)


def at_boundary(plan: Plan, alive: set[int], bounds: Bounds, costs: Costs | None = None) -> PlanDecision:
    return decide(cluster_of(bounds, alive), plan, Boundary(costs or Costs()))


def shape_of(plan: Plan | None) -> tuple[int, int] | None:
    return plan and (plan.num_stages, plan.num_pipelines)


# ---- the stories -----------------------------------------------------------------------------------------------------

MICRO_BATCHES = [None, 4, 8, 9, 16, 64]


@pytest.mark.parametrize("micro_batches", MICRO_BATCHES)
@pytest.mark.parametrize(
    ("stages", "pipelines", "victims", "joins", "shape"),
    [
        (4, 2, (2,), 0, None),
        (4, 2, (), 0, None),
        (4, 2, (), 3, None),
        (4, 2, (2,), 1, (4, 2)),
        (4, 2, (2, 7), 2, (4, 2)),
        (4, 2, (0, 4, 3), 0, (4, 1)),
        (4, 2, (2, 6, 3), 0, (4, 1)),
        (4, 2, (2, 3), 0, (4, 1)),
        (4, 1, (1,), 0, (3, 1)),
        (2, 1, (1,), 0, None),
        (3, 1, (), 1, (4, 1)),
        (3, 1, (), 5, (4, 2)),
        (4, 1, (), 3, None),
        (4, 1, (), 4, (4, 2)),
    ],
)
def test_a_job_is_made_whole_when_that_helps(
    stages: int,
    pipelines: int,
    victims: tuple[int, ...],
    joins: int,
    shape: tuple[int, int] | None,
    micro_batches: int | None,
) -> None:
    plan, alive = worn(stages, pipelines, *victims)
    alive |= set(range(100, 100 + joins))
    bounds = bounds_of(micro_batches=micro_batches)
    decision = at_boundary(plan, alive, bounds)
    assert decision.action is (Action.RECONFIGURE if shape else Action.KEEP), decision.reason
    assert shape_of(decision.plan) == shape
    if decision.plan is not None:
        assert decision.plan.number == (1, 0)
        assert set(decision.plan.workers) <= alive
        assert decision.plan.owners == decision.plan.homes
        again = at_boundary(decision.plan, alive, bounds)
        assert (again.action, "is whole" in again.reason) == (Action.KEEP, True)


def test_stages_go_no_lower_than_the_config_allows() -> None:
    plan, alive = worn(4, 1, 1)
    decision = at_boundary(plan, alive, bounds_of(least=4, micro_batches=8))
    assert decision.action is Action.KEEP
    assert decision.reason == ("the plan 0.1 goes on: 3 worker(s) are there, and min_stages = 4: waiting for nodes")


def test_pipelines_grow_no_further_than_the_config_allows() -> None:
    plan, alive = worn(4, 2)
    assert at_boundary(plan, alive | set(range(100, 104)), bounds_of(pipelines=2)).action is Action.KEEP
    assert shape_of(at_boundary(plan, alive | set(range(100, 104)), bounds_of(pipelines=3)).plan) == (4, 3)


def test_a_gap_is_filled_though_it_trains_no_faster() -> None:
    """With one micro-batch a pipeline there is nothing to overlap, but two workers could abort the step."""
    plan, alive = worn(4, 2, 2)
    bounds = bounds_of(micro_batches=2)
    assert at_boundary(plan, alive, bounds).action is Action.KEEP
    decision = at_boundary(plan, alive | {100}, bounds)
    assert decision.action is Action.RECONFIGURE
    assert "the loss of any of 2 in 7 workers would abort the step, then of 0" in decision.reason


def test_who_has_no_stage_any_more_is_a_standby_and_not_dead() -> None:
    plan, alive = worn(4, 2, 0, 4, 3)
    after = at_boundary(plan, alive, bounds_of(micro_batches=8)).plan
    assert after is not None
    assert len(alive - set(after.workers)) == 1
    assert after.dead == {0, 3, 4}


def test_a_plan_whose_worker_is_gone_awaits_the_verdict_on_it() -> None:
    plan, alive = worn(4, 2, 2)
    decision = at_boundary(plan, alive - {7} | {100}, bounds_of())
    assert (decision.action, decision.plan) == (Action.KEEP, None)
    assert decision.reason == "worker(s) 7 are not there any more: that is decided first"


def test_the_joiner_takes_the_gap_and_nobody_else_moves() -> None:
    plan, alive = worn(4, 2, 2)
    cluster = Cluster(bounds_of(micro_batches=8), tuple(Node(f"n{w}", "z", (w,)) for w in [*sorted(alive), 100]))
    after = decide(cluster, plan, Boundary()).plan
    assert after is not None
    assert after.owners == ((0, 100, 4, 6), (1, 3, 5, 7))


# ---- a new epoch that has not settled --------------------------------------------------------------------------------


def lost(*workers: int, settled: bool) -> Lost:
    return Lost(tuple(Loss(worker, Cause.EXIT, f"worker {worker} was killed") for worker in workers), settled=settled)


def test_a_loss_before_the_epoch_has_settled_aborts_though_a_shadow_lives() -> None:
    bounds = bounds_of(micro_batches=8)
    plan, alive = worn(4, 2)
    decision = decide(cluster_of(bounds, alive), plan, lost(2, settled=False))
    after = decision.plan
    assert after is not None
    assert decision.action is Action.ABORT
    assert (after.aborted, after.number, after.dead) == (True, (0, 1), {2})
    assert after.owners == fail_over(plan, [2], redundancy=True).owners
    assert decision.reason == (
        "worker 2 was killed: worker 0 takes over stage 1 of pipeline 0; "
        "the epoch had just begun, and not all may have the layers that it gave them"
    )
    again = decide(cluster_of(bounds, alive - {2}), after, Boundary())
    assert (again.action, shape_of(again.plan)) == (Action.RECONFIGURE, (4, 1))
    assert again.plan is not None
    assert again.plan.number == (1, 0)


def test_what_was_aborted_stays_so_when_more_are_lost_though_their_shadows_live() -> None:
    plan, alive = worn(4, 2)
    cluster = cluster_of(bounds_of(), alive)
    first = decide(cluster, plan, lost(2, settled=False)).plan
    assert first is not None
    second = decide(cluster, first, lost(7, settled=True))
    assert second.plan is not None
    assert (second.action, second.plan.aborted, second.plan.number) == (Action.ABORT, True, (0, 2))


def test_the_loss_of_a_standby_does_not_abort_an_epoch_that_has_not_settled() -> None:
    plan, alive = worn(4, 2)
    decision = decide(cluster_of(bounds_of(), alive | {100}), plan, lost(100, settled=False))
    assert (decision.action, decision.plan) == (Action.KEEP, None)


# ---- how the layers are cut ------------------------------------------------------------------------------------------

CUTS = {1: (0, 10), 2: (0, 4, 10), 3: (0, 2, 5, 10), 4: (0, 1, 3, 6, 10)}


def test_every_epoch_says_how_its_layers_are_cut() -> None:
    bounds = bounds_of(partitions=CUTS, micro_batches=8)
    first = decide(cluster_of(bounds, set(range(8))), None, Boundary()).plan
    assert first is not None
    assert first.parts == CUTS[4]
    failed = decide(cluster_of(bounds, set(range(8))), first, lost(first.owners[0][1], settled=True)).plan
    assert failed is not None
    assert failed.parts == CUTS[4]
    three = set(first.owners[1][:3])
    gone = decide(cluster_of(bounds, set(range(8))), first, lost(*(set(range(8)) - three), settled=True)).plan
    assert gone is not None
    assert gone.aborted
    assert getattr(decide(cluster_of(bounds, three), gone, Boundary()).plan, "parts", None) == CUTS[3]
    fewer = at_boundary(*worn(4, 1, 1), bounds).plan
    assert fewer is not None
    assert fewer.parts == CUTS[3]


# ---- what is weighed -------------------------------------------------------------------------------------------------


def test_a_step_costs_what_one_micro_batch_takes_and_the_busiest_worker_for_the_others() -> None:
    whole, _ = worn(4, 2)
    merged, _ = worn(4, 2, 2)
    eight = Model(micro_batches=8)
    assert step_cost(whole, eight) == 3 * 0.25 + 1
    assert step_cost(merged, eight) == 3 * 0.5 + 1
    nine = Model(micro_batches=9)
    assert step_cost(whole, nine) == 4 * 0.25 + 1
    assert step_cost(merged, nine) == max(3 * 0.5, 4 * 0.25) + 1, "pipeline 0 is merged and has 4 of the 9"


def test_costs_of_layers_count() -> None:
    model = Model(CUTS, layer_costs=(4.0, 2.0, 2.0, *(0.5,) * 7), micro_batches=8)
    total = 4 + 2 + 2 + 3.5
    whole = replace(static_plan(world_size=8, num_stages=4), parts=CUTS[4])
    assert step_cost(whole, model) == pytest.approx(3 * 4 / total + 1)
    merged = fail_over(whole, [2], redundancy=True)
    assert step_cost(merged, model) == pytest.approx(3 * 8 / total + 1)
    last = fail_over(whole, [6], redundancy=True)
    assert step_cost(last, model) == pytest.approx(3 * 4 / total + 1), "two cheap stages are no bottleneck"


@pytest.mark.parametrize(
    ("costs", "action"),
    [
        (Costs(), Action.RECONFIGURE),
        (Costs(step_seconds=0.1), Action.RECONFIGURE),
        (Costs(step_seconds=0.01), Action.KEEP),
        (Costs(step_seconds=0.01, horizon_steps=1000), Action.RECONFIGURE),
        (Costs(step_seconds=0.1, stall_seconds=5.0), Action.KEEP),
        (Costs(step_seconds=0.1, bytes_per_second=1e9), Action.RECONFIGURE),
        (Costs(step_seconds=0.1, bytes_per_second=1e6), Action.KEEP),
    ],
)
def test_more_pipelines_must_pay_for_the_stall(costs: Costs, action: Action) -> None:
    """100 steps of 0.1 s save 3.6 s; a joiner receives up to 7 of 10 MB."""
    bounds = bounds_of(partitions=CUTS, layer_bytes=(1_000_000,) * 10, micro_batches=8)
    plan = replace(static_plan(world_size=4, num_stages=4), parts=CUTS[4])
    decision = at_boundary(plan, set(range(8)), bounds, costs)
    assert decision.action is action, decision.reason


def test_without_sizes_the_stall_is_what_it_is_said_to_be() -> None:
    costs = Costs(step_seconds=0.1, bytes_per_second=1e-9)
    assert at_boundary(worn(4, 1)[0], set(range(8)), bounds_of(micro_batches=8), costs).action is Action.RECONFIGURE


def test_little_gain_is_no_reason() -> None:
    """From 30 to 31 stages a step is 3 % shorter."""
    plan = static_plan(world_size=30, num_stages=30)
    assert at_boundary(plan, set(range(31)), Bounds(31, 1)).action is Action.KEEP
    assert at_boundary(plan, set(range(31)), Bounds(31, 1, redundancy=False)).action is Action.KEEP


def test_without_redundancy_only_speed_counts() -> None:
    bounds = Bounds(4, 2, redundancy=False, model=Model(micro_batches=8))
    plan = static_plan(world_size=4, num_stages=4)
    assert at_boundary(plan, set(range(7)), bounds).action is Action.KEEP
    assert at_boundary(plan, set(range(8)), bounds).action is Action.RECONFIGURE
    alone = static_plan(world_size=1, num_stages=1)
    for redundancy, action in ((False, Action.KEEP), (True, Action.RECONFIGURE)):
        one = Bounds(2, 1, redundancy=redundancy, model=Model(micro_batches=1))
        assert at_boundary(alone, {0, 1}, one).action is action


def test_a_layer_that_hangs_on_one_worker_is_reason_enough() -> None:
    """One micro-batch: nothing is faster. One of three is lost: two layers have one holder each."""
    plan, alive = worn(3, 1, 1)
    bounds = Bounds(3, 1, model=Model(micro_batches=1))
    assert fatal_workers(plan, redundancy=True) == {0, 2}
    decision = at_boundary(plan, alive, bounds, Costs(step_seconds=0.001))
    assert (decision.action, shape_of(decision.plan)) == (Action.RECONFIGURE, (2, 1))
    assert "each of 2 worker(s) alone holds a stage, then 0 would" in decision.reason


def test_to_be_safer_a_job_does_not_become_slower() -> None:
    """The first stage is the pace of either plan, and one pipeline would have it do the work of two."""
    plan, alive = worn(4, 2, 4, 5)
    uneven = bounds_of(partitions=CUTS, layer_costs=(90.0, *(1.0,) * 9), micro_batches=16)
    decision = at_boundary(replace(plan, parts=CUTS[4]), alive, uneven)
    assert decision.action is Action.KEEP
    assert decision.reason == "6 workers: 4x1 whole would train 0.50 of what 4x2 with 2 merged stage(s) does: keep"
    even = bounds_of(partitions=CUTS, layer_costs=(5.0, 2.5, 2.5, *(5 / 3,) * 3, *(1.25,) * 4), micro_batches=16)
    assert at_boundary(replace(plan, parts=CUTS[4]), alive, even).action is Action.RECONFIGURE


@pytest.mark.parametrize(
    ("stages", "pipelines", "victims", "aborting", "fatal"),
    [
        (4, 2, (), set(), set()),
        (4, 2, (2,), {0, 4}, set()),
        (4, 2, (0, 4, 3), {1, 2, 5, 6}, set()),
        (4, 1, (1,), {0, 2}, {0, 2}),
        (2, 1, (1,), {0}, {0}),
        (1, 2, (), {0, 1}, set()),
        (1, 1, (), {0}, {0}),
    ],
)
def test_who_could_abort_the_step_and_who_alone_holds_a_stage(
    stages: int, pipelines: int, victims: tuple[int, ...], aborting: set[int], fatal: set[int]
) -> None:
    plan, alive = worn(stages, pipelines, *victims)
    assert aborting_workers(plan, redundancy=True) == aborting
    assert fatal_workers(plan, redundancy=True) == fatal
    assert aborting == {worker for worker in alive if fail_over(plan, [worker], redundancy=True).aborted}
    assert aborting_workers(plan, redundancy=False) == alive


@pytest.mark.parametrize(
    ("plan", "shape", "workers", "reason"),
    [
        (worn(4, 2, 2)[0], Shape(4, 1), 7, "7 workers: 4x1 whole would train 0.95 of what 4x2 with 1 merged stage(s) "
         "does: keep"),
        (worn(4, 2)[0], Shape(4, 2), 9, "9 workers: 4x2 is whole and nothing larger can be made: keep"),
        (worn(4, 2, 2)[0], Shape(4, 2), 8, "8 workers: 4x2 whole would train 1.64 of what 4x2 with 1 merged stage(s) "
         "does: 100 steps save 3.89 s for a stall of 0.5 s and the loss of any of 2 in 7 workers would abort the step, "
         "then of 0"),
        (worn(4, 2, 0, 4, 3)[0], Shape(4, 1), 5, "5 workers: 4x1 whole would train 0.95 of what 4x2 with 3 merged "
         "stage(s) does: the loss of any of 4 in 5 workers would abort the step, then of 0"),
        (worn(3, 1)[0], Shape(4, 2), 8, "8 workers: 4x2 whole would train 2.18 of what 3x1 does: 100 steps save 5.42 s "
         "for a stall of 0.5 s"),
    ],
)  # fmt: skip
def test_reasons_are_told_in_numbers(plan: Plan, shape: Shape, workers: int, reason: str) -> None:
    costs = Costs(step_seconds=0.1)
    bounds = bounds_of(micro_batches=16)
    assert weigh(plan, shape=shape, bounds=bounds, costs=costs, workers=workers).reason == reason

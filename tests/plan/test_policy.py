"""Every decision of the policy once, as a story with its plans written out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bamboo_ds.errors import ConfigError
from bamboo_ds.plan import Place, Plan, static_plan
from bamboo_ds.plan.cluster import Bounds, Cluster, Node, Shape
from bamboo_ds.plan.failover import Takeover, fail_over, takeovers
from bamboo_ds.plan.membership import Cause, Loss
from bamboo_ds.plan.model import Model
from bamboo_ds.plan.plan import NOBODY
from bamboo_ds.plan.policy import (
    Action,
    Boundary,
    Event,
    Joined,
    Launched,
    Lost,
    PlanDecision,
    decide,
    unheld_stages,
)


def cluster_of(workers: int, bounds: Bounds, *, without: frozenset[int] = frozenset()) -> Cluster:
    """One worker a node, zones in turn."""
    nodes = (Node(f"n{w}", "abc"[w % 3], (w,)) for w in range(workers) if w not in without)
    return Cluster(bounds, tuple(nodes))


def lost(*workers: int) -> Lost:
    return Lost(tuple(Loss(worker, Cause.EXIT, f"worker {worker} was killed") for worker in workers))


def written(decision: PlanDecision) -> Plan:
    assert decision.plan is not None
    return decision.plan


# ---- the first plan --------------------------------------------------------------------------------------------------

FOUR_BY_TWO = Bounds(num_stages=4, pipelines=2, min_stages=2)


@pytest.mark.parametrize(
    ("workers", "event", "action", "shape"),
    [
        (9, Joined((8,)), Action.START, Shape(4, 2)),
        (8, Joined((7,)), Action.START, Shape(4, 2)),
        (8, Boundary(), Action.START, Shape(4, 2)),
        (7, Joined((6,)), Action.START, Shape(4, 1)),
        (3, Joined((2,)), Action.START, Shape(3, 1)),
        (2, Joined((1,)), Action.START, Shape(2, 1)),
        (1, Joined((0,)), Action.WAIT, None),
        (0, Boundary(), Action.WAIT, None),
        (9, lost(3), Action.START, Shape(4, 2)),
        (8, lost(3), Action.START, Shape(4, 1)),
        (2, lost(1), Action.WAIT, None),
    ],
)
def test_a_job_starts_as_soon_as_its_workers_make_a_plan(
    workers: int, event: Event, action: Action, shape: Shape | None
) -> None:
    decision = decide(cluster_of(workers, FOUR_BY_TWO), None, event)
    assert decision.action is action
    assert (decision.plan and Shape(decision.plan.num_stages, decision.plan.num_pipelines)) == shape
    if decision.plan is not None:
        assert decision.plan.number == (0, 0)
        assert not decision.plan.aborted
        assert not decision.plan.from_checkpoint


def test_the_wait_for_more_names_its_numbers() -> None:
    assert decide(cluster_of(1, FOUR_BY_TWO), None, Joined((0,))).reason == (
        "1 worker(s) are there, and min_stages = 2: waiting for nodes"
    )


def test_a_worker_lost_before_the_first_plan_gets_no_stage_though_it_is_still_registered() -> None:
    plan = written(decide(cluster_of(9, FOUR_BY_TWO), None, lost(0)))
    assert plan.workers == (1, 2, 3, 4, 5, 6, 7, 8)


def test_the_plan_of_a_launcher_is_taken_as_it_is_once_its_workers_are_there() -> None:
    given = Launched(static_plan(world_size=8, num_stages=4))
    early = decide(cluster_of(6, FOUR_BY_TWO), None, given)
    assert (early.action, early.plan) == (Action.WAIT, None)
    assert early.reason == "worker(s) 6, 7 of the launcher's plan are not there"
    decision = decide(cluster_of(9, FOUR_BY_TWO), None, given)
    assert decision.action is Action.START
    assert written(decision) == replace(given.plan, cause="the launcher has placed 8 workers")
    assert decide(cluster_of(9, FOUR_BY_TWO), written(decision), given).action is Action.KEEP
    cut = replace(FOUR_BY_TWO, model=Model({4: (0, 1, 2, 3, 9)}))
    assert written(decide(cluster_of(8, cut), None, given)).parts == (0, 1, 2, 3, 9)
    own = Launched(replace(given.plan, parts=(0, 2, 4, 6, 9)))
    assert written(decide(cluster_of(8, cut), None, own)).parts == (0, 2, 4, 6, 9)


@pytest.mark.parametrize(
    ("workers", "shape"),
    [(0, None), (1, None), (2, (2, 1)), (3, (3, 1)), (4, (4, 1)), (7, (4, 1)), (8, (4, 2)), (13, (4, 3)), (99, (4, 3))],
)
def test_pipelines_shrink_before_stages(workers: int, shape: tuple[int, int] | None) -> None:
    found = Bounds(num_stages=4, pipelines=3, min_stages=2).shape(workers)
    assert found == (shape and Shape(*shape))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Bounds(num_stages=4, min_stages=5), "bamboo.min_stages = 5: must be between 1 and .* 4"),
        (lambda: Bounds(num_stages=4, min_stages=0), "bamboo.min_stages = 0"),
        (lambda: Bounds(num_stages=4, pipelines=0), "bamboo.pipelines = 0"),
        (lambda: Cluster(Bounds(1), (Node("a", "z", (1,)), Node("b", "z", (1,)))), "worker id 1 of node b is taken"),
        (lambda: Cluster(Bounds(1), (Node("a", "z", (1,)), Node("a", "z", (2,)))), "node names must be unique"),
    ],
)
def test_bounds_and_clusters_that_cannot_be_are_refused(make: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()  # type: ignore[operator]


# ---- a loss ----------------------------------------------------------------------------------------------------------

BOUNDS = Bounds(num_stages=4, pipelines=2)
STATIC = static_plan(world_size=8, num_stages=4)
CLUSTER = cluster_of(8, BOUNDS)


@pytest.mark.parametrize(
    ("victims", "owners"),
    [
        ((2,), ((0, 0, 4, 6), (1, 3, 5, 7))),
        ((0,), ((6, 2, 4, 6), (1, 3, 5, 7))),
        ((6,), ((0, 2, 4, 4), (1, 3, 5, 7))),
        ((0, 4), ((6, 2, 2, 6), (1, 3, 5, 7))),
        ((2, 6), ((0, 0, 4, 4), (1, 3, 5, 7))),
        ((2, 3), ((0, 0, 4, 6), (1, 1, 5, 7))),
        ((2, 1), ((0, 0, 4, 6), (7, 3, 5, 7))),
    ],
)
def test_the_shadow_owns_the_stages_of_the_lost(victims: tuple[int, ...], owners: tuple[tuple[int, ...], ...]) -> None:
    decision = decide(CLUSTER, STATIC, lost(*victims))
    plan = written(decision)
    assert decision.action is Action.FAILOVER
    assert (plan.owners, plan.number, plan.dead) == (owners, (0, 1), frozenset(victims))
    assert plan.homes == STATIC.owners
    assert not plan.aborted


@pytest.mark.parametrize(
    ("victims", "owners"),
    [
        ((2, 4), ((0, 0, NOBODY, 6), (1, 3, 5, 7))),
        ((0, 6), ((NOBODY, 2, 4, 4), (1, 3, 5, 7))),
        ((0, 2, 4, 6), ((NOBODY,) * 4, (1, 3, 5, 7))),
    ],
)
def test_two_lost_neighbours_abort_the_step(victims: tuple[int, ...], owners: tuple[tuple[int, ...], ...]) -> None:
    decision = decide(CLUSTER, STATIC, lost(*victims))
    plan = written(decision)
    assert (decision.action, plan.aborted, plan.owners) == (Action.ABORT, True, owners)
    assert unheld_stages(plan, alive=set(range(8)) - set(victims), redundancy=True) == ()


def test_the_loss_of_a_merged_owner_aborts_for_it_holds_no_third_stage() -> None:
    merged = written(decide(CLUSTER, STATIC, lost(2)))
    plan = written(decide(CLUSTER, merged, lost(0)))
    assert plan.owners == ((6, NOBODY, 4, 6), (1, 3, 5, 7))
    assert (plan.aborted, plan.number) == (True, (0, 2))
    after_its_victim = written(decide(CLUSTER, merged, lost(4)))
    assert after_its_victim.owners == ((0, 0, NOBODY, 6), (1, 3, 5, 7))


@pytest.mark.parametrize("bounds", [Bounds(num_stages=1), replace(BOUNDS, redundancy=False)])
def test_without_a_shadow_every_loss_aborts(bounds: Bounds) -> None:
    plan = static_plan(world_size=2 * bounds.num_stages, num_stages=bounds.num_stages)
    decision = decide(cluster_of(8, bounds), plan, lost(0))
    assert decision.action is Action.ABORT
    assert written(decision).lost_places() == (Place(pipeline=0, stage=0),)


def test_the_reason_tells_who_takes_what() -> None:
    assert decide(CLUSTER, STATIC, lost(2, 4)).reason == (
        "worker 2 was killed; worker 4 was killed: "
        "worker 0 takes over stage 1 of pipeline 0, stage 2 of pipeline 0 is lost"
    )


def test_a_loss_that_is_known_or_concerns_a_standby_changes_nothing() -> None:
    plan = written(decide(CLUSTER, STATIC, lost(2)))
    for worker in (2, 99):
        decision = decide(CLUSTER, plan, lost(worker))
        assert (decision.action, decision.plan) == (Action.KEEP, None)
    assert written(decide(CLUSTER, plan, lost(2, 6))).dead == {2, 6}


# ---- who joins -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "action", "words"),
    [
        ((8,), Action.STANDBY, "worker(s) 8 joined"),
        ((2, 9, 8), Action.STANDBY, "worker(s) 9, 8 joined"),
        ((2,), Action.KEEP, "worker(s) 2 were declared dead: only new ids may join"),
        ((0, 1), Action.KEEP, "worker(s) 0, 1 have their stages"),
    ],
)
def test_who_joins_is_a_standby(workers: tuple[int, ...], action: Action, words: str) -> None:
    plan = written(decide(CLUSTER, STATIC, lost(2)))
    decision = decide(cluster_of(10, BOUNDS), plan, Joined(workers))
    assert (decision.action, decision.plan) == (action, None)
    assert words in decision.reason


@pytest.mark.parametrize("event", [Launched(STATIC), Boundary()])
def test_a_plan_that_runs_stands(event: Event) -> None:
    for plan in (STATIC, written(decide(CLUSTER, STATIC, lost(2)))):
        assert decide(CLUSTER, plan, event).action is Action.KEEP


# ---- after an abort --------------------------------------------------------------------------------------------------


def aborted(*victims: int, plan: Plan = STATIC) -> Plan:
    return written(decide(CLUSTER, plan, lost(*victims)))


def test_an_aborted_job_goes_on_in_a_new_epoch_with_the_survivors() -> None:
    before = aborted(2, 4)
    decision = decide(CLUSTER, before, Boundary())
    plan = written(decision)
    assert decision.action is Action.RECONFIGURE
    assert (plan.num_stages, plan.num_pipelines, plan.number) == (4, 1, (1, 0))
    assert set(plan.workers) <= {0, 1, 3, 5, 6, 7}
    assert plan.homes == plan.owners
    assert (plan.dead, plan.aborted, plan.from_checkpoint) == ({2, 4}, False, False)


def test_who_had_a_stage_and_vanished_without_a_verdict_is_dead_in_the_new_epoch() -> None:
    plan = written(decide(cluster_of(8, BOUNDS, without=frozenset({7})), aborted(2, 4), Boundary()))
    assert plan.dead == {2, 4, 7}


def test_too_few_workers_wait_and_the_ones_that_come_end_the_wait() -> None:
    bounds = Bounds(num_stages=4, pipelines=1, min_stages=3)
    plan = written(decide(cluster_of(4, bounds), static_plan(world_size=4, num_stages=4), lost(1, 2)))
    decision = decide(cluster_of(4, bounds), plan, Boundary())
    assert (decision.action, decision.plan) == (Action.WAIT, None)
    assert decide(cluster_of(5, bounds), plan, Joined((4,))).action is Action.STANDBY
    decision = decide(cluster_of(5, bounds), plan, Boundary())
    assert (decision.action, written(decision).workers) == (Action.RESTORE, (0, 3, 4))
    assert written(decision).num_stages == 3


def test_a_stage_that_nobody_alive_holds_comes_from_the_checkpoint() -> None:
    one = aborted(2, 4)
    both = aborted(3, 5, plan=one)
    assert unheld_stages(both, alive=both.workers, redundancy=True) == (2,)
    decision = decide(CLUSTER, both, Boundary())
    assert (decision.action, written(decision).from_checkpoint) == (Action.RESTORE, True)
    assert "nobody alive holds stage(s) 2" in decision.reason
    assert decide(CLUSTER, one, Boundary()).action is Action.RECONFIGURE


def test_without_redundancy_only_owners_hold() -> None:
    plan = fail_over(STATIC, [2, 3], redundancy=False)
    assert unheld_stages(plan, alive=plan.workers, redundancy=False) == (1,)
    assert unheld_stages(plan, alive=plan.workers, redundancy=True) == ()


# ---- what a plan says after a failover -------------------------------------------------------------------------------


def test_a_merged_owner_keeps_its_home_and_holds_what_it_held() -> None:
    plan = fail_over(STATIC, [2, 1], redundancy=True)
    assert plan.place(0) == Place(pipeline=0, stage=0)
    assert plan.places(0) == (Place(pipeline=0, stage=0), Place(pipeline=0, stage=1))
    assert plan.places(7) == (Place(pipeline=1, stage=3), Place(pipeline=1, stage=0))
    assert plan.place(7).stage == 3
    assert plan.held_stages(0, redundancy=True) == {0, 1}
    assert plan.held_stages(7, redundancy=True) == {3, 0}
    assert plan.held_stages(7, redundancy=False) == {3}
    assert plan.workers == (0, 3, 4, 5, 6, 7)


def test_holders_of_a_stage_are_its_live_home_and_shadow_never_who_took_over_beside_it() -> None:
    plan = fail_over(STATIC, [2], redundancy=True)
    assert plan.holders(frozenset({1}), redundancy=True) == (0, 1, 3)
    assert plan.holders(frozenset({2}), redundancy=True) == (3, 4, 5)
    assert plan.holders(frozenset({2}), redundancy=False) == (4, 5)


def test_neighbours_are_those_next_in_the_ring() -> None:
    assert STATIC.neighbours(0, redundancy=True) == (2, 6)
    assert STATIC.neighbours(0, redundancy=False) == (2,)
    assert STATIC.neighbours(3, redundancy=True) == (1, 5)
    merged = fail_over(STATIC, [2], redundancy=True)
    assert merged.neighbours(0, redundancy=True) == (4, 6)
    assert merged.neighbours(4, redundancy=True) == (0, 6)
    broken = fail_over(STATIC, [2, 4], redundancy=True)
    assert (broken.neighbours(0, redundancy=True), broken.neighbours(6, redundancy=True)) == ((6,), (0,))
    assert static_plan(world_size=2, num_stages=2).neighbours(0, redundancy=True) == (1,)
    assert static_plan(world_size=2, num_stages=1).neighbours(0, redundancy=True) == ()


def test_takeovers_are_what_changed() -> None:
    plan = fail_over(STATIC, [2, 4], redundancy=True)
    assert takeovers(STATIC, plan) == (
        Takeover(Place(pipeline=0, stage=1), victim=2, shadow=0),
        Takeover(Place(pipeline=0, stage=2), victim=4, shadow=NOBODY),
    )
    assert takeovers(plan, plan) == ()


def test_the_static_plan_is_the_first_plan_of_a_static_job() -> None:
    bounds = Bounds(num_stages=4, pipelines=2)
    cluster = Cluster(bounds, (Node("host", "zone", tuple(range(8))),))
    one_a_node = Cluster(bounds, tuple(Node(f"n{w}", f"z{w}", (w,)) for w in range(8)))
    assert written(decide(one_a_node, None, Joined((7,)))).owners == STATIC.owners
    assert written(decide(cluster, None, Joined((7,)))).owners == STATIC.owners

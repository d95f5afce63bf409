"""A node that will be taken away hands its stage over to a standby, if there is one; else it keeps it."""

from __future__ import annotations

from dataclasses import replace

from bamboo_ds.plan.cluster import Bounds, Cluster, Node
from bamboo_ds.plan.plan import Plan
from bamboo_ds.plan.policy import Action, Boundary, PlanDecision, decide

BOUNDS = Bounds(num_stages=4, pipelines=2, min_stages=2)
PLAN = Plan(owners=((0, 2, 4, 6), (1, 3, 5, 7)))


def cluster(workers: int) -> Cluster:
    return Cluster(BOUNDS, tuple(Node(f"n{worker}", "abc"[worker % 3], (worker,)) for worker in range(workers)))


def at_boundary(workers: int, *leaving: int, plan: Plan = PLAN) -> PlanDecision:
    return decide(cluster(workers), plan, Boundary(leaving=frozenset(leaving)))


def test_a_standby_takes_the_stage_of_a_warned_worker() -> None:
    decision = at_boundary(9, 3)
    assert decision.action is Action.RECONFIGURE
    assert decision.plan is not None
    assert sorted(decision.plan.workers) == [0, 1, 2, 4, 5, 6, 7, 8]
    assert decision.plan.dead == frozenset()  # it lives, and hands its layers over
    assert (decision.plan.epoch, decision.plan.from_checkpoint) == (1, False)
    assert "worker(s) 3 will be taken away" in decision.reason


def test_without_a_standby_it_keeps_its_stage_and_redundancy_will_take_it() -> None:
    assert at_boundary(8, 3).action is Action.KEEP


def test_fewer_standbys_than_warned_workers_change_nothing() -> None:
    assert at_boundary(9, 3, 4).action is Action.KEEP


def test_a_warned_standby_gets_no_stage() -> None:
    small = Plan(owners=((0, 1, 2, 3),))
    assert at_boundary(8, plan=small).action is Action.RECONFIGURE
    grown = at_boundary(9, 8, plan=small)
    assert grown.plan is not None
    assert 8 not in grown.plan.workers
    assert at_boundary(8, 7, plan=small).action is Action.KEEP


def test_a_warning_of_a_standby_moves_nobody() -> None:
    assert at_boundary(9, 8).action is Action.KEEP


def test_what_was_handed_over_is_not_taken_back_when_the_warning_was_false() -> None:
    moved = at_boundary(9, 3).plan
    assert moved is not None
    assert at_boundary(9, plan=replace(moved)).action is Action.KEEP

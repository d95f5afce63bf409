"""Who is lost: a table of what was seen and what follows from it."""

from __future__ import annotations

from itertools import permutations

import pytest

from bamboo_ds.plan import Plan, static_plan
from bamboo_ds.plan.cluster import Bounds, Cluster, Node
from bamboo_ds.plan.failover import fail_over
from bamboo_ds.plan.membership import Cause, Evidence, LinkReport, judge

BOUNDS = Bounds(num_stages=4, pipelines=2)
PLAN = static_plan(world_size=8, num_stages=4)
"""Pipelines 0 2 4 6 and 1 3 5 7."""

ALL = frozenset(range(9))


def cluster_of(*gone: int, bounds: Bounds = BOUNDS) -> Cluster:
    """Eight workers and a standby, one a node, except those whose lease is gone."""
    return Cluster(bounds, tuple(Node(f"n{w}", "abc"[w % 3], (w,)) for w in range(9) if w not in gone))


def reports(text: str, plan: Plan = PLAN) -> tuple[LinkReport, ...]:
    """Read `2>4`: worker 2 reports its link to worker 4."""
    pairs = (pair.split(">") for pair in text.split())
    return tuple(LinkReport(int(a), int(b), *plan.number) for a, b in pairs)


@pytest.mark.parametrize(
    ("seen", "ended", "gone", "answering", "verdicts"),
    [
        # nothing, or one end's word while the other end has not answered yet
        ("", (), (), ALL, []),
        ("2>4", (), (), (), []),
        ("2>4", (), (), (2,), []),
        ("2>4 4>2", (), (), (2,), []),
        # the agent saw it end
        ("", (4,), (), (), [(4, Cause.EXIT)]),
        ("2>4 6>4", (4,), (4,), (), [(4, Cause.EXIT)]),
        ("", (8,), (), (), []),
        # the lease is gone, with and without a report
        ("", (), (4,), (), [(4, Cause.LEASE)]),
        ("2>4", (), (4,), (), [(4, Cause.LEASE)]),
        ("", (), (8,), (), []),
        ("", (), (5, 4), (), [(4, Cause.LEASE), (5, Cause.LEASE)]),
        # both neighbours, in the ring; not only one of them, nor others
        ("2>4 6>4", (), (), (), [(4, Cause.NEIGHBOURS)]),
        ("2>4 6>4", (), (), ALL, [(4, Cause.NEIGHBOURS)]),
        ("2>0 6>0", (), (), (), [(0, Cause.NEIGHBOURS)]),
        ("2>4 5>4", (), (), (), []),
        # cut off from its peers, it accuses them all
        ("4>2 4>6 4>5 2>4 6>4", (), (), ALL, [(4, Cause.NEIGHBOURS)]),
        # the accusations of the dead are void
        ("2>4 6>4", (2,), (), (), [(2, Cause.EXIT)]),
        ("2>4 4>2 6>4", (), (2,), ALL - {2}, [(2, Cause.LEASE), (4, Cause.EVICTED)]),
        # a link between two that answer: most accused, survivable, fewest stages, youngest
        ("2>4", (), (), ALL, [(4, Cause.EVICTED)]),
        ("4>2", (), (), ALL, [(2, Cause.EVICTED)]),
        ("2>4 4>2", (), (), ALL, [(4, Cause.EVICTED)]),
        ("2>4 4>2 3>2", (), (), ALL, [(2, Cause.EVICTED)]),
        ("0>2 3>5", (), (), ALL, [(5, Cause.EVICTED), (2, Cause.EVICTED)]),
        # a network cut in two halves: one of each broken link goes
        ("2>4 4>2 6>0 0>6", (), (), ALL, [(6, Cause.EVICTED), (2, Cause.EVICTED)]),
        # nonsense: of itself, of a standby, by a standby, by a stranger
        ("4>4 2>8 8>2 77>2 2>77", (), (), ALL, []),
    ],
)
def test_verdicts(
    seen: str,
    ended: tuple[int, ...],
    gone: tuple[int, ...],
    answering: frozenset[int],
    verdicts: list[tuple[int, Cause]],
) -> None:
    evidence = Evidence(reports(seen), frozenset(ended), frozenset(answering))
    losses = judge(cluster_of(*gone), PLAN, evidence)
    assert [(loss.worker, loss.cause) for loss in losses] == verdicts
    assert all(str(loss.worker) in loss.reason for loss in losses)


def test_the_order_of_reports_does_not_matter() -> None:
    seen = reports("2>4 4>2 6>0 0>6 3>5")
    verdicts = {judge(cluster_of(), PLAN, Evidence(order, answering=ALL)) for order in permutations(seen)}
    assert len(verdicts) == 1


def test_reports_about_links_of_another_version_are_void() -> None:
    old = reports("2>4 6>4")
    plan = fail_over(PLAN, [1], redundancy=True)
    assert judge(cluster_of(1), plan, Evidence(old, answering=ALL)) == ()
    assert len(judge(cluster_of(1), plan, Evidence(reports("2>4 6>4", plan), answering=ALL))) == 1


def test_after_a_failover_the_neighbours_are_those_of_the_merged_owner() -> None:
    plan = fail_over(PLAN, [2], redundancy=True)
    (loss,) = judge(cluster_of(2), plan, Evidence(reports("0>4 6>4", plan)))
    assert (loss.worker, loss.cause) == (4, Cause.NEIGHBOURS)
    assert loss.reason == "both neighbours of worker 4, workers 0 and 6, report a broken link"


def test_the_dead_are_not_lost_again() -> None:
    plan = fail_over(PLAN, [2], redundancy=True)
    assert judge(cluster_of(2), plan, Evidence(ended=frozenset({2}))) == ()


def test_with_two_stages_the_only_neighbour_proves_nothing() -> None:
    plan, bounds = static_plan(world_size=4, num_stages=2), Bounds(num_stages=2)
    assert judge(cluster_of(bounds=bounds), plan, Evidence(reports("0>2 2>0", plan))) == ()


def test_without_redundancy_the_ends_of_a_pipeline_are_no_neighbours() -> None:
    bounds = Bounds(num_stages=4, redundancy=False)
    assert judge(cluster_of(bounds=bounds), PLAN, Evidence(reports("2>0 6>0"))) == ()


def test_when_all_links_of_a_ring_break_the_first_verdict_voids_the_others() -> None:
    plan, bounds = static_plan(world_size=3, num_stages=3), Bounds(num_stages=3)
    losses = judge(cluster_of(bounds=bounds), plan, Evidence(reports("0>1 0>2 1>0 1>2 2>0 2>1", plan)))
    assert [(loss.worker, loss.cause) for loss in losses] == [(2, Cause.NEIGHBOURS)]


@pytest.mark.parametrize(
    ("lost", "seen", "worker", "because"),
    [
        ([], "0>2 2>0 3>0", 0, "2 worker(s) report it and 1 report worker 2"),
        ([2], "4>6 6>4", 6, "its stages have a live shadow and those of worker 4 do not"),
        ([6], "2>4 4>2", 2, "its stages have a live shadow and those of worker 4 do not"),
        ([], "2>4 4>2", 4, "it joined after worker 2"),
        ([2], "0>5 5>0", 5, "its stages have a live shadow and those of worker 0 do not"),
    ],
)
def test_an_eviction_says_by_which_rule(lost: list[int], seen: str, worker: int, because: str) -> None:
    plan = fail_over(PLAN, lost, redundancy=True) if lost else PLAN
    (loss,) = judge(cluster_of(*lost), plan, Evidence(reports(seen, plan), answering=ALL))
    assert (loss.worker, loss.cause) == (worker, Cause.EVICTED)
    assert loss.reason.endswith(f"worker {worker} goes: {because}")
    assert "broken while both answer" in loss.reason


def test_of_two_whose_loss_is_fatal_the_one_with_fewer_stages_goes() -> None:
    """Stages 0 1 2 3: 1 is lost and merged into 0; 2's shadow was 1; so the loss of either aborts the step."""
    plan = fail_over(PLAN, [2], redundancy=True)
    (loss,) = judge(cluster_of(2), plan, Evidence(reports("0>4 4>0", plan), answering=ALL))
    assert loss.worker == 4
    assert loss.reason.endswith("worker 4 goes: it owns 1 stage(s) and worker 0 owns 2")

"""The event simulation against what can be worked out by hand."""

from __future__ import annotations

import time

import pytest

from bamboo_ds.errors import ScheduleError
from bamboo_ds.schedule import Kind, Operation, StageCosts, Window, clock, clock_order, simulate, worker_orders


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 16])
def test_equal_stages_take_the_textbook_time(stages: int, micro_batches: int) -> None:
    costs = StageCosts.uniform(stages, forward=1.5, backward=2.5)
    timeline = simulate(worker_orders(stages, micro_batches=micro_batches), costs)
    assert timeline.step_seconds == pytest.approx((micro_batches + stages - 1) * 4.0)


def test_idle_windows_are_those_of_the_picture() -> None:
    timeline = simulate(worker_orders(3, micro_batches=3), StageCosts.uniform(3))
    # 0  F0 F1 F2 .  .  .  .  B0--- .  B1--- .  B2---
    # 1  .  F0 F1 .  .  B0--- F2 B1--- .  B2--- .  .
    # 2  .  .  F0 B0--- F1 B1--- F2 B2--- .  .  .  .
    assert timeline.idle(0) == (Window(3, 7, 3), Window(9, 10, 4), Window(12, 13, 5))
    assert timeline.idle(1) == (Window(0, 1, 0), Window(3, 5, 2), Window(10, 11, 5), Window(13, 15, 6))
    assert timeline.idle(2) == (Window(0, 2, 0), Window(11, 15, 6))


def test_a_message_is_late_by_the_latency_once_per_hop() -> None:
    costs = StageCosts.uniform(3)
    orders = worker_orders(3, micro_batches=1)
    assert simulate(orders, costs, latency_seconds=0.25).step_seconds == pytest.approx(9 + 4 * 0.25)


def test_a_merged_worker_runs_both_stages_one_after_the_other_and_without_latency() -> None:
    orders = {0: clock_order((0,), stages=3, micro_batches=4), 1: clock_order((1, 2), stages=3, micro_batches=4)}
    timeline = simulate(orders, StageCosts.uniform(3), latency_seconds=0.25)
    # The merged worker starts after one forward and one hop, is never idle, and one hop and one backward follow.
    assert timeline.step_seconds == pytest.approx(1 + 0.25 + 4 * 6 + 0.25 + 2)
    assert len(timeline.idle(1)) == 2


def test_a_redundant_forward_costs_what_its_shadow_needs() -> None:
    costs = StageCosts((1.0, 1.0, 1.0), (2.0, 2.0, 2.0), (0.1, 0.2, 0.3))
    frc = Operation(Kind.REDUNDANT, 0, 0)
    orders = dict(worker_orders(3, micro_batches=1))
    orders[2] = (frc, *orders[2])
    first = simulate(orders, costs).events[2][0]
    assert first == (frc, 0.0, 0.3)


def test_a_deadlock_names_who_waits_for_what() -> None:
    forward, backward = ((lambda s, m, k=kind: Operation(k, s, m)) for kind in (Kind.FORWARD, Kind.BACKWARD))
    orders = {
        0: [forward(0, 0), backward(0, 0), forward(0, 1), backward(0, 1)],
        1: [forward(1, 0), forward(1, 1), backward(1, 0), backward(1, 1)],
    }
    with pytest.raises(ScheduleError, match="worker 0 waits in 0B0 for 1B0; worker 1 waits in 1F1 for 0F1"):
        simulate(orders, StageCosts.uniform(2))


def test_a_redundant_forward_before_its_source_is_a_deadlock() -> None:
    orders = dict(worker_orders(2, micro_batches=1))
    orders[0] = (Operation(Kind.REDUNDANT, 1, 0), *orders[0])
    with pytest.raises(ScheduleError, match="worker 0 waits in 1R0 for 0F0"):
        simulate(orders, StageCosts.uniform(2))


def test_a_redundant_forward_has_no_clock() -> None:
    assert [clock(Operation(kind, 1, 2), stages=4) for kind in (Kind.FORWARD, Kind.BACKWARD)] == [5, 10]
    with pytest.raises(ScheduleError, match="1R2"):
        clock(Operation(Kind.REDUNDANT, 1, 2), stages=4)


def test_a_promoted_forward_takes_no_time_and_stands_for_the_forward() -> None:
    costs = StageCosts.uniform(2, forward=3.0, redundant=1.0)
    redundant, promoted, forward = (Operation(k, 0, 0) for k in (Kind.REDUNDANT, Kind.PROMOTED, Kind.FORWARD))
    other = [Operation(Kind.FORWARD, 1, 0)]
    assert simulate({0: [redundant, promoted], 1: other}, costs).step_seconds == 1.0 + 3.0
    assert simulate({0: [forward], 1: other}, costs).step_seconds == 3.0 + 3.0
    with pytest.raises(ScheduleError, match="worker 0 waits in 0P0 for 0R0"):
        simulate({0: [promoted]}, costs)


def test_a_large_step_is_simulated_in_milliseconds() -> None:
    orders, costs = worker_orders(12, micro_batches=64), StageCosts.uniform(12)

    def once() -> float:
        start = time.perf_counter()
        simulate(orders, costs)
        return time.perf_counter() - start

    # About 3 ms on one core; the slack is for a busy machine, and far from what anything quadratic would take.
    assert min(once() for _ in range(20)) < 0.010


@pytest.mark.parametrize(
    ("forward", "backward", "redundant", "named"),
    [
        ((1.0,), (1.0, 1.0), (1.0,), "one value per stage"),
        ((), (), (), "one value per stage"),
        ((1.0, 0.0), (1.0, 1.0), (1.0, 1.0), "forward cost of stage 1 is 0.0"),
        ((1.0,), (float("nan"),), (1.0,), "backward cost of stage 0 is nan"),
        ((1.0,), (1.0,), (float("inf"),), "redundant cost of stage 0 is inf"),
    ],
)
def test_costs_that_are_none_are_refused(
    forward: tuple[float, ...], backward: tuple[float, ...], redundant: tuple[float, ...], named: str
) -> None:
    with pytest.raises(ScheduleError, match=named):
        StageCosts(forward, backward, redundant)

"""A step with a loss in simulated time: against what can be worked out by hand, and what the paper promises."""

from __future__ import annotations

import random
import statistics
from itertools import pairwise

import pytest

from bamboo_ds.errors import ScheduleError
from bamboo_ds.schedule import Disturbance, Redundancy, StageCosts, disturb, simulate, worker_orders
from bamboo_ds.schedule.disturbance import worker_words
from bamboo_ds.schedule.operations import Kind
from bamboo_ds.schedule.words import REDUCE, Word

UNIFORM = StageCosts.uniform(4)


def words(victim: int, redundancy: Redundancy, *, stages: int = 4, micro_batches: int = 8) -> tuple[Word, ...]:
    costs = StageCosts.uniform(stages)
    orders = worker_orders(stages, micro_batches=micro_batches, redundancy=redundancy, costs=costs)
    return worker_words(orders, victim, stages=stages)


def lose(victim: int, before: int, redundancy: Redundancy = "lflb", *, reroute_seconds: float = 0.0) -> Disturbance:
    return disturb(
        4,
        micro_batches=8,
        victim=victim,
        before=before,
        costs=UNIFORM,
        redundancy=redundancy,
        reroute_seconds=reroute_seconds,
    )


@pytest.mark.parametrize("victim", range(4))
def test_a_loss_before_the_first_instruction_is_a_merged_step_without_a_pause(victim: int) -> None:
    owners = [(victim - 1) % 4 if stage == victim else stage for stage in range(4)]
    merged = simulate(worker_orders(4, micro_batches=8, owners=owners), UNIFORM).step_seconds
    lost = lose(victim, 0)
    assert lost.lost_seconds == 0
    assert lost.step_seconds == lost.free_seconds == merged
    assert lost.pause_seconds == 0


def test_a_loss_in_the_reduction_costs_all_of_the_stage_again() -> None:
    for redundancy, seconds in (("lflb", 8 * 3), ("eflb", 8 * 2)):
        own = words(3, redundancy)
        lost = lose(3, own.index(REDUCE), redundancy)
        assert lost.before == REDUCE
        # The shadow had three more operations of its own before it ran out of gradients, then the lost stage follows.
        assert lost.step_seconds >= lost.lost_seconds + seconds
        assert 0 < lost.pause_seconds <= seconds


def test_a_late_loss_by_hand() -> None:
    lost = disturb(2, micro_batches=2, victim=0, before=9, costs=StageCosts.uniform(2))
    # 0  F0 F1 .  .  B0--- x
    # 1  .  F0 B0--- F1 B1--- f0 f1 b0--- b1---    handed over for nothing, b1 alone would be left at 7
    assert str(lost.before) == "0B1"
    assert (lost.lost_seconds, lost.plain_seconds, lost.free_seconds, lost.step_seconds) == (6.0, 9.0, 9.0, 13.0)
    assert lost.pause_seconds == 4.0


def test_the_shadow_runs_the_lost_stage_once_and_its_own_once() -> None:
    rng = random.Random(3)
    for stages in (2, 3, 4, 5):
        costs = StageCosts(
            *(tuple(rng.uniform(0.5, 2.0) for _ in range(stages)) for _ in range(3)),
        )
        for redundancy in ("lflb", "fit", "eflb"):
            for victim in range(stages):
                orders = worker_orders(stages, micro_batches=5, redundancy=redundancy, costs=costs)
                for before in range(len(worker_words(orders, victim, stages=stages))):
                    lost = disturb(
                        stages,
                        micro_batches=5,
                        victim=victim,
                        before=before,
                        costs=costs,
                        redundancy=redundancy,
                        latency_seconds=0.1,
                        reroute_seconds=0.3,
                    )
                    _assert_whole(lost, stages)


def _assert_whole(lost: Disturbance, stages: int) -> None:
    events = lost.timeline.events
    ran = [event.operation for worker, own in events.items() if worker != lost.victim for event in own]
    for stage in range(stages):
        for kinds in ((Kind.FORWARD, Kind.PROMOTED), (Kind.BACKWARD,)):
            counted = sorted(o.micro_batch for o in ran if o.stage == stage and o.kind in kinds)
            assert counted == list(range(5)), (lost.victim, lost.before)
    ends = [event.finish_seconds for event in events[lost.victim]]
    assert lost.lost_seconds == max(ends, default=0.0)
    for own in events.values():
        assert all(one.finish_seconds <= other.start_seconds for one, other in pairwise(own))


@pytest.mark.parametrize("redundancy", ["lflb", "fit", "eflb"])
def test_a_shadow_that_hears_late_is_late_by_no_more(redundancy: Redundancy) -> None:
    for victim in range(4):
        for before in range(0, len(words(victim, redundancy)), 3):
            at_once, late = (lose(victim, before, redundancy, reroute_seconds=seconds) for seconds in (0.0, 2.0))
            assert at_once.free_seconds == late.free_seconds
            assert late.step_seconds <= at_once.step_seconds + 2.0 + 2.0  # it may have begun a backward meanwhile


def losses(redundancy: Redundancy, *, backwards_lost: bool) -> dict[tuple[int, str], Disturbance]:
    """Return the losses after the victim's first backward, or up to it, by victim and the instruction not reached."""
    found = {}
    for victim in range(4):
        own = words(victim, redundancy)
        first = own.index(Word("B", victim, 0)) + 1
        for before in range(first, len(own) - 1) if backwards_lost else range(first):
            found[victim, str(own[before])] = lose(victim, before, redundancy)
    return found


@pytest.mark.parametrize("redundancy", ["fit", "eflb"])
def test_in_the_forward_phase_redundancy_leaves_a_short_pause(redundancy: Redundancy) -> None:
    found = losses(redundancy, backwards_lost=False).values()
    assert max(loss.pause_seconds / loss.plain_seconds for loss in found) <= 0.25


def test_where_backwards_are_lost_eager_forwards_save_a_third() -> None:
    by_mode = [losses(redundancy, backwards_lost=True) for redundancy in ("eflb", "fit", "lflb")]
    moments = set.intersection(*map(set, by_mode))
    assert len(moments) > 70
    eager, fit, lazy = (statistics.median(found[at].pause_seconds for at in moments) for found in by_mode)
    # A forward is a third of forward and backward, and those in flight run again unless their FRC was early.
    assert eager <= 0.7 * lazy
    assert eager < fit < lazy
    eager, lazy = (
        statistics.median(found[at].step_seconds - found[at].plain_seconds for at in moments)
        for found in (by_mode[0], by_mode[2])
    )
    assert eager <= 0.65 * lazy


def test_a_second_loss_elsewhere_is_timed_with_the_merged_owner_of_the_first() -> None:
    lost = disturb(5, micro_batches=6, victim=4, before=8, costs=StageCosts.uniform(5), owners=(0, 1, 1, 3, 4))
    assert (lost.shadow, set(lost.timeline.events)) == (3, {0, 1, 3, 4})
    assert lost.step_seconds > lost.plain_seconds


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"victim": 4}, "victim=4: must be a stage, 0..3"),
        ({"before": 44}, r"before=44: the worker of stage 1 has instructions 0..43"),
        ({"before": -1}, "before=-1"),
        ({"owners": (0, 1, 1, 3), "victim": 1}, r"victim=1: with owners=\(0, 1, 1, 3\) nobody can take over"),
        ({"owners": (0, 1, 1, 3), "victim": 2}, "victim=2: .*nobody can take over"),
        ({"costs": StageCosts.uniform(3)}, "3 stages"),
    ],
)
def test_what_cannot_be_timed_is_refused_with_its_value(changed: dict[str, object], named: str) -> None:
    arguments = {"micro_batches": 7, "victim": 1, "before": 0, "costs": UNIFORM, **changed}
    with pytest.raises(ScheduleError, match=named):
        disturb(4, **arguments)  # type: ignore[arg-type]

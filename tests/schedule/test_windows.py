"""Where redundant forwards run: promises of "fit" and "eflb", held for random costs, and the lower bound."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_ds.schedule import (
    Kind,
    Operation,
    Redundancy,
    StageCosts,
    eager_bound,
    frc_share,
    shadow_of,
    shadowed_stage,
    simulate,
    worker_orders,
)
from bamboo_ds.schedule.windows import FIT_MARGIN, naive_orders

EXACT = 1e-9


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[int, int, StageCosts]:
    stages, micro_batches = draw(st.integers(2, 8)), draw(st.integers(1, 16))
    cost = st.lists(st.floats(0.05, 5.0), min_size=stages, max_size=stages).map(tuple)
    return stages, micro_batches, StageCosts(draw(cost), draw(cost), draw(cost))


def placed(stages: int, micro_batches: int, redundancy: str, costs: StageCosts) -> dict[int, tuple[Operation, ...]]:
    return dict(worker_orders(stages, micro_batches=micro_batches, redundancy=redundancy, costs=costs))


def step_seconds(stages: int, micro_batches: int, redundancy: str, costs: StageCosts) -> float:
    return simulate(placed(stages, micro_batches, redundancy, costs), costs).step_seconds


def assert_sound(orders: dict[int, tuple[Operation, ...]], stages: int, micro_batches: int) -> None:
    """Hold that 1F1B is unchanged and each redundant forward is the shadow's, once, in order, after its source."""
    plain = worker_orders(stages, micro_batches=micro_batches)
    for worker, order in orders.items():
        assert tuple(operation for operation in order if operation.kind is not Kind.REDUNDANT) == plain[worker]
        redundant = [operation for operation in order if operation.kind is Kind.REDUNDANT]
        assert [operation.micro_batch for operation in redundant] == sorted({r.micro_batch for r in redundant})
        for operation in redundant:
            assert shadow_of(operation.stage, stages=stages) == worker
            if operation.stage > 0:
                source = Operation(Kind.FORWARD, worker, operation.micro_batch)
                assert order.index(source) < order.index(operation)


@given(pipelines())
@settings(deadline=None, max_examples=150)
def test_fit_never_stretches_the_step(pipeline: tuple[int, int, StageCosts]) -> None:
    stages, micro_batches, costs = pipeline
    assert_sound(placed(stages, micro_batches, "fit", costs), stages, micro_batches)
    plain = step_seconds(stages, micro_batches, "off", costs)
    assert step_seconds(stages, micro_batches, "fit", costs) == pytest.approx(plain, rel=EXACT)


@st.composite
def merged_pipelines(draw: st.DrawFn) -> tuple[tuple[int, ...], int, StageCosts]:
    stages, micro_batches, costs = draw(pipelines())
    lost = draw(st.sets(st.integers(0, stages - 1), max_size=stages // 2))
    apart = {stage for stage in lost if (stage - 1) % stages not in lost}
    return tuple((s - 1) % stages if s in apart else s for s in range(stages)), micro_batches, costs


@given(merged_pipelines(), st.sampled_from(["fit", "eflb"]))
@settings(deadline=None, max_examples=150)
def test_beside_merged_workers_redundancy_keeps_its_promises(
    pipeline: tuple[tuple[int, ...], int, StageCosts], redundancy: Redundancy
) -> None:
    owners, micro_batches, costs = pipeline
    stages = len(owners)
    plain = worker_orders(stages, micro_batches=micro_batches, owners=owners)
    orders = worker_orders(stages, micro_batches=micro_batches, redundancy=redundancy, costs=costs, owners=owners)
    naive = naive_orders(stages, micro_batches=micro_batches, owners=owners)
    assert set(orders) == set(owners)
    for worker, order in orders.items():
        assert tuple(operation for operation in order if operation.kind is not Kind.REDUNDANT) == plain[worker]
        redundant = [operation.micro_batch for operation in order if operation.kind is Kind.REDUNDANT]
        assert redundant == list(range(len(redundant)))
        if shadowed_stage(worker, owners=owners) is None:
            assert redundant == []
        elif redundancy == "eflb":
            assert len(redundant) == micro_batches
    seconds = simulate(orders, costs).step_seconds
    if redundancy == "fit":
        assert seconds == pytest.approx(simulate(plain, costs).step_seconds, rel=EXACT)
    else:
        assert seconds <= simulate(naive, costs).step_seconds * (1 + EXACT)


def test_beside_a_merged_worker_there_is_more_room_for_redundant_forwards() -> None:
    costs = StageCosts.uniform(5)
    alone = frc_share(5, micro_batches=8, redundancy="fit", costs=costs)
    beside = frc_share(5, micro_batches=8, redundancy="fit", costs=costs, owners=(0, 1, 1, 3, 4))
    assert beside[:3] == (0, 0, 0)
    assert beside[3] > alone[3]
    assert beside[4] >= alone[4]


def test_who_could_take_over_what() -> None:
    def stages(*owners: int) -> list[int | None]:
        return [shadowed_stage(home, owners=owners) for home in sorted(set(owners))]

    assert stages(0, 1, 2) == [1, 2, 0]
    assert stages(0) == [None]
    assert stages(0, 0) == [None]
    assert stages(2, 1, 2) == [None, None]
    assert stages(0, 1, 1, 3, 4) == [None, None, 4, 0]
    assert stages(0, 1, 1, 3, 3) == [None, None, None]


@given(pipelines())
@settings(deadline=None, max_examples=100)
def test_fit_absorbs_costs_that_were_measured_too_low_by_its_margin(pipeline: tuple[int, int, StageCosts]) -> None:
    stages, micro_batches, costs = pipeline
    orders = placed(stages, micro_batches, "fit", costs)
    slower = StageCosts(costs.forward, costs.backward, tuple(r / (1 - FIT_MARGIN) for r in costs.redundant))
    plain = step_seconds(stages, micro_batches, "off", costs)
    assert simulate(orders, slower).step_seconds == pytest.approx(plain, rel=1e-6)


@given(pipelines())
@settings(deadline=None, max_examples=150)
def test_fit_leaves_no_window_that_could_take_one_more(pipeline: tuple[int, int, StageCosts]) -> None:
    stages, micro_batches, costs = pipeline
    plain = simulate(worker_orders(stages, micro_batches=micro_batches), costs)
    orders = placed(stages, micro_batches, "fit", costs)
    for worker, order in orders.items():
        base = [event.operation for event in plain.events[worker]]
        for window in plain.idle(worker):
            end = order.index(base[window.before]) if window.before < len(base) else len(order)
            start = order.index(base[window.before - 1]) + 1 if window.before else 0
            taken = end - start
            room = window.seconds * (1 - FIT_MARGIN) / costs.redundant[worker]
            assert taken <= room + 1e-6
            missing = [m for m in range(micro_batches) if (Kind.REDUNDANT, (worker + 1) % stages, m) not in order[:end]]
            known = range(micro_batches) if worker == stages - 1 else [o.micro_batch for o in base[: window.before]]
            assert taken + 1 > room - 1e-6 or not set(missing) & set(known)


@given(pipelines())
@settings(deadline=None, max_examples=75)
def test_eflb_runs_every_one_before_its_deadline_and_is_no_worse_than_the_naive_rule(
    pipeline: tuple[int, int, StageCosts],
) -> None:
    stages, micro_batches, costs = pipeline
    orders = placed(stages, micro_batches, "eflb", costs)
    assert_sound(orders, stages, micro_batches)
    for worker, order in orders.items():
        for m in range(micro_batches):
            frc = order.index(Operation(Kind.REDUNDANT, (worker + 1) % stages, m))
            assert frc < order.index(Operation(Kind.BACKWARD, worker, m))
    naive = simulate(naive_orders(stages, micro_batches=micro_batches), costs).step_seconds
    chosen = simulate(orders, costs).step_seconds
    plain = step_seconds(stages, micro_batches, "off", costs)
    assert chosen <= naive * (1 + EXACT)
    assert chosen >= eager_bound(stages, micro_batches, costs) * plain * (1 - EXACT)


@given(pipelines(), st.integers(0, 2**32))
@settings(deadline=None, max_examples=150)
def test_no_legal_placement_beats_the_bound(pipeline: tuple[int, int, StageCosts], seed: int) -> None:
    stages, micro_batches, costs = pipeline
    rng = random.Random(seed)
    orders = {}
    for worker, plain in worker_orders(stages, micro_batches=micro_batches).items():
        order = list(plain)
        for m in range(micro_batches):
            first = 0 if worker == stages - 1 else order.index(Operation(Kind.FORWARD, worker, m)) + 1
            last = order.index(Operation(Kind.BACKWARD, worker, m))
            order.insert(rng.randint(first, last), Operation(Kind.REDUNDANT, (worker + 1) % stages, m))
        orders[worker] = tuple(order)
    plain_seconds = step_seconds(stages, micro_batches, "off", costs)
    bound = eager_bound(stages, micro_batches, costs) * plain_seconds
    assert simulate(orders, costs).step_seconds >= bound * (1 - EXACT)


@pytest.mark.parametrize("stages", range(2, 9))
@pytest.mark.parametrize("micro_batches", range(4, 17))
def test_with_equal_stages_eflb_reaches_the_bound(stages: int, micro_batches: int) -> None:
    costs = StageCosts.uniform(stages)
    plain, eager = (step_seconds(stages, micro_batches, redundancy, costs) for redundancy in ("off", "eflb"))
    assert eager / plain == pytest.approx(eager_bound(stages, micro_batches, costs), rel=EXACT)


def test_with_measured_stages_eflb_is_within_two_percent_of_the_bound() -> None:
    rng = random.Random(7)
    for stages, micro_batches in [(2, 8), (4, 8), (4, 16), (6, 12), (8, 16)] * 4:
        forward = [rng.uniform(0.95, 1.05) for _ in range(stages)]
        backward = tuple(2 * cost * rng.uniform(0.95, 1.05) for cost in forward)
        costs = StageCosts(tuple(forward), backward, (*forward[1:], forward[0]))
        ratio = step_seconds(stages, micro_batches, "eflb", costs) / step_seconds(stages, micro_batches, "off", costs)
        assert ratio <= 1.02 * eager_bound(stages, micro_batches, costs)


def test_the_bound_by_hand() -> None:
    # The last stage has windows for 3 of 8 before its first forward; the other 5 lengthen the step of 33.
    assert eager_bound(4, 8, StageCosts.uniform(4)) == pytest.approx(38 / 33)
    assert eager_bound(1, 8, StageCosts.uniform(1)) == 1.0
    # An FRC that costs nearly nothing adds nearly nothing.
    assert eager_bound(4, 8, StageCosts.uniform(4, redundant=1e-6)) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("redundancy", "expected"),
    [
        ("off", (0, 0, 0, 0)),
        ("lflb", (0, 0, 0, 0)),
        ("fit", (0.5, 0.5, 0.5, 0.875)),
        ("eflb", (1, 1, 1, 1)),
    ],
)
def test_the_share_of_redundant_forwards_by_stage(redundancy: str, expected: tuple[float, ...]) -> None:
    assert frc_share(4, micro_batches=8, redundancy=redundancy, costs=StageCosts.uniform(4)) == expected


def test_fit_uses_the_windows_of_stages_that_wait_for_a_slow_one() -> None:
    costs = StageCosts((1.0, 3.0, 1.0), (2.0, 6.0, 2.0), (1.0, 1.0, 1.0))
    share = frc_share(3, micro_batches=8, redundancy="fit", costs=costs)
    assert share[0] == share[2] == 1.0
    assert share[1] < 0.5


def test_placement_is_the_same_every_time() -> None:
    costs = StageCosts((1.0, 1.1, 0.9), (2.0, 2.1, 1.7), (1.1, 0.9, 1.0))
    first = placed(3, 6, "eflb", costs)
    worker_orders.__globals__["_eflb"].cache_clear()
    assert placed(3, 6, "eflb", costs) == first

"""The money: what is counted, by which price, and what a gap costs."""

from __future__ import annotations

import pytest

from bamboo_ds.cloud.meter import Cost, Pace, counted
from bamboo_ds.cloud.prices import Machine, PriceBook
from bamboo_ds.config.cloud import PriceConfig

TABLE = PriceConfig(spot={"g5/a": 0.3, "g5": 0.4, "b": 0.5, "*": 0.9}, on_demand={"g5": 1.2})
BOOK = PriceBook(TABLE)
SPOT = Machine("g5", "a", spot=True)


@pytest.mark.parametrize(
    ("machine", "price"),
    [
        (SPOT, 0.3),
        (Machine("g5", "b", spot=True), 0.4),
        (Machine("p4", "b", spot=True), 0.5),
        (Machine("p4", "c", spot=True), 0.9),
        (Machine("g5", "a", spot=False), 1.2),
        (Machine("p4", "a", spot=False), None),
    ],
)
def test_the_narrowest_price_counts(machine: Machine, price: float | None) -> None:
    assert BOOK.price(machine) == price


def test_what_is_not_written_down_is_asked_for() -> None:
    book = PriceBook(PriceConfig(spot={"g5": 0.4}), spot=lambda type_, zone: {"p4": 2.0}.get(type_))
    assert book.price(SPOT) == 0.4
    assert book.price(Machine("p4", "a", spot=True)) == 2.0
    assert book.price(Machine("x", "a", spot=True)) is None


def test_hours_times_prices() -> None:
    cost = counted(None, [SPOT], prices=BOOK, now=1000.0)
    assert (cost.spent, cost.per_hour, cost.on_demand_per_hour) == (0.0, 0.3, 1.2)
    for minute in range(1, 61):
        cost = counted(cost, [SPOT, SPOT], prices=BOOK, now=1000.0 + 60.0 * minute)
    assert cost.spent == pytest.approx(0.6)
    assert cost.on_demand == pytest.approx(2.4)
    assert cost.node_seconds == 7200.0
    assert "2.00 node-hours have cost $0.60, $0.60 per hour; on demand they would have cost $2.40" in cost.text


def test_a_node_without_a_price_is_named_and_in_no_sum() -> None:
    book = PriceBook(PriceConfig(spot={"g5": 0.4}))
    cost = counted(Cost(0.0, 0.0), [SPOT, Machine("p4", "a", spot=True)], prices=book, now=180.0)
    assert cost.spent == pytest.approx(0.02)
    assert cost.unpriced_seconds == 180.0
    assert cost.on_demand is None
    assert "without 0.05 node-hours" in cost.text


def test_nobody_knows_what_a_long_gap_has_cost() -> None:
    cost = counted(Cost(0.0, 0.0), [SPOT], prices=BOOK, now=86_400.0)
    assert cost.node_seconds == 300.0


def test_a_clock_that_goes_back_takes_no_money_back() -> None:
    cost = counted(Cost(0.0, 100.0, spent=1.0), [SPOT], prices=BOOK, now=50.0)
    assert (cost.spent, cost.at) == (1.0, 100.0)


def test_samples_are_counted_by_steps_and_never_taken_back() -> None:
    cost = counted(Cost(0.0, 0.0), [SPOT], prices=BOOK, now=100.0, pace=Pace(step=3, batch_size=32))
    cost = counted(cost, [SPOT], prices=BOOK, now=200.0, pace=Pace(step=5, batch_size=32))
    assert cost.samples == 160
    cost = counted(cost, [SPOT], prices=BOOK, now=300.0, pace=Pace(step=2, batch_size=32))
    cost = counted(cost, [SPOT], prices=BOOK, now=300.0, pace=Pace(step=4, batch_size=32))
    assert cost.samples == 224
    assert cost.samples_per_dollar == pytest.approx(224 / 0.025)


def test_a_count_survives_its_text() -> None:
    cost = counted(Cost(0.0, 0.0), [SPOT], prices=BOOK, now=180.0, pace=Pace(3, 4))
    assert Cost.decode(cost.encode()) == cost
    assert Cost.decode(b"{}") is None

"""The rehearsal of days: what it finds nothing of in our keeper, it finds in one that forgets."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from bamboo_ds.cli.bench.fleet import HOURS, LEAST_SHARE, _report, _supply
from bamboo_ds.cli.bench.fleet_day import Rehearsal, Tally, neighbours
from bamboo_ds.cloud.ledger import Ledger

DAY = HOURS * 3600.0
TRACE = Path(__file__).resolve().parents[2] / "../shared/data/traces/ec2-p3.csv"


def days(*seeds: int, trace: Path | None = None, seconds: float = DAY) -> Tally:
    total = Tally()
    for seed in seeds:
        total.add(Rehearsal(_supply(seed, trace), seed=seed).run(seconds))
    return total


def test_a_day_goes_well() -> None:
    total = days(1)
    report = _report(total, 1)
    assert report["ok"], report
    assert (total.over_asked, total.double_orders) == (0, 0)
    assert min(total.kills, total.repeated, total.refused, total.losses) > 10
    assert report["mean_share"] >= LEAST_SHARE


def test_a_day_of_a_recorded_trace_goes_well() -> None:
    if not TRACE.exists():
        pytest.skip("the recorded traces are not here")
    report = _report(days(1, trace=TRACE, seconds=DAY / 8), 1)
    assert (report["over_asked"], report["double_orders"]) == (0, 0)


def test_a_day_is_the_same_again() -> None:
    assert days(3, seconds=DAY / 8) == days(3, seconds=DAY / 8)


def test_a_keeper_that_forgets_open_orders_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Ledger.decode
    monkeypatch.setattr(Ledger, "decode", lambda text: dataclasses.replace(read(text), open=()))
    assert days(1, seconds=DAY / 2).double_orders > 0


def test_a_keeper_that_makes_new_tokens_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter(range(10**9))
    read = Ledger.decode

    def renamed(text: bytes) -> Ledger:
        found = read(text)
        return dataclasses.replace(
            found, open=tuple(dataclasses.replace(one, token=f"new-{next(numbers)}") for one in found.open)
        )

    monkeypatch.setattr(Ledger, "decode", renamed)
    assert days(1, seconds=DAY / 2).double_orders > 0


def test_a_keeper_that_forgets_who_was_started_by_hand_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "visited", lambda self, strangers, **rest: dataclasses.replace(self, strangers={}))
    assert days(1, seconds=DAY / 2).over_asked > 0


def test_neighbours_in_one_zone_are_counted_as_placement_puts_them() -> None:
    assert neighbours((11, 11, 10)) == (32, 0)
    assert neighbours((32,)) == (32, 32)
    pairs, same = neighbours((4, 28))
    assert pairs == 32
    assert same == 24  # each of the four parts two
    assert neighbours(()) == (0, 0)

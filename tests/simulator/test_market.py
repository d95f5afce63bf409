"""The drawn market keeps to what is asked of it, over many seeds."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean
from typing import Any

import pytest

from bamboo_ds.errors import ConfigError
from bamboo_ds.simulator.market import Market, generate
from bamboo_ds.simulator.trace import Change, Trace


def drawn(seeds: int = 12, **values: Any) -> list[Trace]:
    return [generate(Market(**values), seed=seed) for seed in range(seeds)]


def bulks(trace: Trace) -> list[dict[str, int]]:
    """Return by instant of preemption how many nodes went, by zone."""
    zones = {event.node: event.zone for event in trace.events if event.change is Change.ADD}
    found = []
    for _, events in trace.instants():
        gone: dict[str, int] = defaultdict(int)
        for event in events:
            if event.change is Change.REMOVE:
                gone[zones[event.node]] += 1
        if gone:
            found.append(gone)
    return found


def test_the_same_seed_gives_the_same_trace_and_another_another() -> None:
    market = Market(nodes=10, hours=10, rate=0.3)
    assert generate(market, seed=4) == generate(market, seed=4)
    assert generate(market, seed=4).events != generate(market, seed=5).events


@pytest.mark.parametrize("rate", [0.05, 0.10, 0.33])
def test_so_many_nodes_are_taken_per_node_and_hour(rate: float) -> None:
    market = Market(nodes=120, hours=24, rate=rate)
    traces = [generate(market, seed=seed) for seed in range(8)]
    hourly = sum(trace.preemptions for trace in traces) / sum(trace.mean_live() * 24 for trace in traces)
    assert hourly == pytest.approx(market.hourly, rel=0.08)


def test_bulks_have_their_mean_and_seldom_touch_two_zones() -> None:
    found = [bulk for trace in drawn(nodes=200, hours=24, rate=0.2) for bulk in bulks(trace)]
    assert len(found) > 2000
    assert fmean(count for bulk in found for count in bulk.values()) == pytest.approx(2.1, rel=0.06)
    assert fmean(len(bulk) > 1 for bulk in found) == pytest.approx(0.055, abs=0.015)


def test_without_bulks_every_instant_takes_one() -> None:
    assert all(
        sum(bulk.values()) == 1 for trace in drawn(3, nodes=30, rate=0.2, bulk=1, zones=1) for bulk in bulks(trace)
    )


def test_missing_nodes_come_late_and_in_part() -> None:
    market = Market(nodes=300, hours=48, rate=0.2, zones=3, bulk=6, delay_seconds=1800, grant=0.5)
    trace = generate(market, seed=1)
    whole = sum(len({event.zone for event in events if event.change is Change.ADD}) for _, events in trace.instants())
    added = sum(event.change is Change.ADD for event in trace.events) - 300
    assert 1 < added / whole < 4  # some are answered in part: fewer than a bulk at once
    # by Little's law: a request of a bulk is answered about twice before all are there
    missing = 300 - trace.mean_live()
    assert 0.5 < missing / (trace.preemptions / 48) < 1.6


def test_no_rate_means_no_loss_and_zones_are_even() -> None:
    (trace,) = drawn(1, nodes=9, rate=0.0, zones=3)
    assert trace.preemptions == 0
    assert [event.zone for event in trace.events] == ["a", "b", "c"] * 3


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"nodes": 0}, "nodes=0"),
        ({"rate": 1.0}, "rate=1"),
        ({"zones": 99}, "zones=99"),
        ({"bulk": 0.5}, "bulk=0.5"),
        ({"hours": float("inf")}, "hours=inf"),
        ({"grant": 0.0}, "grant=0"),
    ],
)
def test_values_that_cannot_be_are_named(value: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Market(**value)

"""Traces: what they count, and what may be done with one."""

from __future__ import annotations

import pytest

from bamboo_ds.errors import ConfigError
from bamboo_ds.simulator.membership import dollars, instants
from bamboo_ds.simulator.trace import Change, NodeEvent, Trace
from tests.simulator.markets import names, story


def test_events_are_put_in_order_and_counted() -> None:
    trace = story("5 +1", "0 +2", "8 -0,2", seconds=10)
    # n0 is the one of second 5, as told first
    assert names(trace.events) == ["0 +n1", "0 +n2", "5 +n0", "8 -n0", "8 -n2"]
    assert trace.live() == ((0, 2), (5, 3), (8, 1))
    assert trace.mean_live() == pytest.approx((5 * 2 + 3 * 3 + 2 * 1) / 10)
    assert trace.mean_live(most=2) == pytest.approx((8 * 2 + 2 * 1) / 10)
    assert trace.preemptions == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("0 +1", "1 -0", "3 -0"), "second 3: node n0 is removed again; it was removed before in second 1"),
        (("0 +1", "1 -7"), "second 1: node n7 is removed, but it was never added"),
    ],
)
def test_a_node_cannot_go_twice_or_without_having_come(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        story(*words, seconds=9)


def test_a_node_cannot_come_twice() -> None:
    twice = [NodeEvent(1, Change.ADD, "a", source="x:1"), NodeEvent(2, Change.ADD, "a", source="x:9")]
    with pytest.raises(ConfigError, match="x:9: node a is added again; it was added before in x:1"):
        Trace.of("t", twice)


def test_a_part_begins_with_those_who_are_there() -> None:
    part = story("0 +3", "2 -1", "5 +1", "7 -0", seconds=10).cut(3, 8)
    assert names(part.events) == ["0 +n0", "0 +n2", "2 +n3", "4 -n0"]
    assert part.seconds == 5


@pytest.mark.parametrize("part", [(5, 5), (-1, 3), (11, 12)])
def test_an_empty_part_is_refused(part: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="cannot cut"):
        story("0 +1", seconds=10).cut(*part)


@pytest.mark.parametrize(("factor", "counts"), [(0.5, (2, 1)), (2.0, (10, 8)), (1.5, (7, 5)), (0.3, (1, 1))])
def test_scaling_gives_every_node_its_copies(factor: float, counts: tuple[int, int]) -> None:
    scaled = story("0 +5", "4 -1", seconds=8).scaled(factor)
    assert tuple(count for _, count in scaled.live())[:1] == counts[:1]
    assert scaled.live()[-1][1] == counts[1]
    with pytest.raises(ConfigError, match="scale"):
        scaled.scaled(0)


def test_a_limit_takes_what_is_offered_when_there_is_room() -> None:
    limited = story("0 +4", "3 -3", "5 -0", seconds=9).limited(2)
    # n3 goes before there was room for it and is never seen; n2 comes when n0 has gone
    assert names(limited.events) == ["0 +n0", "0 +n1", "5 -n0", "5 +n2"]
    assert max(count for _, count in limited.live()) == 2


def test_nodes_that_go_at_once_share_a_zone() -> None:
    trace = story("0 +6", "1 -0,1,2", "2 -3", seconds=4).zoned(["a", "b"])
    zones = {event.node: event.zone for event in trace.events if event.zone}
    assert [zones[f"n{node}"] for node in range(6)] == ["a", "a", "a", "b", "a", "b"]
    assert trace.zones == ("a", "b")


def test_a_node_is_ready_after_warming_up_unless_it_is_gone_by_then() -> None:
    found = instants(story("0 +2", "3 -0", "9 -1", seconds=20), warm_up_seconds=4)
    assert [(one.seconds, [node.node for node in one.joined], one.gone) for one in found] == [
        (4, ["n1"], ()),
        (9, [], ("n1",)),
    ]


def test_who_is_ready_at_once_is_in_the_order_given_whatever_happens_later() -> None:
    found = instants(story("0 +4", "5 -3", "6 -1", "7 +1", "9 -0", seconds=20), warm_up_seconds=1)
    assert [node.node for node in found[0].joined] == ["n0", "n1", "n2", "n3"]
    assert [(one.seconds, one.gone) for one in found if one.gone] == [(5, ("n3",)), (6, ("n1",)), (9, ("n0",))]


def test_a_name_may_come_back() -> None:
    events = [(0, "add"), (4, "remove"), (6, "add"), (7, "remove"), (8, "add")]
    trace = Trace.of("t", [NodeEvent(at, Change(change), "a") for at, change in events], seconds=20)
    found = instants(trace, warm_up_seconds=2)
    assert [(one.seconds, len(one.joined), one.gone) for one in found] == [(2, 1, ()), (4, 0, ("a",)), (10, 1, ())]


def test_nodes_cost_from_the_moment_they_are_given() -> None:
    trace = story("0 +2", "1800 -0", seconds=3600)
    assert dollars(trace, price=2.0) == pytest.approx(0.5 * 2 + 1 * 2)
    priced = Trace.of("t", [NodeEvent(0, Change.ADD, "a", price=5.0)], seconds=7200)
    assert dollars(priced, price=2.0) == pytest.approx(10)

"""What the pure rule asks for and gives back."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo_ds.cloud.fleet import FleetFacts, FleetRules, fleet, spread
from bamboo_ds.cloud.port import ANY_ZONE, Instance

RULES = FleetRules(release_seconds=300.0, boot_seconds=900.0)


def instances(zones: str) -> tuple[Instance, ...]:
    return tuple(Instance(f"i-{number}", zone) for number, zone in enumerate(zones))


def test_only_what_is_missing_is_asked_for() -> None:
    facts = FleetFacts(target=8, zones=("a", "b"), instances=instances("aab"), unlisted=instances("b"))
    assert fleet(facts, RULES).orders == {"a": 2, "b": 2}


def test_nodes_that_were_started_by_hand_count() -> None:
    facts = FleetFacts(target=4, zones=("a", "b"), strangers={"head": "a", "other": "a"})
    assert fleet(facts, RULES).orders == {"b": 2}


def test_what_is_promised_or_ordered_counts() -> None:
    facts = FleetFacts(target=4, zones=("a", "b"), instances=instances("a"), under_way={"b": 3})
    wish = fleet(facts, RULES)
    assert (wish.orders, wish.missing) == ({}, 0)


def test_a_closed_zone_is_left_alone_and_the_others_fill_up() -> None:
    facts = FleetFacts(target=6, zones=("a", "b", "c"), instances=instances("bc"), closed={"a": 20.0})
    assert fleet(facts, RULES).orders == {"b": 2, "c": 2}


def test_when_all_zones_are_closed_it_waits_for_the_first() -> None:
    facts = FleetFacts(target=6, zones=("a", "b"), closed={"a": 20.0, "b": 9.0})
    wish = fleet(facts, RULES)
    assert (wish.orders, wish.missing, wish.wait_seconds) == ({}, 6, 9.0)


def test_a_cloud_that_refuses_everything_is_not_asked() -> None:
    facts = FleetFacts(target=6, zones=("a", "b"), closed={ANY_ZONE: 60.0})
    wish = fleet(facts, RULES)
    assert (wish.orders, wish.wait_seconds) == ({}, 60.0)


def test_a_cloud_that_chooses_the_zone_is_asked_for_any() -> None:
    assert fleet(FleetFacts(target=3), RULES).orders == {ANY_ZONE: 3}


def test_nothing_is_asked_for_before_the_target_is_known() -> None:
    assert fleet(FleetFacts(target=None, zones=("a",)), RULES).orders == {}


def test_a_surplus_is_given_back_after_a_while_from_the_fullest_zone() -> None:
    facts = FleetFacts(
        target=3,
        zones=("a", "b"),
        instances=instances("aabbb"),
        idle=frozenset({"i-0", "i-3", "i-4"}),
        surplus_seconds=299.0,
    )
    assert fleet(facts, RULES).releases == ()
    later = FleetFacts(**{name: getattr(facts, name) for name in facts.__slots__} | {"surplus_seconds": 300.0})
    assert [release.instance for release in fleet(later, RULES).releases] == ["i-4", "i-3"]


def test_a_node_with_a_stage_is_never_surplus() -> None:
    facts = FleetFacts(target=1, instances=instances("abc"), idle=frozenset({"i-1"}), surplus_seconds=1e6)
    assert [release.instance for release in fleet(facts, RULES).releases] == ["i-1"]


def test_an_instance_whose_agent_does_not_come_is_given_back_before_anything_is_asked_for() -> None:
    wish = fleet(FleetFacts(target=8, zones=("a",), instances=instances("ab"), duds=frozenset({"i-1"})), RULES)
    assert [release.instance for release in wish.releases] == ["i-1"]
    assert wish.orders == {}


zones = st.lists(st.sampled_from("abcd"), unique=True, min_size=1)


@given(nodes=st.integers(0, 40), counts=st.dictionaries(st.sampled_from("abcd"), st.integers(0, 12)), zones=zones)
def test_shares_are_as_even_as_they_can_be(nodes: int, counts: dict[str, int], zones: list[str]) -> None:
    shares = spread(nodes, counts=counts, zones=zones)
    assert sum(shares.values()) == nodes
    assert set(shares) <= set(zones)
    after = Counter(counts) + Counter(shares)
    # Nobody got a node while another zone that may have some had fewer than it has now without that node.
    assert all(after[got] - 1 <= after[other] for got in shares for other in zones)


@pytest.mark.parametrize("names", [("a", "b", "c"), ("c", "a", "b")])
def test_the_order_of_zones_does_not_matter(names: tuple[str, ...]) -> None:
    assert fleet(FleetFacts(target=5, zones=names), RULES).orders == {"a": 2, "b": 2, "c": 1}

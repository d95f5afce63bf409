"""What the keeper writes down, and that a successor reads the same."""

from __future__ import annotations

import pytest

from bamboo_ds.cloud.fleet import FleetRules
from bamboo_ds.cloud.ledger import Ledger
from bamboo_ds.cloud.port import ANY_ZONE, Grant, Instance
from bamboo_ds.cloud.trouble import Trouble
from bamboo_ds.errors import ConfigError

RULES = FleetRules(retry_seconds=30.0, retry_max_seconds=200.0, appear_seconds=100.0)
FULL = Trouble("Full", "no capacity", "none is needed", zone="a")


def test_a_ledger_survives_its_text() -> None:
    ledger = Ledger().ordered({"a": 2, "b": 1}, total=3, now=5.0)
    ledger = ledger.settled(ledger.open[0], Grant((Instance("i-1", "a", "g5"),), trouble=FULL), rules=RULES, now=6.0)
    assert Ledger.decode(ledger.encode()) == ledger


def test_tokens_are_never_the_same_also_not_of_two_ledgers() -> None:
    first = Ledger().ordered({"a": 1}, total=1, now=0.0)
    second = first.settled(first.open[0], Grant(promised=1), rules=RULES, now=0.0).ordered({"a": 1}, total=2, now=0.0)
    other = Ledger().ordered({"a": 1}, total=1, now=0.0)
    tokens = {first.open[0].token, second.open[0].token, other.open[0].token}
    assert len(tokens) == 3
    assert all(len(token) <= 64 and token.isascii() for token in tokens)  # as EC2 wants them


def test_an_answered_order_is_no_longer_open() -> None:
    ledger = Ledger().ordered({"a": 2, "b": 1}, total=3, now=0.0)
    after = ledger.settled(ledger.open[0], Grant(promised=2), rules=RULES, now=0.0)
    assert [order.zone for order in after.open] == ["b"]


def test_a_zone_that_refuses_again_and_again_is_left_alone_for_longer() -> None:
    ledger, pauses = Ledger(), []
    for _ in range(40):
        ledger = ledger.refused(FULL, rules=RULES, now=0.0)
        pauses.append(ledger.closed_seconds(0.0)["a"])
    assert pauses[:5] == [30.0, 60.0, 120.0, 200.0, 200.0]
    assert pauses[-1] == 200.0


def test_a_trouble_that_lasts_is_waited_for_longer_than_a_full_zone() -> None:
    expired = Trouble("ExpiredToken", "no longer valid", "renew it", patience=10.0)
    assert Ledger().refused(expired, rules=RULES, now=0.0).closed_seconds(0.0) == {ANY_ZONE: 300.0}


def test_a_grant_opens_its_zone_and_a_part_of_one_counts_as_the_first_refusal() -> None:
    ledger = Ledger()
    for _ in range(3):
        ledger = ledger.refused(FULL, rules=RULES, now=0.0)
    ledger = ledger.ordered({"a": 3}, total=3, now=0.0)
    partly = ledger.settled(ledger.open[0], Grant(promised=1, trouble=FULL), rules=RULES, now=0.0)
    assert partly.closed_seconds(0.0) == {"a": 30.0}
    assert ledger.settled(ledger.open[0], Grant(promised=3), rules=RULES, now=0.0).closed == {}


def test_a_granted_instance_is_believed_until_it_is_listed_or_late() -> None:
    ledger = Ledger().ordered({"a": 2}, total=2, now=0.0)
    ledger = ledger.settled(ledger.open[0], Grant((Instance("i-1", "a"), Instance("i-2", "a"))), rules=RULES, now=0.0)
    assert set(ledger.unlisted) == {"i-1", "i-2"}
    assert set(ledger.listed([Instance("i-1", "a")], joined=(), now=50.0).unlisted) == {"i-2"}
    assert ledger.listed([], joined=(), now=100.0).unlisted == {}


def test_an_instance_is_known_while_it_is_listed_or_its_agent_is_registered() -> None:
    both = Ledger().listed([Instance("i-1", "a"), Instance("i-2", "a")], joined=["i-1"], now=0.0)
    assert both.known == ("i-1", "i-2")
    gone = both.listed([], joined=["i-1", "hand"], now=1.0)
    assert gone.known == ("i-1",)
    assert Ledger.decode(gone.encode()) == gone
    assert gone.listed([], joined=["hand"], now=2.0).known == ()


def test_a_node_that_was_started_by_hand_counts_for_a_while_after_it_has_gone() -> None:
    ledger = Ledger().visited({"head": "a"}, rules=RULES, now=0.0)
    assert ledger.visited({"head": "a"}, rules=RULES, now=500.0) is ledger
    gone = ledger.visited({}, rules=RULES, now=1000.0)
    assert Ledger.decode(gone.encode()) == gone
    assert set(gone.visited({}, rules=RULES, now=1099.0).strangers) == {"head"}
    assert gone.visited({}, rules=RULES, now=1100.0).strangers == {}
    back = gone.visited({"head": "a"}, rules=RULES, now=1050.0)
    assert back == ledger


@pytest.mark.parametrize("text", [b"", b"[]", b'{"schema": 2}', b'{"schema": 1, "id": "x"}'])
def test_a_text_of_another_version_is_refused(text: bytes) -> None:
    with pytest.raises(ConfigError, match="same version"):
        Ledger.decode(text)

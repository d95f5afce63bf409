"""What goes to the store comes back, and what is not ours is refused by name."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_ds.errors import ConfigError
from bamboo_ds.plan import Decision, Plan, Vote, static_plan
from bamboo_ds.plan.cluster import Bounds, Node
from bamboo_ds.plan.codec import decode, encode
from bamboo_ds.plan.failover import fail_over
from bamboo_ds.plan.membership import LinkReport
from bamboo_ds.plan.model import Model

PLAN = static_plan(world_size=4, num_stages=2)

GOLDEN = (
    b'{"aborted":false,"cause":"","dead":[],"epoch":0,"from_checkpoint":false,'
    b'"owners":[[0,2],[1,3]],"record":"plan","schema":1,"version":0}'
)

RECORDS: list[Any] = [
    PLAN,
    fail_over(PLAN, [0], redundancy=True, cause="worker 0 ended: \N{SKULL}"),
    fail_over(PLAN, [0, 2], redundancy=True),
    Plan(owners=((7,),), epoch=3, dead=frozenset({0, 1, 2, 4}), from_checkpoint=True),
    Node("n1", "eu-1a", (3, 4), address="10.0.0.1", spot=False),
    Bounds(num_stages=4, pipelines=None, min_stages=2, redundancy=False),
    Bounds(num_stages=2, model=Model({1: (0, 3), 2: (0, 1, 3)}, (0.5, 1.5, 0.1), (8, 0, 2**50), micro_batches=4)),
    Plan(owners=((3, 4),), epoch=2, parts=(0, 7, 12)),
    LinkReport(1, 2, epoch=0, version=3, detail="connection reset"),
    Vote(1, 5, 0, 1, squared_norms={"3": math.inf, "tied:e": 1e-30}, losses={0: 1 / 3, 11: 0.1}, overflow=True),
    Decision(5, 1 / 3, (0.1, 0.2), {"aux": 0.5}, math.inf, True, ((0.1, 0.2),)),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_records_come_back_bit_by_bit(record: Any) -> None:
    again = decode(type(record), encode(record))
    assert again == record
    assert repr(again) == repr(record)
    assert encode(again) == encode(record)


def test_the_text_of_a_plan() -> None:
    assert encode(PLAN) == GOLDEN


def test_the_cut_of_a_plan_is_written_where_there_is_one() -> None:
    text = GOLDEN.replace(b'"record"', b'"parts":[0,3,9],"record"')
    assert encode(replace(PLAN, parts=(0, 3, 9))) == text
    assert decode(Plan, text).parts == (0, 3, 9)


def test_any_mapping_is_written_as_a_dict() -> None:
    vote = Vote(1, 5, 0, 1, losses=MappingProxyType({2: 0.5}))
    assert decode(Vote, encode(vote)) == Vote(1, 5, 0, 1, losses={2: 0.5})


def test_a_field_that_json_has_no_form_for_is_our_bug() -> None:
    with pytest.raises(TypeError, match="a complex cannot go to the store"):
        encode(LinkReport(1, 2, epoch=0, version=3, detail=1j))  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.frozensets(st.integers(0, 60)))
def test_the_dead_come_back_from_their_ranges(dead: frozenset[int]) -> None:
    plan = Plan(owners=((99,),), dead=dead)
    assert decode(Plan, encode(plan)) == plan


def test_the_dead_of_a_long_run_take_little_room() -> None:
    dead = frozenset(range(100_000)) - {17, 5_000}
    text = encode(Plan(owners=((17, 5_000),), dead=dead))
    assert json.loads(text)["dead"] == [[0, 16], [18, 4_999], [5_001, 99_999]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "a plan in the store is no JSON"),
        (b"\xff\xfe\x00", "a plan in the store is no JSON"),
        (b"[1]", "the store holds record None of schema None, wanted 'plan' of schema 1"),
        (GOLDEN.replace(b'"schema":1', b'"schema":2'), "record 'plan' of schema 2, wanted 'plan' of schema 1"),
        (encode(RECORDS[4]), "record 'node' of schema 1, wanted 'plan'"),
        (GOLDEN.replace(b'"epoch":0', b'"epoch":"0"'), "malformed.*epoch"),
        (GOLDEN.replace(b'"epoch":0', b'"epoch":0,"era":0'), r"unknown keys \['era'\]"),
        (GOLDEN.replace(b'"owners":[[0,2],[1,3]],', b""), "malformed.*owners"),
        (GOLDEN.replace(b'"dead":[]', b'"dead":[[1]]'), "malformed"),
        (GOLDEN.replace(b'"dead":[]', b'"dead":7'), "malformed"),
    ],
)
def test_what_is_not_ours_is_refused_with_the_remedy(text: bytes, words: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){words}.*run the same version of bamboo_ds on all nodes"):
        decode(Plan, text)

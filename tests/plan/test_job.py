"""What all workers must agree on: how it travels, what it allows, and by which name a difference is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_ds.errors import ConfigError
from bamboo_ds.plan import Decision, Plan, Vote, static_plan
from bamboo_ds.plan.cluster import Bounds, Shape
from bamboo_ds.plan.codec import decode, encode
from bamboo_ds.plan.commit import Ballot, Outcome
from bamboo_ds.plan.failover import fail_over
from bamboo_ds.plan.job import JobSettings, JobSpec, Roster
from bamboo_ds.plan.model import Model

PLAN = static_plan(world_size=4, num_stages=2)
SPEC = JobSpec(publisher=0, num_stages=4, num_layers=10, pipelines=2, min_stages=2, redundancy="fit")
CUTS = {4: (0, 2, 5, 7, 10), 3: (0, 3, 7, 10), 2: (0, 5, 10)}
FULL = replace(
    SPEC, partitions=CUTS, layer_costs=(0.1,) * 9 + (1 / 3,), layer_bytes=(2**40,) * 9 + (0,), micro_batches=16
)
VOTE = Vote(1, 5, 0, 1, squared_norms={"3": math.inf, "tied:e": 1e-30}, losses={0: 1 / 3, 11: 0.1}, overflow=True)
DECISION = Decision(5, 1 / 3, (0.1, 0.2), {"aux": 0.5}, math.inf, True, ((0.1, 0.2),))

RECORDS: list[Any] = [
    Roster((0, 1, 7), cause="3 workers are ready"),
    Roster(()),
    SPEC,
    FULL,
    replace(FULL, launched=replace(PLAN, parts=CUTS[2])),
    replace(SPEC, pipelines=None, redundancy="off", launched=PLAN),
    replace(SPEC, launched=fail_over(PLAN, [0], redundancy=True, cause="worker 0 ended: \N{SKULL}")),
    JobSettings(3, {"optimizer.params.lr": "0.001", "train_batch_size": "64", "bamboo.job": '"gpt"'}),
    JobSettings(0),
    Ballot((VOTE, replace(VOTE, worker=2, losses={})), loss_scale=2.0**16),
    Ballot((), rows=('{"loss": 0.5}', "\N{SKULL}")),
    Outcome(decision=DECISION),
    Outcome(refusal="loss is nan in step 3"),
    Outcome(rows=("a", "", "b")),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_records_come_back_bit_by_bit(record: Any) -> None:
    again = decode(type(record), encode(record))
    assert again == record
    assert encode(again) == encode(record)


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (Roster((0, 7), "why"), b'{"cause":"why","record":"roster","schema":1,"workers":[0,7]}'),
        (
            replace(SPEC, pipelines=None),
            b'{"launched":null,"layer_bytes":[],"layer_costs":[],"micro_batches":null,"min_stages":2,"num_layers":10,'
            b'"num_stages":4,"partitions":{},"pipelines":null,"publisher":0,"reconfigure":"auto","record":"job_spec",'
            b'"redundancy":"fit","schema":1}',
        ),
        (
            JobSettings(3, {"a.b": "1"}),
            b'{"micro_batches":null,"publisher":3,"record":"job_settings","schema":1,"settings":{"a.b":"1"}}',
        ),
        (Outcome(refusal="no"), b'{"decision":null,"record":"outcome","refusal":"no","rows":[],"schema":1}'),
        (Ballot((), 2.0), b'{"boundary":false,"loss_scale":2.0,"record":"ballot","rows":[],"schema":1,"votes":[]}'),
    ],
)
def test_the_text_of_records(record: Any, text: bytes) -> None:
    assert encode(record) == text


numbers = st.floats(allow_nan=False)
votes = st.builds(
    Vote,
    worker=st.integers(0, 99),
    step=st.integers(0, 2**40),
    pipeline=st.integers(0, 9),
    stage=st.integers(0, 9),
    squared_norms=st.dictionaries(st.text(max_size=4), numbers, max_size=3),
    losses=st.dictionaries(st.integers(0, 99), numbers, max_size=3),
    additional_losses=st.dictionaries(st.text(max_size=4), numbers, max_size=2),
    overflow=st.booleans(),
    forward_seconds=numbers,
    backward_seconds=numbers,
)


@settings(deadline=None)
@given(st.builds(Ballot, votes=st.lists(votes, max_size=3).map(tuple), loss_scale=numbers))
def test_a_ballot_survives_the_store_with_all_its_bits(ballot: Ballot) -> None:
    assert decode(Ballot, encode(ballot)) == ballot


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (Roster, encode(PLAN), "record 'plan' of schema 1, wanted 'roster'"),
        (JobSpec, encode(SPEC).replace(b'"schema":1', b'"schema":7'), "schema 7, wanted 'job_spec' of schema 1"),
        (JobSpec, encode(SPEC).replace(b'"num_layers":10', b'"num_layers":"10"'), "a job spec .*malformed.*num_layers"),
        (Ballot, b'{"loss_scale":1.0,"record":"ballot","schema":1,"votes":[{"worker":1}]}', "malformed.*votes.0.step"),
        (Outcome, b'{"decision":7,"record":"outcome","refusal":"","schema":1}', "malformed.*decision"),
    ],
)
def test_what_is_not_ours_is_refused_with_the_remedy(kind: Any, text: bytes, words: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){words}.*run the same version of bamboo_ds on all nodes"):
        decode(kind, text)


@pytest.mark.parametrize(
    ("redundancy", "bounds"),
    [
        ("fit", Bounds(num_stages=4, pipelines=2, min_stages=2, redundancy=True)),
        ("lflb", Bounds(num_stages=4, pipelines=2, min_stages=2, redundancy=True)),
        ("off", Bounds(num_stages=4, pipelines=2, min_stages=2, redundancy=False)),
    ],
)
def test_the_specification_bounds_the_plans(redundancy: str, bounds: Bounds) -> None:
    found = replace(SPEC, redundancy=redundancy).bounds
    assert found == bounds
    assert found.shape(9) == Shape(4, 2)


def test_the_specification_says_what_is_known_of_the_model() -> None:
    model = Model(CUTS, FULL.layer_costs, FULL.layer_bytes, micro_batches=16)
    assert FULL.bounds == Bounds(num_stages=4, pipelines=2, min_stages=2, redundancy=True, model=model)
    assert SPEC.bounds.model == Model()
    assert decode(JobSpec, encode(FULL)).bounds.model.parts(3) == (0, 3, 7, 10), "the keys are numbers again"


def test_cuts_that_cannot_be_are_refused_when_the_bounds_are_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"partitions\[4\] = \(0, 10\)"):
        _ = replace(SPEC, partitions={4: (0, 10)}).bounds


def test_a_specification_that_cannot_be_is_refused_when_its_bounds_are_asked_for() -> None:
    with pytest.raises(ConfigError, match="min_stages = 5: must be between 1 and the stages of the model, 4"):
        _ = replace(SPEC, min_stages=5).bounds


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_stages": 5}, "num_stages = 5 here, but 4 in the job"),
        ({"num_layers": 11}, "num_layers = 11 here, but 10 in the job"),
        ({"pipelines": None}, "pipelines = absent here, but 2 in the job"),
        ({"min_stages": 1}, "min_stages = 1 here, but 2 in the job"),
        ({"redundancy": "off"}, "redundancy = off here, but fit in the job"),
        ({"launched": PLAN}, "launched = Plan.* here, but absent in the job"),
        ({"partitions": {4: (0, 1, 2, 3, 10)}}, r"partitions = {4: \(0, 1, 2, 3, 10\)} here, but {} in the job"),
        ({"layer_costs": (1.0,) * 10}, r"layer_costs = \(1.0, .* here, but \(\) in the job"),
        ({"micro_batches": 8}, "micro_batches = 8 here, but absent in the job"),
    ],
)
def test_another_specification_is_refused_by_the_name_of_what_differs(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s){words} \(as worker 0 published\): run the same script"):
        SPEC.check(replace(SPEC, publisher=3, **change))


def test_who_published_and_how_its_device_pads_make_no_difference() -> None:
    SPEC.check(replace(SPEC, publisher=3))
    FULL.check(replace(FULL, layer_bytes=(1,) * 10))
    JobSettings(0, {"a": "1"}).check(JobSettings(5, {"a": "1"}))


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        ({"lr": "0.1", "steps": "2"}, "lr = 0.1 here, but 0.2 in the job"),
        ({"lr": "0.2"}, "steps = absent here, but 2 in the job"),
        ({"lr": "0.2", "steps": "2", "extra": "true"}, "extra = true here, but absent in the job"),
    ],
)
def test_other_settings_are_refused_by_the_first_key_that_differs(ours: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        JobSettings(4, {"lr": "0.2", "steps": "2"}).check(JobSettings(5, ours))


def test_a_launched_plan_that_went_through_the_store_is_the_same() -> None:
    launched = replace(SPEC, launched=PLAN)
    launched.check(replace(launched, launched=decode(Plan, encode(PLAN))))

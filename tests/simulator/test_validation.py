"""A simulated job held against a real one: the trace that both follow, and what is compared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bamboo_ds.errors import ConfigError
from bamboo_ds.simulator.validation import Course, Validation, simulated, spaced
from tests.simulator.markets import SIMPLE, even, names, story

REAL = Course(10.0, failovers=3, reconfigurations=2, aborts=1, shapes=("4x2", "4x1"))


@pytest.mark.parametrize(
    ("other", "ok"),
    [
        ({}, True),
        ({"samples_per_second": 9.05}, True),
        ({"samples_per_second": 8.9}, False),
        ({"samples_per_second": 11.2}, False),
        ({"failovers": 4}, False),
        ({"reconfigurations": 1}, False),
    ],
)
def test_a_simulation_is_right_within_a_tenth_and_with_as_many_decisions(other: dict[str, float], ok: bool) -> None:
    found = Validation(replace(REAL, **other), REAL)  # type: ignore[arg-type]  # fields of it
    assert found.ok is ok
    told = found.as_json()
    assert told["ok"] is ok
    assert told["throughput_ratio"] == pytest.approx(other.get("samples_per_second", 10.0) / 10)
    assert told["failovers"] == [other.get("failovers", 3), 3]
    assert told["shapes"] == [("4x2", "4x1"), ("4x2", "4x1")]


def test_a_job_that_trained_nothing_is_compared_with_nothing() -> None:
    with pytest.raises(ConfigError, match="trained 0 samples/s"):
        Validation(REAL, replace(REAL, samples_per_second=0.0))


def test_changes_are_spaced_so_that_each_is_over_before_the_next() -> None:
    trace = story("100 +3", "200 -0,1", "210 +1", "220 +1", "800 -2", "900 +1", seconds=1000)
    played = spaced(trace, speedup=10, gap_seconds=5, seconds=80)
    assert names(played.events) == [
        *("0 +n0", "0 +n1", "0 +n2"),
        *("10 -n0", "10 -n1", "15 +n3", "20 +n4"),
        "70 -n2",  # the last is later than 5 seconds before the end
    ]
    assert played.seconds == 75


@pytest.mark.parametrize(("words", "seconds"), [(["0 +3", "10 -1"], 100), (["0 +3", "10 +1"], 100), (["0 +3"], 100)])
def test_a_trace_without_a_loss_or_a_join_shows_nothing(words: list[str], seconds: float) -> None:
    with pytest.raises(ConfigError, match="hold no loss or no join: play it faster or longer"):
        spaced(story(*words, seconds=seconds), speedup=1, gap_seconds=5, seconds=seconds)


def test_a_course_is_that_of_the_policy_from_the_first_step_on() -> None:
    constants = replace(SIMPLE, warm_up_seconds=7.0)
    trace = story("0 +12", "50 -4", "200 +1", "400 -0,1,2", seconds=600, zones=("a", "b", "c"))
    course = simulated(even(pipelines=3, micro_batches=12), trace, constants=constants, redundancy="lflb")
    assert course.failovers + course.aborts == 2
    assert course.shapes[:3] == ("4x3", "4x2", "4x3")
    assert course.reconfigurations >= 3
    quiet = story("0 +12", seconds=21 * 30, zones=("a", "b", "c"))
    whole = simulated(even(pipelines=3, micro_batches=12), quiet, constants=constants, redundancy="lflb")
    assert whole.samples_per_second == pytest.approx(12 * 3 / 21), "the start is no part of it"

"""Cuts of a model are the best there are, compared with all others, and found fast."""

from __future__ import annotations

import time
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_ds.errors import ConfigError
from bamboo_ds.plan.partition import balanced_parts

COSTS = st.lists(st.sampled_from([0, 0, 1, 2, 3, 5, 8, 30]), min_size=1, max_size=9)
"""Whole numbers: their sums are exact, so the best can be told from the second best."""

ENDS = st.tuples(st.sampled_from([0, 0, 4]), st.sampled_from([0, 0, 7]))


def stages_of(costs: list[int], parts: tuple[int, ...], ends: tuple[float, float]) -> list[float]:
    stages = [float(sum(costs[start:stop])) for start, stop in pairwise(parts)]
    stages[0] += ends[0]
    stages[-1] += ends[1]
    return stages


def badness(stages: list[float]) -> tuple[float, float]:
    return max(stages), sum(stage**2 for stage in stages)


@settings(max_examples=200, deadline=None)
@given(COSTS, ENDS, st.data())
def test_no_other_cut_is_better(costs: list[int], ends: tuple[float, float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(costs)))
    parts = balanced_parts(costs, count, ends=ends)
    assert len(parts) == count + 1
    assert (parts[0], parts[-1]) == (0, len(costs))
    assert all(start < stop for start, stop in pairwise(parts)), "every stage has a layer"
    weighed = costs if any(costs) else [1] * len(costs)
    cuts = ((0, *cut, len(costs)) for cut in combinations(range(1, len(costs)), count - 1))
    best = min(badness(stages_of(weighed, cut, ends)) for cut in cuts)
    assert badness(stages_of(weighed, parts, ends)) == best


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=30), st.data())
def test_the_pace_of_any_numbers_is_that_of_a_run_of_layers_and_no_stage_is_slower(
    costs: list[float], data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, len(costs)))
    parts = balanced_parts(costs, count)
    stages = [sum(costs[start:stop]) for start, stop in pairwise(parts)]
    assert max(stages) >= max(max(costs), sum(costs) / count) * (1 - 1e-9)
    assert max(stages) <= (sum(costs) / count + max(costs)) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("costs", "stages", "ends", "parts"),
    [
        ([1] * 8, 4, (0, 0), (0, 2, 4, 6, 8)),
        ([1] * 10, 4, (0, 0), (0, 2, 4, 7, 10)),
        ([1, 1, 1, 9], 2, (0, 0), (0, 3, 4)),
        ([5, 1, 1, 1, 1, 1, 5], 3, (0, 0), (0, 1, 6, 7)),
        ([1] * 8, 4, (2, 2), (0, 1, 4, 7, 8)),
        ([1, 5, 2, 3], 3, (0, 0), (0, 1, 2, 4)),  # the more even 6, 2, 3 is slower
        ([0, 0, 0, 0], 2, (0, 0), (0, 2, 4)),
        ([3], 1, (1, 1), (0, 1)),
    ],
)
def test_cuts_that_can_be_checked_by_eye(
    costs: list[float], stages: int, ends: tuple[float, float], parts: tuple[int, ...]
) -> None:
    assert balanced_parts(costs, stages, ends=ends) == parts


@pytest.mark.parametrize("costs", [[1.0] * 200, [0.1 * (index % 7) for index in range(200)], [1e3, *[0.1] * 199]])
def test_two_hundred_layers_are_cut_into_sixty_four_stages_at_once(costs: list[float]) -> None:
    began = time.process_time()
    assert len(balanced_parts(costs, 64)) == 65
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("costs", "stages", "ends", "words"),
    [
        ([1, 1], 3, (0, 0), "2 layers make no 3 stages"),
        ([], 1, (0, 0), "0 layers make no 1 stages"),
        ([1], 0, (0, 0), "1 layers make no 0 stages"),
        ([1, -1], 1, (0, 0), r"0 or more, and finite, not \[1, -1\]"),
        ([float("nan")], 1, (0, 0), "finite"),
        ([1], 1, (0, float("inf")), r"with ends \(0, inf\)"),
    ],
)
def test_what_cannot_be_cut_is_refused(costs: list[float], stages: int, ends: tuple[float, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        balanced_parts(costs, stages, ends=ends)

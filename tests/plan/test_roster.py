"""Who begins a job: a number closes the roster at once, patience closes it with fewer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo_ds.errors import ConfigError
from bamboo_ds.plan.job import Roster
from bamboo_ds.plan.roster import StartRule, close_roster


@pytest.mark.parametrize(
    ("start_workers", "ready", "waited", "workers", "cause"),
    [
        (None, (), 1e9, None, ""),
        (3, (), 1e9, None, ""),
        (None, (5,), 9.9, None, ""),
        (None, (5,), 10.0, (5,), "1 worker(s) are ready and nobody has joined for 10 s"),
        (3, (2, 0), 9.9, None, ""),
        (3, (2, 0), 10.0, (0, 2), "2 of 3 worker(s) are ready and nobody has joined for 10 s"),
        (3, (7, 2, 0), 0.0, (0, 2, 7), "3 workers are ready, 3 were asked for"),
        (3, (9, 7, 2, 0), 0.0, (0, 2, 7, 9), "4 workers are ready, 3 were asked for"),
    ],
)
def test_the_roster_closes_at_a_number_or_when_patience_runs_out(
    start_workers: int | None, ready: tuple[int, ...], waited: float, workers: tuple[int, ...] | None, cause: str
) -> None:
    roster = close_roster(StartRule(start_workers, patience_seconds=10), ready=ready, waited_seconds=waited)
    assert roster == (None if workers is None else Roster(workers, cause))


def test_no_patience_begins_with_the_first_worker() -> None:
    roster = close_roster(StartRule(patience_seconds=0), ready=[4], waited_seconds=0.0)
    assert roster is not None
    assert roster.workers == (4,)


@given(
    st.none() | st.integers(1, 9), st.floats(0, 60), st.sets(st.integers(0, 20)), st.integers(0, 20), st.floats(0, 90)
)
def test_a_roster_that_closes_would_close_later_and_with_more_as_well(
    start: int | None, patience: float, ready: set[int], newcomer: int, waited: float
) -> None:
    rule = StartRule(start, patience)
    roster = close_roster(rule, ready=ready, waited_seconds=waited)
    if roster is None:
        return
    assert roster.workers == tuple(sorted(ready))
    for more, longer in ((ready | {newcomer}, waited), (ready, waited + 1)):
        later = close_roster(rule, ready=more, waited_seconds=longer)
        assert later is not None
        assert later.workers == tuple(sorted(more))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: StartRule(start_workers=0), "start_workers = 0: a job begins with at least 1 worker"),
        (lambda: StartRule(patience_seconds=-1), "patience_seconds = -1"),
        (lambda: StartRule(patience_seconds=float("inf")), "patience_seconds = inf"),
        (lambda: StartRule(patience_seconds=float("nan")), "patience_seconds = nan"),
    ],
)
def test_rules_that_cannot_be_are_refused(make: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()  # type: ignore[operator]

"""Jobs that take turns: who runs when, and what is called the time of a step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from bamboo_ds.cli.bench.turns import Contestant, Pace, Timed, ratio, take_turns
from bamboo_ds.cli.bench.workers import WorkerError, WorkerResult

Run = Callable[..., list[WorkerResult]]


class Sleeper:
    """Stands for an engine whose workers need different times; the slowest one counts."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds * (1 + int(os.environ["RANK"]))
        self.spans: list[tuple[float, float]] = []
        self.warm = 0

    def step(self) -> None:
        started = time.monotonic()
        time.sleep(self.seconds)
        self.spans.append((started, time.monotonic()))

    def warmed_up(self) -> None:
        self.warm = len(self.spans)

    def facts(self) -> dict[str, Any]:
        return {"spans": self.spans, "warm": self.warm, "world": os.environ["WORLD_SIZE"]}


def test_only_one_contestant_runs_at_a_time_and_the_slowest_worker_counts(workers: Run) -> None:
    names = {"quick": 0.005, "slow": 0.010}
    contestants = [Contestant(name, lambda seconds=seconds: Sleeper(seconds)) for name, seconds in names.items()]
    timed = take_turns(contestants, 2, Pace(rounds=3, steps=3, warm_up_steps=1, timeout_seconds=30))
    assert [len(timed[name].seconds) for name in names] == [3, 3]
    assert ratio(timed["slow"], timed["quick"]) == pytest.approx(2, rel=0.3)
    assert all(second >= 0.010 for second in timed["quick"].seconds)
    quick, slow = ([span for facts in timed[name].facts for span in facts["spans"]] for name in names)
    assert not [1 for a in quick for b in slow if a[0] < b[1] and b[0] < a[1]]
    assert [(facts["warm"], facts["world"]) for facts in timed["quick"].facts] == [(1, "2"), (1, "2")]


def test_a_failing_contestant_is_reported(workers: Run) -> None:
    def build() -> Sleeper:
        raise RuntimeError("no engine today")

    with pytest.raises(WorkerError, match="no engine today"):
        take_turns([Contestant("broken", build)], 2, Pace(rounds=1, steps=1, warm_up_steps=0, timeout_seconds=3))


def test_ratio_compares_each_round_with_itself() -> None:
    drifting = Timed(seconds=[1.0, 2.0, 10.0])
    assert ratio(Timed(seconds=[1.1, 2.2, 11.0]), drifting) == pytest.approx(1.1)

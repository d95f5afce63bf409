"""The store bench: what it demands and reckons, and small jobs on a real etcd."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bamboo_ds.cli.bench.store import (
    PIPELINES,
    STAGES,
    WATCHERS,
    Costs,
    Load,
    Rounds,
    StoreBench,
    at_scale,
    ballot_of,
    outcome_bytes,
    parts,
    summarize,
)
from bamboo_ds.plan.codec import encode
from bamboo_ds.store.embedded import EmbeddedEtcd

LOADS = [Load(pipelines, watchers) for watchers in (0, WATCHERS) for pipelines in PIPELINES]
KEPT = {1000: 58, 10_000: 58}


def found(milliseconds: float = 10.0) -> dict[Load, Rounds]:
    """Return figures of an etcd that takes 0.25 ms a ballot, and 0.01 ms and 0.02 ms/kB a watcher."""
    used = {
        load: 0.25 * load.pipelines + load.watchers * (0.01 + 0.02e-3 * outcome_bytes(load.pipelines)) for load in LOADS
    }
    return {load: Rounds([milliseconds] * 3, 1.0 + used[load]) for load in LOADS}


# ---- what it demands -------------------------------------------------------------------------------------------------


def test_a_report_has_the_figures_by_number_of_pipelines() -> None:
    report = summarize(found(), KEPT, 1800.0)
    assert report["ok"]
    assert report["vote_ms"] == report[f"vote_ms_{WATCHERS}_watchers"] == {"4": 10.0, "16": 10.0, "64": 10.0}
    assert report["keys_after"] == {"1000": 58, "10000": 58}
    assert report["costs"] == {
        "puts_per_second": 1800.0, "ballot_cpu_ms": 0.25, "message_cpu_ms": 0.01, "kilobyte_cpu_ms": 0.02
    }  # fmt: skip


@pytest.mark.parametrize("load", LOADS, ids=lambda load: f"{load.pipelines}-{load.watchers}")
def test_each_demand_can_fail(load: Load) -> None:
    for bad in (Rounds([load.most_ms + 1] * 3, 1.0), Rounds([1.0] * 3, 1.0, unheard=1)):
        report = summarize({**found(), load: bad}, KEPT, 1800.0)
        assert not report["ok"]
        assert report["failed"] == [f"{load.name} {load.pipelines}"]


def test_a_store_that_grows_fails() -> None:
    report = summarize(found(), {1000: 58, 10_000: 59}, 1800.0)
    assert not report["ok"]
    assert report["failed"] == ["keys_after"]


def test_demands_grow_with_the_load() -> None:
    assert [round(load.most_ms) for load in LOADS] == [22, 42, 122, 172, 192, 272]


# ---- what it reckons -------------------------------------------------------------------------------------------------


def test_a_step_at_scale_is_one_write_a_pipeline_and_one_outcome_for_everybody() -> None:
    scale = at_scale(80, Costs(1000.0, 0.25, 0.02, 0.01))
    ballot, outcome = scale["ballot_bytes"], scale["outcome_bytes"]
    assert ballot == len(encode(ballot_of(9, 1)))
    assert scale["pipelines"] == 80 // STAGES == 10
    assert scale["writes_per_step"] == 11
    assert scale["events_per_step"] == 2 * 10 + 2 * 160
    assert scale["bytes_in_per_step"] == 10 * ballot + outcome
    assert scale["bytes_out_per_step"] == 10 * ballot + 160 * outcome
    assert scale["write_seconds_per_step"] == 0.011
    assert scale["etcd_cpu_seconds_per_step"] == pytest.approx(
        10 * 0.25e-3 + 160 * (0.02e-3 + 0.01e-6 * outcome), rel=1e-3
    )


def test_a_ballot_has_a_vote_of_every_stage() -> None:
    ballot = ballot_of(3, 7)
    assert [(vote.pipeline, vote.stage, vote.step) for vote in ballot.votes] == [(3, s, 7) for s in range(STAGES)]
    assert [bool(vote.losses) for vote in ballot.votes] == [False] * (STAGES - 1) + [True]


def test_parts_cover_everything_once() -> None:
    assert [number for part in parts(10, 4) for number in part] == list(range(10))
    assert {len(part) for part in parts(10, 4)} == {2, 3}
    assert parts(0, 0) == []


# ---- for real --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench() -> Iterator[StoreBench]:
    with EmbeddedEtcd() as server:
        yield StoreBench(server)


@pytest.mark.parametrize("load", [Load(3, 0, rounds=4), Load(5, 20, rounds=4)], ids=["alone", "watched"])
def test_rounds_of_a_job_are_timed(bench: StoreBench, load: Load) -> None:
    rounds = bench.rounds(load)
    assert len(rounds.milliseconds) == 4
    assert all(0 < each < 10_000 for each in rounds.milliseconds)  # the machine that tests may be busy
    assert rounds.unheard == 0


def test_the_store_does_not_grow_with_the_steps(bench: StoreBench) -> None:
    counts = bench.keys_after((10, 60))
    assert list(counts) == [10, 60]
    assert counts[10] == counts[60] > 2 * STAGES


def test_puts_are_counted(bench: StoreBench) -> None:
    assert 20 < bench.puts_per_second() < 100_000

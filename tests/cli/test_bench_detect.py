"""The detect bench: what it demands, whom it breaks, and one fault of a kind for real."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer

from bamboo_ds.cli.bench.detect import (
    KINDS,
    NODES,
    PIPELINES,
    STAGES,
    TTL_MS,
    DetectBench,
    Detection,
    Kind,
    Seat,
    Watchman,
    busy_loops,
    cause_of,
    choose_victim,
    chosen,
    summarize,
)

BY_NAME = {kind.name: kind for kind in KINDS}
SEATS = [Seat(worker, f"n{worker}", worker // STAGES, worker % STAGES) for worker in range(NODES)]
QUIET = Watchman(10.0, 5000, {}, {"node_joined": 8})


def found(milliseconds: float = 50.0) -> dict[Kind, list[Detection]]:
    return {kind: [Detection(milliseconds, "the lease of worker 3's node is gone")] * 3 for kind in KINDS}


# ---- whom it breaks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.coordinator], ids=lambda kind: kind.name)
def test_victims_visit_all_places_but_that_of_the_coordinator(kind: Kind) -> None:
    nodes = [choose_victim(SEATS, kind, number, coordinator="n5").node for number in range(NODES)]
    spared = set() if kind.how is None else {"n5"}
    assert set(nodes) == {seat.node for seat in SEATS} - spared
    assert [int(node[1:]) % STAGES for node in nodes] == [*range(STAGES)] * PIPELINES


def test_the_coordinator_is_the_victim_where_that_is_meant() -> None:
    kind = BY_NAME["coordinator_kill_ms"]
    assert {choose_victim(SEATS, kind, number, coordinator="n5").node for number in range(NODES)} == {"n5"}


def test_kinds_are_chosen_by_name() -> None:
    assert chosen([]) == KINDS
    assert [kind.name for kind in chosen(["stop_ms", "worker_exit_ms"])] == ["worker_exit_ms", "stop_ms"]
    with pytest.raises(typer.BadParameter, match="nap_ms"):
        chosen(["nap_ms"])


# ---- what it demands -------------------------------------------------------------------------------------------------


def test_a_report_has_the_figures_of_every_kind() -> None:
    report = summarize(found(), QUIET)
    assert report["ok"]
    assert report["stop_ms"] == {"median": 50.0, "worst": 50.0, "n": 3}
    assert report["causes"]["stop_ms"] == {"lease": 3}
    assert report["false_alarms"] == 0
    assert report["demands"] == {
        "worker_exit_ms": {"median": 100.0},
        "node_kill_ms": {"worst": 250.0},
        "stop_ms": {"worst": TTL_MS + 1000},
        "cut_ms": {"worst": TTL_MS + 1000},
        "coordinator_kill_ms": {"worst": TTL_MS + 1500},
        "false_alarms": 0,
    }


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_each_demand_can_fail(kind: Kind) -> None:
    times = [10.0, kind.most_ms + 1, kind.most_ms + 1] if kind.figure == "median" else [10.0, 10.0, kind.most_ms + 1]
    report = summarize({**found(), kind: [Detection(each) for each in times]}, QUIET)
    assert not report["ok"]
    assert report["failed"] == [kind.name]


def test_one_outlier_does_not_spoil_a_median() -> None:
    kind = BY_NAME["worker_exit_ms"]
    assert summarize({kind: [Detection(each) for each in (10.0, 10.0, 9000.0)]}, QUIET)["ok"]


@pytest.mark.parametrize(
    ("watchman", "alarms"),
    [
        (Watchman(10.0, 5000, {"evicted": 1}, {}), 1),
        (Watchman(10.0, 0, {}, {}, "nothing was trained"), 0),
    ],
)
def test_a_false_alarm_or_a_job_that_did_not_train_fails(watchman: Watchman, alarms: int) -> None:
    report = summarize(found(), watchman)
    assert not report["ok"]
    assert report["false_alarms"] == alarms


def test_a_case_that_went_wrong_fails_and_does_not_count() -> None:
    kind = BY_NAME["stop_ms"]
    report = summarize({kind: [Detection(10.0), Detection(0.0, problem="the job has failed")]}, None)
    assert not report["ok"]
    assert report["stop_ms"]["n"] == 1
    assert report["problems"] == ["stop_ms[1]: the job has failed"]
    assert not summarize({kind: []}, None)["ok"]


@pytest.mark.parametrize(
    ("cause", "word"),
    [
        ("both neighbours of worker 2, workers 0 and 4, report a broken link", "neighbours"),
        ("the lease of worker 2's node is gone, and its link to worker 0 is broken", "lease"),
        ("worker 2 of node n2 was ended by SIGKILL", "exit"),
        ("the link between workers 1 and 2 is broken while both answer; worker 2 goes: ...", "evicted"),
    ],
)
def test_a_cause_is_told_in_a_word(cause: str, word: str) -> None:
    assert cause_of(cause) == word


# ---- for real --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench(workers: Callable[..., Any]) -> Iterator[DetectBench]:
    del workers  # it has warmed this process up
    with DetectBench(random.Random(0)) as made:
        yield made


def test_busy_loops_keep_the_cores_busy_and_end() -> None:
    def busy() -> float:
        with open("/proc/stat", encoding="utf-8") as file:
            user, nice, system = map(int, file.readline().split()[1:4])
        return (user + nice + system) / 100

    before = busy()
    with busy_loops() as cores:
        time.sleep(0.5)
    assert busy() - before > 0.3 * cores


@pytest.mark.parametrize("name", ["worker_exit_ms", "coordinator_kill_ms"])
def test_a_fault_is_detected(bench: DetectBench, name: str) -> None:
    found = bench.break_one(BY_NAME[name], 6)
    assert not found.problem
    assert 0 < found.milliseconds < TTL_MS + 10_000  # the machine that tests may be busy
    assert cause_of(found.cause) in ("exit", "neighbours", "lease")


def test_nobody_is_taken_for_dead_on_busy_cores_and_a_death_would_be_seen(bench: DetectBench) -> None:
    watchman = bench.watch_idly(0.05)
    assert watchman.alarms == {}
    assert not watchman.problem
    assert watchman.steps > 0
    assert watchman.others["node_joined"] == NODES

    with bench.job(apart=False) as (cluster, folder):
        assert not bench.strike(BY_NAME["node_kill_ms"], 1, cluster, folder).problem
        deadline = time.monotonic() + 10
        while "failover" not in (seen := bench.judge(0.0, 1, cluster, folder)).alarms and time.monotonic() < deadline:
            time.sleep(0.1)
        assert seen.alarms["failover"] == seen.alarms["plans"] == 1

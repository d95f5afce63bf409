"""A cluster that follows a trace: real nodes whose workers only pretend to train; and the whole of it, small."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bamboo_ds.cli.chaos.drive import Drive, begins_with
from bamboo_ds.cli.chaos.journal import Journal, StepLine
from bamboo_ds.cli.local import LocalCluster
from bamboo_ds.elastic.membership import Membership
from bamboo_ds.simulator.trace import Change, NodeEvent, Trace

EVENTS = [
    NodeEvent(100.0, Change.ADD, "m1"),
    NodeEvent(100.0, Change.ADD, "m2"),
    NodeEvent(110.0, Change.REMOVE, "m1"),
    NodeEvent(110.0, Change.REMOVE, "m2"),
    NodeEvent(120.0, Change.ADD, "m1", "x"),
    NodeEvent(120.0, Change.ADD, "m3", "y"),
    NodeEvent(130.0, Change.REMOVE, "m3"),
]


def step_along(folder: Path, *, silent_from: int = 10**9) -> None:
    """Write down a step every 20 ms until it is enough; from some step on nobody says anything."""
    membership = Membership.read()
    assert membership is not None
    journal, step = Journal(folder), 0
    while step < journal.steps:
        time.sleep(0.02)
        if step < silent_from:
            journal.write(StepLine(step, 1.0, time.time(), membership.worker, 1, 1))
        step += 1


def drive(folder: Path, *, steps: int | None, stuck_seconds: float = 30.0, **program: Any) -> tuple[int, Drive, Any]:
    trace, said = Trace.of("t", EVENTS), list[str]()
    work = functools.partial(step_along, folder, **program)
    options: dict[str, Any] = {"warm": False, "echo": False, "ttl_seconds": 2.0}
    with LocalCluster(work, nodes=len(begins_with(trace)), zones=("a", "b"), **options) as cluster:
        driven = Drive(
            cluster,
            trace,
            speedup=10.0,
            journal=Journal(folder),
            ready=(folder / "steps.jsonl").exists,
            steps=steps,
            stuck_seconds=stuck_seconds,
            tell=said.append,
        )
        code = cluster.wait(60, meanwhile=driven.go_on)
        zones = [cluster._nodes[name].settings.zone for name in cluster.names]
    return code, driven, (said, zones)


def test_nodes_come_and_go_when_the_trace_says_so(tmp_path: Path) -> None:
    code, driven, (said, zones) = drive(tmp_path, steps=None)
    assert code == 0
    assert [(deed.change.value, deed.node, deed.live) for deed in driven.deeds] == [
        ("add", "n0", 2),
        ("add", "n1", 2),
        ("remove", "n0", 1),
        ("remove", "n1", 0),
        ("add", "n2", 1),
        ("add", "n3", 2),
        ("remove", "n3", 1),
    ]
    assert zones == ["a", "b", "x", "y"]
    first = min(line.at for line in driven.lines)
    times = [deed.at - first for deed in driven.deeds[2:]]
    assert times == pytest.approx([1.0, 1.0, 2.0, 2.0, 3.0], abs=0.5)
    assert not driven.hung
    assert len(said) == 5


def test_when_the_steps_are_done_the_rest_of_the_trace_is_left(tmp_path: Path) -> None:
    code, driven, _ = drive(tmp_path, steps=30)
    assert code == 0
    assert [deed.change for deed in driven.deeds] == [Change.ADD, Change.ADD]
    assert max(line.step for line in driven.lines) >= 28


def test_a_run_that_stands_still_is_given_up(tmp_path: Path) -> None:
    begun = time.monotonic()
    code, driven, (said, _) = drive(tmp_path, steps=10**6, stuck_seconds=4.0, silent_from=5)
    assert code == 1
    assert driven.hung
    assert time.monotonic() - begun < 25
    assert said[-1].startswith("no step for 4 s with 1 nodes: given up")


def chaos(folder: Path, events: list[dict[str, Any]], *, seconds: float, **options: object) -> dict[str, Any]:
    """Run the command on a trace of ours, at its own speed, and return the report, which must be a good one."""
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [{"trace": "small", "seconds": seconds}, *events]))
    given = {"trace": path, "nodes": 3, "stages": 2, "pipelines": 2, "speedup": 1, "pace": 1, "undisturbed-steps": 8}
    words = [str(word) for name, value in {**given, **options}.items() for word in (f"--{name}", value)]
    done = subprocess.run(
        [sys.executable, "-m", "bamboo_ds.cli.main", "chaos", *words, "--logs", str(folder / "logs"), "--json"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.stdout, done.stderr[-3000:]
    report = dict(json.loads(done.stdout.splitlines()[-1]))
    assert (done.returncode, report["ok"]) == (0, True), (report, done.stderr[-3000:])
    assert (report["lost_samples"], report["repeated_samples"], report["restarts"]) == (0, 0, 0)
    assert 0 < report["max_rel_diff"] <= 1e-5
    return report


def rows(change: str, seconds: float, *nodes: str) -> list[dict[str, Any]]:
    return [{"seconds": seconds, "event": change, "node": node} for node in nodes]


@pytest.mark.slow
def test_a_small_run_loses_nothing_and_says_so(tmp_path: Path) -> None:
    events = [
        *rows("add", 0, "m0", "m1", "m2", "m3"),
        *rows("remove", 2, "m1"),
        *rows("add", 6, "m5"),
        *rows("remove", 10, "m0", "m2"),
        *rows("add", 14, "m6", "m7"),
    ]
    plot = tmp_path / "chaos.png"
    report = chaos(tmp_path, events, seconds=18, plot=plot)
    assert report["removals"] >= 2
    assert report["joins"] >= 2
    assert report["failovers"] + report["reconfigurations"] >= 2
    assert report["steps"] > 10
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.sample(0)
@pytest.mark.slow
def test_a_job_of_which_no_node_is_left_goes_on_from_its_checkpoint_with_the_next(tmp_path: Path) -> None:
    names = ("m0", "m1", "m2", "m3")
    events = [*rows("add", 0, *names), *rows("remove", 4, *names), *rows("add", 8, *names)]
    report = chaos(tmp_path, events, seconds=14)
    assert report["restores"] == 1
    assert report["removals"] >= 3
    assert report["steps"] > 10

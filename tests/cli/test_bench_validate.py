"""The bench that holds the simulator against a real cluster: what it reads from a run, its traces, and all of it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from bamboo_ds.cli.bench.observed import costs_of, course_of, played
from bamboo_ds.cli.bench.validate import QUICK, ValidateOptions, calibration_trace, trace_of
from bamboo_ds.cli.chaos.drive import Deed
from bamboo_ds.cli.chaos.journal import Pass, StepLine
from bamboo_ds.cli.chaos.report import Timeline
from bamboo_ds.cli.main import app
from bamboo_ds.errors import BambooError
from bamboo_ds.simulator.trace import Change
from bamboo_ds.simulator.workload import Layer

START = 1000.0


def line(step: int, *, at: float, worker: int = 0, shape: tuple[int, int] = (4, 3), **timing: Any) -> StepLine:
    return StepLine(step, 1.0, at, worker, *shape, **timing)


def event(kind: str, at: float, node: str = "n0", **fields: Any) -> dict[str, Any]:
    return {"time": at, "node": node, "kind": kind, "text": "", **fields}


def joined(*nodes: str, at: float = START) -> list[dict[str, Any]]:
    """Nodes that join in this order; the number of the worker is that of the place."""
    return [event("node_joined", at, node, workers=[place], zone=f"z{place}") for place, node in enumerate(nodes)]


DEEDS = [
    Deed(START, Change.ADD, "n0", 2),
    Deed(START, Change.ADD, "n1", 2),
    Deed(START + 10, Change.REMOVE, "n1", 1),
    Deed(START + 20, Change.ADD, "n2", 2),
    Deed(START + 30, Change.REMOVE, "n0", 1),
]
EVENTS = [
    *joined("n0", "n1", "n2"),
    event("coordinator", START),
    event("worker_ready", START + 1, workers=[0, 1]),
    event("reshaped", START + 2, number=[0, 0], seconds=77.0),
    event("failover", START + 10.125, action="failover"),
    event("recovered", START + 10.25, reroute_ms=70.0),
    event("reconfigure", START + 12, action="reconfigure"),
    event("reshaped", START + 12.5, number=[1, 0], seconds=0.5),
    event("worker_ready", START + 21.5, workers=[2]),
    event("reconfigure", START + 23, action="reconfigure"),
    event("reshaped", START + 23.7, number=[2, 0], seconds=0.7),
    event("failover", START + 32.5, action="failover"),
    event("recovered", START + 32.75, reroute_ms=90.0),
]


def timed_lines(steps: int = 6) -> list[StepLine]:
    """Tell of two stages and two micro-batches in steps of 10 s.

    Forwards take 1 and 1.5 s, backwards 2 and 3, messages half a second; all is computed after 9.5 s.
    """
    found = []
    for step in range(steps):
        at = START - 100 + 10 * step
        first = [
            ("forward", 0, 0, 0, 1),
            ("forward", 0, 1, 1, 2),
            ("backward", 0, 0, 6.5, 8.5),
            ("backward", 0, 1, 7, 9),
        ]
        last = [
            ("forward", 1, 0, 1.5, 3),
            ("backward", 1, 0, 3, 6),
            ("forward", 1, 1, 3, 4.5),
            ("backward", 1, 1, 3.5, 6.5),
        ]
        for worker, passes in enumerate((first, last)):
            moved = tuple(Pass(*each[:3], at + each[3], at + each[4]) for each in passes)
            computed = at + (9.5 if worker == 0 else 7)
            found.append(line(step, at=at + 9.8, worker=worker, pipeline=0, computed=computed, passes=moved))
    return found


def test_costs_are_read_from_what_agents_and_workers_wrote() -> None:
    costs = costs_of(timed_lines(), DEEDS, EVENTS)
    assert costs.fixed == {
        "latency_seconds": pytest.approx(0.5),
        "commit_seconds": pytest.approx(0.5),
        "detect_seconds": pytest.approx(0.125),
        "lease_seconds": pytest.approx(2.5),
        "reroute_seconds": pytest.approx(0.08),
        "reconfigure_seconds": pytest.approx(0.6),
        "warm_up_seconds": pytest.approx(1.5),
    }
    assert (costs.forward, costs.backward, costs.step) == (approx(1, 1.5), approx(2, 3), pytest.approx(10))


def approx(*values: float) -> Any:
    return tuple(map(pytest.approx, values))


def test_layers_take_together_what_their_stages_took() -> None:
    costs = costs_of(timed_lines(), DEEDS, EVENTS)
    layers = [Layer("a", 0.1, 0.3), Layer("b", 0.3, 0.3), Layer("c", 1.0, 2.0)]
    found = [(layer.forward_seconds, layer.backward_seconds) for layer in costs.layers(layers, parts=(0, 2, 3))]
    assert found == [approx(0.25, 1), approx(0.75, 1), approx(1.5, 3)]


@pytest.mark.parametrize("missing", ["failover", "recovered", "reshaped", "worker_ready"])
def test_a_cost_that_nobody_has_told_of_is_an_error(missing: str) -> None:
    with pytest.raises(BambooError, match="the calibration run has seen no"):
        costs_of(timed_lines(), DEEDS, [told for told in EVENTS if told["kind"] != missing])


def test_a_job_that_is_not_timed_has_no_costs() -> None:
    with pytest.raises(BambooError, match="the calibration run has seen no message"):
        costs_of([line(step, at=START - 50 + step) for step in range(9)], DEEDS, EVENTS)


def timeline(last: float = 60.0) -> Timeline:
    shapes = {0: (4, 3), 15: (4, 2), 40: (4, 3)}
    shape, steps = (4, 3), []
    for step in range(int(last)):
        shape = shapes.get(step, shape)
        steps.append(line(step, at=START + 5 + step, shape=shape))
    return Timeline.of(steps, DEEDS)


def test_the_trace_is_that_which_was_played() -> None:
    found = played(timeline(), [*joined("n1", "n0", "n2"), *EVENTS[3:]])
    told = [(each.seconds, each.change.value, each.node, each.zone) for each in found.events]
    assert told == [
        (0.0, "add", "n1", "z0"),  # it has registered first
        (0.0, "add", "n0", "z1"),
        (5.0, "remove", "n1", ""),
        (15.0, "add", "n2", "z2"),
        (25.0, "remove", "n0", ""),
    ]
    assert found.seconds == pytest.approx(59)
    assert len(played(timeline(last=12), EVENTS).events) == 3, "what came after the last step is no part of it"


def test_what_goes_at_once_goes_at_the_same_second() -> None:
    deeds = [*DEEDS[:2], Deed(START + 10, Change.REMOVE, "n1", 1), Deed(START + 10.1, Change.REMOVE, "n0", 0)]
    found = played(Timeline(timeline().steps, tuple(deeds)), EVENTS)
    assert [each.seconds for each in found.events] == [0.0, 0.0, 5.0, 5.0]


def test_the_course_of_a_run_is_told_by_events_and_steps() -> None:
    course = course_of(timeline(), EVENTS, batch=24)
    assert course.samples_per_second == pytest.approx(24)
    assert (course.failovers, course.reconfigurations, course.aborts) == (2, 2, 0)
    assert course.shapes == ("4x3", "4x2", "4x3")


def test_losses_at_once_are_one_failover_in_however_many_plans_and_none_if_the_step_is_lost() -> None:
    more = [event("failover", START + 10.5, action="failover")]
    assert course_of(timeline(), [*EVENTS, *more], batch=24).failovers == 2
    dropped = [event("abort", START + 33, action="abort")]
    course = course_of(timeline(), [*EVENTS, *dropped], batch=24)
    assert (course.failovers, course.aborts) == (1, 1)
    unbegun = [event("reconfigure", START + 33, action="reconfigure"), event("abort", START + 35, action="abort")]
    course = course_of(timeline(), [*EVENTS, *unbegun], batch=24)
    assert (course.failovers, course.aborts, course.reconfigurations) == (2, 1, 3)


def test_the_drawn_trace_takes_and_gives_enough() -> None:
    trace = trace_of(ValidateOptions())
    sizes = [sum(each.change is Change.REMOVE for each in group) for _, group in trace.instants()]
    assert trace.preemptions >= 6
    assert len(trace.events) - trace.preemptions - 12 >= 6
    assert max(sizes) >= 2
    assert trace.seconds <= 180
    quick = trace_of(ValidateOptions(**QUICK))  # type: ignore[arg-type]  # fields of it
    assert quick.preemptions >= 2
    assert quick.seconds <= 30


def test_the_calibration_loses_a_node_and_the_one_that_coordinates() -> None:
    trace = calibration_trace(6, gap_seconds=5.0)
    told = [(each.seconds, each.change.value, each.node) for each in trace.events[6:]]
    assert told == [(5.0, "remove", "m1"), (10.0, "add", "m6"), (15.0, "remove", "m0"), (20.0, "add", "m7")]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--pace=0", "--pace 0: must be above 0"),
        ("--gap=-1", "--gap -1: must be above 0"),
        ("--stages=2", "--stages 2: must be from 3"),
        ("--stages=7", "to half of --nodes, 6"),
        ("--nodes=13", "--nodes 13: must be a multiple of --stages, 4"),
        ("--seconds=20", "hold no loss or no join"),
    ],
)
def test_wrong_options_are_named(option: str, message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "validate", option])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.sample(0)
@pytest.mark.slow
def test_a_small_cluster_does_what_the_simulator_says() -> None:
    words = [sys.executable, "-m", "bamboo_ds.cli.main", "bench", "validate", "--quick", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=115, check=False)
    assert done.stdout, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["failovers"][0] == report["failovers"][1] > 0
    assert report["reconfigurations"][0] == report["reconfigurations"][1] > 0
    assert report["shapes"][0] == report["shapes"][1]
    assert 0.7 < report["throughput_ratio"] < 1.3  # other work beside it slows the real one

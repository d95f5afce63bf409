"""`bamboo-ds chaos`: its pure parts, and the counting of samples in the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from bamboo_ds.cli.bench.reference import train_one_process
from bamboo_ds.cli.chaos.drive import Deed, begins_with, fitted
from bamboo_ds.cli.chaos.job import BATCH, SAMPLES, ChaosJob, CountingEmbedding, Samples, micro_batch, parameter_groups
from bamboo_ds.cli.chaos.journal import Journal, StepLine
from bamboo_ds.cli.chaos.picture import Story, draw
from bamboo_ds.cli.chaos.report import Timeline, lost_and_repeated, max_rel_diff, read_events, told
from bamboo_ds.cli.main import app
from bamboo_ds.simulator.trace import Change, NodeEvent, Trace
from bamboo_ds.simulator.trace_files import read_trace

P3 = Path(__file__).resolve().parents[3] / "shared/data/traces/ec2-p3.csv"


def line(step: int, loss: float = 1.0, *, at: float, worker: int = 0) -> StepLine:
    return StepLine(step=step, loss=loss, at=at, worker=worker, stages=4, pipelines=2)


# ---- the census --------------------------------------------------------------------------------------------------


def counted(*batches: list[int]) -> list[int]:
    """Return the census after steps of AdamW on these samples."""
    layer = CountingEmbedding(8, 4, 5, std=0.1)
    groups = parameter_groups([(name, parameter) for name, parameter in layer.named_parameters()])
    optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=1e-6, weight_decay=0.01)
    for samples in batches:
        rows = torch.tensor([[sample, 1, 2] for sample in samples])
        (layer(rows).square().mean() / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    return layer.counts()


def test_the_census_counts_each_sample_whatever_the_loss() -> None:
    assert counted([0, 1], [2, 3]) == [1, 1, 1, 1, 0]


def test_the_census_counts_a_sample_that_comes_twice_in_a_step_or_in_two() -> None:
    assert counted([0, 0, 1], [1, 2], [1, 4]) == [2, 3, 1, 0, 1]


def test_the_census_changes_no_value() -> None:
    layer = CountingEmbedding(8, 4, 5, std=0.1)
    rows = torch.tensor([[3, 1, 2]])
    assert torch.equal(layer(rows), torch.nn.functional.embedding(rows[:, 1:], layer.weight))


def test_a_step_takes_the_samples_that_the_engine_would_draw() -> None:
    numbers = [int(row[0]) for step in (0, 41) for index in range(12) for row in micro_batch(step, index)[0]]
    assert numbers == [number % SAMPLES for step in (0, 41) for number in range(step * BATCH, (step + 1) * BATCH)]


def test_samples_are_a_language_that_can_be_learnt_and_differ() -> None:
    first, again, other = Samples()[7], Samples()[7], Samples()[8]
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0][1:], other[0][1:])
    assert torch.equal(first[0][2:], first[1][:-1])


def test_the_reference_learns_and_the_layers_fit_their_costs() -> None:
    job = ChaosJob(4, 3, 0.001, 10, 60.0)
    losses = train_one_process(job.reference(steps=4)).losses
    assert losses[0] > losses[-1] > 0
    assert len(job.layers()) == len(job.layer_costs())


@pytest.mark.parametrize(
    ("census", "expected"),
    [
        ([2, 2, 1, 1], (0, 0)),
        ([2, 1, 1, 1], (1, 0)),
        ([2, 2, 2, 1], (0, 1)),
        ([3, 1, 1, 1], (1, 1)),
        ([0, 0, 0, 0], (6, 0)),
    ],
)
def test_lost_and_repeated_samples_are_counted(census: list[int], expected: tuple[int, int]) -> None:
    assert lost_and_repeated(census, steps=3, batch=2) == expected


# ---- the report --------------------------------------------------------------------------------------------------


def test_the_worst_loss_of_any_worker_and_any_repetition_counts() -> None:
    lines = [line(0, 2.0, at=0), line(0, 2.0 + 4e-6, at=0, worker=1), line(1, 1.0, at=1), line(1, 1.0 - 3e-6, at=2)]
    assert max_rel_diff(lines, [2.0, 1.0]) == pytest.approx(3e-6)
    assert max_rel_diff(lines, [2.0, 1.0, 0.5]) == float("inf"), "nobody has seen the third"


def test_a_step_that_is_trained_again_counts_once_for_the_speed() -> None:
    timeline = Timeline.of(
        [line(0, at=10), line(0, at=10.1, worker=1), line(1, at=11), line(2, at=12), line(1, at=16), line(2, at=17),
         line(3, at=18)]
    )  # fmt: skip
    assert [step.step for step in timeline.steps] == [0, 1, 2, 1, 2, 3]
    assert (timeline.rollbacks, timeline.seconds) == (1, 8)
    assert timeline.steps_per_second == 3 / 8
    assert timeline.stalls(step_seconds=0.5) == {
        "count": 1, "seconds": 4.0, "longest_seconds": 4.0, "median_seconds": 4.0,
    }  # fmt: skip


def test_the_share_of_live_nodes_is_a_mean_over_the_time_of_training() -> None:
    deeds = [
        Deed(0.0, Change.ADD, "n0", 2),
        Deed(0.0, Change.ADD, "n1", 2),
        Deed(12.0, Change.REMOVE, "n0", 1),
        Deed(12.1, Change.REMOVE, "n1", 0),
        Deed(15.0, Change.ADD, "n2", 1),
        Deed(16.0, Change.REMOVE, "n2", 0),
        Deed(30.0, Change.ADD, "n3", 1),
    ]
    timeline = Timeline.of([line(0, at=10), line(1, at=20)], deeds)
    assert timeline.mean_live() == pytest.approx((2 * 2 + 0.1 + 1) / 10)
    assert timeline.removals() == {"removals": 3, "bulk_removals": 1, "largest_bulk": 2}
    assert timeline.joins() == 2


def event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"time": 0.0, "node": "n0", "kind": kind, "text": "", **fields}


def test_it_counts_what_the_events_tell() -> None:
    joined = [{**event("node_joined", workers=[worker]), "node": f"n{worker}"} for worker in range(3)]
    plans = ["start", "failover", "failover", "abort", "reconfigure", "restore"]
    found = told([*joined, *(event("x", action=action) for action in plans), event("restored", tag="t")])
    assert found == {"failovers": 2, "reconfigurations": 2, "restores": 1, "aborts": 1, "restarts": 0}
    again = {**event("node_joined", workers=[7]), "node": "n1"}
    assert told([*joined, again])["restarts"] == 1
    given = {**event("node_joined", workers=[8, 9]), "node": "n3"}  # by a cloud, in place of one that was lost
    assert told([*joined, given])["restarts"] == 0
    assert told([*joined, event("roster"), event("roster")])["restarts"] == 1


def test_events_of_a_killed_writer_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    (tmp_path / "n0").mkdir()
    (tmp_path / "n0/events.jsonl").write_text('{"time": 2, "kind": "b"}\n{"time": 1, "kind": "a"}\n{"time": 3, "ki')
    assert [found["kind"] for found in read_events(tmp_path)] == ["a", "b"]


def test_a_journal_is_read_while_it_is_written(tmp_path: Path) -> None:
    journal, reader = Journal(tmp_path), Journal(tmp_path)
    assert reader.read() == []
    journal.write(line(0, 0.1, at=1.5))
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write('{"step": 1, "lo')
    assert reader.read() == [line(0, 0.1, at=1.5)]
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write('ss": 0.2, "at": 2.0, "worker": 3, "stages": 4, "pipelines": 2}\n')
    assert reader.read() == [line(1, 0.2, at=2.0, worker=3)]
    assert reader.read() == []


def test_a_journal_ends_when_somebody_says_so(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert journal.steps == float("inf")
    Journal(tmp_path).end_after(7)
    assert journal.steps == 7


# ---- the trace ---------------------------------------------------------------------------------------------------


def test_a_trace_is_scaled_to_the_fleet_and_never_above() -> None:
    events = [NodeEvent(5.0, Change.ADD, f"m{number}") for number in range(40)]
    events += [NodeEvent(10.0, Change.REMOVE, f"m{number}") for number in range(20)]
    trace = fitted(Trace.of("t", events, seconds=15.0), nodes=10)
    assert max(count for _, count in trace.live()) == 10
    assert trace.mean_live(most=10) == pytest.approx(10 * 10 / 15, rel=0.1)
    assert len(begins_with(trace)) == 10
    assert begins_with(Trace.of("empty", [])) == ()


@pytest.mark.skipif(not P3.exists(), reason="the published traces are not here")
def test_the_published_trace_takes_and_gives_enough() -> None:
    trace = fitted(read_trace(P3), nodes=12)
    removed = [event for event in trace.events if event.change is Change.REMOVE]
    added = [event for event in trace.events if event.change is Change.ADD and event.seconds > trace.events[0].seconds]
    assert len(removed) >= 60
    assert len(added) >= 60
    assert max(sum(event.change is Change.REMOVE for event in events) for _, events in trace.instants()) >= 3


# ---- the command -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--nodes=0", "--nodes 0: must be at least 1"),
        ("--steps=1", "--steps 1: must be at least 2"),
        ("--speedup=0", "--speedup 0: must be above 0"),
        ("--stuck=-1", "--stuck -1: must be above 0"),
        ("--pace=-1", "--pace -1: must be at least 0"),
        ("--zones=a,,b", "--zones a,,b: must be names between commas"),
    ],
)
def test_wrong_options_are_named(option: str, message: str) -> None:
    result = CliRunner().invoke(app, ["chaos", "--trace", "t.csv", option])
    assert result.exit_code == 2
    assert message in result.output


def test_a_trace_without_nodes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("1000,add,m1\n1000,remove,m1\n")
    result = CliRunner().invoke(app, ["chaos", "--trace", str(path)])
    assert result.exit_code == 2
    assert "trace t: there is never a node in it" in result.output


def test_a_run_is_drawn(tmp_path: Path) -> None:
    steps = [line(0, 3.0, at=0), line(1, 2.0, at=1), line(0, 3.0, at=4), line(1, 2.0, at=5)]
    deeds = [Deed(0, Change.ADD, "n0", 1), Deed(2.0, Change.REMOVE, "n0", 0), Deed(3.0, Change.ADD, "n1", 1)]
    story = Story("title", Timeline.of(steps, deeds), 2, 24, 10.0, [3.0, 2.0])
    path = tmp_path / "folder/chaos.png"
    assert draw(story, path) == str(path)
    assert path.read_bytes().startswith(b"\x89PNG")

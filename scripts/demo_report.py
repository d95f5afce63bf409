"""What came of the demo: counted and compared, and drawn.

Every figure is counted in what workers and agents have written, none follows from what should be.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt_report import Curves

from bamboo_ds.cli.chaos.journal import StepLine
from bamboo_ds.cli.chaos.picture import Story, draw
from bamboo_ds.cli.chaos.report import MOST_DIFFERENCE, Timeline, max_rel_diff, told
from bamboo_ds.simulator.trace import Change

if TYPE_CHECKING:
    from demo import Run


def compare(undisturbed: Run, disturbed: Run, *, plot: Path) -> dict[str, Any]:
    """Return the summary of the disturbed run, with what was done to it and came of it; draw both runs."""
    losses = {line.step: line.loss for line in undisturbed.lines}
    expected = [losses[step] for step in range(undisturbed.steps)]
    timeline, before = Timeline.of(disturbed.lines, disturbed.deeds), Timeline.of(undisturbed.lines)
    curve = Curves(1, disturbed.batch, [line.loss for line in timeline.steps])
    figures = {name: curve.summary()[name] for name in ("loss_first", "loss_last", "steps")}
    counts = told(disturbed.events)
    difference, cost = max_rel_diff(disturbed.lines, expected), money(disturbed.cost)
    counts = {
        "preemptions": timeline.removals()["removals"],
        "joins": len({deed.node for deed in disturbed.deeds} - disturbed.zones.keys()),
        **{name: counts[name] for name in ("failovers", "reconfigurations", "restores", "restarts")},
        **handed_over(disturbed),
        **lost_and_repeated(disturbed.lines, expected, batch=disturbed.batch),
    }
    story = Story(
        title=title(disturbed, before.steps[0], counts, difference=difference, cost=cost),
        timeline=timeline,
        capacity=disturbed.fleet_nodes,
        batch=disturbed.batch,
        undisturbed_rate=disturbed.batch * before.steps_per_second,
        expected=expected,
        loss_name="loss (nats per byte)",
        marks=disturbed.marks,
    )
    return {
        **disturbed.summary,
        **figures,
        "plot": draw(story, plot),
        **counts,
        "max_rel_diff": float(f"{difference:.3g}") if difference < math.inf else None,
        "matches_undisturbed": matches(timeline.steps, expected),
        "cost": cost,
    }


def title(run: Run, first: StepLine, counts: Mapping[str, int], *, difference: float, cost: Mapping[str, float]) -> str:
    """Say what is to be seen."""
    nodes, all_nodes = len(run.zones), run.fleet_nodes
    return (
        f"{nodes} nodes for {first.stages} stages x {first.pipelines} pipelines, and {all_nodes - nodes} to spare. "
        f"{counts['preemptions']} taken away, {counts['joins']} ordered by the job: {counts['lost_samples']} samples "
        f"lost, {counts['repeated_samples']} repeated, {counts['restarts']} restarts, losses within {difference:.0e}. "
        f"Cost {100 * cost['spent']:.1f} cents; on demand {100 * cost['on_demand_equivalent']:.1f}"
    )


def money(cost: Mapping[str, Any]) -> dict[str, float]:
    """Return the dollars of a run, from what `bamboo-ds status` says of its cost."""
    names = {"spent": "spent", "per_hour": "mean_per_hour", "samples_per_dollar": "samples_per_dollar"}
    names |= {"on_demand_equivalent": "on_demand"}
    return {name: float(f"{cost[theirs]:.4g}") for name, theirs in names.items()}


def handed_over(run: Run) -> dict[str, int]:
    """Return whether the warned node's stage was handed over before its end, and what was computed again for it.

    Handed over means that an epoch has begun between the warning and the end, and no step was dropped. What was
    computed again say those who took over from its workers.
    """
    workers = {worker for event in run.events if event["kind"] == "node_joined" and event["node"] == run.warned
               for worker in event["workers"]}  # fmt: skip
    warned = [event["time"] for event in run.events if event["kind"] == "notice" and event["node"] == run.warned]
    taken = [deed.at for deed in run.deeds if deed.change is Change.REMOVE and deed.node == run.warned]
    between = Counter(
        event["kind"] for event in run.events if warned and taken and warned[0] < event["time"] < taken[0]
    )
    redone = [event["micro_batches_redone"] for event in run.events
              if event["kind"] == "recovered" and not workers.isdisjoint(event["victims"])]  # fmt: skip
    in_time = between["reshaped"] > 0 and not between["abort"]
    return {"handovers": int(in_time), "recomputed_micro_batches": sum(redone)}


def lost_and_repeated(lines: Sequence[StepLine], expected: Sequence[float], *, batch: int) -> dict[str, int]:
    """Return how many samples the run cannot prove to have trained on once each.

    The loss of a step is the mean over all samples of its batch: one sample that is missing, or there twice, changes it
    by far more than rounding does. So a step that nobody has seen, or whose loss is another, counts as lost with all
    its samples; a step that a worker has committed twice counts as repeated.
    """
    right = {line.step for line in lines if _is_close(line.loss, expected[line.step])}
    wrong = {line.step for line in lines if not _is_close(line.loss, expected[line.step])}
    commits = Counter((line.worker, line.step) for line in lines)
    twice = {step for (_, step), count in commits.items() if count > 1}
    return {
        "lost_samples": batch * len(set(range(len(expected))) - right | wrong),
        "repeated_samples": batch * len(twice),
    }


def _is_close(loss: float, expected: float) -> bool:
    return abs(loss - expected) <= MOST_DIFFERENCE * abs(expected)


def matches(steps: Sequence[StepLine], expected: Sequence[float]) -> bool:
    """Say whether losses are the undisturbed run's: bit by bit up to the first step in another shape, then closely."""
    shape, same = (steps[0].stages, steps[0].pipelines), True
    for line in steps:
        same = same and (line.stages, line.pipelines) == shape
        if line.loss != expected[line.step] and (same or not _is_close(line.loss, expected[line.step])):
            return False
    return [line.step for line in steps] == list(range(len(expected)))

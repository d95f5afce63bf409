"""What a chaos run has come to: every figure is counted or measured, none follows from what should be."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from bamboo_ds.cli.bench.report import rounded
from bamboo_ds.cli.chaos.drive import Deed
from bamboo_ds.cli.chaos.journal import StepLine
from bamboo_ds.simulator.trace import Change

__all__ = [
    "EPOCHS", "MOST_DIFFERENCE", "Timeline", "at_once", "lost_and_repeated", "max_rel_diff", "read_events", "told",
]  # fmt: skip

MOST_DIFFERENCE = 1e-5
"""Of a loss, relative: with another number of pipelines, sums are taken in another order."""
EPOCHS = ("reconfigure", "restore")
"""Actions of the coordinator that begin an epoch."""
_AT_ONCE_SECONDS = 0.25  # what is no further apart has happened at once
_STALLED_STEPS = 5.0  # a step that takes longer than so many undisturbed ones


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Return the events of a run, oldest first: those that any of its agents has seen.

    Args:
        folder: of the logs, with one folder for each node.
    """
    lines = {line for path in folder.glob("*/events.jsonl") for line in _whole_lines(path)}
    return sorted((json.loads(line) for line in lines), key=lambda event: float(event["time"]))


def _whole_lines(path: Path) -> list[str]:
    """Return the lines of a file whose writer may have been killed in the middle of the last."""
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def told(events: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Count what the coordinators have decided, and what came of it.

    - failovers: plans in which shadows took over.
    - reconfigurations: epochs after the first.
    - restores: of those, how many went on from a checkpoint, as the workers say: they know what they hold.
    - restarts: workers that were started on a node that had joined before, and times that the job began anew.
    """
    actions = Counter(event["action"] for event in events if "action" in event)
    kinds = Counter(event["kind"] for event in events)
    return {
        "failovers": actions["failover"],
        "reconfigurations": sum(actions[action] for action in EPOCHS),
        "restores": kinds["restored"],
        "aborts": actions["abort"],
        "restarts": _started_again(events) + max(kinds["roster"] - 1, 0),
    }


def _started_again(events: Sequence[Mapping[str, Any]]) -> int:
    """Count the workers of nodes that joined once more; a node that a cloud gives for another has a name of its own."""
    first: dict[str, set[int]] = {}
    workers: dict[str, set[int]] = {}
    for event in events:
        if event["kind"] == "node_joined":
            first.setdefault(event["node"], set(event["workers"]))
            workers.setdefault(event["node"], set()).update(event["workers"])
    return sum(len(workers[node] - first[node]) for node in first)


def lost_and_repeated(census: Sequence[int], *, steps: int, batch: int) -> tuple[int, int]:
    """Return how many samples are missing in the weights after some steps, and how many are in them once too often.

    Args:
        census: how often each sample has gone into them.
        steps: that were committed.
        batch: samples of a step; they come in order, epoch after epoch.
    """
    epochs, rest = divmod(steps * batch, len(census))
    over = [count - epochs - (index < rest) for index, count in enumerate(census)]
    return sum(-more for more in over if more < 0), sum(more for more in over if more > 0)


def max_rel_diff(lines: Sequence[StepLine], expected: Sequence[float]) -> float:
    """Return the largest relative difference of a loss that any worker has seen from that of the undisturbed run.

    Steps that were trained again after a restore count each time; a step that nobody has seen is infinitely wrong.
    """
    if set(range(len(expected))) - {line.step for line in lines}:
        return math.inf
    return max(abs(line.loss - expected[line.step]) / abs(expected[line.step]) for line in lines)


def at_once(deeds: Sequence[Deed], change: Change) -> list[list[Deed]]:
    """Return the deeds of one kind, those together that were done at once."""
    groups: list[list[Deed]] = []
    for deed in deeds:
        if deed.change is not change:
            continue
        if not groups or deed.at > groups[-1][-1].at + _AT_ONCE_SECONDS:
            groups.append([])
        groups[-1].append(deed)
    return groups


@dataclass(frozen=True, slots=True)
class Timeline:
    """What happened when.

    Attributes:
        steps: each step as the first worker that saw it committed; after a restore they begin again further back.
        deeds: what was done to the cluster.
    """

    steps: tuple[StepLine, ...]
    deeds: tuple[Deed, ...] = ()

    @classmethod
    def of(cls, lines: Sequence[StepLine], deeds: Sequence[Deed] = ()) -> Timeline:
        """Make one of what the workers have written. All write a step before any of them can commit the next."""
        ordered = sorted(lines, key=lambda line: line.at)
        return cls(tuple(next(same) for _, same in groupby(ordered, key=lambda line: line.step)), tuple(deeds))

    @property
    def seconds(self) -> float:
        """From the end of the first step to that of the last."""
        return self.steps[-1].at - self.steps[0].at

    @property
    def steps_per_second(self) -> float:
        """Of those that count: what is trained again after a restore counts once."""
        return (self.steps[-1].step - self.steps[0].step) / self.seconds

    @property
    def rollbacks(self) -> int:
        """How often training has gone back to a checkpoint."""
        return sum(after.step < before.step for before, after in pairwise(self.steps))

    def mean_live(self) -> float:
        """Return the mean number of nodes between the first and the last step."""
        begin, end = self.steps[0].at, self.steps[-1].at
        changes = [(min(max(deed.at, begin), end), deed.live) for deed in self.deeds]
        spans = pairwise([*changes, (end, 0)])
        return sum((until - since) * live for (since, live), (until, _) in spans) / self.seconds

    def stalls(self, *, step_seconds: float) -> dict[str, Any]:
        """Return how long no step ended that should have: beyond so many undisturbed steps."""
        pauses = [after.at - before.at for before, after in pairwise(self.steps)]
        long = [pause for pause in pauses if pause > _STALLED_STEPS * step_seconds]
        return {
            "count": len(long),
            "seconds": rounded(sum(long)),
            "longest_seconds": rounded(max(long, default=0.0)),
            "median_seconds": rounded(statistics.median(long)) if long else 0.0,
        }

    def removals(self) -> dict[str, int]:
        """Return how many nodes were removed, how often several at once, and the largest such number."""
        bulks = [len(group) for group in at_once(self.deeds, Change.REMOVE)]
        return {
            "removals": sum(bulks),
            "bulk_removals": sum(size > 1 for size in bulks),
            "largest_bulk": max(bulks, default=0),
        }

    def joins(self) -> int:
        """Return how many nodes were added after training had begun."""
        return sum(deed.change is Change.ADD and deed.at > self.steps[0].at for deed in self.deeds)

"""The three runs of `bamboo-ds chaos`, and the report of what the market's nodes have done to the second.

1. A whole fleet that nobody disturbs, for its speed.
2. A fleet that follows the trace: every removal is a `kill -9` of all processes of a node.
3. One process, for the losses. It shares no code with the engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bamboo_ds.cli.bench.reference import train_one_process
from bamboo_ds.cli.bench.report import rounded
from bamboo_ds.cli.chaos.disturbed import Disturbed, cluster_of, teller, train_disturbed
from bamboo_ds.cli.chaos.drive import begins_with
from bamboo_ds.cli.chaos.job import BATCH, ChaosJob
from bamboo_ds.cli.chaos.journal import Journal
from bamboo_ds.cli.chaos.picture import Story, draw
from bamboo_ds.cli.chaos.report import MOST_DIFFERENCE, Timeline, lost_and_repeated, max_rel_diff, told
from bamboo_ds.errors import BambooError
from bamboo_ds.simulator.trace import Trace

if TYPE_CHECKING:
    from bamboo_ds.cli.chaos.command import ChaosOptions

__all__ = ["Chaos"]

_START_SECONDS = 60.0
_SLOWEST_STEP_SECONDS = 10.0
_say = teller("chaos")


class Chaos:
    """The runs of one command.

    Args:
        options: of the command.
        trace: fitted to the fleet.
        folder: for logs and checkpoints.
    """

    def __init__(self, options: ChaosOptions, trace: Trace, folder: Path) -> None:
        self._options, self._trace, self._folder = options, trace, folder
        self._job = ChaosJob(
            stages=options.stages,
            pipelines=options.pipelines,
            pace_seconds=options.pace / 1000,
            checkpoint_steps=options.checkpoint_steps,
            timeout_seconds=options.stuck,
        )

    def report(self) -> dict[str, Any]:
        """Make the runs and return the report."""
        undisturbed = self._undisturbed()
        disturbed = self._disturbed()
        if len(disturbed.timeline.steps) < 2:
            raise BambooError(f"the job trained no two steps once it was disturbed; its logs: {self._folder}")
        steps = max(line.step + 1 for line in disturbed.lines)
        _say(f"3 of 3: {steps} steps in one process")
        expected = train_one_process(self._job.reference(steps=steps)).losses
        report = summary(disturbed, undisturbed, expected, nodes=self._options.nodes)
        if self._options.plot is not None:
            report["plot"] = draw(self._story(report, disturbed.timeline, expected), self._options.plot)
        return report

    def _story(self, report: dict[str, Any], timeline: Timeline, expected: Sequence[float]) -> Story:
        return Story(
            title=f"{self._trace.name}, {self._options.speedup:g} times as fast: {report['removals']} nodes killed, "
            f"{report['joins']} added; {report['lost_samples']} samples lost, {report['repeated_samples']} repeated, "
            f"losses within {report['max_rel_diff'] or math.inf:.0e}",
            timeline=timeline,
            capacity=self._options.nodes,
            batch=BATCH,
            undisturbed_rate=report["undisturbed_samples_per_second"],
            expected=expected,
            loss_name="loss (nats per letter)",
        )

    def _undisturbed(self) -> Timeline:
        options, folder = self._options, self._folder / "undisturbed"
        _say(f"1 of 3: {options.undisturbed_steps} steps on {options.nodes} nodes, undisturbed")
        folder.mkdir()
        journal = Journal(folder)
        journal.end_after(options.undisturbed_steps)
        with cluster_of(self._job, folder, nodes=options.nodes, zones=options.zone_names) as cluster:
            code = cluster.wait(_START_SECONDS + _SLOWEST_STEP_SECONDS * options.undisturbed_steps)
        if code != 0:
            raise BambooError(f"the undisturbed run has failed; its logs: {folder}")
        return Timeline.of(journal.read())

    def _disturbed(self) -> Disturbed:
        options = self._options
        first, lasts = len(begins_with(self._trace)), self._trace.seconds / options.speedup
        _say(f"2 of 3: {first} nodes to begin with; the trace takes {lasts:.0f} s at {options.speedup:g} times")
        return train_disturbed(
            self._job,
            self._trace,
            self._folder / "disturbed",
            zones=options.zone_names,
            speedup=options.speedup,
            steps=options.steps,
            stuck_seconds=options.stuck,
            tell=_say,
        )


def summary(run: Disturbed, undisturbed: Timeline, expected: Sequence[float], *, nodes: int) -> dict[str, Any]:
    """Return the report of a disturbed run.

    Args:
        run: that was disturbed.
        undisturbed: of a whole fleet.
        expected: the loss of each step in one process.
        nodes: of a whole fleet.
    """
    timeline, steps = run.timeline, len(expected)
    share = timeline.mean_live() / nodes
    counted = [lost_and_repeated(census, steps=steps, batch=BATCH) for census in run.census]
    lost, repeated = map(max, zip(*counted, strict=True)) if counted else (None, None)
    counts, difference = told(run.events), max_rel_diff(run.lines, expected)
    report = {
        "steps": steps,
        **counts,
        "lost_samples": lost,
        "repeated_samples": repeated,
        "max_rel_diff": rounded(difference) if difference < math.inf else None,
        "goodput": rounded(timeline.steps_per_second / (undisturbed.steps_per_second * share)),
        **timeline.removals(),
        "joins": timeline.joins(),
        "rollbacks": timeline.rollbacks,
        "seconds": rounded(timeline.seconds),
        "mean_live_share": rounded(share),
        "samples_per_second": rounded(BATCH * timeline.steps_per_second),
        "undisturbed_samples_per_second": rounded(BATCH * undisturbed.steps_per_second),
        "stalls": timeline.stalls(step_seconds=1 / undisturbed.steps_per_second),
        "ended": run.ended,
        "hung": run.hung,
    }
    exact = (counts["restarts"], lost, repeated) == (0, 0, 0) and difference <= MOST_DIFFERENCE
    return {"ok": run.ended and exact, **report}

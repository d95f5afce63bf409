"""The three runs of `bamboo-ds chaos`, and the report of what the market's nodes have done to the second.

1. A whole fleet that nobody disturbs, for its speed.
2. A fleet that follows the trace: every removal is a `kill -9` of all processes of a node.
3. One process, for the losses. It shares no code with the engine.
"""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bamboo_ds.cli.bench.reference import train_one_process
from bamboo_ds.cli.bench.report import rounded
from bamboo_ds.cli.chaos.drive import Drive, begins_with
from bamboo_ds.cli.chaos.job import BATCH, ChaosJob
from bamboo_ds.cli.chaos.journal import Journal, StepLine
from bamboo_ds.cli.chaos.picture import Story, draw
from bamboo_ds.cli.chaos.report import Timeline, lost_and_repeated, max_rel_diff, read_events, told
from bamboo_ds.cli.chaos.worker import train
from bamboo_ds.cli.local import LocalCluster
from bamboo_ds.config.source import CONFIG_VARIABLE, encoded
from bamboo_ds.errors import BambooError
from bamboo_ds.simulator.trace import Trace

if TYPE_CHECKING:
    from bamboo_ds.cli.chaos.command import ChaosOptions

__all__ = ["MOST_DIFFERENCE", "Chaos"]

MOST_DIFFERENCE = 1e-5
"""Of a loss, relative: sums over pipelines are taken in another order than in one process."""
_TTL_SECONDS = 3.0
_PATIENCE_SECONDS = 10.0
_START_SECONDS = 60.0
_SLOWEST_STEP_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Disturbed:
    """What is left of the disturbed run.

    Attributes:
        ended: whether the job has said that it is done.
        hung: whether it was given up.
        lines: of all its steps, by all workers.
        timeline: of its steps from the beginning of the trace on, and of what was done to it.
        census: how often each sample is in the final weights, as each worker that knows it says.
        events: of its agents.
    """

    ended: bool
    hung: bool
    lines: list[StepLine]
    timeline: Timeline
    census: tuple[list[int], ...]
    events: list[dict[str, Any]]


class Chaos:
    """The runs of one command.

    Args:
        options: of the command.
        trace: fitted to the fleet.
        folder: for logs and checkpoints.
    """

    def __init__(self, options: ChaosOptions, trace: Trace, folder: Path) -> None:
        self._options, self._trace, self._folder = options, trace, folder

    def report(self) -> dict[str, Any]:
        """Make the runs and return the report."""
        undisturbed = self._undisturbed()
        disturbed = self._disturbed()
        if len(disturbed.timeline.steps) < 2:
            raise BambooError(f"the job trained no two steps once it was disturbed; its logs: {self._folder}")
        steps = max(line.step + 1 for line in disturbed.lines)
        _say(f"3 of 3: {steps} steps in one process")
        expected = train_one_process(self._job(self._folder).reference(steps=steps)).losses
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
        with self._cluster(folder, nodes=options.nodes, zones=options.zone_names) as cluster:
            code = cluster.wait(_START_SECONDS + _SLOWEST_STEP_SECONDS * options.undisturbed_steps)
        if code != 0:
            raise BambooError(f"the undisturbed run has failed; its logs: {folder}")
        return Timeline.of(journal.read())

    def _disturbed(self) -> Disturbed:
        options, folder = self._options, self._folder / "disturbed"
        first = begins_with(self._trace)
        zones = tuple(event.zone for event in first) if all(event.zone for event in first) else options.zone_names
        lasts = self._trace.seconds / options.speedup
        _say(f"2 of 3: {len(first)} nodes to begin with; the trace takes {lasts:.0f} s at {options.speedup:g} times")
        folder.mkdir()
        journal = Journal(folder)
        with self._cluster(folder, nodes=len(first), zones=zones) as cluster:
            drive = Drive(
                cluster,
                self._trace,
                speedup=options.speedup,
                journal=journal,
                ready=functools.partial(_has_checkpoint, folder),
                steps=options.steps,
                stuck_seconds=options.stuck,
                tell=_say,
            )
            code = cluster.wait(meanwhile=drive.go_on)
            census = tuple(one for one in cluster.results().values() if one is not None)
        lines = [*drive.lines, *journal.read()]
        timeline = Timeline.of([line for line in lines if line.at >= drive.began], drive.deeds)
        return Disturbed(code == 0, drive.hung, lines, timeline, census, read_events(folder / "logs"))

    def _cluster(self, folder: Path, *, nodes: int, zones: tuple[str, ...]) -> LocalCluster:
        job = self._job(folder)
        return LocalCluster(
            functools.partial(train, job, folder),
            nodes=nodes,
            zones=zones,
            job="chaos",
            ttl_seconds=_TTL_SECONDS,
            patience_seconds=_PATIENCE_SECONDS,
            log_folder=folder / "logs",
            echo=False,
            environment={CONFIG_VARIABLE: encoded(job.deepspeed_config())},
        )

    def _job(self, folder: Path) -> ChaosJob:
        options = self._options
        return ChaosJob(
            stages=options.stages,
            pipelines=options.pipelines,
            pace_seconds=options.pace / 1000,
            checkpoints=str(folder / "checkpoints"),
            checkpoint_steps=options.checkpoint_steps,
            timeout_seconds=options.stuck,
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


def _has_checkpoint(folder: Path) -> bool:
    return (folder / "checkpoints" / "latest").exists()


def _say(text: str) -> None:
    sys.stderr.write(f"chaos: {time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()

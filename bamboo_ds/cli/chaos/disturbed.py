"""A job on local nodes that come and go as a trace says, and what is left of it."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bamboo_ds.cli.chaos.drive import Drive, begins_with
from bamboo_ds.cli.chaos.job import ChaosJob, checkpoints_in
from bamboo_ds.cli.chaos.journal import Journal, StepLine
from bamboo_ds.cli.chaos.report import Timeline, read_events
from bamboo_ds.cli.chaos.worker import train
from bamboo_ds.cli.local import LocalCluster
from bamboo_ds.config.source import CONFIG_VARIABLE, encoded
from bamboo_ds.simulator.trace import Trace

__all__ = ["TTL_SECONDS", "Disturbed", "Tell", "cluster_of", "teller", "train_disturbed"]

Tell = Callable[[str], None]

TTL_SECONDS = 3.0
_PATIENCE_SECONDS = 10.0
_APART_SECONDS = 0.5
"""Between nodes that come in turn: each has registered before the next one starts."""


@dataclass(frozen=True, slots=True)
class Disturbed:
    """What is left of a disturbed run.

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


def cluster_of(
    job: ChaosJob, folder: Path, *, nodes: int, zones: Sequence[str], start_workers: int | None = None
) -> LocalCluster:
    """Return a cluster that trains a job.

    Args:
        job: what is trained.
        folder: of logs, journal and checkpoints.
        nodes: at the beginning.
        zones: of the nodes, in turn.
        start_workers: with so many the job begins; all by default.
    """
    return LocalCluster(
        functools.partial(train, job, folder),
        nodes=nodes,
        zones=zones,
        job="chaos",
        ttl_seconds=TTL_SECONDS,
        patience_seconds=_PATIENCE_SECONDS,
        start_workers=start_workers,
        log_folder=folder / "logs",
        echo=False,
        # One thread, also where the cluster begins with one node.
        environment={CONFIG_VARIABLE: encoded(job.deepspeed_config(folder)), "OMP_NUM_THREADS": "1"},
    )


def train_disturbed(
    job: ChaosJob,
    trace: Trace,
    folder: Path,
    *,
    zones: Sequence[str],
    speedup: float = 1.0,
    steps: int | None = None,
    stuck_seconds: float = 60.0,
    tell: Tell,
    in_turn: bool = False,
) -> Disturbed:
    """Let a job train on the nodes of a trace.

    Args:
        job: what is trained.
        trace: when nodes come and go.
        folder: of logs, journal and checkpoints; is made.
        zones: of nodes whose zone the trace does not tell, in turn.
        speedup: seconds of the trace in a second.
        steps: to train; None to end soon after the trace.
        stuck_seconds: without a step after which the run is given up.
        tell: says what goes on.
        in_turn: let the first nodes come one after another, so that which worker and whose turn it is to coordinate
            follows from the trace.
    """
    first = begins_with(trace)
    zones = [event.zone for event in first] if all(event.zone for event in first) else list(zones)
    folder.mkdir()
    journal = Journal(folder)
    at_once = 1 if in_turn else len(first)
    with cluster_of(job, folder, nodes=at_once, zones=zones, start_workers=len(first)) as cluster:
        for _ in first[at_once:]:
            time.sleep(_APART_SECONDS)
            cluster.add()
        drive = Drive(
            cluster,
            trace,
            speedup=speedup,
            journal=journal,
            ready=functools.partial(_has_checkpoint, folder),
            steps=steps,
            stuck_seconds=stuck_seconds,
            tell=tell,
        )
        code = cluster.wait(meanwhile=drive.go_on)
        census = tuple(one for one in cluster.results().values() if one is not None)
    lines = [*drive.lines, *journal.read()]
    timeline = Timeline.of([line for line in lines if line.at >= drive.began], drive.deeds)
    return Disturbed(code == 0, drive.hung, lines, timeline, census, read_events(folder / "logs"))


def _has_checkpoint(folder: Path) -> bool:
    return (checkpoints_in(folder) / "latest").exists()


def teller(name: str) -> Tell:
    """Return what tells people on stderr what goes on in a command."""

    def tell(text: str) -> None:
        sys.stderr.write(f"{name}: {time.strftime('%H:%M:%S')} {text}\n")
        sys.stderr.flush()

    return tell

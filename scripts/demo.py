"""The demo: trains the main job on emulated nodes twice; in the second run nodes go and come. Compares the losses.

::

    python scripts/demo.py                              8 nodes in 3 zones, 4 stages x 2 pipelines
    python scripts/demo.py --steps 60 --text my_texts/

Both runs are what `bamboo-ds run --local-nodes 8 --zones a,b,c scripts/train_gpt.py ...` does, with the same seed. In
the second one, nodes are killed (SIGKILL to all their processes) and added as `STORY` says: one node, all nodes of a
zone at once, one more. Progress goes to stderr; stdout holds one line, the JSON summary of the second run and what all
that has done to it. Options that the demo does not know go to the job. Exit code: 0 when nothing was lost, repeated,
restarted or computed otherwise, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shlex
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpt_report import Curves
from train_gpt import claim_stdout, positive

from bamboo_ds.cli import endpoint
from bamboo_ds.cli.chaos.drive import Deed
from bamboo_ds.cli.chaos.journal import Journal, StepLine
from bamboo_ds.cli.chaos.picture import Mark, Story, draw
from bamboo_ds.cli.chaos.report import Timeline, max_rel_diff, read_events, told
from bamboo_ds.cli.local import LocalCluster
from bamboo_ds.elastic.spawner import Script
from bamboo_ds.errors import BambooError
from bamboo_ds.simulator.trace import Change

ROOT = Path(__file__).resolve().parents[1]
JOB = "demo"
LOOK_SECONDS = 0.1
MOST_DIFFERENCE = 1e-5
"""Of a loss, relative: with another number of pipelines, sums are taken in another order."""

STORY = (
    (0.12, "kill the node that reports"),
    (0.30, "add what was lost"),
    (0.48, "kill a zone"),
    (0.66, "add what was lost"),
    (0.86, "kill the newest node"),
)
"""After which part of the steps what happens."""


def main() -> None:
    """Run the demo."""
    arguments, for_job = parse_arguments()
    stdout = claim_stdout()
    try:
        summary = demo(arguments, for_job)
    except (DemoError, BambooError) as error:
        say(str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    print(json.dumps(summary), file=stdout, flush=True)
    sys.exit(0 if is_right(summary) else 1)


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Return the demo's own options, and those of the job."""
    parser = argparse.ArgumentParser(
        description="Train, kill and add nodes meanwhile, and compare with an undisturbed run.",
        epilog="Other options go to scripts/train_gpt.py in both runs.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nodes", type=positive, default=8, help="nodes to emulate, with one worker each")
    add("--zones", default="a,b,c", help="their zones in turn")
    add("--steps", type=positive, default=120, help="steps to train, in both runs")
    add("--out", type=Path, default=Path("runs/demo"), help="folder for logs and the picture")
    return parser.parse_known_args(argv)


class DemoError(Exception):
    """The demo cannot go on."""


def say(text: str) -> None:
    """Tell the user what goes on; a progress bar that stands in this line gives way to it."""
    clear = "\r\x1b[2K" if sys.stderr.isatty() else ""
    sys.stderr.write(f"{clear}demo: {text}\n")  # in one piece, with its end: workers write at the same time
    sys.stderr.flush()


def demo(arguments: argparse.Namespace, for_job: Sequence[str]) -> dict[str, Any]:
    """Run the job twice, and return the summary."""
    undisturbed, disturbed = (Run(arguments, for_job, name=name) for name in ("undisturbed", "disturbed"))
    say("1 of 2: an undisturbed run")
    undisturbed.run(())
    say("2 of 2: the same again, while nodes go and come; to watch it from another terminal:")
    say(f"    bamboo-ds status --watch --logs {shlex.quote(str(disturbed.folder))}")
    disturbed.run(STORY)
    for event in disturbed.events:
        if event["kind"] in ("recovered", "reshaped"):
            say(event["text"])
    return compare(undisturbed, disturbed, arguments)


# ---- a run -------------------------------------------------------------------------------------------------------


class Run:
    """The main job on emulated nodes.

    Args:
        arguments: of the demo.
        for_job: options of the job.
        name: of the run, and of its folder.

    Attributes:
        folder: of its logs; what a former run has left there goes when it begins.
        lines: of its steps, by all workers.
        deeds: what was done to its nodes; `marks` says it in words.
        events: that its agents have seen, oldest first.
        summary: what the job itself says.
        batch: samples of a step.
    """

    def __init__(self, arguments: argparse.Namespace, for_job: Sequence[str], *, name: str) -> None:
        self.folder: Path = arguments.out / name
        self._losses = self.folder / "losses.json"
        job = ["--deepspeed_config", ROOT / "ds_configs/gpt_tiny.json", "--stages", 4, "--steps", arguments.steps]
        job += ["--journal", self.folder, "--losses", self._losses, "--out", self.folder, *for_job]
        self._script = Script((str(ROOT / "scripts/train_gpt.py"), *map(str, job)))
        self._nodes, self._zones, self.steps = arguments.nodes, tuple(arguments.zones.split(",")), arguments.steps
        self.lines: list[StepLine] = []
        self.deeds: list[Deed] = []
        self.marks: list[Mark] = []
        self.events: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.batch = 0

    def run(self, story: Sequence[tuple[float, str]]) -> None:
        """Run it to its end, and let that happen to it.

        Raises:
            DemoError: it failed.
        """
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        with self._cluster() as cluster:
            teller = Teller(self, cluster, story, zones=self._zones)
            # Bamboo bounds its own waits; the job itself may take as long as it takes.
            code = cluster.wait(meanwhile=teller.go_on)
        teller.look()
        if code != 0:
            raise DemoError(f"the job has failed; its logs: {self.folder}")
        self.events = read_events(self.folder)
        self.summary = summary_in(self.folder)
        self.batch = Curves.read(self._losses).batch_size

    @contextlib.contextmanager
    def _cluster(self) -> Iterator[LocalCluster]:
        """Start it; at the end of the block it runs no longer."""
        cluster = LocalCluster(
            self._script, nodes=self._nodes, zones=self._zones, job=JOB, log_folder=self.folder.resolve()
        )
        with cluster:
            endpoint.remember(self.folder, cluster.etcd, job=JOB)
            try:
                yield cluster
            finally:
                endpoint.forget(self.folder)

    def node_of(self, worker: int) -> str:
        """Return the node that a worker has been started on."""
        (log,) = self.folder.glob(f"*/worker-{worker}.log")
        return log.parent.name


def summary_in(folder: Path) -> dict[str, Any]:
    """Return the summary that some worker has printed.

    Raises:
        DemoError: nobody has.
    """
    for path in folder.glob("*/worker-*.log"):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                if line.startswith('{"loss_first"'):
                    return dict(json.loads(line))
    raise DemoError(f"the job printed no summary; its logs: {folder}")


class Teller:
    """Lets happen what the story says, when training is so far.

    Args:
        run: that it happens to.
        cluster: of the run.
        story: after which part of the steps what happens.
        zones: given to the first nodes in turn.
    """

    def __init__(
        self, run: Run, cluster: LocalCluster, story: Sequence[tuple[float, str]], *, zones: Sequence[str]
    ) -> None:
        self._run, self._cluster, self._story = run, cluster, list(story)
        self._journal, self._looked = Journal(run.folder), 0.0
        self._zone = {name: zones[index % len(zones)] for index, name in enumerate(cluster.names)}
        self._lost: list[str] = []
        run.deeds = [Deed(time.time(), Change.ADD, name, len(cluster.names)) for name in cluster.names]

    def go_on(self) -> bool:
        """Do what is due; there are nodes at any time."""
        if time.monotonic() > self._looked + LOOK_SECONDS:
            self._looked = time.monotonic()
            self.look()
            if self._story and self._trained >= max(self._story[0][0] * self._run.steps, 1):
                self._do(self._story.pop(0)[1])
        return False

    def look(self) -> None:
        """See how far the workers are."""
        self._run.lines += self._journal.read()

    @property
    def _trained(self) -> int:
        return max((line.step + 1 for line in self._run.lines), default=0)

    def _do(self, what: str) -> None:
        if what == "add what was lost":
            self._add()
        elif what == "kill a zone":
            zones = Counter(self._zone[name] for name in self._cluster.live)
            zone, _ = zones.most_common(1)[0]
            self._kill([name for name in self._cluster.live if self._zone[name] == zone], f"zone {zone} lost")
        else:
            workers = sorted({line.worker for line in self._run.lines if line.step == self._trained - 1})
            node = self._run.node_of(workers[0] if what == "kill the node that reports" else workers[-1])
            self._kill([node], f"{node} killed")

    def _kill(self, nodes: Sequence[str], text: str) -> None:
        self._mark(f"kill -9 of {', '.join(nodes)}", text)
        for node in nodes:
            self._cluster.kill(node)
            self._note(Change.REMOVE, node)
        self._lost += [self._zone[node] for node in nodes]

    def _add(self) -> None:
        count = len(self._lost)
        self._mark(f"{count} node(s) join", f"{count} join")
        for zone in self._lost:
            node = self._cluster.add(zone=zone)
            self._zone[node] = zone
            self._note(Change.ADD, node)
        self._lost.clear()

    def _note(self, change: Change, node: str) -> None:
        self._run.deeds.append(Deed(time.time(), change, node, len(self._cluster.live)))

    def _mark(self, text: str, short: str) -> None:
        say(f"step {self._trained}: {text}")
        self._run.marks.append(Mark(time.time(), short))


# ---- what came of it ---------------------------------------------------------------------------------------------


def compare(undisturbed: Run, disturbed: Run, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the summary of the disturbed run, with what was done to it and came of it; draw both runs."""
    losses = {line.step: line.loss for line in undisturbed.lines}
    expected = [losses[step] for step in range(arguments.steps)]
    timeline, before = Timeline.of(disturbed.lines, disturbed.deeds), Timeline.of(undisturbed.lines)
    curve = Curves(1, disturbed.batch, [line.loss for line in timeline.steps])
    figures = {name: curve.summary()[name] for name in ("loss_first", "loss_last", "steps")}
    counts = told(disturbed.events)
    samples = lost_and_repeated(disturbed.lines, expected, batch=disturbed.batch)
    difference = max_rel_diff(disturbed.lines, expected)
    shape = f"{before.steps[0].stages} stages x {before.steps[0].pipelines} pipelines"
    story = Story(
        title=f"{arguments.nodes} nodes, {shape} when all are there. {timeline.removals()['removals']} nodes killed, "
        f"{timeline.joins()} added: {samples['lost_samples']} samples lost, {samples['repeated_samples']} repeated, "
        f"{counts['restarts']} restarts, losses within {difference:.0e}",
        timeline=timeline,
        capacity=arguments.nodes,
        batch=disturbed.batch,
        undisturbed_rate=disturbed.batch * before.steps_per_second,
        expected=expected,
        loss_name="loss (nats per byte)",
        marks=disturbed.marks,
    )
    return {
        **disturbed.summary,
        **figures,
        "plot": draw(story, arguments.out / "timeline.png"),
        "preemptions": timeline.removals()["removals"],
        "joins": timeline.joins(),
        **{name: counts[name] for name in ("failovers", "reconfigurations", "restores", "restarts")},
        **samples,
        "max_rel_diff": float(f"{difference:.3g}") if difference < math.inf else None,
        "matches_undisturbed": matches(timeline.steps, expected),
    }


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


def is_right(summary: Mapping[str, Any]) -> bool:
    """Say whether the disturbed run was disturbed as it should be, and nothing came of it; if not, say why."""
    wanted = {"restarts": 0, "lost_samples": 0, "repeated_samples": 0, "matches_undisturbed": True}
    wrong = [f"{name} is {summary[name]}, not {value}" for name, value in wanted.items() if summary[name] != value]
    least = {"preemptions": 3, "joins": 2, "failovers": 1, "reconfigurations": 1}
    few = [f"{name} is {summary[name]}, not {value} or more" for name, value in least.items() if summary[name] < value]
    if wrong or few:
        say("; ".join([*wrong, *few]))
    if few:
        say("the run may have ended before all of it had happened: take more --steps")
    return not wrong and not few


if __name__ == "__main__":
    main()

"""The demo: trains the main job on emulated nodes twice, kills two nodes of the second run, and compares the losses.

::

    python scripts/demo.py                              8 nodes, 4 stages x 2 pipelines
    python scripts/demo.py --steps 60 --text my_texts/

Both runs are `bamboo-ds run --local-nodes 8 ... scripts/train_gpt.py ...` with the same seed. While the second one
trains, `bamboo-ds preempt NODE --how kill` ends all processes of a node after a third of the steps (the node whose
worker reports: it has rank 0), and of a node in another pipeline after two thirds. Progress goes to stderr; stdout
holds one line, the JSON summary of the second run and what the kills have done to it. Options that the demo does not
know go to the job. Exit code: 0 when both runs match, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from gpt_report import Curves, Mark, plot_runs
from train_gpt import positive

from bamboo_ds.elastic.forking import signal_at_parents_death

ROOT = Path(__file__).resolve().parents[1]
BAMBOO = (sys.executable, "-m", "bamboo_ds.cli.main")
KILLS = 2
END_SECONDS = 30.0
"""In which a run that is told to end does so."""
LOOK_SECONDS = 0.5

Report = dict[str, Any]
"""What `bamboo-ds status --json` prints."""


def main() -> None:
    """Run the demo."""
    arguments, for_job = parse_arguments()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end_in_order)
    try:
        summary = demo(arguments, for_job)
    except DemoError as error:
        say(str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    print(json.dumps(summary), flush=True)
    sys.exit(0 if is_right(summary) else 1)


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Return the demo's own options, and those of the job."""
    parser = argparse.ArgumentParser(
        description="Train, kill two nodes meanwhile, and compare with an undisturbed run.",
        epilog="Other options go to scripts/train_gpt.py in both runs.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nodes", type=positive, default=8, help="nodes to emulate, with one worker each")
    add("--zones", default="a,b,c", help="their zones in turn")
    add("--steps", type=positive, default=120, help="steps to train, in both runs")
    add("--out", type=Path, default=Path("runs/demo"), help="folder for logs and the loss plot")
    return parser.parse_known_args(argv)


class DemoError(Exception):
    """The demo cannot go on."""


def end_in_order(number: int, frame: object) -> NoReturn:
    """Unwind, so that what was started ends first."""
    sys.exit(128 + number)


def say(text: str) -> None:
    """Tell the user what goes on; a progress bar that stands in this line gives way to it."""
    clear = "\r\x1b[2K" if sys.stderr.isatty() else ""
    sys.stderr.write(f"{clear}demo: {text}\n")  # in one piece, with its end: workers write at the same time
    sys.stderr.flush()


def demo(arguments: argparse.Namespace, for_job: Sequence[str]) -> dict[str, Any]:
    """Run the job twice, and return the summary."""
    begun = time.time()
    undisturbed = Run(arguments, for_job, name="undisturbed")
    say("1 of 2: an undisturbed run")
    with undisturbed.running():
        undisturbed.wait()
    disturbed = Run(arguments, for_job, name="disturbed")
    say("2 of 2: the same again, and two nodes are killed meanwhile; to watch it from another terminal:")
    say(f"    bamboo-ds status --watch --logs {shlex.quote(str(disturbed.folder))}")
    with disturbed.running():
        killed = kill_nodes(disturbed, steps=arguments.steps)
        disturbed.wait()
    events = read_events(disturbed.folder, since=begun)
    tell_failovers(events)
    return compare(undisturbed, disturbed, events, killed, plot=arguments.out / "loss.png")


# ---- a run -------------------------------------------------------------------------------------------------------


class Run:
    """The main job on emulated nodes, from `bamboo-ds run` to its summary.

    Args:
        arguments: of the demo.
        for_job: options of the job.
        name: of the run, and of its folder.
    """

    def __init__(self, arguments: argparse.Namespace, for_job: Sequence[str], *, name: str) -> None:
        self.folder = arguments.out / name
        self._losses = self.folder / "losses.json"
        cluster = ["--local-nodes", arguments.nodes, "--zones", arguments.zones, "--logs", self.folder]
        job = ["--deepspeed_config", ROOT / "ds_configs/gpt_tiny.json", "--stages", 4, "--steps", arguments.steps]
        job += ["--losses", self._losses, "--out", self.folder, *for_job]
        self._command = ["run", *map(str, cluster), str(ROOT / "scripts/train_gpt.py"), *map(str, job)]
        self.summary: dict[str, Any] = {}
        self._process: subprocess.Popen[str] | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Start it; at the end of the block it runs no longer."""
        (self.folder / "endpoint.json").unlink(missing_ok=True)  # of a run that was killed
        self._losses.unlink(missing_ok=True)
        say(shlex.join(["bamboo-ds", *self._command]))
        with started(*self._command) as self._process:
            yield

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._process is not None and self._process.poll() is None

    def wait(self) -> None:
        """Wait for its end and take its summary.

        Raises:
            DemoError: it failed.
        """
        assert self._process is not None
        # Bamboo bounds its own waits; the job itself may take as long as it takes.
        stdout, _ = self._process.communicate()
        if self._process.returncode != 0:
            raise DemoError(f"bamboo-ds run ended with code {self._process.returncode}; its logs: {self.folder}")
        try:
            self.summary = json.loads(stdout.splitlines()[-1])
        except (IndexError, ValueError):
            raise DemoError(f"bamboo-ds run printed no summary; its logs: {self.folder}") from None

    def curves(self) -> Curves:
        """Return the losses of the run, which has ended."""
        return Curves.read(self._losses)

    def reports(self) -> Iterator[Report]:
        """Yield what `bamboo-ds status` sees of the run, about twice a second while it trains."""
        while self.runs:
            with started("status", "--watch", "--json", "--logs", str(self.folder), quiet=True) as status:
                assert status.stdout is not None
                yield from map(json.loads, status.stdout)
            time.sleep(LOOK_SECONDS)  # there is nothing to see yet, or no more


@contextlib.contextmanager
def started(*command: str, quiet: bool = False) -> Iterator[subprocess.Popen[str]]:
    """Start a `bamboo-ds` command whose stdout we read; it ends with the block, and if we are killed.

    It has a session of its own: Ctrl-C comes to us, and we tell it to end.
    """
    process = subprocess.Popen(
        [*BAMBOO, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if quiet else None,
        text=True,
        start_new_session=True,
        preexec_fn=functools.partial(signal_at_parents_death, signal.SIGTERM, parent=os.getpid()),
    )
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[str]) -> None:
    """Let a command end in order, or else at once."""
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


# ---- the kills ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Victim:
    """A node to kill, and what its worker does."""

    node: str
    worker: int
    pipeline: int
    stage: int

    def __str__(self) -> str:
        return f"node {self.node}: worker {self.worker}, stage {self.stage} of pipeline {self.pipeline}"


def kill_nodes(run: Run, *, steps: int) -> list[Victim]:
    """Kill a node after a third of the steps, and another after two thirds; return them.

    Raises:
        DemoError: no node can be lost without losing a stage.
    """
    killed: list[Victim] = []
    struck_at = 0.0
    with contextlib.closing(run.reports()) as reports:
        for report in reports:
            step = (report["progress"] or {}).get("step") or 0
            is_due = step >= max((len(killed) + 1) * steps // (KILLS + 1), 1)
            if not is_due or report["time"] < struck_at:  # one from before the last kill shows what is no more
                continue
            victim = choose_victim(report["plan"], killed)
            say(f"step {step}: kill -9 of {victim}")
            preempt(run, victim)
            killed.append(victim)
            struck_at = time.time()
            if len(killed) == KILLS:
                break
    return killed


def choose_victim(plan: Mapping[str, Any], killed: Sequence[Victim]) -> Victim:
    """Choose a node whose loss the plan survives: the shadow of its stage lives, in a pipeline without a loss so far.

    The first is that of the worker with rank 0: ranks are the order of the ids of the plan's workers.

    Raises:
        DemoError: there is none.
    """
    whole = [
        Victim(cell["node"], cell["owner"], pipeline, stage)
        for pipeline, row in enumerate(plan["grid"])
        if len(row) > 1 and all(cell["owner"] == cell["home"] for cell in row)
        for stage, cell in enumerate(row)
    ]
    if not whole:
        raise DemoError("every pipeline has lost a worker, or has one only: take more --nodes or more --stages")
    if killed:
        # Half a pipeline further on, as each stage is another case: the first draws the data, the last has the loss.
        stage = (killed[0].stage + plan["num_stages"] // 2) % plan["num_stages"]
        whole = [victim for victim in whole if victim.stage == stage]
    return min(whole, key=lambda victim: victim.worker)


def preempt(run: Run, victim: Victim) -> None:
    """Kill a node, as a cloud might, and tell what the job did about it.

    Raises:
        DemoError: it cannot be done.
    """
    command = ["preempt", victim.node, "--how", "kill", "--wait", "15", "--logs", str(run.folder)]
    done = subprocess.run([*BAMBOO, *command], capture_output=True, text=True, check=False, timeout=60)
    if done.returncode != 0:
        raise DemoError(f"bamboo-ds {shlex.join(command)}: {done.stderr.strip()}")
    say(done.stdout.strip())


# ---- what came of it ---------------------------------------------------------------------------------------------


def read_events(folder: Path, *, since: float) -> list[dict[str, Any]]:
    """Return the events of a run, oldest first: those that any of its agents has seen (some were killed).

    Args:
        folder: of its logs; those of former runs in it are passed over.
        since: Unix seconds.
    """
    lines = {line for path in folder.glob("*/events.jsonl") for line in path.read_text(encoding="utf-8").splitlines()}
    events = [json.loads(line) for line in lines]
    return sorted((event for event in events if event["time"] >= since), key=lambda event: event["time"])


def of_kind(events: Sequence[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    """Return the events of a kind."""
    return [event for event in events if event["kind"] == kind]


def tell_failovers(events: Sequence[Mapping[str, Any]]) -> None:
    """Tell what the workers that took over say of it."""
    for event in of_kind(events, "recovered"):
        say(event["text"])


def count(events: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the numbers of the summary that the events of a run tell.

    - preemptions: nodes that were told to break, and said that they do. (One that cannot says so without `how`.)
    - failovers: versions of the plan in which shadows took over, as the coordinators decided them.
    - restarts: workers that were started when training had begun, i.e. are not among those that began, and plans that
      went back to a checkpoint.
    """
    began = {worker for event in of_kind(events, "roster") for worker in event["workers"]}
    came = {worker for event in of_kind(events, "node_joined") for worker in event["workers"]}
    restored = [event for event in events if event.get("action") == "restore"]
    return {
        "preemptions": len({event["node"] for event in of_kind(events, "preempt") if "how" in event}),
        "failovers": len(of_kind(events, "failover")),
        "restarts": len(came - began) + len(restored),
    }


def lost_samples(undisturbed: Curves, disturbed: Curves) -> int:
    """Return how many samples of the undisturbed run the other cannot prove to have trained on.

    The loss of a step is the mean over all samples of its batch. So a step whose loss has the same bits has seen them
    all, each once; one with another loss, or none, counts as lost with all its samples.
    """
    theirs = dict(enumerate(disturbed.training, start=disturbed.first_step))
    ours = enumerate(undisturbed.training, start=undisturbed.first_step)
    return undisturbed.batch_size * sum(theirs.get(step) != loss for step, loss in ours)


def compare(
    undisturbed: Run, disturbed: Run, events: Sequence[Mapping[str, Any]], killed: Sequence[Victim], *, plot: Path
) -> dict[str, Any]:
    """Return the summary of the disturbed run, with what the kills did to it; draw both runs."""
    before, after = undisturbed.curves(), disturbed.curves()
    numbers = {**count(events), "lost_samples": lost_samples(before, after)}
    matches = (
        before.training == after.training  # floats compare by their bits, but for NaN, which nothing equals
        and before.validation == after.validation
        and undisturbed.summary["sample"] == disturbed.summary["sample"]
    )
    shape = f"{disturbed.summary['stages']} stages x {disturbed.summary['pipelines']} pipelines"
    title = f"{shape}, {len(killed)} nodes killed: losses {'are bit-equal' if matches else 'differ'}"
    drawn = plot_runs(before, after, marks(events, killed), title=title, path=plot)
    return {**disturbed.summary, "plot": drawn, **numbers, "matches_undisturbed": matches}


def marks(events: Sequence[Mapping[str, Any]], killed: Sequence[Victim]) -> list[Mark]:
    """Return where to mark the kills: at the step in which the shadow took over, as it says itself."""
    victims = {victim.worker: victim for victim in killed}
    return [
        Mark(event["step"] + 1, "kill -9 of " + str(victims[worker]).replace(": ", "\n"))  # the event counts from 0
        for event in of_kind(events, "recovered")
        for worker in event["victims"]
        if worker in victims
    ]


def is_right(summary: Mapping[str, Any]) -> bool:
    """Say whether the disturbed run was disturbed as it should be, and nothing came of it; if not, say why."""
    wanted = {"preemptions": KILLS, "failovers": KILLS, "restarts": 0, "lost_samples": 0, "matches_undisturbed": True}
    wrong = [f"{name} is {summary[name]}, not {value}" for name, value in wanted.items() if summary[name] != value]
    if wrong:
        say("; ".join(wrong))
        if summary["preemptions"] < KILLS:
            say("the run ended before both nodes were killed: take more --steps")
    return not wrong


if __name__ == "__main__":
    main()

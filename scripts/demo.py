"""The demo: trains the main job on emulated nodes twice; in the second run nodes go and come. Compares the losses.

::

    python scripts/demo.py                              8 nodes in 3 zones, 4 stages x 2 pipelines
    python scripts/demo.py --steps 60 --text my_texts/

Both runs are what `bamboo-ds run --local-nodes 8 --zones a,b,c scripts/train_gpt.py ...` does, with the same seed. The
second one has `--cloud`, too: a pretend market on this machine, with prices. There, nodes are taken away as `STORY`
says: killed (SIGKILL to all their processes), all nodes of a zone at once, or after a warning. Nobody adds any: the job
orders them itself, and one more than it uses, a spare. What happens next waits until the fleet is whole again.

Progress goes to stderr; stdout holds one line, the JSON summary of the second run and what all that has done to it.
Options that the demo does not know go to the job. Exit code: 0 when nothing was lost, repeated, restarted or computed
otherwise, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from demo_report import compare
from demo_story import STORY, DemoError, Teller, say
from gpt_report import Curves
from train_gpt import claim_stdout, positive

from bamboo_ds.cli import endpoint
from bamboo_ds.cli.chaos.drive import Deed
from bamboo_ds.cli.chaos.journal import StepLine
from bamboo_ds.cli.chaos.picture import Mark
from bamboo_ds.cli.chaos.report import read_events
from bamboo_ds.cli.local import LocalCluster
from bamboo_ds.cli.run_cloud import LocalFleet, local_fleet
from bamboo_ds.config.cloud import CloudConfig, load_cloud_config
from bamboo_ds.elastic.spawner import Script
from bamboo_ds.errors import BambooError

ROOT = Path(__file__).resolve().parents[1]
CLOUD = ROOT / "scripts/demo_cloud.json"
"""The pretend market, and what its nodes cost."""
JOB = "demo"
SPARES = 1
"""Nodes that the fleet has above those that train: one takes over at once what another leaves."""
STATUS_SECONDS = 60.0


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


def demo(arguments: argparse.Namespace, for_job: Sequence[str]) -> dict[str, Any]:
    """Run the job twice, and return the summary."""
    undisturbed, disturbed = (Run(arguments, for_job, name=name) for name in ("undisturbed", "disturbed"))
    say("1 of 2: an undisturbed run")
    undisturbed.run()
    say("2 of 2: the same again, while nodes go and come; to watch it from another terminal:")
    say(f"    bamboo-ds status --watch --logs {shlex.quote(str(disturbed.folder))}")
    disturbed.run(STORY, load_cloud_config(CLOUD))
    for event in disturbed.events:
        if event["kind"] in ("fleet_order", "notice", "recovered", "reshaped"):
            say(event["text"])
    return compare(undisturbed, disturbed, plot=arguments.out / "timeline.png")


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
        deeds: what became of its nodes; `marks` says it in words.
        warned: the node that was taken away with a warning; empty for none.
        events: that its agents have seen, oldest first.
        summary: what the job itself says.
        batch: samples of a step.
        cost: of its nodes, as `bamboo-ds status` says in the end.
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
        self.warned = ""
        self.events: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.batch = 0
        self.cost: dict[str, Any] = {}

    def run(self, story: Sequence[tuple[float, str]] = (), market: CloudConfig | None = None) -> None:
        """Run it to its end, and let that happen to it.

        Args:
            story: what happens after which part of the steps.
            market: that gives nodes in place of those that are gone, and prices; None for none.

        Raises:
            DemoError: it failed.
        """
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        cloud = None if market is None else self._cloud(market)
        with local_fleet(cloud, job=JOB, workers=1, zones=self._zones) as fleet, self._cluster(fleet) as cluster:
            teller = Teller(self, cluster, story, fleet=fleet)
            # Bamboo bounds its own waits; the job itself may take as long as it takes.
            code = cluster.wait(meanwhile=teller.go_on)
            if code == 0 and cloud is not None:
                self.cost = cost_of(self.folder)
        teller.look()
        if code != 0:
            raise DemoError(f"the job has failed; its logs: {self.folder}")
        self.events = read_events(self.folder)
        self.summary = summary_in(self.folder)
        self.batch = Curves.read(self._losses).batch_size

    @property
    def fleet_nodes(self) -> int:
        """How many nodes its fleet has when it is whole."""
        return self._nodes + SPARES

    @property
    def zones(self) -> dict[str, str]:
        """The zones of the nodes that it begins with."""
        return {f"n{index}": self._zones[index % len(self._zones)] for index in range(self._nodes)}

    def notice_file(self, node: str) -> Path:
        """Return the file that says that a node will be taken away."""
        return self.folder.resolve() / f"notice-{node}.json"

    def _cloud(self, market: CloudConfig) -> CloudConfig:
        """Return the market that keeps this fleet, and warns."""
        return market.model_copy(update={"nodes": self.fleet_nodes, "notice_file": str(self.notice_file("{node}"))})

    @contextlib.contextmanager
    def _cluster(self, fleet: LocalFleet) -> Iterator[LocalCluster]:
        """Start it; at the end of the block it runs no longer."""
        cluster = LocalCluster(
            self._script,
            nodes=self._nodes,
            zones=self._zones,
            job=JOB,
            log_folder=self.folder.resolve(),
            companions=fleet.companions,
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


def cost_of(folder: Path) -> dict[str, Any]:
    """Return what the nodes of a run cost, from a `bamboo-ds status` of its own: this process opens no store.

    Raises:
        DemoError: it does not say.
    """
    command = [sys.executable, "-m", "bamboo_ds.cli.main", "status", "--json", "--logs", str(folder)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=STATUS_SECONDS, check=False)
    cost = json.loads(said.stdout)["fleet"]["cost"] if said.returncode == 0 else None
    if not cost or cost["samples_per_dollar"] is None:
        raise DemoError(f"bamboo-ds status knows of no cost: {said.stderr or said.stdout}")
    return dict(cost)


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


# ---- whether it is right ------------------------------------------------------------------------------------------


def is_right(summary: Mapping[str, Any]) -> bool:
    """Say whether the disturbed run was disturbed as it should be, and nothing came of it; if not, say why."""
    wanted = {
        "restarts": 0, "recomputed_micro_batches": 0, "lost_samples": 0, "repeated_samples": 0,
        "matches_undisturbed": True,
    }  # fmt: skip
    wrong = [f"{name} is {summary[name]}, not {value}" for name, value in wanted.items() if summary[name] != value]
    least = {"preemptions": 4, "joins": 4, "failovers": 1, "reconfigurations": 1, "handovers": 1}
    few = [f"{name} is {summary[name]}, not {value} or more" for name, value in least.items() if summary[name] < value]
    if wrong or few:
        say("; ".join([*wrong, *few]))
    if few:
        say("the run may have ended before all of it had happened: take more --steps")
    return not wrong and not few


if __name__ == "__main__":
    main()

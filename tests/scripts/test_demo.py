"""The demo: its pure parts here, and the whole of it on four small nodes, which go and come."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import demo  # noqa: E402
import demo_report  # noqa: E402
import demo_story  # noqa: E402

from bamboo_ds.cli.chaos.drive import Deed  # noqa: E402
from bamboo_ds.cli.chaos.journal import StepLine  # noqa: E402
from bamboo_ds.config.cloud import load_cloud_config  # noqa: E402
from bamboo_ds.simulator.trace import Change  # noqa: E402
from tests.dropin.launching import shared_memory  # noqa: E402

CONFIG = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 1000,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "gpt": {"size": "tiny", "layers": 4, "hidden": 32, "sequence_length": 32},
    "bamboo": {},
}


# ---- what came of it -------------------------------------------------------------------------------------------


def line(step: int, loss: float, *, worker: int = 0, stages: int = 4, pipelines: int = 2) -> StepLine:
    return StepLine(step=step, loss=loss, at=float(step), worker=worker, stages=stages, pipelines=pipelines)


CLOSE = 2.000001
LOSSES = [3.0, 2.0, 1.5]


def test_losses_match_bit_by_bit_until_the_shape_changes() -> None:
    equal = [line(step, loss) for step, loss in enumerate(LOSSES)]
    assert demo_report.matches(equal, LOSSES)
    assert not demo_report.matches([equal[0], line(1, CLOSE), equal[2]], LOSSES)


def test_losses_match_closely_once_the_shape_has_changed_and_also_when_it_is_back() -> None:
    thin = line(0, 3.0, pipelines=1)
    assert not demo_report.matches([thin, line(1, 2.1, pipelines=1), line(2, 1.5)], LOSSES)
    assert demo_report.matches([line(0, 3.0), line(1, CLOSE, stages=3), line(2, 1.500001)], LOSSES)


def test_losses_of_fewer_steps_or_of_steps_that_came_again_do_not_match() -> None:
    equal = [line(step, loss) for step, loss in enumerate(LOSSES)]
    assert not demo_report.matches(equal[:2], LOSSES)
    assert not demo_report.matches([*equal, *equal], LOSSES)


@pytest.mark.parametrize(
    ("lines", "lost", "repeated"),
    [
        ([line(0, 3.0), line(1, CLOSE), line(2, 1.5)], 0, 0),
        ([line(0, 3.0), line(0, 3.0, worker=1), line(1, 2.0), line(2, 1.5)], 0, 0),
        ([line(0, 3.0), line(1, 2.0)], 32, 0),
        ([line(0, 3.0), line(1, 2.0), line(2, 1.6)], 32, 0),
        ([line(0, 3.0), line(1, 2.0), line(2, 1.5), line(2, 1.6, worker=1)], 32, 0),
        ([line(0, 3.0), line(1, 2.0), line(1, 2.0), line(2, 1.5)], 0, 32),
    ],
)
def test_a_step_counts_as_lost_unless_its_loss_is_right(lines: list[StepLine], lost: int, repeated: int) -> None:
    found = demo_report.lost_and_repeated(lines, LOSSES, batch=32)
    assert found == {"lost_samples": lost, "repeated_samples": repeated}


def event(kind: str, at: float, *, node: str = "n0", **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "time": at, "node": node, **fields}


JOINED = event("node_joined", 0.0, node="n5", workers=[5])
NOTICE, EPOCH = event("notice", 1.0, node="n5"), event("reshaped", 2.0)
TAKEN_OVER = event("recovered", 3.1, victims=[5], micro_batches_redone=2)


@pytest.mark.parametrize(
    ("events", "handovers", "recomputed"),
    [
        ([JOINED, NOTICE, EPOCH], 1, 0),
        ([JOINED, NOTICE, EPOCH, {**TAKEN_OVER, "victims": [4]}], 1, 0),
        ([JOINED, NOTICE, TAKEN_OVER], 0, 2),
        ([JOINED, NOTICE, {**EPOCH, "time": 3.5}], 0, 0),
        ([JOINED, NOTICE, event("abort", 1.5), EPOCH], 0, 0),
        ([JOINED, EPOCH], 0, 0),
    ],
)
def test_a_handover_is_an_epoch_between_warning_and_end(
    events: list[dict[str, Any]], handovers: int, recomputed: int, tmp_path: Path
) -> None:
    run = demo.Run(demo.parse_arguments(["--out", str(tmp_path)])[0], (), name="disturbed")
    run.warned, run.events, run.deeds = "n5", events, [Deed(3.0, Change.REMOVE, "n5", 8)]
    assert demo_report.handed_over(run) == {"handovers": handovers, "recomputed_micro_batches": recomputed}


def test_a_node_is_ready_once_all_its_workers_have_said_so() -> None:
    joined = [event("node_joined", 0.0, node=f"n{node}", workers=[2 * node, 2 * node + 1]) for node in range(3)]
    assert demo_story.ready_nodes([*joined, event("worker_ready", 1.0, workers=[0, 1, 2])]) == {"n0"}


def test_the_market_has_a_price_for_every_node() -> None:
    prices = load_cloud_config(demo.CLOUD).prices
    assert min({*prices.spot.values(), *prices.on_demand.values()}) > 0
    assert "*" in prices.spot
    assert "*" in prices.on_demand


RIGHT = {
    "preemptions": 6, "joins": 6, "failovers": 2, "reconfigurations": 4, "restarts": 0, "handovers": 1,
    "recomputed_micro_batches": 0, "lost_samples": 0, "repeated_samples": 0, "matches_undisturbed": True,
}  # fmt: skip


def test_what_is_not_as_it_should_be_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.is_right(RIGHT)
    assert capsys.readouterr().err == ""
    assert not demo.is_right({**RIGHT, "joins": 1, "lost_samples": 64})
    assert capsys.readouterr().err == (
        "demo: lost_samples is 64, not 0; joins is 1, not 4 or more\n"
        "demo: the run may have ended before all of it had happened: take more --steps\n"
    )


def test_options_that_the_demo_does_not_know_go_to_the_job() -> None:
    arguments, for_job = demo.parse_arguments(["--steps", "9", "--text", "a", "b", "--stages=2"])
    assert (arguments.steps, for_job) == (9, ["--text", "a", "b", "--stages=2"])


# ---- the whole of it -------------------------------------------------------------------------------------------


class Demo:
    """A running demo that leaves its traces where we look: in our processes and our temporary folder."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        self.folder = folder
        (folder / "tmp").mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG))
        # Drawn, so that it cannot be learnt by heart: of a loss of almost nothing, rounding is a large part.
        (folder / "text.txt").write_bytes(bytes(random.Random(0).choices(b"abcdefgh \n", k=17_600)))
        small = ["--nodes", 4, "--stages", 2, "--deepspeed_config", folder / "config.json", "--text"]
        small += [folder / "text.txt", "--sample-bytes", 8, "--eval-interval", 50, "--out", folder / "out"]
        own = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TMPDIR": str(folder / "tmp")}
        own |= {"PYTHONPATH": str(SCRIPTS.parent), "BAMBOO_TEST_FOLDER": str(folder)}
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPTS / "demo.py"), *map(str, small), *map(str, arguments)],
            env={**os.environ, **own},
            stdin=subprocess.DEVNULL,
            stdout=(folder / "stdout").open("wb"),
            stderr=(folder / "stderr").open("wb"),
        )

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    def processes(self) -> list[psutil.Process]:
        """Return all processes that the demo and its children have started and that run."""
        mine = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                theirs = process.environ().get("BAMBOO_TEST_FOLDER") == str(self.folder)
                if theirs and process.pid != self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    mine.append(process)
        return mine

    def temporary_folders(self) -> list[str]:
        """Return what is in the temporary folder, but for torch's cache: one per user, made at import and kept."""
        return [name for name in os.listdir(self.folder / "tmp") if not name.startswith("torchinductor_")]

    def servers(self) -> set[str]:
        """Return where the etcds of its runs are, as far as they run."""
        found = set()
        for path in self.folder.glob("out/*/endpoint.json"):
            with contextlib.suppress(OSError, ValueError):
                found |= {*json.loads(path.read_text())["endpoints"]}
        return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Demo]]:
    """Start a demo; what is left of it after the test is killed."""
    demos: list[Demo] = []

    def start(*arguments: object) -> Demo:
        demos.append(Demo(tmp_path, *arguments))
        return demos[-1]

    yield start
    for one in demos:
        for process in [one.process, *one.processes()]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        one.process.wait(10)


def eventually(condition: Callable[[], object], *, what: str, within_seconds: float = 100.0) -> None:
    deadline = time.monotonic() + within_seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_seconds} s: {what}"
        time.sleep(0.1)


def is_open(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=2):
        return True
    return False


@pytest.mark.sample(0)
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nodes_go_and_come_and_nothing_is_lost_and_nothing_is_left(start: Callable[..., Demo]) -> None:
    before = {*shared_memory()}
    run = start("--steps", 150)
    servers: set[str] = set()
    while run.process.poll() is None:
        servers |= run.servers()
        time.sleep(0.1)
    assert run.process.returncode == 0, run.stderr[-6000:] + run.stdout
    assert len(run.stdout.splitlines()) == 1, run.stdout
    summary = json.loads(run.stdout)
    # Five nodes in three zones, the spare among them: two go with their zone. What comes for the last may be too late.
    figures = {name: summary[name] for name in ("steps", "preemptions", "restarts", "restores", "handovers")}
    assert figures == {"steps": 150, "preemptions": 5, "restarts": 0, "restores": 0, "handovers": 1}
    assert summary["joins"] in (5, 6)
    assert (summary["lost_samples"], summary["repeated_samples"], summary["matches_undisturbed"]) == (0, 0, True)
    assert summary["recomputed_micro_batches"] == 0
    assert 0 < summary["cost"]["spent"] < summary["cost"]["on_demand_equivalent"]
    assert summary["cost"]["samples_per_dollar"] == pytest.approx(150 * 16 / summary["cost"]["spent"], rel=0.1)
    assert 0 <= summary["max_rel_diff"] <= 1e-5
    assert summary["reconfigurations"] >= 3
    assert summary["loss_last"] < summary["loss_first"]
    assert Path(summary["plot"]).read_bytes().startswith(b"\x89PNG")
    assert run.stderr.count("step 150/150") == 2, "whoever reports goes on when the reporter dies"
    assert not run.processes()
    assert len(servers) == 2
    assert not [server for server in servers if is_open(server)]
    assert run.temporary_folders() == []
    assert {*shared_memory()} <= before


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_goes_on_when_the_demo_is_ended(number: signal.Signals, start: Callable[..., Demo]) -> None:
    run = start("--steps", 100_000)
    eventually(lambda: "step 10/" in run.stderr, what="it trains")
    os.kill(run.process.pid, number)
    assert run.process.wait(60) == (130 if number == signal.SIGINT else -number)
    eventually(lambda: not run.processes(), what="all processes end", within_seconds=30)
    if number == signal.SIGINT:  # nobody can remove what the killed one had; the next launcher does
        assert run.temporary_folders() == []
    assert run.stdout == ""

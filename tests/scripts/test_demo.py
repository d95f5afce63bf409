"""The demo: its pure parts here, and the whole of it on four small nodes, of which it kills two."""

from __future__ import annotations

import contextlib
import json
import os
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
from gpt_report import Curves, Mark, plot_runs  # noqa: E402

CONFIG = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 1000,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "gpt": {"size": "tiny", "layers": 4, "hidden": 32, "sequence_length": 32},
    "bamboo": {},
}


# ---- whom it kills ---------------------------------------------------------------------------------------------


def plan_of(*rows: tuple[int, ...], homes: tuple[tuple[int, ...], ...] = ()) -> dict[str, Any]:
    """Return a plan as `status --json` shows it; worker 7 is on node n7."""
    grid = [
        [{"owner": owner, "home": home, "node": f"n{owner}"} for owner, home in zip(row, homes_of, strict=True)]
        for row, homes_of in zip(rows, homes or rows, strict=True)
    ]
    return {"num_stages": len(rows[0]), "grid": grid}


def test_the_first_victim_is_the_worker_that_reports() -> None:
    victim = demo.choose_victim(plan_of((1, 4, 6, 2), (0, 3, 7, 5)), [])
    assert victim == demo.Victim("n0", worker=0, pipeline=1, stage=0)
    assert str(victim) == "node n0: worker 0, stage 0 of pipeline 1"


def test_the_second_is_in_a_whole_pipeline_at_another_stage() -> None:
    first = demo.Victim("n0", worker=0, pipeline=1, stage=0)
    plan = plan_of((1, 4, 6, 2), (5, 3, 7, 5), homes=((1, 4, 6, 2), (0, 3, 7, 5)))
    assert demo.choose_victim(plan, [first]) == demo.Victim("n6", worker=6, pipeline=0, stage=2)


@pytest.mark.parametrize(
    ("rows", "homes"), [(((0,), (1,)), ()), (((1, 1), (2, 2)), ((0, 1), (2, 3)))], ids=["no shadows", "all have lost"]
)
def test_where_every_loss_would_lose_a_stage_it_kills_nobody(rows: Any, homes: Any) -> None:
    with pytest.raises(demo.DemoError, match="take more --nodes or more --stages"):
        demo.choose_victim(plan_of(*rows, homes=homes), [])


# ---- what it counts --------------------------------------------------------------------------------------------


def event(kind: str, *, node: str = "n0", at: float = 0.0, **fields: Any) -> dict[str, Any]:
    return {"time": at, "node": node, "kind": kind, "text": f"{kind} at {at}", **fields}


BEGIN = [
    event("node_joined", node="n0", workers=[0, 1]),
    event("node_joined", node="n1", workers=[2]),
    event("roster", workers=[0, 1, 2]),
    event("plan", action="start"),
]


def test_an_undisturbed_run_counts_nothing() -> None:
    assert demo.count(BEGIN) == {"preemptions": 0, "failovers": 0, "restarts": 0}


def test_it_counts_what_the_events_tell() -> None:
    told = [
        event("preempt", node="n1", how="kill"),
        event("preempt", node="n0", text="it cannot"),
        event("failover", action="failover"),
        event("failover", action="failover"),
        event("node_joined", node="n2", workers=[3, 4]),
        event("reconfigure", action="restore"),
        event("recovered", victims=[2]),
    ]
    assert demo.count([*BEGIN, *told]) == {"preemptions": 1, "failovers": 2, "restarts": 3}


def test_a_step_counts_as_lost_unless_its_loss_has_the_same_bits() -> None:
    losses = [3.0, 2.0, 1.5]
    undisturbed = Curves(first_step=5, batch_size=32, training=losses)
    for other, lost in [(losses, 0), ([3.0, 2.0], 32), ([3.0, 2.0000000000000004, 1.5], 32), ([], 96)]:
        assert demo.lost_samples(undisturbed, Curves(first_step=5, batch_size=32, training=other)) == lost


def test_events_of_all_agents_are_put_together_without_those_of_former_runs(tmp_path: Path) -> None:
    seen = {"n0": [event("old", at=1.0), event("b", at=3.0)], "n1": [event("b", at=3.0), event("a", at=2.0)]}
    for node, events in seen.items():
        (tmp_path / node).mkdir()
        (tmp_path / node / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    assert [found["kind"] for found in demo.read_events(tmp_path, since=2.0)] == ["a", "b"]


def test_what_is_not_as_it_should_be_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    right = {"preemptions": 2, "failovers": 2, "restarts": 0, "lost_samples": 0, "matches_undisturbed": True}
    assert demo.is_right(right)
    assert capsys.readouterr().err == ""
    assert not demo.is_right({**right, "preemptions": 1, "lost_samples": 64})
    assert capsys.readouterr().err == (
        "demo: preemptions is 1, not 2; lost_samples is 64, not 0\n"
        "demo: the run ended before both nodes were killed: take more --steps\n"
    )


def test_options_that_the_demo_does_not_know_go_to_the_job() -> None:
    arguments, for_job = demo.parse_arguments(["--steps", "9", "--text", "a", "b", "--stages=2"])
    assert (arguments.steps, for_job) == (9, ["--text", "a", "b", "--stages=2"])


def test_two_runs_are_drawn_with_what_happened_in_the_second(tmp_path: Path) -> None:
    curves = Curves(first_step=1, batch_size=4, training=[3.0, 2.0, 1.0], validation={2: 2.5})
    path = tmp_path / "folder/loss.png"
    assert plot_runs(curves, curves, [Mark(2, "kill")], title="two", path=path) == str(path)
    assert path.read_bytes().startswith(b"\x89PNG")


# ---- the whole of it -------------------------------------------------------------------------------------------


class Demo:
    """A running demo that leaves its traces where we look: in our processes and our temporary folder."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        self.folder = folder
        (folder / "tmp").mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG))
        (folder / "text.txt").write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 400)
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


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_nodes_are_killed_and_nothing_differs_and_nothing_is_left(start: Callable[..., Demo]) -> None:
    before = {*os.listdir("/dev/shm")}
    run = start("--steps", 150)
    servers: set[str] = set()
    while run.process.poll() is None:
        servers |= run.servers()
        time.sleep(0.1)
    assert run.process.returncode == 0, run.stderr[-6000:] + run.stdout
    assert len(run.stdout.splitlines()) == 1, run.stdout
    summary = json.loads(run.stdout)
    figures = {name: summary[name] for name in ("steps", "stages", "pipelines", "preemptions", "failovers")}
    assert figures == {"steps": 150, "stages": 2, "pipelines": 2, "preemptions": 2, "failovers": 2}
    assert (summary["restarts"], summary["lost_samples"], summary["matches_undisturbed"]) == (0, 0, True)
    assert summary["loss_last"] < summary["loss_first"]
    assert Path(summary["plot"]).read_bytes().startswith(b"\x89PNG")
    told = [line for line in run.stderr.splitlines() if line.startswith("demo: worker ")]
    assert len(told) == 2, run.stderr
    assert all("took over stage" in line for line in told)
    assert run.stderr.count("step 150/150") == 2, "whoever reports goes on when the reporter dies"
    assert not run.processes()
    assert len(servers) == 2
    assert not [server for server in servers if is_open(server)]
    assert run.temporary_folders() == []
    assert {*os.listdir("/dev/shm")} <= before


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_goes_on_when_the_demo_is_ended(number: signal.Signals, start: Callable[..., Demo]) -> None:
    run = start("--steps", 100_000)
    eventually(lambda: "step 10/" in run.stderr, what="it trains")
    os.kill(run.process.pid, number)
    assert run.process.wait(60) == (130 if number == signal.SIGINT else -number)
    eventually(lambda: not run.processes(), what="all processes end", within_seconds=30)
    assert run.temporary_folders() == []
    assert run.stdout == ""

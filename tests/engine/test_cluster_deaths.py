"""Deaths around training: the store's, coordinator and worker at once, and that of one who wakes up again."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bamboo_ds.cli.local import LocalCluster
from bamboo_ds.config.source import CONFIG_VARIABLE, encoded
from tests.engine.disturbed import Cluster, logs
from tests.engine.test_failover import JOBS, assert_undisturbed, reference
from tests.engine.training import Outcome, Training, build_engine, own_weights, train_step

NAME, SHAPE = "dropout, clipping and Adam", (3, 1)
SECONDS = 90.0


def marking(folder: Path, job: Training, *, pause_seconds: float = 0.0) -> Callable[[], Outcome]:
    """Return what trains as `train` does and leaves a mark per worker and step."""

    def program() -> Outcome:
        engine, outcome = build_engine(job, SHAPE[0], "eflb"), Outcome()
        for step in range(job.steps):
            (folder / f"{engine.module.worker}-{step}").touch()
            time.sleep(pause_seconds)
            train_step(engine, job, step, outcome)
        outcome.weights = own_weights(engine)
        return outcome

    return program


def local(program: Callable[[], Any], folder: Path, **settings: Any) -> LocalCluster:
    """Make a cluster of three nodes with one worker each, and an etcd of its own."""
    config = {CONFIG_VARIABLE: encoded(JOBS[NAME].deepspeed_config("eflb"))}
    return LocalCluster(
        program, nodes=3, job="deaths", ttl_seconds=2.0, log_folder=folder / "logs", echo=False, environment=config,
        **settings,
    )  # fmt: skip


def await_marks(folder: Path, step: int) -> None:
    """Wait until all workers have begun a step."""
    deadline = time.monotonic() + SECONDS
    while not all((folder / f"{worker}-{step}").exists() for worker in range(3)):
        assert time.monotonic() < deadline, f"step {step} did not begin"
        time.sleep(0.005)


def plans(folder: Path) -> list[str]:
    """Return the events of plans that one node has seen."""
    lines = next(folder.rglob("events.jsonl")).read_text().splitlines()
    return [line for line in lines if '"failover"' in line or '"evicted"' in line or '"abort"' in line]


def test_an_etcd_that_is_killed_and_comes_back_costs_nothing(cluster: Cluster, tmp_path: Path) -> None:
    expected = reference(cluster, NAME, SHAPE, "eflb")
    with local(marking(tmp_path, JOBS[NAME], pause_seconds=1.0), tmp_path, outage_seconds=60.0) as running:
        await_marks(tmp_path, 1)
        assert running.server is not None
        running.server.kill()
        time.sleep(4.0)  # two lives of a lease
        running.server.start()
        assert running.wait(SECONDS) == 0, logs(tmp_path)
        got = running.results()
    assert len(got) == 3
    assert_undisturbed(got, expected)
    assert plans(tmp_path) == []


def test_an_etcd_that_is_gone_for_good_ends_every_worker_with_its_name(cluster: Cluster, tmp_path: Path) -> None:
    with local(marking(tmp_path, JOBS[NAME], pause_seconds=0.5), tmp_path, outage_seconds=16.0) as running:
        await_marks(tmp_path, 1)
        assert running.server is not None
        running.server.kill()
        killed = time.monotonic()
        assert running.wait(SECONDS) == 1
        assert time.monotonic() - killed < 30.0
        for worker in range(3):
            assert "StoreUnavailableError" in running.log(worker)


def test_a_worker_and_the_coordinator_may_die_together(cluster: Cluster, tmp_path: Path) -> None:
    expected = reference(cluster, NAME, SHAPE, "eflb")
    with local(marking(tmp_path, JOBS[NAME]), tmp_path) as running:
        await_marks(tmp_path, 1)
        leader = next(line for line in _events(tmp_path) if " coordinates" in line).split("node ")[1].split(" ")[0]
        running.kill(leader, "kill")
        assert running.wait(SECONDS) == 0, logs(tmp_path)
        got = running.results()
    assert len(got) == 2
    assert_undisturbed(got, expected)


def _events(folder: Path) -> list[str]:
    return [line for path in folder.rglob("events.jsonl") for line in path.read_text().splitlines()]


def test_a_worker_that_wakes_up_after_it_was_declared_dead_does_nothing(cluster: Cluster, tmp_path: Path) -> None:
    expected = reference(cluster, NAME, SHAPE, "eflb")
    with local(marking(tmp_path, JOBS[NAME], pause_seconds=0.3), tmp_path) as running:
        await_marks(tmp_path, 1)
        victim = running.names[1]
        processes = running.processes(victim).everything
        running.kill(victim, "stop")
        waker = threading.Timer(20.0, _wake, [processes])  # after the others have finished
        waker.start()
        assert running.wait(SECONDS) == 0, logs(tmp_path)
        got = running.results()
        _wake(processes)
        waker.cancel()
        time.sleep(1.0)
        assert set(running.results()) == set(got), "the stopped worker went on"
    assert len(got) == 2
    assert_undisturbed(got, expected)


def _wake(processes: list[int]) -> None:
    for process in processes:
        try:
            os.kill(process, signal.SIGCONT)
        except ProcessLookupError:
            continue

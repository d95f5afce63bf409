"""How a worker of a cluster ends: in order, with a failure that is told once, or without a word as the job goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from bamboo_ds.cli.bench.workers import WorkerResult
from bamboo_ds.elastic import keys
from bamboo_ds.elastic.forking import run_as_script
from bamboo_ds.errors import PlanChangedError, StoreUnavailableError
from bamboo_ds.plan import Plan
from bamboo_ds.plan.job import JobSpec
from bamboo_ds.store.embedded import EmbeddedEtcd
from tests.world.cluster import Pen, dead, eventually
from tests.world.jobs import Job, await_keys

PLAN = Plan(owners=((4, 6),))


def run(job: Job, script: Callable[[Any], Any], coordinate: Callable[[Pen], Any], **options: Any) -> list[WorkerResult]:
    """Run a script in workers 4 and 6 as Python runs one, to the end of its process."""

    def program() -> None:
        from bamboo_ds.world import init_distributed

        script(init_distributed(20.0))

    return job(lambda worker: run_as_script(program, finalize=True), (4, 6), coordinate=coordinate, **options)


def take_seat(world: Any, *, layers: int = 8) -> None:
    world.member.take_seat(JobSpec(publisher=world.worker, num_stages=2, num_layers=layers))


def await_news(world: Any) -> None:
    """Do what an engine does while it waits."""
    plan = world.member.current()
    while True:
        world.member.check(plan)
        time.sleep(0.005)


def test_a_script_that_ends_says_so_and_leaves_with_code_0(job: Job) -> None:
    def script(world: Any) -> None:
        take_seat(world)
        dist.barrier()

    def coordinate(pen: Pen) -> str:
        pen.plan(PLAN)
        await_keys(pen.store, keys.left(4), keys.left(6))
        return "both left"

    results = run(job, script, coordinate)
    assert [result.exit_code for result in results] == [0, 0, 0], results
    assert results[2].value == "both left"


def test_the_first_failure_is_told_once_with_its_traceback_and_the_others_follow(job: Job) -> None:
    def script(world: Any) -> None:
        take_seat(world)
        if world.worker == 6:
            raise ValueError("the learning rate\nis a fish")
        await_news(world)

    def coordinate(pen: Pen) -> Any:
        pen.plan(PLAN)
        await_keys(pen.store, keys.failure("job"))
        return json.loads(pen.store.get(keys.failure("job")).value), len(pen.store.list(keys.LEFT).entries)  # type: ignore[union-attr]

    results = run(job, script, coordinate)
    failure, left = results[2].value
    assert (failure["worker"], failure["kind"], failure["message"]) == (6, "ValueError", "the learning rate\nis a fish")
    assert failure["traceback"].startswith("Traceback (most recent call last):")
    assert 'raise ValueError("the learning rate' in failure["traceback"]
    assert left == 0
    assert [result.exit_code for result in results[:2]] == [1, 1], [result.log for result in results]
    assert "worker 6 failed first, with:" in results[1].log
    assert results[1].log.count("Traceback") == 1
    assert "worker 4 ends: worker 6 failed: ValueError: the learning rate" in results[0].log
    assert "Traceback" not in results[0].log


def test_a_collective_that_a_failing_worker_breaks_does_not_hide_the_cause(job: Job) -> None:
    def script(world: Any) -> None:
        take_seat(world)
        dist.barrier()
        if world.worker == 6:
            raise ValueError("a fish")
        dist.barrier()

    results = run(job, script, lambda pen: pen.plan(PLAN))
    assert [result.exit_code for result in results[:2]] == [1, 1], [result.log for result in results]
    assert "worker 4 ends: worker 6 failed: ValueError: a fish" in results[0].log
    assert "Traceback" not in results[0].log


def test_an_evicted_worker_ends_with_code_3_and_one_line_and_fails_nobody(job: Job) -> None:
    def script(world: Any) -> None:
        take_seat(world)
        if world.worker == 6:
            await_keys(world.member.store, "over")
            return
        await_news(world)

    def coordinate(pen: Pen) -> Any:
        pen.plan(PLAN)
        time.sleep(0.3)
        pen.plan(dead(PLAN, 4))
        time.sleep(1.0)
        pen.store.put("over", b"")
        await_keys(pen.store, keys.left(6))
        return [entry.key for entry in pen.store.list(keys.LEFT).entries], pen.store.get(keys.failure("job"))

    results = run(job, script, coordinate)
    assert results[0].exit_code == 3
    assert "worker 4 ends: worker 4 was declared dead by plan 0.1" in results[0].log
    assert "Traceback" not in results[0].log
    assert results[1].exit_code == 0
    assert results[2].value == ([keys.left(6)], None)


def test_a_refused_worker_ends_with_one_line_and_fails_nobody(job: Job) -> None:
    def script(world: Any) -> None:
        if world.worker == 6:
            await_keys(world.member.store, keys.SPEC)
        take_seat(world, layers=8 if world.worker == 4 else 9)

    def coordinate(pen: Pen) -> Any:
        pen.plan(PLAN)
        await_keys(pen.store, keys.ended(6), keys.left(4))
        time.sleep(0.5)
        record = json.loads(pen.store.get(keys.ended(6)).value)  # type: ignore[union-attr]
        return record["reason"], pen.store.get(keys.failure("job")), len(pen.store.list(keys.LEFT).entries)

    results = run(job, script, coordinate)
    assert [result.exit_code for result in results[:2]] == [0, 1]
    reason, failure, left = results[2].value
    assert reason.startswith("refused: num_layers = 9 here, but 8 in the job (as worker 4 published)")
    assert (failure, left) == (None, 1)
    assert "worker 6 ends: worker 6 is refused: num_layers = 9 here" in results[1].log
    assert "Traceback" not in results[1].log


def test_a_standby_that_was_never_needed_ends_with_code_0(job: Job) -> None:
    def coordinate(pen: Pen) -> None:
        pen.roster(1, 2)
        await_keys(pen.store, keys.ready(4), keys.ready(6))
        pen.finish()

    results = run(job, lambda world: None, coordinate, roster=False)
    assert [result.exit_code for result in results] == [0, 0, 0], results
    assert "Traceback" not in results[0].log


def test_a_plan_change_that_nobody_handles_is_a_failure_of_the_job(job: Job) -> None:
    def script(world: Any) -> None:
        take_seat(world)
        if world.worker == 6:
            await_keys(world.member.store, keys.failure("job"))
            os.kill(os.getpid(), signal.SIGKILL)
        await_news(world)

    def coordinate(pen: Pen) -> Any:
        pen.plan(PLAN)
        time.sleep(0.3)
        pen.plan(dead(PLAN, 6))
        await_keys(pen.store, keys.failure("job"))
        return json.loads(pen.store.get(keys.failure("job")).value)["kind"]  # type: ignore[union-attr]

    results = run(job, script, coordinate)
    assert results[0].exit_code == 1
    assert results[2].value == "PlanChangedError"


def test_a_store_that_is_gone_for_good_ends_every_worker_with_a_clear_error(
    own_etcd: EmbeddedEtcd, workers: Callable[..., list[WorkerResult]]
) -> None:
    job, server = Job(own_etcd.endpoint, name="outage", run=workers, outage_seconds=2.0), own_etcd.pid
    assert server is not None

    def script(world: Any) -> None:
        take_seat(world)
        world.member.store.put(f"seated/{world.worker}", b"")
        await_news(world)

    def coordinate(pen: Pen) -> None:
        pen.plan(PLAN)
        await_keys(pen.store, "seated/4", "seated/6")
        os.kill(server, signal.SIGKILL)

    began = time.monotonic()
    results = run(job, script, coordinate)
    assert time.monotonic() - began < 40
    for result in results[:2]:
        assert result.exit_code == 1
        assert "StoreUnavailableError: nothing was heard of the cluster's store" in result.log


def stopped(server: EmbeddedEtcd) -> None:
    server.signal(signal.SIGSTOP)
    time.sleep(3.0)
    server.signal(signal.SIGCONT)


def killed(server: EmbeddedEtcd) -> None:
    server.signal(signal.SIGKILL)
    time.sleep(2.0)
    server.start()


@pytest.mark.parametrize("disturb", [stopped, killed])
def test_an_outage_that_passes_disturbs_nobody(
    own_etcd: EmbeddedEtcd,
    workers: Callable[..., list[WorkerResult]],
    tmp_path: Path,
    disturb: Callable[[EmbeddedEtcd], None],
) -> None:
    """Etcd hangs for a while, or is killed and started again with its data: by this process, who owns it."""
    job, ready = Job(own_etcd.endpoint, name="outage", run=workers), tmp_path / "ready"

    def script(world: Any) -> None:
        take_seat(world)
        world.member.store.put(f"seated/{world.worker}", b"")
        with contextlib.suppress(PlanChangedError):
            await_news(world)

    def coordinate(pen: Pen) -> None:
        pen.plan(PLAN)
        await_keys(pen.store, "seated/4", "seated/6")
        ready.touch()
        time.sleep(4.0)
        insist(lambda: pen.plan(Plan(owners=PLAN.owners, version=1, cause="it goes on")))

    def when_ready() -> None:
        eventually(ready.exists, within_seconds=40)
        disturb(own_etcd)

    disturber = threading.Thread(target=when_ready, daemon=True)
    disturber.start()
    results = run(job, script, coordinate)
    disturber.join(10)
    assert [result.exit_code for result in results] == [0, 0, 0], results


def insist(write: Callable[[], Any]) -> None:
    for _ in range(20):
        with contextlib.suppress(StoreUnavailableError):
            write()
            return

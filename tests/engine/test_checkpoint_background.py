"""Checkpoints that are written beside training: whole, right, and of no consequence to training."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bamboo_ds.checkpoint import Report, find, latest, open_storage
from bamboo_ds.cli.bench.workers import WorkerResult, values
from bamboo_ds.engine.parameters import groups_of
from bamboo_ds.engine.unit_state import put
from bamboo_ds.errors import StateLostError
from tests.engine.disturbed import Cluster, kill
from tests.engine.test_checkpoints import JOBS, STOCK, build_stock, of_stock
from tests.engine.training import Outcome, Training, build_engine, largest, train_step

Run = Callable[..., list[WorkerResult]]
STEPS = 7


def periodic(job: Training, path: object, **settings: Any) -> Training:
    block = {"checkpoint": {"path": str(path), **settings}}
    return replace(job, steps=STEPS, config={**job.config, "bamboo": {**job.config.get("bamboo", {}), **block}})


def train_all(rank: int, job: Training, num_stages: int, redundancy: str = "eflb") -> tuple[Outcome, list[Report]]:
    engine, outcome = build_engine(job, num_stages, redundancy), Outcome()
    for step in range(engine.global_steps, job.steps):
        train_step(engine, job, step, outcome)
    engine.close()
    return outcome, engine.checkpoint_reports


def go_on(rank: int, job: Training, num_stages: int, folder: str, tag: str | None = None) -> tuple[int, list[float]]:
    engine, outcome = build_engine(job, num_stages), Outcome()
    engine.load_checkpoint(folder, tag=tag)
    first = engine.global_steps
    for step in range(first, job.steps):
        train_step(engine, job, step, outcome)
    engine.close()
    return first, outcome.losses


@pytest.mark.parametrize("shape", [(1, 1), (2, 2)], ids=["1x1", "2x2"])
@pytest.mark.parametrize("name", ["Adam", "momentum, tied, in bf16"])
def test_they_are_whole_and_training_is_what_it_would_be(
    workers: Run, name: str, shape: tuple[int, int], tmp_path: Path
) -> None:
    job, count, folder = replace(JOBS[name], steps=STEPS), shape[0] * shape[1], tmp_path / "place"
    plain = values(workers(train_all, count, args=(job, shape[0]), timeout_seconds=60))
    saving = periodic(job, folder, interval_steps=2, asynchronous=False)
    found = values(workers(train_all, count, args=(saving, shape[0]), timeout_seconds=60))
    assert [one.losses for one, _ in found] == [one.losses for one, _ in plain]
    assert [one.digests for one, _ in found] == [one.digests for one, _ in plain]
    storage = open_storage(str(folder))
    whole = find(storage).whole
    assert [manifest.step for manifest in whole] == [6, 4]
    assert latest(storage) == whole[0].tag
    assert [[(report.error, report.finished) for report in reports] for _, reports in found] == [
        [("", worker == 0)] * 3 for worker in range(count)
    ]
    for manifest in whole:
        arguments = (job, shape[0], str(folder), manifest.tag)
        again = values(workers(go_on, count, args=arguments, timeout_seconds=60))
        assert again == [(manifest.step, one.losses[manifest.step :]) for one, _ in plain]


def test_they_are_written_while_training_goes_on(workers: Run, tmp_path: Path) -> None:
    """A checkpoint that is due while one is being written is begun when that is done, by all at the same step."""
    job = periodic(JOBS["Adam"], tmp_path, interval_steps=1, keep=100)
    found = values(workers(train_all, 4, args=(job, 2), timeout_seconds=60))
    tags = [[report.tag for report in reports] for _, reports in found]
    assert tags[0] == tags[1] == tags[2] == tags[3]
    assert not [report.error for _, reports in found for report in reports if report.error]
    whole = find(open_storage(str(tmp_path))).whole
    assert [manifest.tag for manifest in reversed(whole)] == tags[0]
    assert 1 <= len(whole) <= STEPS
    first, losses = values(workers(go_on, 3, args=(job, 3, str(tmp_path)), timeout_seconds=60))[0]
    assert first == whole[0].step
    assert largest(losses, found[0][0].losses[first:]) < 1e-6 if losses else first == STEPS


def test_seconds_are_counted_by_whoever_is_first(workers: Run, tmp_path: Path) -> None:
    job = periodic(JOBS["Adam"], tmp_path, interval_seconds=0.3, keep=100)

    def train_slowly(rank: int) -> list[str]:
        engine = build_engine(job, 2)
        for step in range(STEPS):
            train_step(engine, job, step, Outcome())
            time.sleep(0.15 + 0.1 * rank)
        engine.close()
        return [report.tag for report in engine.checkpoint_reports]

    tags = values(workers(train_slowly, 2, timeout_seconds=60))
    assert tags[0] == tags[1]
    assert 2 <= len(tags[0]) < STEPS


def test_what_cannot_be_written_does_not_end_training(workers: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    job = periodic(JOBS["Adam"], tmp_path / "file", interval_steps=2)
    job = replace(job, config={**job.config, "bamboo": {**job.config["bamboo"], "timeout_seconds": 3.0}})
    found = values(workers(train_all, 2, args=(job, 2), timeout_seconds=60))
    assert all(len(outcome.losses) == STEPS for outcome, _ in found)
    assert all(report.error for _, reports in found for report in reports)
    assert all(reports for _, reports in found)


def stock_weights(rank: int, folder: str) -> tuple[int, list[float]]:
    engine = build_stock(STOCK, 2)
    path, _ = engine.load_checkpoint(folder, load_optimizer_states=False)
    assert path is not None
    return engine.global_steps, [float(engine.eval_batch(of_stock(STOCK, 9), compute_loss=True))]


def our_weights(rank: int, folder: str) -> tuple[int, list[float]]:
    engine = build_engine(STOCK, 2)
    engine.load_checkpoint(folder)
    steps = engine.global_steps
    loss = float(engine.eval_batch(iter([STOCK.batch(9, m) for m in range(STOCK.micro_batches)])))
    engine.close()
    return steps, [loss]


def test_stock_deepspeed_loads_their_weights(workers: Run, tmp_path: Path) -> None:
    job = periodic(STOCK, tmp_path, interval_steps=STEPS)
    values(workers(train_all, 2, args=(job, 2), timeout_seconds=60))
    stock = values(workers(stock_weights, 2, args=(str(tmp_path),), timeout_seconds=60))
    ours = values(workers(our_weights, 2, args=(str(tmp_path),), timeout_seconds=60))
    assert [steps for steps, _ in (*stock, *ours)] == [STEPS] * 4
    assert (
        largest([loss for _, losses in stock for loss in losses], [loss for _, losses in ours for loss in losses])
        < 1e-6
    )


# ---- when nobody alive has a layer ---------------------------------------------------------------------------------


def restore(rank: int, job: Training, num_stages: int) -> tuple[int, bool, list[float]]:
    """Take all from the newest whole checkpoint, as a new epoch does."""
    engine, outcome = build_engine(job, num_stages), Outcome()
    units = engine._held_units()
    restored = engine._restored(units)
    named = restored.groups.keys() == groups_of(engine.module, engine.optimizer).keys()
    restored.common.give_to(engine)
    for name, unit in units.items():
        put(unit, engine.optimizer, restored.states[name])
    for step in range(restored.step, STEPS):
        train_step(engine, job, step, outcome)
    engine.close()
    return restored.step, named, outcome.losses


def test_a_worker_can_take_what_it_lacks_from_the_newest_whole_checkpoint(workers: Run, tmp_path: Path) -> None:
    job = periodic(JOBS["Adam in bf16"], tmp_path, interval_steps=2, asynchronous=False)
    expected = values(workers(train_all, 2, args=(job, 2), timeout_seconds=60))[0][0].losses
    for path in find(open_storage(str(tmp_path))).whole[:1]:
        (tmp_path / path.tag / "bamboo_unit_3.safetensors").write_bytes(b"damaged")
    idle = periodic(JOBS["Adam in bf16"], tmp_path)
    found = values(workers(restore, 2, args=(idle, 2), timeout_seconds=60))
    assert found == [(4, True, expected[4:])] * 2


def test_without_checkpoints_what_is_lost_is_lost(workers: Run, tmp_path: Path) -> None:
    def try_to_restore(rank: int, job: Training) -> str:
        engine = build_engine(job, 2)
        try:
            engine._restored(engine._held_units())
        except StateLostError as error:
            return str(error)
        finally:
            engine.close()
        return ""

    told = values(workers(try_to_restore, 2, args=(JOBS["Adam"],), timeout_seconds=60))
    assert all("bamboo.checkpoint.path would say where they are" in text for text in told)
    told = values(workers(try_to_restore, 2, args=(periodic(JOBS["Adam"], tmp_path),), timeout_seconds=60))
    assert all(f"there is no whole checkpoint in {tmp_path}" in text for text in told)


# ---- deaths --------------------------------------------------------------------------------------------------------


def die(rank: int, job: Training, num_stages: int, folder: str, seed: int) -> None:
    """Go on from the newest checkpoint, and die some time after the first one that was written here."""
    engine = build_engine(job, num_stages)
    engine.load_checkpoint(folder)

    def strike() -> None:
        while not engine.checkpoint_reports:
            time.sleep(0.01)
        time.sleep(random.Random(100 * seed + rank).uniform(0.0, 0.5))
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=strike, daemon=True).start()
    for step in range(engine.global_steps, 10**6):
        train_step(engine, job, step, Outcome())


@pytest.mark.slow
def test_a_job_that_is_killed_again_and_again_goes_on_from_the_newest_whole_checkpoint(
    workers: Run, tmp_path: Path
) -> None:
    """In another shape each time. The losses stay those of the run that nobody killed."""
    folder, dice, before = tmp_path / "place", random.Random(0), 0
    job = periodic(JOBS["Adam"], folder, interval_steps=1)
    for number in range(12):
        stages, count = dice.choice([(1, 1), (2, 2), (2, 4), (3, 3)])
        workers(die, count, args=(job, stages, str(folder), number), timeout_seconds=60, grace_seconds=10.0)
        whole = find(open_storage(str(folder))).whole
        step = whole[0].step if whole else 0
        assert step >= before
        before = step
    assert before >= 6
    rest = replace(JOBS["Adam"], steps=before + 3)
    undisturbed = values(workers(train_all, 1, args=(rest, 1), timeout_seconds=60))[0][0].losses
    first, losses = values(workers(go_on, 2, args=(rest, 2, str(folder)), timeout_seconds=60))[0]
    assert first == before
    assert largest(losses, undisturbed[before:]) < 1e-5


@pytest.mark.slow
def test_in_a_cluster_the_survivors_write_the_next_ones(cluster: Cluster, workers: Run, tmp_path: Path) -> None:
    swift = replace(JOBS["Adam"], config={})

    def batch(step: int, micro_batch: int) -> Any:
        time.sleep(0.05)  # steps that are faster than a write begin no checkpoint
        return swift.batch(step, micro_batch)

    job = periodic(replace(swift, batch=batch), tmp_path, interval_steps=1, keep=100)
    survivors = cluster.train(job, (2, 2), [kill(1, 1, before=4, step=3)], target=train_all)
    whole = find(open_storage(str(tmp_path))).whole
    assert whole[0].step >= 5
    assert any({unit.writer for unit in manifest.units.values()} == {0, 1, 2} for manifest in whole)
    losses = next(iter(survivors.values()))[0].losses
    for manifest in whole:
        arguments = (replace(job, config={}), 1, str(tmp_path), manifest.tag)
        first, again = values(workers(go_on, 1, args=arguments, timeout_seconds=60))[0]
        assert first == manifest.step
        assert largest(again, losses[first:]) < 1e-6 if again else first == STEPS

"""A process that writes checkpoints is killed at random times: what is found afterwards is whole, and the newest."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from bamboo_ds.checkpoint import Begun, Periodic, Report, find, latest, open_storage, periodic_tag
from bamboo_ds.config.checkpoint import CheckpointConfig
from tests.checkpoint.saved import assert_holds, closing, part, save

KILLS, PAIRS, KEEP, SIZE = 120, 60, 2, 20_000


def write_on(path: str, first: int, told: Connection) -> None:
    """Write one checkpoint after the other; tell of each before and after."""
    storage = open_storage(path)
    for step in range(first, first + 10_000):
        told.send(("begun", step))
        save(storage, step, keep=KEEP, size=SIZE)
        told.send(("finished", step))


def kill_while_writing(path: str, first: int, after_seconds: float) -> tuple[int, int]:
    """Return the steps of the last checkpoint that was begun, and of the last that was finished (0 for none)."""
    ours, theirs = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=write_on, args=(path, first, theirs), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(30.0)
    time.sleep(after_seconds)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join(30.0)
    last = last_told(ours, first)
    return last["begun"], last["finished"]


def last_told(pipe: Connection, first: int) -> dict[str, int]:
    last = {"begun": first, "finished": 0}
    try:
        while pipe.poll(0):
            kind, step = pipe.recv()
            last[kind] = step
    except EOFError:
        pass
    return last


def test_the_newest_whole_checkpoint_is_found_after_any_death(tmp_path: Path) -> None:
    dice, path, next_step, middles, newest = random.Random(0), str(tmp_path / "place"), 1, 0, 0
    storage = open_storage(path)
    for _ in range(KILLS):
        begun, finished = kill_while_writing(path, next_step, dice.uniform(0.0, 0.1))
        found = find(storage)
        steps = [manifest.step for manifest in found.whole]
        # It may be whole although its writer died before it could say so; what was said to be whole is.
        before, newest = max(newest, finished), steps[0] if steps else 0
        assert newest in (before, begun)
        assert steps == sorted(steps, reverse=True)
        for manifest in found.whole:
            assert_holds(storage, manifest, size=SIZE)
        named = latest(storage)
        assert named is None or named in {manifest.tag for manifest in found.whole}
        middles += bool(found.skipped)
        next_step = begun + 1
    assert middles >= KILLS // 4, "the deaths were not in the middle of anything"


# ---- of one of two -------------------------------------------------------------------------------------------------


def write_parts(path: str, worker: int, first: int, told: Connection) -> None:
    """Write one worker's parts beside what it does, one checkpoint after the other, as in training."""
    config = CheckpointConfig(path=path, keep=KEEP)
    reports: list[Report] = []
    periodic = Periodic(config, step=0, timeout_seconds=0.5, tell=reports.append)
    for step in range(first, first + 10_000):
        tag = periodic_tag(step, "x")
        told.send(("begun", step))
        periodic.begin(
            Begun(tag, step, (0, 1), worker),
            lambda tag=tag, step=step: part(tag, worker, step, size=SIZE),
            (lambda tag=tag, step=step: closing(tag, step, keep=KEEP)) if worker == 0 else None,
        )
        assert periodic.finish(timeout_seconds=20.0)
        if reports[-1].error:
            return
        told.send(("finished", step))


def kill_one_of_two(path: str, first: int, dice: random.Random) -> tuple[int, int]:
    """Return the last step that was begun, and the last whose checkpoint is whole for all that its writer said."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    processes = [
        context.Process(target=write_parts, args=(path, worker, first, pipes[worker][1]), daemon=True)
        for worker in (0, 1)
    ]
    for process in processes:
        process.start()
    for _, theirs in pipes:
        theirs.close()
    assert all(ours.poll(30.0) for ours, _ in pipes)
    time.sleep(dice.uniform(0.0, 0.15))
    victim = dice.randrange(2)
    os.kill(processes[victim].pid or 0, signal.SIGKILL)
    if victim == 0:
        time.sleep(0.1)
        os.kill(processes[1].pid or 0, signal.SIGKILL)  # it would write parts for ever
    for process in processes:
        process.join(30.0)
    last = [last_told(ours, first) for ours, _ in pipes]
    return max(one["begun"] for one in last), last[0]["finished"]


@pytest.mark.sample(0)
@pytest.mark.slow
def test_the_death_of_one_of_several_writers_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    dice, path, next_step, newest = random.Random(1), str(tmp_path / "place"), 1, 0
    storage = open_storage(path)
    for _ in range(PAIRS):
        begun, finished = kill_one_of_two(path, next_step, dice)
        found = find(storage)
        before, newest = max(newest, finished), found.whole[0].step if found.whole else 0
        assert before <= newest <= begun
        for manifest in found.whole:
            assert_holds(storage, manifest, size=SIZE)
        next_step = begun + 1
    assert newest > PAIRS // 2


@pytest.mark.parametrize("seed", range(5))
def test_what_a_death_left_is_cleaned_up_by_the_next_checkpoints(seed: int, tmp_path: Path) -> None:
    dice, path, next_step = random.Random(seed), str(tmp_path / "place"), 1
    for _ in range(5):
        begun, _ = kill_while_writing(path, next_step, dice.uniform(0.0, 0.1))
        next_step = begun + 1
    storage = open_storage(path)
    for step in range(next_step, next_step + KEEP):
        save(storage, step, keep=KEEP, size=SIZE)
    assert len(storage.folders()) == KEEP
    assert not list(Path(path).glob("*/*.partial"))

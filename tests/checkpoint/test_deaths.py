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

from bamboo_ds.checkpoint import find, latest, open_storage
from tests.checkpoint.saved import assert_holds, save

KILLS, KEEP, SIZE = 120, 2, 20_000


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
    last = {"begun": first, "finished": 0}
    try:
        while ours.poll(0):
            kind, step = ours.recv()
            last[kind] = step
    except EOFError:
        pass
    return last["begun"], last["finished"]


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
        assert named is None or named in {manifest.tag for manifest in found.whole[:2]}
        middles += bool(found.skipped)
        next_step = begun + 1
    assert middles >= KILLS // 4, "the deaths were not in the middle of anything"


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
    assert not list(Path(path).rglob("*.partial"))

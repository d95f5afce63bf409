"""Checkpoints that are written beside training: when they are due, and that nothing that goes wrong ends the job."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from bamboo_ds.checkpoint import Begun, Part, Periodic, Report, find, open_storage, periodic_tag
from bamboo_ds.checkpoint.storage import Sink
from bamboo_ds.config.checkpoint import CheckpointConfig
from tests.checkpoint.saved import assert_holds, closing, part


class Worker:
    """One of two workers that train, as far as checkpoints are concerned."""

    def __init__(self, path: Path, worker: int, **settings: Any) -> None:
        self.reports: list[Report] = []
        config = CheckpointConfig(path=str(path), **settings)
        self.worker, self.keep = worker, config.keep
        self.periodic = Periodic(config, step=0, timeout_seconds=20.0, tell=self.reports.append)

    def begin(self, step: int, *, made: Any = None) -> str:
        tag = periodic_tag(step, "x")
        self.periodic.begin(
            Begun(tag, step, (0, 1), self.worker),
            made or (lambda: part(tag, self.worker, step)),
            (lambda: closing(tag, step, keep=self.keep)) if self.worker == 0 else None,
        )
        return tag


@pytest.fixture
def both(tmp_path: Path) -> list[Worker]:
    return [Worker(tmp_path / "place", worker, interval_steps=1) for worker in (0, 1)]


def test_all_parts_make_a_checkpoint(both: list[Worker], tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "place"))
    for step in (1, 2, 3):
        tag = both[0].begin(step)
        both[1].begin(step)
        assert all(worker.periodic.finish(timeout_seconds=20.0) for worker in both)
        newest = find(storage).whole[0]
        assert (newest.tag, newest.step) == (tag, step)
        assert_holds(storage, newest)
    assert [one.step for one in find(storage).whole] == [3, 2]
    assert [[(one.error, one.finished) for one in worker.reports] for worker in both] == [
        [("", True)] * 3,
        [("", False)] * 3,
    ]
    assert sum(worker.reports[-1].bytes for worker in both) == newest.bytes


def test_training_goes_on_meanwhile(both: list[Worker], tmp_path: Path) -> None:
    """The first write waits until the test lets it go on."""
    go_on = threading.Event()

    def slow(sink: Sink) -> None:
        go_on.wait(20.0)
        sink.write(b"x")

    both[1].begin(1)
    both[0].begin(
        1, made=lambda: Part(periodic_tag(1, "x"), 0, {"slow": slow, **part("", 0, 1).files}, part("", 0, 1).units)
    )
    assert both[0].periodic.busy
    assert not both[0].periodic.finish(timeout_seconds=0.05)
    assert find(open_storage(str(tmp_path / "place"))).whole == ()
    go_on.set()
    assert both[0].periodic.finish(timeout_seconds=20.0)
    assert len(find(open_storage(str(tmp_path / "place"))).whole) == 1


def test_a_part_that_cannot_be_made_is_told_at_once(both: list[Worker], tmp_path: Path) -> None:
    def fail() -> Part:
        raise ValueError("an optimizer that keeps sets")

    both[0].begin(1)
    both[1].begin(1, made=fail)
    assert all(worker.periodic.finish(timeout_seconds=5.0) for worker in both)
    assert both[1].reports[0].error == "ValueError: an optimizer that keeps sets"
    assert "worker 1 could not write its part: ValueError: an optimizer" in both[0].reports[0].error
    assert find(open_storage(str(tmp_path / "place"))).whole == ()


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    worker = Worker(tmp_path / "file", 0)
    worker.begin(1)
    assert worker.periodic.finish(timeout_seconds=5.0)
    assert worker.reports[0].error.startswith(("NotADirectoryError", "FileExistsError"))
    assert not worker.reports[0].finished


def test_nobody_waits_for_the_dead(both: list[Worker]) -> None:
    both[0].begin(1)
    both[0].periodic.lost(frozenset({7}))
    assert not both[0].periodic.finish(timeout_seconds=0.3)
    both[0].periodic.lost(frozenset({1, 7}))
    assert both[0].periodic.finish(timeout_seconds=5.0)
    assert "nothing was heard of worker(s) 1" in both[0].reports[0].error


def test_the_next_one_may_follow_one_that_failed(both: list[Worker], tmp_path: Path) -> None:
    both[0].begin(1)
    both[0].periodic.lost(frozenset({1}))
    assert both[0].periodic.finish(timeout_seconds=5.0)
    for worker in both:
        worker.begin(2)
    assert all(worker.periodic.finish(timeout_seconds=20.0) for worker in both)
    storage = open_storage(str(tmp_path / "place"))
    assert storage.folders() == [periodic_tag(2, "x")]


# ---- when one is due -----------------------------------------------------------------------------------------------


def test_one_is_due_at_every_multiple_of_the_interval(tmp_path: Path) -> None:
    worker = Worker(tmp_path, 1, interval_steps=10)
    due = []
    for step in range(1, 35):
        if worker.periodic.due(step) and step != 20:  # the others were not ready at 20
            due.append(step)
            worker.begin(step)
            assert worker.periodic.finish(timeout_seconds=20.0)
    assert due == [10, 21, 30]


def test_one_is_due_again_at_a_step_that_training_has_gone_back_before(tmp_path: Path) -> None:
    worker = Worker(tmp_path, 1, interval_steps=10)
    worker.begin(40)
    assert worker.periodic.finish(timeout_seconds=20.0)
    assert [step for step in range(31, 51) if worker.periodic.due(step)] == [40, *range(41, 51)]


def test_one_is_due_after_the_seconds_of_the_interval(tmp_path: Path) -> None:
    worker = Worker(tmp_path, 1, interval_seconds=0.2)
    assert not worker.periodic.due(1)
    time.sleep(0.25)
    assert worker.periodic.due(2)
    worker.begin(2)
    assert not worker.periodic.due(3)


def test_none_is_due_without_an_interval(tmp_path: Path) -> None:
    assert not Worker(tmp_path, 1).periodic.due(1_000_000)

"""Fixtures of the agent's tests: a spawner to ask for workers, and what it reports."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bamboo_ds.elastic.spawner import Change, Program, Report, Spawner


@dataclass
class Nursery:
    """A spawner, and what it has reported so far."""

    spawner: Spawner
    folder: Path
    reports: list[Report] = field(default_factory=list)

    def spawn(self, worker: int = 0, environment: Mapping[str, str] | None = None) -> int:
        """Start a worker and return its process id."""
        out = [os.open(self.path(worker, name), os.O_CREAT | os.O_WRONLY | os.O_APPEND) for name in ("out", "err")]
        self.spawner.spawn(worker, stdout=out[0], stderr=out[1], environment=environment or dict(os.environ))
        return self.await_report(worker, Change.STARTED).pid

    def end(self, worker: int = 0) -> int:
        """Wait for the end of a worker and return its exit code."""
        return self.await_report(worker, Change.ENDED).code

    def run(self, worker: int = 0, environment: Mapping[str, str] | None = None) -> int:
        """Start a worker, wait for its end and return its exit code."""
        self.spawn(worker, environment)
        return self.end(worker)

    def await_report(self, worker: int, change: Change, within_seconds: float = 10.0) -> Report:
        deadline = time.monotonic() + within_seconds
        while True:
            for report in self.reports:
                if (report.worker, report.change) == (worker, change):
                    self.reports.remove(report)
                    return report
            remaining = deadline - time.monotonic()
            assert remaining > 0, f"worker {worker} has not {change.value} within {within_seconds} s: {self.reports}"
            select.select([self.spawner], [], [], remaining)
            self.reports += self.spawner.read()

    def path(self, worker: int, name: str) -> Path:
        return self.folder / f"{worker}.{name}"

    def out(self, worker: int = 0) -> str:
        return self.path(worker, "out").read_text()

    def err(self, worker: int = 0) -> str:
        return self.path(worker, "err").read_text()


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Callable[[Program], Nursery]]:
    """Make a spawner of a program: `nursery(program)`. It ends with the test."""
    made: list[Spawner] = []

    def make(program: Program) -> Nursery:
        made.append(Spawner(program))
        return Nursery(made[-1], tmp_path)

    yield make
    for spawner in made:
        spawner.close()

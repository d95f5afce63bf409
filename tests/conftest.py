"""Shared fixtures. `workers` runs a function in real forked processes, in milliseconds (design: testing)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bamboo_ds.cli.bench.workers import WorkerResult, run_workers, warm_up


@pytest.fixture(scope="session")
def workers() -> Callable[..., list[WorkerResult]]:
    """Give `run_workers` with this process warmed once per session."""
    warm_up()
    return run_workers

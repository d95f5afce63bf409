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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of the store last: they open etcd in this process, and gRPC survives no fork.

    All others fork workers that open a store of their own.
    """
    items.sort(key=lambda item: item.path.parent.name == "store")

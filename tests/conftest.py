"""Shared fixtures. `workers` runs a function in real forked processes, in milliseconds (design: testing)."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from bamboo_ds.cli.bench.workers import WorkerResult, run_workers, warm_up


@pytest.fixture(scope="session")
def workers() -> Callable[..., list[WorkerResult]]:
    """Give `run_workers` with this process warmed once per session."""
    warm_up()
    return run_workers


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let all cases run."""
    parser.addoption("--all", action="store_true", help="run all cases of tests that are marked `sample`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take a seeded part of the tests marked `sample`, and run those of the store last.

    The store's tests open etcd in this process, and gRPC survives no fork; all others fork workers that open a store
    of their own.
    """
    left_out = set() if config.getoption("--all") else _left_out(items)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = sorted((item for item in items if item not in left_out), key=_is_of_store)


def _is_of_store(item: pytest.Item) -> bool:
    return item.path.parent.name == "store"


def _left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the cases that a `sample` leaves out: of each marked test, all but so many."""
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") is not None:
            cases.setdefault((item.path, getattr(item, "originalname", item.name)), []).append(item)
    left_out: set[pytest.Item] = set()
    for same in cases.values():
        marker = same[0].get_closest_marker("sample")
        keep = min(int(marker.args[0]), len(same)) if marker is not None else len(same)
        left_out |= set(same) - set(random.Random(0).sample(same, keep))
    return left_out

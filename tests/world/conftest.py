"""A real etcd for forked workers, which must be forked before this process opens a store itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from bamboo_ds.cli.bench.workers import WorkerResult
from bamboo_ds.store.embedded import EmbeddedEtcd
from tests.world.jobs import Job

_numbers = itertools.count()


@pytest.fixture(scope="session")
def etcd() -> Iterator[EmbeddedEtcd]:
    """One server for all tests that leave it as it is."""
    with EmbeddedEtcd() as server:
        yield server


@pytest.fixture
def own_etcd() -> Iterator[EmbeddedEtcd]:
    """A server that a test may kill and stop."""
    with EmbeddedEtcd() as server:
        yield server


@pytest.fixture
def job(etcd: EmbeddedEtcd, workers: Callable[..., list[WorkerResult]]) -> Job:
    """A job of its own on the common server."""
    return Job(etcd.endpoint, name=f"test-{next(_numbers)}", run=workers)

"""Real servers and both kinds of stores. One etcd serves all tests that do it no harm; each test has its own prefix."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from bamboo_ds.store.embedded import EmbeddedEtcd
from bamboo_ds.store.etcd import EtcdStore
from tests.store.servers import EtcdWorld, MemoryWorld, World

_numbers = itertools.count()


@pytest.fixture(scope="session")
def etcd() -> Iterator[EmbeddedEtcd]:
    """One server for all tests that leave it as it is."""
    with EmbeddedEtcd() as server:
        yield server


@pytest.fixture
def own_etcd() -> Iterator[EmbeddedEtcd]:
    """A server that a test may kill, stop and fill."""
    with EmbeddedEtcd() as server:
        yield server


@pytest.fixture
def prefix() -> str:
    return f"/bamboo/test-{next(_numbers)}/"


@pytest.fixture(params=["memory", "etcd"])
def world(request: pytest.FixtureRequest, prefix: str) -> Iterator[World]:
    """A kind of store, and time to let pass."""
    if request.param == "memory":
        world: World = MemoryWorld(prefix)
    else:
        world = EtcdWorld(request.getfixturevalue("etcd").endpoint, prefix)
    with world:
        yield world


@pytest.fixture
def connect() -> Iterator[Callable[..., EtcdStore]]:
    """Open stores that are closed after the test: `connect(server, …)` or `connect([endpoint, …], …)`."""
    with ExitStack() as stack:

        def open_store(
            servers: EmbeddedEtcd | list[str], *, prefix: str = "/bamboo/test/", **options: object
        ) -> EtcdStore:
            endpoints = [servers.endpoint] if isinstance(servers, EmbeddedEtcd) else servers
            return stack.enter_context(EtcdStore(endpoints, prefix=prefix, **options))  # type: ignore[arg-type]

        yield open_store

"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bamboo_ds.cli.bench.workers import warm_up
from bamboo_ds.config import EtcdConfig
from bamboo_ds.store.embedded import EmbeddedEtcd
from tests.engine.disturbed import Cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Give a cluster on this machine: real agents, workers and etcd."""
    warm_up()
    with EmbeddedEtcd() as etcd:
        yield Cluster(EtcdConfig(endpoints=(etcd.endpoint,)), tmp_path_factory.mktemp("clusters"))

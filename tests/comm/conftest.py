"""The jobs of `tests/world`, for networks in a cluster."""

from tests.world.conftest import etcd, job, own_etcd

__all__ = ["etcd", "job", "own_etcd"]

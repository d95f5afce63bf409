"""What an agent tells each worker it starts, and how both reach the store. It travels in one environment variable."""

from __future__ import annotations

import json
import os
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass

from bamboo_ds.clock import Clock
from bamboo_ds.config.etcd import EtcdConfig
from bamboo_ds.elastic import keys
from bamboo_ds.store import Store

VARIABLE = "BAMBOO_MEMBERSHIP"


@dataclass(frozen=True, slots=True)
class Membership:
    """A worker's seat in the cluster.

    Attributes:
        etcd: how to reach the store.
        job: name of the job.
        node: name of the node.
        worker: id of the worker.
        address: at which workers of other nodes reach this one; empty for gloo's own choice.
        outage_seconds: how long the store may be out of reach before the worker gives up.
    """

    etcd: EtcdConfig
    job: str
    node: str
    worker: int
    address: str = ""
    outage_seconds: float = 60.0

    def write(self, environment: MutableMapping[str, str]) -> None:
        """Put it into the environment of a worker."""
        fields = {**asdict(self), "etcd": self.etcd.model_dump()}
        environment[VARIABLE] = json.dumps(fields)

    @classmethod
    def read(cls) -> Membership | None:
        """Return this process's seat; None when no agent started it."""
        text = os.environ.get(VARIABLE)
        if not text:
            return None
        fields = json.loads(text)
        return cls(**{**fields, "etcd": EtcdConfig.model_validate(fields["etcd"])})


def open_store(etcd: EtcdConfig, *, job: str, clock: Clock | None = None) -> Store:
    """Open the store of a job. Call it in the process that uses the store: gRPC does not survive a fork."""
    from bamboo_ds.store.etcd import EtcdStore, Login, Tls  # needs gRPC

    login = Login(etcd.user, etcd.password) if etcd.user else None
    tls = Tls(etcd.ca, etcd.cert, etcd.key) if etcd.ca or etcd.cert else None
    return EtcdStore(
        etcd.endpoints,
        prefix=keys.prefix(job),
        tls=tls,
        login=login,
        timeout_seconds=etcd.timeout_seconds,
        clock=clock,
    )

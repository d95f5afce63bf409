"""Jobs of forked workers that join a cluster through a real etcd, and a process that writes what a coordinator does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bamboo_ds.cli.bench.workers import WorkerResult
from bamboo_ds.config import EtcdConfig
from bamboo_ds.elastic import keys
from bamboo_ds.elastic.membership import Membership, open_store
from bamboo_ds.plan import codec
from bamboo_ds.plan.cluster import Node
from bamboo_ds.store import Store
from tests.world.cluster import Pen

_STALE = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Job:
    """A job on a server.

    Attributes:
        endpoint: of the server.
        name: of the job.
        run: the fixture `workers`.
        outage_seconds: how long workers bear that the store is away.
    """

    endpoint: str
    name: str
    run: Callable[..., list[WorkerResult]]
    outage_seconds: float = 20.0

    @property
    def etcd(self) -> EtcdConfig:
        return EtcdConfig(endpoints=(self.endpoint,), timeout_seconds=2.0)

    def store(self) -> Store:
        """Open the store; in a forked process only."""
        return open_store(self.etcd, job=self.name)

    def __call__(
        self,
        script: Callable[[int], Any],
        ids: tuple[int, ...],
        *,
        coordinate: Callable[[Pen], Any] | None = None,
        roster: bool = True,
        timeout_seconds: float = 60.0,
        **options: Any,
    ) -> list[WorkerResult]:
        """Run `script(worker)` in a process per id, and `coordinate(pen)` in one more, whose result comes last."""

        def one(index: int) -> Any:
            for name in _STALE:
                os.environ.pop(name, None)
            if index == len(ids):
                return self._coordinate(coordinate, ids if roster else ())
            worker = ids[index]
            os.environ["LOCAL_RANK"] = "0"
            seat = Membership(self.etcd, self.name, f"n{worker}", worker, outage_seconds=self.outage_seconds)
            seat.write(os.environ)
            return script(worker)

        return self.run(one, len(ids) + 1, timeout_seconds=timeout_seconds, **options)

    def _coordinate(self, coordinate: Callable[[Pen], Any] | None, ids: tuple[int, ...]) -> Any:
        with self.store() as store:
            pen = Pen(store)
            if ids:
                await_keys(store, *map(keys.ready, ids))
                pen.roster(*ids)
            return None if coordinate is None else coordinate(pen)


def await_keys(store: Store, *names: str, within_seconds: float = 20.0) -> None:
    """Wait until all keys exist."""
    deadline = time.monotonic() + within_seconds
    while any(store.get(name) is None for name in names):
        assert time.monotonic() < deadline, f"not all of {names} appeared"
        time.sleep(0.005)


def register(store: Store, *ids: int) -> None:
    """Register the nodes of workers, as their agents do."""
    for worker in ids:
        store.put(keys.node(f"n{worker}"), codec.encode(Node(f"n{worker}", "a", (worker,))))

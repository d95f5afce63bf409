"""What the store's tests share: worlds to run the contract in, clusters, and waits with a deadline."""

from __future__ import annotations

import abc
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import psutil
from typing_extensions import Self

from bamboo_ds.clock import ManualClock
from bamboo_ds.errors import StoreUnavailableError
from bamboo_ds.store import Event, MemoryServer, MemoryStore, Store, Watch
from bamboo_ds.store.embedded import EmbeddedEtcd
from bamboo_ds.store.etcd import EtcdStore


class World(ExitStack, abc.ABC):
    """A server, and as many clients of it as a test wants."""

    ttl_seconds: float
    """The shortest lease that the server grants."""
    brief_seconds: float
    """What a watch needs to hear of the server."""

    @abc.abstractmethod
    def store(self, prefix: str | None = None) -> Store: ...

    @abc.abstractmethod
    def pass_time(self, seconds: float) -> None: ...


class MemoryWorld(World):
    ttl_seconds, brief_seconds = 2.0, 0.0

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.clock, self._prefix = ManualClock(100.0), prefix
        self.server = MemoryServer(clock=self.clock)

    def store(self, prefix: str | None = None) -> Store:
        return self.enter_context(MemoryStore(prefix=prefix or self._prefix, server=self.server))

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            self.clock.advance(0.1)


class EtcdWorld(World):
    ttl_seconds, brief_seconds = 1.0, 0.5

    def __init__(self, endpoint: str, prefix: str) -> None:
        super().__init__()
        self._endpoint, self._prefix = endpoint, prefix

    def store(self, prefix: str | None = None) -> Store:
        return self.enter_context(EtcdStore([self._endpoint], prefix=prefix or self._prefix))

    def pass_time(self, seconds: float) -> None:
        time.sleep(seconds)


class Cluster(ExitStack):
    """Three servers that are one etcd."""

    def __init__(self) -> None:
        super().__init__()
        self.servers = [EmbeddedEtcd(arguments=["--name", name]) for name in ("a", "b", "c")]

    def __enter__(self) -> Self:
        members = ",".join(f"{name}={server.peer_url}" for name, server in zip("abc", self.servers, strict=True))
        election = ["--heartbeat-interval", "100", "--election-timeout", "1000"]
        for server in self.servers:
            self.callback(server.stop)
            server._arguments += ["--initial-cluster", members, *election]
            server.launch()
        for server in self.servers:
            server.wait_until_healthy()
        return super().__enter__()

    @property
    def endpoints(self) -> list[str]:
        return [server.endpoint for server in self.servers]

    def leader_last(self) -> tuple[EmbeddedEtcd, list[EmbeddedEtcd]]:
        """Return the leader and the others."""
        import grpc

        from bamboo_ds.store.etcd_protobuf import etcd_messages

        for server in self.servers:
            with grpc.insecure_channel(server.endpoint) as channel:
                status = etcd_messages().MaintenanceStub(channel).Status(etcd_messages().StatusRequest(), timeout=5)
                if status.leader == status.header.member_id:
                    return server, [other for other in self.servers if other is not server]
        raise AssertionError("a healthy cluster has a leader")


def stop(server: EmbeddedEtcd) -> None:
    """Stop a server, all of its threads; SIGCONT lets it go on."""
    server.signal(signal.SIGSTOP)
    process = psutil.Process(server.pid)
    eventually(lambda: process.status() == psutil.STATUS_STOPPED, within_seconds=5, what="the server stops")


def eventually(condition: Callable[[], Any], *, within_seconds: float, what: str) -> Any:
    """Wait until something is true, and return it."""
    deadline = time.monotonic() + within_seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {within_seconds} s: {what}"
        time.sleep(0.02)
    return result


def collect(watch: Watch, count: int, *, within_seconds: float = 10.0) -> list[Event]:
    """Take at least so many events, through times without a server."""
    events: list[Event] = []
    deadline = time.monotonic() + within_seconds
    while len(events) < count:
        assert time.monotonic() < deadline, f"{len(events)} of {count} events came in {within_seconds} s: {events[-3:]}"
        try:
            events += watch.next(0.5)
        except StoreUnavailableError:
            continue
    return events


def insist(write: Callable[[], Any], *, within_seconds: float = 15.0) -> Any:
    """Repeat a write that may be repeated until the store answers."""
    deadline = time.monotonic() + within_seconds
    while True:
        try:
            return write()
        except StoreUnavailableError:
            assert time.monotonic() < deadline, f"the store does not answer for {within_seconds} s"

"""Reaches etcd: one gRPC channel per server, a login, and requests that move on to the next server when one fails.

Each server has its own channel, rather than one channel over all, as only so a server that is connected but hangs can
be left: gRPC moves on by itself only when a connection breaks.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import grpc  # type: ignore[import-untyped]

from bamboo_ds.clock import Clock
from bamboo_ds.errors import StoreError, StoreUnavailableError
from bamboo_ds.store.etcd_access import Login, Tls, read_endpoints
from bamboo_ds.store.etcd_errors import Failure, Outcome, read_failure
from bamboo_ds.store.etcd_protobuf import etcd_messages

__all__ = ["Connection", "Server"]

_log = logging.getLogger(__name__)

_CHANNEL_OPTIONS = (
    # gRPC would wait up to two minutes before it tries again to connect.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", -1),  # a list of 10,000 nodes is more than its 4 MB
    ("grpc.use_local_subchannel_pool", 1),  # two stores of one process do not share a broken connection
    ("grpc.enable_http_proxy", 0),  # a proxy in the environment is for the outside, not for the cluster's own store
)
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.02, 0.5
_SHORTEST_TRY_SECONDS = 0.5
_LONGEST_LOGINS = 3  # in one request; more means that it is refused for another reason

_first_process: int | None = None
"""The first process that opened a connection, of this one and of those that it was forked from."""


class Server:
    """One etcd server: its address and what can be asked of it."""

    def __init__(self, address: str, *, tls: Tls | None) -> None:
        self.address = address
        options = list(_CHANNEL_OPTIONS)
        self.channel = (
            grpc.insecure_channel(address, options=options)
            if tls is None
            else grpc.secure_channel(address, tls.credentials(), options=options)
        )
        messages = etcd_messages()
        self.kv, self.watch = messages.KVStub(self.channel), messages.WatchStub(self.channel)
        self.lease, self.auth = messages.LeaseStub(self.channel), messages.AuthStub(self.channel)


class Connection:
    """The servers of one etcd cluster; the one that answered last is asked first.

    Args:
        endpoints: ``host:port``, with ``http://`` or ``https://`` before it if you like.
        tls: for encrypted connections; ``https://`` alone trusts the system's authorities.
        login: a user of etcd, if it wants one.
        clock: measures deadlines.

    Raises:
        ConfigError: an endpoint or a TLS file cannot be used.
        StoreError: this process was forked from one that has used gRPC.
    """

    def __init__(self, endpoints: Sequence[str], *, tls: Tls | None, login: Login | None, clock: Clock) -> None:
        self.clock = clock
        self._pid = _claim_process()
        addresses, tls = read_endpoints(endpoints, tls)
        self._servers = [Server(address, tls=tls) for address in addresses]
        self._login, self._token = login, ""
        self._index = 0
        self._lock, self._login_lock = threading.Lock(), threading.Lock()
        self._ending = threading.Condition()
        self._closed = False

    @property
    def inherited(self) -> bool:
        """Whether this connection belongs to the process that forked this one."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Check that this connection may be used.

        Raises:
            StoreError: it was closed, or belongs to the process that forked this one.
        """
        if self.inherited:
            raise StoreError(
                f"this store was opened in process {self._pid} and is used in process {os.getpid()}, which was forked "
                "from it: gRPC does not survive a fork; open the store in the process that uses it"
            )
        if self._closed:
            raise StoreError("this store was closed")

    def server(self) -> Server:
        """Return the server to ask now."""
        self.check()
        return self._servers[self._index]

    def leave(self, server: Server) -> None:
        """Ask another server from now on, as this one failed; nothing changes if another one is asked already."""
        with self._lock:
            if len(self._servers) > 1 and self._servers[self._index] is server:
                self._index = (self._index + 1) % len(self._servers)
                _log.info("etcd at %s failed; going on with %s", server.address, self._servers[self._index].address)

    def metadata(self, *, deadline: float) -> list[tuple[str, str]]:
        """Return what goes with each request: the token, and that a server without a leader shall say so."""
        if self._login is not None and not self._token:
            self.log_in(deadline=deadline, stale_token="")
        return [("hasleader", "true"), *([("token", self._token)] if self._token else [])]

    def token(self) -> str:
        """Return the token in use; empty if there is none."""
        return self._token

    def log_in(self, *, deadline: float, stale_token: str) -> None:
        """Get a new token, unless another thread replaced the stale one already."""
        if self._login is None:
            return
        if not self._login_lock.acquire(timeout=max(deadline - self.clock.now(), 0.0)):
            raise StoreUnavailableError("log in to etcd: no answer before the deadline")
        try:
            if self._token == stale_token:
                self._token = self._new_token(self._login, deadline)
        finally:
            self._login_lock.release()

    def ask(self, call: Callable[[Server], Any], request: Any, *, what: str, deadline: float, repeatable: bool) -> Any:
        """Send a request until it is answered, or refused, or the deadline has passed.

        Args:
            call: picks the method of a server.
            request: to send.
            what: it is, for messages.
            deadline: of our clock.
            repeatable: whether doing it twice is doing it once. If not, it is sent again only when it certainly was
                not done.

        Raises:
            StoreUnavailableError: no answer in time; it may have been done.
            StoreError: it was refused.
        """

        def attempt(server: Server) -> Any:
            seconds = self._attempt_seconds(deadline, repeatable)
            return call(server)(request, timeout=seconds, metadata=self.metadata(deadline=deadline))

        return self._until_answered(attempt, what=what, deadline=deadline, repeatable=repeatable)

    def close(self) -> None:
        """Close all channels. May be called again; does nothing in a forked child."""
        if self.inherited or self._closed:
            return
        with self._ending:
            self._closed = True
            self._ending.notify_all()
        for server in self._servers:
            server.channel.close()

    def _until_answered(self, attempt: Callable[[Server], Any], *, what: str, deadline: float, repeatable: bool) -> Any:
        failures, logins = 0, 0
        while True:
            server, token = self.server(), self._token
            try:
                return attempt(server)
            except (grpc.RpcError, ValueError) as error:  # ValueError: the channel was closed under us
                self.check()
                if isinstance(error, ValueError):
                    raise
                failure = read_failure(error, what=what, server=server.address)
            if failure.outcome is Outcome.STALE_TOKEN and self._login is not None and logins < _LONGEST_LOGINS:
                logins += 1
                self.log_in(deadline=deadline, stale_token=token)
                continue
            failures += 1
            self._prepare_retry(failure, server, failures=failures, deadline=deadline, repeatable=repeatable)

    def _prepare_retry(
        self, failure: Failure, server: Server, *, failures: int, deadline: float, repeatable: bool
    ) -> None:
        """Move to another server and wait a little, or raise the failure if the request must not be sent again."""
        if failure.outcome in (Outcome.REFUSED, Outcome.STALE_TOKEN):
            raise failure.error
        self.leave(server)
        if failure.outcome is Outcome.UNKNOWN and not repeatable:
            raise StoreUnavailableError(f"{failure.error}; it may have been done: read back before you repeat it")
        rounds = failures // len(self._servers)
        if failures % len(self._servers) == 0:
            self.pause(min(_FIRST_PAUSE_SECONDS * 2.0 ** min(rounds - 1, 10), _LONGEST_PAUSE_SECONDS), deadline)
        if self.clock.now() >= deadline:
            raise failure.error

    def pause(self, seconds: float, deadline: float) -> None:
        """Wait, but not past the deadline nor past `close`."""
        end = min(self.clock.now() + seconds, deadline)
        with self._ending:
            while not self._closed and (remaining := end - self.clock.now()) > 0:
                self.clock.wait(self._ending, remaining)

    def _attempt_seconds(self, deadline: float, repeatable: bool) -> float:
        """Return how long one server may take: a part of the time if others can be asked afterwards."""
        remaining = max(deadline - self.clock.now(), 0.001)
        if not repeatable or len(self._servers) == 1:
            return remaining
        return min(remaining, max(remaining / len(self._servers), _SHORTEST_TRY_SECONDS))

    def _new_token(self, login: Login, deadline: float) -> str:
        request = etcd_messages().AuthenticateRequest(name=login.user, password=login.password)

        def attempt(server: Server) -> Any:
            return server.auth.Authenticate(request, timeout=self._attempt_seconds(deadline, True))

        what = f"log in as {login.user!r}"
        try:
            return str(self._until_answered(attempt, what=what, deadline=deadline, repeatable=True).token)
        except StoreError as error:
            if "authentication is not enabled" in str(error):
                return ""  # This cluster lets everyone in; so did the operator until now, perhaps.
            raise


def _claim_process() -> int:
    """Return our process id, unless a process that we were forked from has opened a connection.

    gRPC's threads are gone in a forked child. It may seem to work there, also after the parent had closed all of its
    connections, and once in a while it hangs for ever when it makes a channel: seen with grpcio 1.85.
    """
    global _first_process
    if _first_process is not None and _first_process != os.getpid():
        raise StoreError(
            f"process {os.getpid()} was forked from {_first_process} after that had opened a store: gRPC does not "
            "survive a fork; fork before anyone opens a store, or start a new program"
        )
    _first_process = os.getpid()
    return _first_process

"""Keeps a lease of etcd alive: a thread renews it every third of its time, on any server that answers.

A renewal that fails is tried again until the time is really over. Over is what our own clock says, reckoned from the
moment the last answered renewal was *sent*: a server that got it later lets the lease live longer than we think, never
shorter. So a holder that was cut off or stopped knows in time that it holds nothing any more.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

import grpc  # type: ignore[import-untyped]

from bamboo_ds.errors import LeaseLostError, StoreError, StoreUnavailableError
from bamboo_ds.store.contract import Lease
from bamboo_ds.store.etcd_connection import Connection, Server
from bamboo_ds.store.etcd_errors import AlreadyGrantedError, Outcome, read_failure
from bamboo_ds.store.etcd_protobuf import etcd_messages

__all__ = ["EtcdLease", "grant"]

_log = logging.getLogger(__name__)

_RETRY_PART = 30  # of the lease's time, between two tries
_TRY_PART = 6  # of the lease's time, for one try


def grant(connection: Connection, ttl_seconds: int, *, deadline: float) -> EtcdLease:
    """Take a lease and start to renew it.

    We choose its id, so that asking twice is asking once.
    """
    messages, lease_id = etcd_messages(), int.from_bytes(os.urandom(8), "big") >> 1 or 1
    sent_at = connection.clock.now()
    request = messages.LeaseGrantRequest(TTL=ttl_seconds, ID=lease_id)
    try:
        answer = connection.ask(
            _grant_of, request, what=f"take a lease of {ttl_seconds} s", deadline=deadline, repeatable=True
        )
        ttl_seconds = answer.TTL
    except AlreadyGrantedError:
        _log.debug("lease %x was granted at an earlier try whose answer got lost", lease_id)
    return EtcdLease(connection, lease_id, ttl_seconds, sent_at=sent_at)


class EtcdLease(Lease):
    """A lease of etcd, renewed until it is revoked, lost, or the store is closed."""

    def __init__(self, connection: Connection, lease_id: int, ttl_seconds: float, *, sent_at: float) -> None:
        self.id, self.ttl_seconds, self.lost = lease_id, ttl_seconds, threading.Event()
        self._connection, self._clock = connection, connection.clock
        self._end = sent_at + ttl_seconds
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._keep_alive, name=f"lease-{lease_id:x}", daemon=True)
        self._thread.start()

    @property
    def remaining_seconds(self) -> float:
        """Seconds until the lease is over unless it is renewed; 0 once it is over."""
        return 0.0 if self.lost.is_set() else max(self._end - self._clock.now(), 0.0)

    def revoke(self, *, timeout_seconds: float | None = None) -> None:
        """End the lease and delete its keys now."""
        self._connection.check()
        self.stop()
        deadline = self._clock.now() + (self.ttl_seconds if timeout_seconds is None else timeout_seconds)
        request = etcd_messages().LeaseRevokeRequest(ID=self.id)
        try:
            self._connection.ask(
                _revoke_of, request, what=f"revoke lease {self.id:x}", deadline=deadline, repeatable=True
            )
        except StoreUnavailableError:
            raise
        except StoreError as error:
            if "lease not found" not in str(error):  # over already
                raise

    def stop(self) -> None:
        """Renew it no longer, and consider it lost."""
        with self._wake:
            self.lost.set()
            self._wake.notify_all()

    def _keep_alive(self) -> None:
        pause = self.ttl_seconds / 3
        while self._sleep(min(pause, max(self._end - self._clock.now(), 0.0))):
            if self._clock.now() >= self._end:
                _log.error("lease %x was not renewed within %g s: it is lost", self.id, self.ttl_seconds)
                return self.stop()
            try:
                renewed = self._renew()
            except LeaseLostError as error:
                _log.error("%s", error)
                return self.stop()
            except StoreError as error:  # a login that is refused for a while, say: the lease lives on until its end
                _log.info("lease %x was not renewed: %s", self.id, error)
                renewed = False
            pause = self.ttl_seconds / (3 if renewed else _RETRY_PART)
        return None

    def _sleep(self, seconds: float) -> bool:
        """Wait, and return whether there is still a lease to renew."""
        end = self._clock.now() + seconds
        with self._wake:
            while not self.lost.is_set() and (remaining := end - self._clock.now()) > 0:
                self._clock.wait(self._wake, remaining)
        return not self.lost.is_set()

    def _renew(self) -> bool:
        """Renew the lease at one server and return whether that worked.

        Raises:
            LeaseLostError: it is over.
            StoreError: the login is refused, or the store was closed.
        """
        server, sent_at = self._connection.server(), self._clock.now()
        remaining = max(self._end - sent_at, 0.001)
        seconds = min(remaining, self.ttl_seconds / _TRY_PART)
        token = self._connection.token()
        try:
            ttl_seconds = _ask_once(server, self.id, seconds, self._connection.metadata(deadline=sent_at + seconds))
        except StoreUnavailableError:
            return False
        except (grpc.RpcError, ValueError) as error:
            self._connection.check()
            return self._after(error, server, token, deadline=sent_at + seconds)
        if ttl_seconds <= 0:
            raise LeaseLostError(f"etcd knows no lease {self.id:x}: it ran out or was revoked")
        self._end = sent_at + ttl_seconds
        return True

    def _after(self, error: Exception, server: Server, token: str, *, deadline: float) -> bool:
        """Prepare another try."""
        failure = read_failure(error, what=f"renew lease {self.id:x}", server=server.address)
        _log.info("%s", failure.error)
        if failure.outcome is Outcome.STALE_TOKEN:
            self._connection.log_in(deadline=deadline, stale_token=token)
        else:
            self._connection.leave(server)
        return False


def _ask_once(server: Server, lease_id: int, seconds: float, metadata: Any) -> float:
    """Send one renewal on a stream of its own, and return the time to live it is answered with."""
    request = etcd_messages().LeaseKeepAliveRequest(ID=lease_id)
    stream = server.lease.LeaseKeepAlive(iter([request]), timeout=seconds, metadata=metadata)
    try:
        return float(next(stream).TTL)
    except StopIteration:
        raise StoreUnavailableError(f"etcd at {server.address} closed the stream of renewals") from None
    finally:
        stream.cancel()


def _grant_of(server: Server) -> Any:
    return server.lease.LeaseGrant


def _revoke_of(server: Server) -> Any:
    return server.lease.LeaseRevoke

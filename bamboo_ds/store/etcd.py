"""The real store: etcd, 3.4 or later. With its neighbours `etcd_*`, the only place that knows etcd3 and gRPC.

Of the package etcd3 we use what etcd's own protocol defines, the messages and stubs. Its client has one server, one
login for ever, watches that die at the first error and leases that nobody renews; connections, logins, watches and
leases here are our own.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

from bamboo_ds.clock import Clock, SystemClock
from bamboo_ds.errors import ConflictError
from bamboo_ds.store.contract import (
    Committed,
    Condition,
    DeletePrefix,
    Entry,
    Fence,
    Lease,
    Put,
    Snapshot,
    Watch,
    Write,
    broken_condition,
    check_key,
    check_writes,
)
from bamboo_ds.store.etcd_access import Login, Tls
from bamboo_ds.store.etcd_connection import Connection, Server
from bamboo_ds.store.etcd_lease import EtcdLease, grant
from bamboo_ds.store.etcd_protobuf import etcd_messages
from bamboo_ds.store.etcd_watch import EtcdWatch
from bamboo_ds.store.store import Store

__all__ = ["EtcdStore", "Login", "Tls"]


class EtcdStore(Store):
    """A store on a cluster of etcd servers. Connects at the first call, not before.

    Args:
        endpoints: the servers, as ``host:port``, ``http://host:port`` or ``https://host:port``.
        prefix: what all keys begin with, for instance ``/bamboo/<job>/``.
        tls: for encrypted connections.
        login: a user of etcd, if it wants one.
        timeout_seconds: the deadline of calls that name none, and how long a watch bears silence.
        clock: measures deadlines and leases.

    Raises:
        ConfigError: an argument cannot be right, or a package is missing.
        StoreError: this process was forked from one that had opened a store, if it is closed or not.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        prefix: str,
        tls: Tls | None = None,
        login: Login | None = None,
        timeout_seconds: float = 5.0,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(
            prefix=prefix, timeout_seconds=timeout_seconds, clock=SystemClock() if clock is None else clock
        )
        self._connection = Connection(endpoints, tls=tls, login=login, clock=self.clock)
        self._messages = etcd_messages()
        self._watches: weakref.WeakSet[EtcdWatch] = weakref.WeakSet()
        self._leases: weakref.WeakSet[EtcdLease] = weakref.WeakSet()

    def get(self, key: str, *, timeout_seconds: float | None = None) -> Entry | None:
        """Return a key's entry, or None if there is no such key."""
        request = self._messages.RangeRequest(key=self._full(check_key(key)))
        answer = self._read(request, f"get {key!r}", timeout_seconds)
        return self._entry(answer.kvs[0]) if answer.kvs else None

    def list(self, prefix: str = "", *, timeout_seconds: float | None = None) -> Snapshot:
        """Return all keys that begin with a prefix, as they are at one moment."""
        first, end = self._range(prefix)
        request = self._messages.RangeRequest(key=first, range_end=end)
        answer = self._read(request, f"list {prefix!r}", timeout_seconds)
        return Snapshot(tuple(self._entry(found) for found in answer.kvs), answer.header.revision)

    def transact(
        self,
        conditions: Sequence[Condition],
        writes: Sequence[Write],
        *,
        fence: Fence | None = None,
        timeout_seconds: float | None = None,
    ) -> Committed:
        """Write, all or nothing, if all conditions and the fence hold."""
        check_writes(writes)
        everything = [*conditions, *([] if fence is None else [fence])]
        request = self._messages.TxnRequest(
            compare=[self._compare(condition) for condition in everything],
            success=[self._operation(write) for write in writes],
            # What conflicted, seen at the same moment, for the message.
            failure=[self._look(condition) for condition in everything],
        )
        answer = self._connection.ask(
            _transact_of,
            request,
            what=_describe(writes),
            deadline=self._deadline(timeout_seconds),
            repeatable=not writes,
        )
        if not answer.succeeded:
            raise ConflictError("nothing was written: " + self._broken(everything, answer))
        deleted = sum(part.response_delete_range.deleted for part in answer.responses)
        return Committed(answer.header.revision, deleted)

    def watch(self, prefix: str = "", *, from_revision: int) -> Watch:
        """Watch the keys that begin with a prefix, from the changes of a revision on."""
        if from_revision < 1:
            raise ValueError(f"watch from_revision = {from_revision}: revisions begin at 1")
        return self._watch(prefix, from_revision)

    def listen(self, prefix: str = "", *, timeout_seconds: float | None = None) -> tuple[Snapshot, Watch]:
        """Return the keys that begin with a prefix, and a watch of all that changes after that."""
        deadline, watch = self._deadline(timeout_seconds), self._watch(prefix, None)
        try:
            watch.begin(deadline=deadline)
            snapshot = self.list(prefix, timeout_seconds=max(deadline - self.clock.now(), 0.0))
        except BaseException:
            watch.close()
            raise
        watch.skip(snapshot.revision)
        return snapshot, watch

    def _watch(self, prefix: str, from_revision: int | None) -> EtcdWatch:
        self._connection.check()
        watch = EtcdWatch(
            self._connection,
            prefix=self.prefix + prefix,
            strip=self.prefix,
            end=self._range(prefix)[1],
            from_revision=from_revision,
            patience_seconds=self.timeout_seconds,
        )
        self._watches.add(watch)
        return watch

    def lease(self, ttl_seconds: float, *, timeout_seconds: float | None = None) -> Lease:
        """Take a lease and keep it alive in the background."""
        if not ttl_seconds > 0:
            raise ValueError(f"lease ttl_seconds = {ttl_seconds}: must be greater than 0")
        lease = grant(self._connection, math.ceil(ttl_seconds), deadline=self._deadline(timeout_seconds))
        self._leases.add(lease)
        return lease

    def compact(self, revision: int, *, timeout_seconds: float | None = None) -> None:
        """Forget the history up to a revision, of the whole etcd and not of this prefix alone."""
        self._connection.ask(
            lambda server: server.kv.Compact,
            self._messages.CompactionRequest(revision=revision, physical=True),
            what=f"compact up to revision {revision}",
            deadline=self._deadline(timeout_seconds),
            repeatable=False,
        )

    def close(self) -> None:
        """End watches and renewals and close the connections. May be called again; nothing in a forked child."""
        if self._connection.inherited:
            return
        for watch in list(self._watches):
            watch.close()
        for lease in list(self._leases):
            lease.stop()
        self._connection.close()

    def _read(self, request: Any, what: str, timeout_seconds: float | None) -> Any:
        return self._connection.ask(
            _range_of, request, what=what, deadline=self._deadline(timeout_seconds), repeatable=True
        )

    def _full(self, key: str) -> bytes:
        return (self.prefix + key).encode()

    def _range(self, prefix: str) -> tuple[bytes, bytes]:
        """Return the first key of a prefix and the first one behind it. UTF-8 has no byte 0xff, so that +1 is fine."""
        first = self._full(prefix)
        return first, first[:-1] + bytes([first[-1] + 1])

    def _entry(self, found: Any) -> Entry:
        key = found.key.decode().removeprefix(self.prefix)
        return Entry(key, found.value, found.mod_revision, found.create_revision, found.lease)

    def _compare(self, condition: Condition) -> Any:
        compare, key = self._messages.Compare, self._full(check_key(condition.key))
        if isinstance(condition, Fence):
            return compare(
                key=key, target=compare.CREATE, result=compare.EQUAL, create_revision=condition.create_revision
            )
        return compare(key=key, target=compare.MOD, result=compare.EQUAL, mod_revision=condition.revision)

    def _look(self, condition: Condition) -> Any:
        request = self._messages.RangeRequest(key=self._full(condition.key))
        return self._messages.RequestOp(request_range=request)

    def _operation(self, write: Write) -> Any:
        if isinstance(write, Put):
            lease_id = 0 if write.lease is None else write.lease.id
            put = self._messages.PutRequest(key=self._full(write.key), value=write.value, lease=lease_id)
            return self._messages.RequestOp(request_put=put)
        if isinstance(write, DeletePrefix):
            first, end = self._range(write.prefix)
            delete = self._messages.DeleteRangeRequest(key=first, range_end=end)
        else:
            delete = self._messages.DeleteRangeRequest(key=self._full(write.key))
        return self._messages.RequestOp(request_delete_range=delete)

    def _broken(self, conditions: Sequence[Condition], answer: Any) -> str:
        """Say which conditions do not hold, from what the failed transaction saw."""
        found = [part.response_range.kvs for part in answer.responses]
        reasons = [
            broken_condition(condition, found=self._entry(kvs[0]) if kvs else None)
            for condition, kvs in zip(conditions, found, strict=True)
        ]
        return "; ".join(reason for reason in reasons if reason)


def _range_of(server: Server) -> Any:
    return server.kv.Range


def _transact_of(server: Server) -> Any:
    return server.kv.Txn


def _describe(writes: Sequence[Write]) -> str:
    """Name the writes of a transaction, for messages."""
    names = [
        f"delete prefix {write.prefix!r}"
        if isinstance(write, DeletePrefix)
        else f"{'put' if isinstance(write, Put) else 'delete'} {write.key!r}"
        for write in writes[:3]
    ]
    more = f" and {len(writes) - 3} more" if len(writes) > 3 else ""
    return ", ".join(names) + more if names else "check conditions"

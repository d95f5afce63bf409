"""A store in this process, for tests and the simulator: the contract in full, on a clock that is handed in.

`MemoryServer` is what etcd is for the real store: it holds keys, history and leases, and several `MemoryStore`s, one
per would-be process, share it. Leases end by the server's clock; whoever touches the server first afterwards finds
their keys gone, as if they had gone in time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from bamboo_ds.clock import Clock
from bamboo_ds.errors import ConflictError, StoreError, StoreUnavailableError
from bamboo_ds.store.contract import (
    Committed,
    Condition,
    Delete,
    DeletePrefix,
    Entry,
    Event,
    Fence,
    Lease,
    Put,
    Snapshot,
    Unchanged,
    Watch,
    Write,
    check_key,
    check_writes,
)
from bamboo_ds.store.memory_server import Grant, MemoryServer
from bamboo_ds.store.store import Store

__all__ = ["MemoryServer", "MemoryStore"]


class MemoryStore(Store):
    """One process's view of a `MemoryServer`.

    Args:
        prefix: what all keys begin with.
        server: shared with others; an own one if None.
        timeout_seconds: kept for the contract; no call waits, but watches.
        clock: of an own server.
    """

    def __init__(
        self,
        *,
        prefix: str = "/bamboo/test/",
        server: MemoryServer | None = None,
        timeout_seconds: float = 5.0,
        clock: Clock | None = None,
    ) -> None:
        self.server = MemoryServer(clock=clock) if server is None else server
        super().__init__(prefix=prefix, timeout_seconds=timeout_seconds, clock=self.server.clock)
        self._closed = False
        self._leases: list[_MemoryLease] = []

    def get(self, key: str, *, timeout_seconds: float | None = None) -> Entry | None:
        """Return a key's entry, or None if there is no such key."""
        with self.server._changed:
            self._enter()
            found = self.server._entries.get(self.prefix + check_key(key))
        return None if found is None else self._bare(found)

    def list(self, prefix: str = "", *, timeout_seconds: float | None = None) -> Snapshot:
        """Return all keys that begin with a prefix, as they are at one moment."""
        with self.server._changed:
            self._enter()
            entries, wanted = self.server._entries, self.prefix + prefix
            found = sorted(key for key in entries if key.startswith(wanted))
            return Snapshot(tuple(self._bare(entries[key]) for key in found), self.server._revision)

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
        with self.server._changed:
            self._enter()
            try:
                return self.server._transact(
                    [self._full_condition(condition) for condition in everything],
                    [self._full_write(write) for write in writes],
                )
            except ConflictError as error:
                raise ConflictError(str(error).replace(f"'{self.prefix}", "'")) from None

    def watch(self, prefix: str = "", *, from_revision: int) -> Watch:
        """Watch the keys that begin with a prefix, from the changes of a revision on."""
        if from_revision < 1:
            raise ValueError(f"watch from_revision = {from_revision}: revisions begin at 1")
        with self.server._changed:
            self._enter(even_if_unreachable=True)
        return _MemoryWatch(self, prefix, from_revision)

    def listen(self, prefix: str = "", *, timeout_seconds: float | None = None) -> tuple[Snapshot, Watch]:
        """Return the keys that begin with a prefix, and a watch of all that changes after that."""
        snapshot = self.list(prefix)
        return snapshot, self.watch(prefix, from_revision=snapshot.revision + 1)

    def lease(self, ttl_seconds: float, *, timeout_seconds: float | None = None) -> Lease:
        """Take a lease that is kept alive until it is revoked, expired by the server, or this store is closed."""
        if not ttl_seconds > 0:
            raise ValueError(f"lease ttl_seconds = {ttl_seconds}: must be greater than 0")
        with self.server._changed:
            self._enter()
            lease_id, grant = next(self.server._lease_ids), Grant(math.ceil(ttl_seconds), self.clock.now())
            self.server._grants[lease_id] = grant
            self._leases.append(_MemoryLease(self, lease_id, grant))
            return self._leases[-1]

    def compact(self, revision: int, *, timeout_seconds: float | None = None) -> None:
        """Forget the history up to a revision."""
        server = self.server
        with server._changed:
            self._enter()
            if not server._compacted < revision <= server._revision:
                raise StoreError(
                    f"compact({revision}): must be after {server._compacted} (compacted already) and at most "
                    f"{server._revision} (the latest)"
                )
            server._compacted = revision
            while server._history and server._history[0][0].revision <= revision:
                server._history.popleft()
            server._changed.notify_all()

    def close(self) -> None:
        """End watches, and renew leases no longer. May be called again."""
        with self.server._changed:
            for lease in [] if self._closed else self._leases:
                lease._stop()
            self._closed = True
            self.server._changed.notify_all()

    def _enter(self, *, even_if_unreachable: bool = False) -> None:
        if self._closed:
            raise StoreError("this store was closed")
        if not (self.server.reachable or even_if_unreachable):
            raise StoreUnavailableError("the store does not answer (MemoryServer.reachable is False)")
        self.server._settle()

    def _bare(self, entry: Entry) -> Entry:
        key = entry.key.removeprefix(self.prefix)
        return Entry(key, entry.value, entry.revision, entry.create_revision, entry.lease_id)

    def _full_condition(self, condition: Condition) -> Condition:
        key = self.prefix + check_key(condition.key)
        if isinstance(condition, Fence):
            return Fence(key, condition.create_revision)
        return Unchanged(key, condition.revision)

    def _full_write(self, write: Write) -> Write:
        if isinstance(write, Put):
            return Put(self.prefix + write.key, write.value, write.lease)
        if isinstance(write, DeletePrefix):
            return DeletePrefix(self.prefix + write.prefix)
        return Delete(self.prefix + write.key)


class _MemoryLease(Lease):
    def __init__(self, store: MemoryStore, lease_id: int, grant: Grant) -> None:
        self.id, self.ttl_seconds, self.lost = lease_id, grant.ttl_seconds, grant.lost
        self._store, self._grant = store, grant

    @property
    def remaining_seconds(self) -> float:
        return 0.0 if self.lost.is_set() else self._grant.remaining_seconds(self._store.clock.now())

    def revoke(self, *, timeout_seconds: float | None = None) -> None:
        with self._store.server._changed:
            self._stop()
            self._store._enter()
            self._store.server._end_lease(self.id)

    def _stop(self) -> None:
        """Renew no longer; the server ends it when its time is over."""
        if self._grant.last_renewed_at is None:
            self._grant.last_renewed_at = self._grant.renewed_at(self._store.clock.now())
        self.lost.set()


class _MemoryWatch(Watch):
    def __init__(self, store: MemoryStore, prefix: str, from_revision: int) -> None:
        self._store, self._prefix, self._revision = store, store.prefix + prefix, from_revision
        self._closed = False

    def next(self, timeout_seconds: float) -> tuple[Event, ...]:
        server, clock = self._store.server, self._store.clock
        deadline = clock.now() + timeout_seconds
        with server._changed:
            while True:
                if events := self._news():
                    return events
                remaining = deadline - clock.now()
                if remaining <= 0:
                    self._store._enter()
                    return ()
                clock.wait(server._changed, min(remaining, server._seconds_to_next_end()))

    def close(self) -> None:
        with self._store.server._changed:
            self._closed = True
            self._store.server._changed.notify_all()

    def _news(self) -> tuple[Event, ...]:
        """Take what has come since the last call."""
        server = self._store.server
        self._store._enter(even_if_unreachable=True)
        if self._closed:
            raise StoreError("this watch was closed")
        if not server.reachable:
            return ()
        events = [event for event in server._since(self._revision) if event.key.startswith(self._prefix)]
        self._revision = max(self._revision, server._revision + 1)
        own = self._store.prefix
        return tuple(Event(event.kind, event.key.removeprefix(own), event.value, event.revision) for event in events)

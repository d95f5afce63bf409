"""What etcd is for the real store: the keys, the history and the leases behind all `MemoryStore`s of a test.

Methods that begin with an underscore are for `bamboo_ds.store.memory` alone, which holds the lock.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from bamboo_ds.clock import Clock, SystemClock
from bamboo_ds.errors import CompactedError, ConflictError, LeaseLostError
from bamboo_ds.store.contract import (
    Committed,
    Condition,
    DeletePrefix,
    Entry,
    Event,
    EventKind,
    Put,
    Write,
    broken_condition,
)

__all__ = ["Grant", "MemoryServer"]

_ANY_TIME_SECONDS = 3600.0


@dataclass(eq=False, slots=True)
class Grant:
    """A lease as the server knows it."""

    ttl_seconds: float
    granted_at: float
    lost: threading.Event = field(default_factory=threading.Event)
    last_renewed_at: float | None = None
    """None while its holder renews it."""

    def renewed_at(self, now: float) -> float:
        """Return the moment of the last renewal: every third of its time, while the holder renews it."""
        if self.last_renewed_at is not None:
            return self.last_renewed_at
        third = self.ttl_seconds / 3
        return self.granted_at + math.floor((now - self.granted_at) / third) * third

    def remaining_seconds(self, now: float) -> float:
        """Return the time until it ends, if it is not renewed again."""
        return max(self.renewed_at(now) + self.ttl_seconds - now, 0.0)


class MemoryServer:
    """The keys, the history and the leases. Several `MemoryStore`s share it.

    Args:
        clock: by which leases end.
        history_revisions: how many changes watches can go back.

    Attributes:
        reachable: False makes every call fail as if no server answered, until it is set again.
    """

    def __init__(self, *, clock: Clock | None = None, history_revisions: int = 10_000) -> None:
        self.clock = SystemClock() if clock is None else clock
        self.reachable = True
        self._changed = threading.Condition()
        self._revision, self._compacted = 1, 0
        self._entries: dict[str, Entry] = {}
        self._history: deque[tuple[Event, ...]] = deque()
        self._history_revisions = history_revisions
        self._grants: dict[int, Grant] = {}
        self._lease_ids = itertools.count(1)

    def expire(self, lease_id: int) -> None:
        """End a lease as if its time had run out."""
        with self._changed:
            self._end_lease(lease_id)

    def _settle(self) -> None:
        """End the leases whose time is over, in the order of their ends."""
        now = self.clock.now()
        over = [(grant.renewed_at(now) + grant.ttl_seconds, lease_id) for lease_id, grant in self._grants.items()]
        for end, lease_id in sorted(over):
            if end <= now:
                self._end_lease(lease_id)

    def _end_lease(self, lease_id: int) -> None:
        grant = self._grants.pop(lease_id, None)
        if grant is None:
            return
        grant.lost.set()
        keys = [key for key, entry in self._entries.items() if entry.lease_id == lease_id]
        self._commit([self._remove(key, self._revision + 1) for key in sorted(keys)])

    def _remove(self, key: str, revision: int) -> Event:
        del self._entries[key]
        return Event(EventKind.DELETE, key, b"", revision)

    def _set(self, put: Put, revision: int) -> Event:
        old = self._entries.get(put.key)
        created = revision if old is None else old.create_revision
        lease_id = 0 if put.lease is None else put.lease.id
        self._entries[put.key] = Entry(put.key, put.value, revision, created, lease_id)
        return Event(EventKind.PUT, put.key, put.value, revision)

    def _write(self, write: Write, revision: int) -> list[Event]:
        if isinstance(write, Put):
            return [self._set(write, revision)]
        if isinstance(write, DeletePrefix):
            keys = sorted(key for key in self._entries if key.startswith(write.prefix))
        else:
            keys = [write.key] if write.key in self._entries else []
        return [self._remove(key, revision) for key in keys]

    def _commit(self, events: list[Event]) -> None:
        if not events:
            return
        self._revision += 1
        self._history.append(tuple(events))
        if len(self._history) > self._history_revisions:
            self._history.popleft()
            self._compacted = self._revision - len(self._history)
        self._changed.notify_all()

    def _transact(self, conditions: Sequence[Condition], writes: Sequence[Write]) -> Committed:
        broken = [broken_condition(condition, found=self._entries.get(condition.key)) for condition in conditions]
        if any(broken):
            raise ConflictError("nothing was written: " + "; ".join(reason for reason in broken if reason))
        for write in writes:
            if isinstance(write, Put) and write.lease is not None and write.lease.id not in self._grants:
                raise LeaseLostError(f"{write.key!r} was not written: its lease {write.lease.id:x} is over")
        events = [event for write in writes for event in self._write(write, self._revision + 1)]
        self._commit(events)
        return Committed(self._revision, sum(event.kind is EventKind.DELETE for event in events))

    def _since(self, revision: int) -> tuple[Event, ...]:
        """Return all changes from a revision on."""
        if revision <= self._compacted:
            raise CompactedError(
                f"the history up to revision {self._compacted} is gone, the watch is at {revision}: list again and "
                "watch from the snapshot's revision + 1"
            )
        first = self._revision - len(self._history) + 1
        return tuple(itertools.chain.from_iterable(itertools.islice(self._history, max(revision - first, 0), None)))

    def _seconds_to_next_end(self) -> float:
        now = self.clock.now()
        ends = [grant.remaining_seconds(now) for grant in self._grants.values() if grant.last_renewed_at is not None]
        return min(ends, default=_ANY_TIME_SECONDS)

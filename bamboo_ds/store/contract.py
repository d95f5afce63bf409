"""What the cluster may ask of its store, and what the store promises. `memory` and `etcd` pass the same tests of it.

Keys are text below a prefix that is chosen at construction (`/bamboo/<job>/`) and never seen by the caller; values are
bytes. The promises:

* **Revisions.** The store counts its changes. Each successful `transact` that changes something is one step of the
  count, whatever it writes; its entries carry that revision. Revisions grow, and are comparable between keys.
* **Linearizable.** A call sees all calls that ended before it began, whoever made them. `list` shows one moment.
* **All or nothing.** The writes of a `transact` happen together, and only if all its conditions hold at that moment.
* **Deadlines.** No call takes longer than its `timeout_seconds` (the store's own if none is given), but for a blink.
* **Definite and indefinite errors.** `StoreUnavailableError` is indefinite: a write may have happened, be happening, or
  never happen; read back before you do it again. Every other `StoreError` is definite: nothing was written. A write
  is never repeated behind your back unless it is certain that it did not happen; reads are repeated until the deadline.
* **Watches** deliver each change of their prefix once, in order of revisions, changes of one revision together, across
  reconnects. What they cannot deliver they report (`CompactedError`).
* **Leases.** A key written under a lease goes when the lease is revoked or runs out: not before `ttl_seconds` after the
  last renewal, and shortly after it. The holder reckons from the moment it *sent* the last renewal that was answered,
  so it knows of the end no later than the store.
* **Elections.** At most one candidate's `Fence` holds at any moment. A fenced write of anyone else fails.

All methods may be called from all threads. Nothing survives a fork: open the store in the process that uses it, which
must not be the child of one that had opened a store before it forked.
"""

from __future__ import annotations

import abc
import enum
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from typing_extensions import Self

__all__ = [
    "ABSENT",
    "Committed",
    "Condition",
    "Delete",
    "DeletePrefix",
    "Entry",
    "Event",
    "EventKind",
    "Fence",
    "Lease",
    "Put",
    "Snapshot",
    "Unchanged",
    "Watch",
    "Write",
]

ABSENT = 0
"""The revision of a key that does not exist."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A key as it was at one moment."""

    key: str
    value: bytes
    revision: int
    """Of its last change."""
    create_revision: int
    """Of the change that brought it into being; a key that is deleted and written again gets a new one."""
    lease_id: int = 0
    """Of the lease it lives under; 0 if under none."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All keys below a prefix at one moment, sorted by key."""

    entries: tuple[Entry, ...]
    revision: int
    """Of the whole store at that moment: watch from `revision + 1` to miss nothing."""


class EventKind(enum.Enum):
    """What happened to a key."""

    PUT = "put"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Event:
    """One change of one key. The value of a deleted key is empty."""

    kind: EventKind
    key: str
    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class Unchanged:
    """Holds while the key's last change is that of `revision`; 0 (`ABSENT`) holds while there is no such key."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class Fence:
    """Holds while the key that was created at `create_revision` exists: while its candidate leads."""

    key: str
    create_revision: int


Condition = Unchanged | Fence


class Lease(abc.ABC):
    """A promise to be alive, renewed in the background every third of its time until it is revoked or lost.

    Attributes:
        id: a number that no other lease has.
        ttl_seconds: how long it lives without renewal, as the store granted it (perhaps longer than asked for).
        lost: set once the lease is over, or may be, by our own clock; also by `revoke` and by closing the store.
    """

    id: int
    ttl_seconds: float
    lost: threading.Event

    @property
    @abc.abstractmethod
    def remaining_seconds(self) -> float:
        """Seconds until the lease is over unless it is renewed; 0 once it is over."""

    @property
    def alive(self) -> bool:
        """Whether the lease certainly is not over; right also in a process that was just woken from a long stop."""
        return not self.lost.is_set() and self.remaining_seconds > 0

    @abc.abstractmethod
    def revoke(self, *, timeout_seconds: float | None = None) -> None:
        """End the lease and delete its keys now. Does nothing if it is over already.

        Raises:
            StoreUnavailableError: the store did not answer; the lease is not renewed any more and ends by itself.
        """


@dataclass(frozen=True, slots=True)
class Put:
    """Write a key, under a lease if one is given; without one, a lease it had before no longer binds it."""

    key: str
    value: bytes
    lease: Lease | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a key if it exists."""

    key: str


@dataclass(frozen=True, slots=True)
class DeletePrefix:
    """Delete all keys that begin so; all keys of the store if it is empty."""

    prefix: str


Write = Put | Delete | DeletePrefix


@dataclass(frozen=True, slots=True)
class Committed:
    """A transaction that happened."""

    revision: int
    """Of the store after it, and of every key it wrote."""
    deleted: int
    """How many keys it deleted."""


class Watch(abc.ABC):
    """The changes of a prefix from a revision on, each once and in order."""

    @abc.abstractmethod
    def next(self, timeout_seconds: float) -> tuple[Event, ...]:
        """Return the changes that came, as soon as there are any.

        Returns:
            Changes, at least one; or none at all if the time is over, nothing came, and the store can be heard.

        Raises:
            StoreUnavailableError: the time is over and the store cannot be heard: there may be news. Call again: the
                watch reconnects by itself and goes on where it was.
            CompactedError: the next changes are no longer in the history, as the watch was cut off for too long. It
                is over: `list` the prefix again and watch from the snapshot's `revision + 1`.
            StoreError: the watch was closed, or the store refuses it for good.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """End the watch; a thread that waits in `next` gets a StoreError. May be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_key(key: str) -> str:
    """Return a key that may be used.

    Raises:
        TypeError: it is no text.
        ValueError: it is empty.
    """
    if not isinstance(key, str):
        raise TypeError(f"a key is a str, not {type(key).__name__}: {key!r}")
    if not key:
        raise ValueError("a key must not be empty")
    return key


def check_writes(writes: Sequence[Write]) -> None:
    """Check what a transaction wants to write.

    Raises:
        TypeError: a value is not bytes, or a key is no text.
        ValueError: two writes touch the same key: their order would be unclear.
    """
    for index, write in enumerate(writes):
        if isinstance(write, DeletePrefix):
            continue
        check_key(write.key)
        if isinstance(write, Put) and not isinstance(write.value, bytes):
            raise TypeError(f"the value of {write.key!r} must be bytes, not {type(write.value).__name__}")
        for other in (*writes[:index], *writes[index + 1 :]):
            same = write.key.startswith(other.prefix) if isinstance(other, DeletePrefix) else write.key == other.key
            if same:
                raise ValueError(f"two writes of one transaction touch {write.key!r}")


def broken_condition(condition: Condition, *, found: Entry | None) -> str | None:
    """Say why a condition does not hold, or nothing if it does."""
    if isinstance(condition, Fence):
        created = ABSENT if found is None else found.create_revision
        if created == condition.create_revision:
            return None
        state = "is gone" if found is None else f"has create revision {created}"
        return f"{condition.key!r} {state}, the fence expects create revision {condition.create_revision}: fenced off"
    revision = ABSENT if found is None else found.revision
    if revision == condition.revision:
        return None
    state = "does not exist" if found is None else f"has revision {revision}"
    wanted = "no such key" if condition.revision == ABSENT else f"revision {condition.revision}"
    return f"{condition.key!r} {state}, expected {wanted}"

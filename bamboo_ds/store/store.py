"""The store as its users see it: three primitives that each kind of store brings, and all calls that follow from them.

That compare-and-set, counters and elections are written once, on `transact`, is why they mean the same everywhere.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from types import TracebackType

from typing_extensions import Self

from bamboo_ds.clock import Clock
from bamboo_ds.errors import ConfigError, ConflictError, StoreError
from bamboo_ds.store.contract import (
    ABSENT,
    Committed,
    Condition,
    Delete,
    DeletePrefix,
    Entry,
    Fence,
    Lease,
    Put,
    Snapshot,
    Unchanged,
    Watch,
    Write,
)
from bamboo_ds.store.election import Election

__all__ = ["Store"]


class Store(abc.ABC):
    """A small, strict key-value store; `bamboo_ds.store.contract` says what it promises.

    Args:
        prefix: what all keys begin with, for instance ``/bamboo/<job>/``.
        timeout_seconds: the deadline of calls that name none.
        clock: measures deadlines and leases.

    Raises:
        ConfigError: prefix or time-out cannot be right.
    """

    def __init__(self, *, prefix: str, timeout_seconds: float, clock: Clock) -> None:
        if not prefix.endswith("/"):
            raise ConfigError(f'store prefix = "{prefix}": must end with "/", or it would match other jobs\' keys')
        if not timeout_seconds > 0:
            raise ConfigError(f"store timeout_seconds = {timeout_seconds}: must be greater than 0")
        self.prefix, self.timeout_seconds, self.clock = prefix, timeout_seconds, clock

    # What each kind of store brings

    @abc.abstractmethod
    def get(self, key: str, *, timeout_seconds: float | None = None) -> Entry | None:
        """Return a key's entry, or None if there is no such key."""

    @abc.abstractmethod
    def list(self, prefix: str = "", *, timeout_seconds: float | None = None) -> Snapshot:
        """Return all keys that begin with a prefix, as they are at one moment."""

    @abc.abstractmethod
    def transact(
        self,
        conditions: Sequence[Condition],
        writes: Sequence[Write],
        *,
        fence: Fence | None = None,
        timeout_seconds: float | None = None,
    ) -> Committed:
        """Write, all or nothing, if all conditions and the fence hold. At most 100 of each (etcd's own limit is 128).

        Raises:
            ConflictError: a condition does not hold; the message names all that do not. Nothing was written.
            LeaseLostError: a lease of the writes is over. Nothing was written.
            StoreUnavailableError: no answer in time: it may or may not have been written.
            ValueError: two writes touch one key.
        """

    @abc.abstractmethod
    def watch(self, prefix: str = "", *, from_revision: int) -> Watch:
        """Watch the keys that begin with a prefix, from the changes of a revision on. Returns at once.

        Raises:
            ValueError: the revision is not positive.
        """

    @abc.abstractmethod
    def listen(self, prefix: str = "", *, timeout_seconds: float | None = None) -> tuple[Snapshot, Watch]:
        """Return the keys that begin with a prefix, and a watch of all that changes after that.

        What changes is told within milliseconds from the first moment on. A watch that begins after a `list`, at a
        revision that is past by then, hears nothing for up to a tenth of a second: so long etcd lets it wait.
        """

    @abc.abstractmethod
    def lease(self, ttl_seconds: float, *, timeout_seconds: float | None = None) -> Lease:
        """Take a lease and keep it alive in the background.

        Args:
            ttl_seconds: how long it lives unrenewed; rounded up to whole seconds, and the store may grant more.
            timeout_seconds: deadline of the call.
        """

    @abc.abstractmethod
    def compact(self, revision: int, *, timeout_seconds: float | None = None) -> None:
        """Forget the history up to a revision, of the whole store and not of this prefix alone.

        Watches that have not come so far are cut off (`CompactedError`).

        Raises:
            StoreError: the revision is in the future, or compacted already.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """End watches and renewals and let go of connections. Leases are not revoked: they run out.

        May be called again. Every other call raises StoreError from now on.
        """

    # What follows from it

    def put(
        self,
        key: str,
        value: bytes,
        *,
        lease: Lease | None = None,
        fence: Fence | None = None,
        timeout_seconds: float | None = None,
    ) -> int:
        """Write a key whatever it was, and return its revision."""
        return self.transact((), [Put(key, value, lease)], fence=fence, timeout_seconds=timeout_seconds).revision

    def delete(self, key: str, *, fence: Fence | None = None, timeout_seconds: float | None = None) -> bool:
        """Delete a key, and return whether there was one."""
        return self.transact((), [Delete(key)], fence=fence, timeout_seconds=timeout_seconds).deleted > 0

    def delete_prefix(self, prefix: str, *, fence: Fence | None = None, timeout_seconds: float | None = None) -> int:
        """Delete all keys that begin with a prefix, and return how many there were."""
        return self.transact((), [DeletePrefix(prefix)], fence=fence, timeout_seconds=timeout_seconds).deleted

    def compare_and_set(
        self,
        key: str,
        value: bytes,
        *,
        expected: int,
        lease: Lease | None = None,
        fence: Fence | None = None,
        timeout_seconds: float | None = None,
    ) -> int:
        """Write a key if nobody else did since it was read.

        Args:
            key: the key.
            value: its new value.
            expected: the revision that was read; 0 if the key must not exist.
            lease: the lease it shall live under.
            fence: of the leader that writes.
            timeout_seconds: deadline of the call.

        Returns:
            The key's new revision.

        Raises:
            ConflictError: the key has another revision, or the fence fell. Nothing was written.
            StoreUnavailableError: no answer in time: read the key back and compare.
        """
        condition, write = Unchanged(key, expected), Put(key, value, lease)
        return self.transact([condition], [write], fence=fence, timeout_seconds=timeout_seconds).revision

    def add(self, key: str, amount: int, *, timeout_seconds: float | None = None) -> int:
        """Add to a counter (a decimal number in text; 0 if there is none) and return its new value.

        Raises:
            ConflictError: others changed it again and again until the deadline. Nothing was added.
            StoreError: the key holds something else than a number.
        """
        deadline = self._deadline(timeout_seconds)
        while True:
            entry = self.get(key, timeout_seconds=self._remaining(deadline))
            total = amount + (0 if entry is None else _number(entry))
            expected = ABSENT if entry is None else entry.revision
            try:
                self.compare_and_set(
                    key, str(total).encode(), expected=expected, timeout_seconds=self._remaining(deadline)
                )
                return total
            except ConflictError:
                if self.clock.now() >= deadline:
                    raise

    def elect(self, name: str, value: bytes, lease: Lease) -> Election:
        """Return a candidacy for a leadership; `campaign` on it.

        Args:
            name: of what is led, such as ``coordinator``. Its candidates are keys below it.
            value: what the others shall know of this candidate.
            lease: ends the candidacy or leadership when it ends.
        """
        return Election(self, name=name, value=value, lease=lease)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _deadline(self, timeout_seconds: float | None) -> float:
        return self.clock.now() + (self.timeout_seconds if timeout_seconds is None else timeout_seconds)

    def _remaining(self, deadline: float) -> float:
        return max(deadline - self.clock.now(), 0.0)


def _number(entry: Entry) -> int:
    try:
        return int(entry.value)
    except ValueError:
        raise StoreError(f"{entry.key!r} is no counter: it holds {entry.value[:60]!r}") from None

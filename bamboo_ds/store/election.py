"""Elects one leader among candidates, and fences off those who led before.

Each candidate writes one key below the election's name, under its lease; the oldest key leads. A candidate that waits
watches only the key before its own, so that a leader's end wakes one candidate and not all of a thousand. The key of a
leader exists as long as nobody else leads: "my key still exists, as I created it" is the condition (`Fence`) that every
write of a leader carries. A leader that was stopped, slept through its lease and wakes up writes nothing.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from bamboo_ds.errors import CompactedError, ConflictError, LeaseLostError, StoreUnavailableError
from bamboo_ds.store.contract import ABSENT, Entry, EventKind, Fence, Lease

if TYPE_CHECKING:
    from bamboo_ds.store.store import Store

__all__ = ["Election"]

_LOOK_SECONDS = 0.5  # a candidate that waits looks so often whether its own lease is alive


class Election:
    """One candidacy; made by `Store.elect`. It belongs to one thread.

    Attributes:
        name: of the leadership.
        key: of this candidate.
    """

    def __init__(self, store: Store, *, name: str, value: bytes, lease: Lease) -> None:
        self._store, self._value, self._lease = store, value, lease
        self.name = name
        # All equally long, so that no candidate's key is the beginning of another's.
        self.key = f"{name}/{lease.id:016x}"
        self._fence: Fence | None = None

    def campaign(self, timeout_seconds: float = 0.0) -> bool:
        """Stand for the election and return whether this candidate leads.

        May be called again, to look again or to wait longer: the candidate keeps its place.

        Args:
            timeout_seconds: how long to wait to become the leader; 0 looks once. The requests themselves have the
                store's own deadline.

        Raises:
            LeaseLostError: the lease is over, and the candidacy with it. Stand again with a new one.
            StoreUnavailableError: the store does not answer. Call again.
        """
        deadline = self._store.clock.now() + timeout_seconds
        while True:
            own = self._join()
            snapshot = self._store.list(f"{self.name}/")
            if own not in snapshot.entries:
                continue  # It went in between: the lease has ended, which `_join` tells, or somebody deleted the key.
            ahead = [entry for entry in snapshot.entries if entry.create_revision < own.create_revision]
            if not ahead:
                self._fence = Fence(self.key, own.create_revision)
                return True
            before = max(ahead, key=lambda entry: entry.create_revision)
            if not self._await_end(before, from_revision=snapshot.revision + 1, deadline=deadline):
                return False

    @property
    def leading(self) -> bool:
        """Whether this candidate was elected and its lease is alive. What is written must still carry the fence."""
        return self._fence is not None and self._lease.alive

    @property
    def fence(self) -> Fence:
        """The condition that every write of this leader must carry.

        Raises:
            ConflictError: this candidate was not elected, or has resigned.
        """
        if self._fence is None:
            raise ConflictError(f"{self.key!r} does not lead {self.name!r}: campaign first")
        return self._fence

    def leader(self) -> Entry | None:
        """Return the leader's entry, whoever it is; None if there is none."""
        entries = self._store.list(f"{self.name}/").entries
        return min(entries, key=lambda entry: entry.create_revision, default=None)

    def resign(self) -> None:
        """Give up the leadership, or the place among the candidates. May be called again."""
        self._fence = None
        self._store.delete(self.key)

    def _join(self) -> Entry:
        """Return this candidate's entry, written if it is not there.

        Nobody else writes this key: after an indefinite error the next call finds out what became of it.
        """
        while True:
            if not self._lease.alive:
                raise LeaseLostError(f"the lease of candidate {self.key!r} is over: take a new lease and stand again")
            own = self._store.get(self.key)
            if own is not None:
                return own
            self._fence = None
            with contextlib.suppress(ConflictError):  # An earlier write of ours whose answer got lost.
                self._store.compare_and_set(self.key, self._value, expected=ABSENT, lease=self._lease)

    def _await_end(self, before: Entry, *, from_revision: int, deadline: float) -> bool:
        """Wait for the end of the candidate before this one; return whether to look again before the deadline."""
        clock = self._store.clock
        if clock.now() >= deadline:
            return False
        with self._store.watch(before.key, from_revision=from_revision) as watch:
            while (remaining := deadline - clock.now()) > 0 and self._lease.alive:
                try:
                    events = watch.next(min(remaining, _LOOK_SECONDS))
                except CompactedError:
                    return True
                except StoreUnavailableError:
                    if clock.now() >= deadline:
                        raise
                    continue
                if any(event.kind is EventKind.DELETE for event in events):
                    return True
        return not self._lease.alive

"""Keeps those keys of a job up to date here that a picture of it needs (`elastic.report`).

Each prefix is listed once and then watched, so that following a job costs the store nothing but its changes; votes and
rendezvous keys are never read.
"""

from __future__ import annotations

import contextlib
from types import TracebackType

from typing_extensions import Self

from bamboo_ds.elastic import keys
from bamboo_ds.errors import CompactedError, StoreUnavailableError
from bamboo_ds.store import Entry, Event, EventKind, Store, Watch

__all__ = ["PREFIXES", "Mirror"]

PREFIXES = (
    keys.BOARD,
    keys.NODES,
    keys.READY,
    keys.ENDED,
    keys.LEFT,
    f"{keys.COORDINATOR}/",
    keys.EVENTS,
    keys.PROGRESS,
)
"""What a picture is made of."""


class Mirror:
    """A copy of the keys that a `report` needs, kept up to date by watches.

    Args:
        store: of the job.

    Raises:
        StoreUnavailableError: the store does not answer.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._entries: dict[str, Entry] = {}
        self._watches: dict[str, Watch] = {}
        self._revisions: dict[str, int] = {}
        for prefix in PREFIXES:
            self._list(prefix)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The keys as last heard."""
        return tuple(self._entries.values())

    def follow(self, timeout_seconds: float) -> bool:
        """Wait for a change of the board, take in all other changes, and return whether there were any.

        Raises:
            StoreUnavailableError: the time is over and the store cannot be heard.
        """
        changed = self._take(keys.BOARD, timeout_seconds)
        for prefix in PREFIXES:
            if prefix != keys.BOARD:
                with contextlib.suppress(StoreUnavailableError):  # the board's watch tells it, if it stays so
                    changed = self._take(prefix, 0.0) or changed
        return changed

    def close(self) -> None:
        """End the watches."""
        for watch in self._watches.values():
            watch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self, prefix: str, timeout_seconds: float) -> bool:
        if prefix not in self._watches:
            self._watches[prefix] = self._store.watch(prefix, from_revision=self._revisions[prefix] + 1)
        try:
            events = self._watches[prefix].next(timeout_seconds)
        except CompactedError:
            self._list(prefix)
            return True
        for event in events:
            self._apply(event)
        return bool(events)

    def _list(self, prefix: str) -> None:
        if prefix in self._watches:
            self._watches.pop(prefix).close()
        snapshot = self._store.list(prefix)
        self._entries = {key: entry for key, entry in self._entries.items() if not key.startswith(prefix)}
        self._entries.update({entry.key: entry for entry in snapshot.entries})
        self._revisions[prefix] = snapshot.revision

    def _apply(self, event: Event) -> None:
        if event.kind is EventKind.DELETE:
            self._entries.pop(event.key, None)
            return
        known = self._entries.get(event.key)
        created = event.revision if known is None else known.create_revision
        self._entries[event.key] = Entry(event.key, event.value, event.revision, created)

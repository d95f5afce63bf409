"""Follows a prefix of the store in a thread: what is there, then every change, whatever becomes of the connection."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from bamboo_ds.errors import CompactedError, StoreError, StoreUnavailableError
from bamboo_ds.store import Event, EventKind, Snapshot, Store, Watch

__all__ = ["Follower"]

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_RETRY_SECONDS = 0.2


class Follower:
    """Tells a listener of the keys below a prefix until it is closed.

    After a list, what was there comes as changes, oldest first; after a watch that was cut off for too long also what
    is gone since.

    Args:
        store: of the job.
        prefix: of the keys.
        listener: called from the thread, with one change after another.
        from_revision: leave out what was written before.
        on_end: called from the thread when the store refuses to be followed.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        listener: Callable[[Event], None],
        *,
        from_revision: int = 0,
        on_end: Callable[[StoreError], None],
    ) -> None:
        self._store, self._prefix, self._listener, self._on_end = store, prefix, listener, on_end
        self._seen = from_revision - 1
        self._known: set[str] = set()
        self._closed = threading.Condition()
        self._watch: Watch | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"follow-{prefix}", daemon=True)
        self._thread.start()

    def close(self, *, wait_seconds: float = 1.0) -> None:
        """Stop. May be called again."""
        with self._closed:
            self._is_closed = True
            self._closed.notify_all()
            watch = self._watch
        if watch is not None:
            watch.close()
        if self._thread is not threading.current_thread():
            self._thread.join(wait_seconds)

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._follow()
        except StoreError as error:
            if not self._is_closed:
                self._on_end(error)

    def _follow(self) -> None:
        """List, then watch until that is cut off."""
        try:
            snapshot, watch = self._store.listen(self._prefix)
        except StoreUnavailableError:
            with self._closed:
                self._store.clock.wait(self._closed, _RETRY_SECONDS)
            return
        with watch:
            with self._closed:
                if self._is_closed:
                    return
                self._watch = watch
            self._take_list(snapshot)
            while not self._is_closed:
                try:
                    self._take(watch)
                except CompactedError:
                    _log.info("the watch of %s was cut off for too long; listing it again", self._prefix)
                    return

    def _take(self, watch: Watch) -> None:
        try:
            events = watch.next(_LOOK_SECONDS)
        except StoreUnavailableError:
            return
        for event in events:
            self._tell(event)
        if events:
            self._seen = events[-1].revision

    def _take_list(self, snapshot: Snapshot) -> None:
        there = {entry.key for entry in snapshot.entries}
        for key in sorted(self._known - there):
            self._tell(Event(EventKind.DELETE, key, b"", snapshot.revision))
        for entry in sorted(snapshot.entries, key=lambda entry: entry.revision):
            if entry.revision > self._seen:
                self._tell(Event(EventKind.PUT, entry.key, entry.value, entry.revision))
        self._seen = snapshot.revision

    def _tell(self, event: Event) -> None:
        if event.kind is EventKind.PUT:
            self._known.add(event.key)
        else:
            self._known.discard(event.key)
        self._listener(event)

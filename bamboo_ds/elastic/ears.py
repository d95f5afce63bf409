"""Hears the changes of several prefixes of the store at once, by a thread at each watch.

One watch of all keys would do without threads, but bring every rendezvous key of every worker to whoever only wants
the desk and the board.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from contextlib import ExitStack

from bamboo_ds.errors import StoreError, StoreUnavailableError
from bamboo_ds.store import Entry, Event, Store, Watch

__all__ = ["Ears"]

_HEAR_SECONDS = 1.0  # a watch that cannot be heard for so long says so

_News = tuple[Event, ...] | StoreError
_Inbox = queue.SimpleQueue[_News]


class Ears:
    """The changes of some prefixes: of each in order, each once. Belongs to one thread, but for `wake`.

    Args:
        store: of the job.
        prefixes: what keys begin with.
    """

    def __init__(self, store: Store, prefixes: Sequence[str]) -> None:
        self._store, self._prefixes = store, tuple(prefixes)
        self._watches: list[Watch] = []
        self._inbox: _Inbox | None = None
        self._trouble: StoreUnavailableError | None = None

    def begin(self) -> tuple[Entry, ...]:
        """Return what is there now, and tell what changes from there on.

        Raises:
            StoreUnavailableError: the store does not answer; we hear on as before.
        """
        with ExitStack() as opened:
            heard = []
            for prefix in self._prefixes:
                snapshot, watch = self._store.listen(prefix)
                opened.callback(watch.close)
                heard.append((snapshot, watch))
            opened.pop_all()
        self.close()
        self._watches = [watch for _, watch in heard]
        return tuple(entry for snapshot, _ in heard for entry in snapshot.entries)

    def take(self) -> tuple[Event, ...]:
        """Return what has come, without waiting.

        Raises:
            CompactedError: not all that has changed can be told: `begin` anew.
            StoreUnavailableError: the store cannot be heard: there may be news.
        """
        if self._inbox is None:
            return tuple(event for watch in self._watches for event in watch.next(0.0))
        return self._drain(self._inbox, [])

    def wait(self, timeout_seconds: float) -> tuple[Event, ...]:
        """Return what has come, as soon as there is anything; nothing when the time is over, or after `wake`.

        Raises:
            CompactedError: not all that has changed can be told: `begin` anew.
            StoreUnavailableError: the store cannot be heard: there may be news. Wait again.
            StoreError: the store was closed, or refuses to be watched.
        """
        inbox = self._listen()
        try:
            first = inbox.get(timeout=0.0 if self._trouble is not None else max(timeout_seconds, 0.0))
        except queue.Empty:
            first = ()
        return self._drain(inbox, [first])

    def wake(self) -> None:
        """End a `wait` of another thread."""
        inbox = self._inbox
        if inbox is not None:
            inbox.put(())

    def close(self) -> None:
        """Hear no more. May be called again."""
        for watch in self._watches:
            watch.close()
        self._watches, self._inbox, self._trouble = [], None, None

    def _listen(self) -> _Inbox:
        if self._inbox is None:
            self._inbox = queue.SimpleQueue()
            for watch in self._watches:
                threading.Thread(target=_listen_at, args=(watch, self._inbox), name="ears", daemon=True).start()
        return self._inbox

    def _drain(self, inbox: _Inbox, news: list[_News]) -> tuple[Event, ...]:
        """Return all events that are there; trouble is told when there are none."""
        events: list[Event] = []
        while True:
            for item in news:
                if isinstance(item, StoreUnavailableError):
                    self._trouble = item
                elif isinstance(item, StoreError):
                    raise item
                else:
                    events += item
            try:
                news = [inbox.get_nowait()]
            except queue.Empty:
                break
        if not events and self._trouble is not None:
            trouble, self._trouble = self._trouble, None
            raise trouble
        return tuple(events)


def _listen_at(watch: Watch, inbox: _Inbox) -> None:
    """Hand over what a watch tells, until it ends."""
    while True:
        try:
            if events := watch.next(_HEAR_SECONDS):
                inbox.put(events)
        except StoreUnavailableError as error:
            inbox.put(error)
        except StoreError as error:  # compacted away, or closed
            inbox.put(error)
            return

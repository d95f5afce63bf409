"""What happened in a job, for people: short sentences with their cause, in the store and in a file of JSON lines.

Nothing is decided by them, so writing one never fails its writer, and one may be missing after an outage. Their keys
begin with the time, so a list of them is in order; the coordinator trims it to the newest.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bamboo_ds.elastic import keys
from bamboo_ds.errors import StoreError, StoreUnavailableError
from bamboo_ds.store import Delete, Fence, Put, Store

__all__ = ["NEWEST_EVENTS", "ClusterEvent", "EventLog", "append_event", "read_event", "read_events", "trim_events"]

_log = logging.getLogger(__name__)

NEWEST_EVENTS = 1000
"""How many the store keeps."""

_WRITES = 50  # of one transaction
_TRIMS = 10  # transactions of one trim, which shall not hold up its caller
_KEPT_EVENTS = 1000  # that wait for the store to come back
_TELL_SECONDS = 1.0
_OWN_FIELDS = ("time", "node", "kind", "text")


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """Something that happened.

    Attributes:
        time: in Unix seconds.
        node: the node it is about: that of the writer, if it is about no other.
        kind: `node_joined`, `failover`, `coordinator`, ...
        text: one sentence, with the cause.
        fields: more, for programs.
    """

    time: float
    node: str
    kind: str
    text: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the text that goes to the store."""
        own = {name: getattr(self, name) for name in _OWN_FIELDS}
        return json.dumps({**self.fields, **own}, default=str).encode()


def read_event(value: bytes) -> ClusterEvent | None:
    """Return the event that a text holds; None if it holds none."""
    try:
        found = json.loads(value)
        own = {name: found.pop(name) for name in _OWN_FIELDS}
        return ClusterEvent(float(own["time"]), str(own["node"]), str(own["kind"]), str(own["text"]), found)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


class EventLog:
    """Writes events to the store of a job. All methods may be called from all threads, and raise no StoreError.

    Args:
        store: of the job.
        node: name of the node that writes.
        wall_nanoseconds: Unix time.
    """

    def __init__(self, store: Store, *, node: str, wall_nanoseconds: Callable[[], int] = time.time_ns) -> None:
        self._store, self._node, self._wall_nanoseconds = store, node, wall_nanoseconds
        self._lock = threading.Lock()
        self._last = 0
        self._waiting: deque[tuple[str, bytes]] = deque(maxlen=_KEPT_EVENTS)

    def note(self, kind: str, text: str, *, about: str = "", **fields: Any) -> ClusterEvent:
        """Keep an event until `flush` writes it.

        Args:
            kind: of event.
            text: one sentence, with the cause.
            about: the node it is about; empty for that of the writer.
            fields: more, for programs.
        """
        with self._lock:
            # No two events of a writer share a key, whatever its clock does.
            self._last = max(self._wall_nanoseconds(), self._last + 1)
            event = ClusterEvent(self._last / 1e9, about or self._node, kind, text, fields)
            self._waiting.append((f"{keys.EVENTS}{self._last:020d}-{self._node}", event.encode()))
        return event

    def tell(self, kind: str, text: str, *, about: str = "", **fields: Any) -> ClusterEvent:
        """Write an event now, as well as the store answers within a second."""
        event = self.note(kind, text, about=about, **fields)
        self.flush()
        return event

    def flush(self, *, fence: Fence | None = None) -> bool:
        """Write what waits, and return whether all of it was written.

        What the store did not take waits on. Writing an event twice is writing it once.

        Args:
            fence: of the leader that writes.
        """
        while batch := self._batch():
            try:
                self._store.transact(
                    (), [Put(key, value) for key, value in batch], fence=fence, timeout_seconds=_TELL_SECONDS
                )
            except StoreError as error:
                self._put_back([] if _hopeless(error) else batch)
                _log.info("%d events were not written: %s", len(batch), error)
                return False
        return True

    def _batch(self) -> list[tuple[str, bytes]]:
        with self._lock:
            return [self._waiting.popleft() for _ in range(min(_WRITES, len(self._waiting)))]

    def _put_back(self, batch: list[tuple[str, bytes]]) -> None:
        with self._lock:
            room = _KEPT_EVENTS - len(self._waiting)
            self._waiting.extendleft(reversed(batch[-room:] if room else []))


def _hopeless(error: StoreError) -> bool:
    """Return whether a write would be refused again: it was fenced off, say."""
    return not isinstance(error, StoreUnavailableError)


def read_events(store: Store, *, newest: int | None = None) -> tuple[ClusterEvent, ...]:
    """Return the events of a job, oldest first.

    Args:
        store: of the job.
        newest: at most so many, the last ones.

    Raises:
        StoreUnavailableError: the store does not answer.
    """
    entries = store.list(keys.EVENTS).entries
    found = (
        read_event(entry.value) for entry in (entries if newest is None else entries[max(len(entries) - newest, 0) :])
    )
    return tuple(event for event in found if event is not None)


def trim_events(store: Store, *, fence: Fence | None = None, newest: int = NEWEST_EVENTS) -> int:
    """Delete events that are older than the newest, a few hundred at most, and return how many.

    Raises:
        ConflictError: the fence fell.
        StoreUnavailableError: the store does not answer.
    """
    entries = store.list(keys.EVENTS).entries
    old = [entry.key for entry in entries[: max(len(entries) - newest, 0)]][: _WRITES * _TRIMS]
    for first in range(0, len(old), _WRITES):
        store.transact((), [Delete(key) for key in old[first : first + _WRITES]], fence=fence)
    return len(old)


def append_event(path: Path, event: ClusterEvent) -> None:
    """Add an event to a file of JSON lines.

    One write of one line: what several processes append does not mix.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("ab", buffering=0) as file:
        file.write(event.encode() + b"\n")

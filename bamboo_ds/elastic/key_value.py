"""The cluster's store in the shape of a `torch.distributed` one: what process groups form by.

A group forms by each member writing its address and waiting for those of the others. Asking the store for each of them
again and again would cost it a thousand requests a second for every worker. So the first wait lists all keys below the
prefix and listens from there on: what another worker writes is here a millisecond later, and reading it asks nobody.
Once the groups have formed, `rest` ends the watch; the next wait begins one again. Groups form at once, in a thread
each: one of these hears the watch, and what it hears wakes the others.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from bamboo_ds.errors import CompactedError, ConflictError, StoreError, StoreUnavailableError
from bamboo_ds.store import ABSENT, Event, EventKind, Store, Watch

__all__ = ["StoreKeys"]


class StoreKeys:
    """Keys below a prefix of the cluster's store, with the calls of a `torch.distributed.Store`.

    Args:
        store: of the job.
        prefix: in front of all keys.
        write_once: whether a key that was seen never changes, so that it need not be read again.
    """

    def __init__(self, store: Store, *, prefix: str = "", write_once: bool = False) -> None:
        self._store, self._prefix, self._write_once = store, prefix, write_once
        self._clock = store.clock
        self._changed = threading.Condition()
        self._hearing = False
        self._seen: dict[str, bytes] = {}
        self._watch: Watch | None = None

    def below(self, prefix: str) -> StoreKeys:
        """Return the keys below a longer prefix, which are written once: what the groups of one plan form by."""
        return StoreKeys(self._store, prefix=self._prefix + prefix, write_once=True)

    def get(self, key: str) -> bytes:
        """Return the value of a key that exists.

        Raises:
            KeyError: it does not.
        """
        if self._write_once and key in self._seen:
            return self._seen[key]
        entry = self._store.get(self._prefix + key)
        if entry is None:
            raise KeyError(f"there is no key {self._prefix + key!r}")
        return entry.value

    def set(self, key: str, value: str | bytes) -> None:
        """Write a key."""
        written = _bytes(value)
        self._store.put(self._prefix + key, written)
        if self._write_once:
            self._seen[key] = written

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        return self._store.add(self._prefix + key, amount)

    def check(self, keys: Iterable[str]) -> bool:
        """Return whether all keys exist."""
        return all(self._exists(key) for key in keys)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write a key if it holds what is expected, and return what it holds then.

        As in torch, an empty text is expected of a key that does not exist; one that does not exist although another
        was expected is left alone, and `expected` returned.
        """
        while True:
            entry = self._store.get(self._prefix + key)
            found = b"" if entry is None else entry.value
            if found != _bytes(expected):
                return _bytes(expected) if entry is None else found
            try:
                self._store.compare_and_set(
                    self._prefix + key, _bytes(desired), expected=ABSENT if entry is None else entry.revision
                )
                return _bytes(desired)
            except ConflictError:
                continue

    def delete_key(self, key: str) -> bool:
        """Delete a key, and return whether there was one."""
        self._seen.pop(key, None)
        return self._store.delete(self._prefix + key)

    def await_keys(self, keys: Iterable[str], *, timeout_seconds: float) -> bool:
        """Return whether all keys exist, as soon as they do or when the time is over.

        Raises:
            StoreUnavailableError: the store does not answer; what it knows may have changed. Call again.
        """
        wanted = list(keys)
        if self._write_once and all(key in self._seen for key in wanted):
            return True
        deadline = self._clock.now() + timeout_seconds
        with self._changed:
            while True:
                watch = self._watch or self._begin()
                if all(key in self._seen for key in wanted):
                    return True
                remaining = deadline - self._clock.now()
                if remaining <= 0:
                    return False
                if self._hearing:
                    self._clock.wait(self._changed, remaining)
                else:
                    self._hear(watch, remaining)

    def rest(self) -> None:
        """End the watch until the next wait."""
        with self._changed:
            self._drop_watch()
            if not self._write_once:
                self._seen = {}

    def _exists(self, key: str) -> bool:
        return (self._write_once and key in self._seen) or self._store.get(self._prefix + key) is not None

    def _begin(self) -> Watch:
        snapshot, self._watch = self._store.listen(self._prefix)
        self._seen = {entry.key.removeprefix(self._prefix): entry.value for entry in snapshot.entries}
        return self._watch

    def _hear(self, watch: Watch, seconds: float) -> None:
        """Wait for news for all threads, without the lock; when there are any, all look."""
        self._hearing = True
        events: tuple[Event, ...] | StoreError = ()
        self._changed.release()
        try:
            events = watch.next(seconds)
        except StoreUnavailableError:
            pass  # the watch goes on by itself
        except StoreError as error:
            events = error
        finally:
            self._changed.acquire()
            self._hearing = False
            self._changed.notify_all()
        if self._watch is watch:  # else another thread has let go of it, and closed it
            self._heard(events)

    def _heard(self, events: tuple[Event, ...] | StoreError) -> None:
        if isinstance(events, CompactedError):
            self._drop_watch()
        elif isinstance(events, StoreError):
            raise events
        else:
            for event in events:
                self._note(event)

    def _note(self, event: Event) -> None:
        key = event.key.removeprefix(self._prefix)
        if event.kind is EventKind.PUT:
            self._seen[key] = event.value
        else:
            self._seen.pop(key, None)

    def _drop_watch(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()

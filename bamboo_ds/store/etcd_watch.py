"""Watches etcd across broken connections, hung servers, compactions and expired logins.

A thread reads the stream. When the stream breaks it opens another one, on another server if there is one, at the last
revision delivered, and drops what it has seen: nothing is lost and nothing comes twice. It asks again for one revision
it has seen already, since etcd may forget deletions *of* the revision it was compacted at: only if that one can still
be had, all after it can.

A stream to a hung server is silent, as is one without news. To tell them apart, a reader who waits asks the stream for
its progress every now and then (a sign of life, in etcd since 3.4), and gives the stream up when no answer comes.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from typing import Any

import grpc  # type: ignore[import-untyped]

from bamboo_ds.errors import CompactedError, StoreError, StoreUnavailableError
from bamboo_ds.store.contract import Event, EventKind, Watch
from bamboo_ds.store.etcd_connection import Connection, Server
from bamboo_ds.store.etcd_errors import Outcome, read_failure
from bamboo_ds.store.etcd_protobuf import etcd_messages

__all__ = ["EtcdWatch"]

_log = logging.getLogger(__name__)

_ASK_PART = 3  # signs of life are asked for after this part of the silence that we bear
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.02, 0.5
_PROGRESS_REQUEST = b"\x1a\x00"
"""Serialized `WatchRequest(progress_request={})`, a field that etcd3's descriptors are too old to name."""
_LOGIN_TROUBLE = ("permission denied", "invalid auth token")
"""What etcd says to a watch whose token has expired; the first also to one that may not read the prefix."""


class _Stream:
    """One try: a request queue that stays open, and the call that answers."""

    def __init__(self, server: Server, create: Any, metadata: Any) -> None:
        self.server = server
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._requests.put(etcd_messages().WatchRequest(create_request=create))
        self.call = server.watch.Watch(iter(self._requests.get, None), metadata=metadata)

    def ask_for_progress(self) -> None:
        self._requests.put(etcd_messages().WatchRequest.FromString(_PROGRESS_REQUEST))

    def end(self) -> None:
        self._requests.put(None)  # ends gRPC's thread that waits for requests
        self.call.cancel()


class EtcdWatch(Watch):
    """The changes of a range of keys.

    Args:
        connection: to the servers.
        prefix: that keys begin with; the store's own prefix in front.
        strip: how much of it the caller does not see.
        end: of the range.
        from_revision: the first revision to deliver; None for what changes once the watch has begun.
        patience_seconds: how long a stream may be silent after it was asked for a sign of life.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        prefix: str,
        strip: str,
        end: bytes,
        from_revision: int | None,
        patience_seconds: float,
    ) -> None:
        self._connection, self._clock = connection, connection.clock
        self._key, self._range_end, self._strip = prefix.encode(), end, len(strip)
        self._revision = from_revision
        self._patience_seconds = patience_seconds
        self._changed = threading.Condition()
        self._events: deque[Event] = deque()
        self._stream: _Stream | None = None
        self._heard_at = self._clock.now()
        self._asked_at: float | None = self._heard_at  # of a sign of life that did not come yet
        self._up, self._closed = False, False
        self._error: StoreError | None = None
        self._trouble = "not connected yet"
        self._thread = threading.Thread(target=self._run, name=f"watch-{prefix}", daemon=True)
        self._thread.start()

    def next(self, timeout_seconds: float) -> tuple[Event, ...]:
        """Return the changes that came, as soon as there are any; see `Watch.next`."""
        self._connection.check()
        deadline = self._clock.now() + timeout_seconds
        with self._changed:
            while not self._events:
                if self._error is not None:
                    raise self._error
                self._mind_silence()
                now = self._clock.now()
                if now >= deadline:
                    return self._no_news(timeout_seconds)
                self._clock.wait(self._changed, min(deadline - now, self._patience_seconds / _ASK_PART))
            events = tuple(self._events)
            self._events.clear()
            return events

    def begin(self, *, deadline: float) -> None:
        """Wait until the changes are known that will be told: all from now on, of a watch that had no first revision.

        etcd tells what happens after it took the watch at once. One that begins in the past it lets catch up with the
        present first, and for that it looks only every 100 ms.

        Raises:
            StoreUnavailableError: etcd does not answer.
            StoreError: it refuses the watch, or this was closed.
        """
        with self._changed:
            while self._revision is None:
                if self._error is not None:
                    raise self._error
                self._mind_silence()
                remaining = deadline - self._clock.now()
                if remaining <= 0:
                    raise StoreUnavailableError(f"watch of {self._key.decode()!r}: etcd is silent ({self._trouble})")
                self._clock.wait(self._changed, min(remaining, self._patience_seconds / _ASK_PART))

    def skip(self, revision: int) -> None:
        """Leave out what has changed up to a revision."""
        with self._changed:
            self._revision = max(self._revision or 0, revision + 1)
            self._events = deque(event for event in self._events if event.revision > revision)

    def close(self) -> None:
        """End the watch; a thread that waits in `next` gets a StoreError. May be called again."""
        if self._connection.inherited:
            return  # A thread of the parent may have held the lock when it forked.
        with self._changed:
            self._closed = True
            self._error = self._error or StoreError("this watch was closed")
            stream = self._stream
            self._changed.notify_all()
        if stream is not None:
            stream.end()

    def _no_news(self, timeout_seconds: float) -> tuple[Event, ...]:
        if self._up:
            return ()
        raise StoreUnavailableError(
            f"watch of {self._key.decode()!r}: nothing heard from etcd for {timeout_seconds:g} s ({self._trouble}); "
            "there may be news: call again, the watch goes on by itself"
        )

    def _mind_silence(self) -> None:
        """Ask a silent stream for a sign of life, and give it up when none comes."""
        now = self._clock.now()
        if self._stream is None:
            return
        if self._asked_at is None:
            if now - self._heard_at >= self._patience_seconds / _ASK_PART:
                self._asked_at = now
                self._stream.ask_for_progress()
        elif now - self._asked_at >= self._patience_seconds:
            self._up, self._trouble = False, f"{self._stream.server.address} is silent"
            self._asked_at = now  # once for each stream
            self._stream.end()

    def _run(self) -> None:
        """Read streams, one after the other, until the watch ends."""
        failures = 0
        while not self._over():
            heard_at = self._heard_at
            try:
                self._read_stream(renew_login=failures > 0 and self._trouble_is_login())
            except StoreUnavailableError as error:
                self._note_trouble(str(error))
            except StoreError as error:
                return self._fail(error)
            failures = 0 if self._heard_at > heard_at and self._up else failures + 1
            self._up = False
            self._pause(max(failures, 1))
        return None

    def _over(self) -> bool:
        return self._closed or self._error is not None

    def _read_stream(self, *, renew_login: bool) -> None:
        server, token = self._connection.server(), self._connection.token()
        deadline = self._clock.now() + self._patience_seconds
        if renew_login:
            self._connection.log_in(deadline=deadline, stale_token=token)
        try:
            stream = self._open(server, deadline)
            try:
                for answer in stream.call:
                    self._take(answer)
            finally:
                stream.end()
        except (grpc.RpcError, ValueError) as error:  # ValueError: the channel was closed under us
            self._connection.check()
            if not self._over():
                self._leave(server, error)

    def _open(self, server: Server, deadline: float) -> _Stream:
        create = etcd_messages().WatchCreateRequest(
            key=self._key,
            range_end=self._range_end,
            start_revision=0 if self._revision is None else max(self._revision - 1, 1),
            progress_notify=True,
        )
        stream = _Stream(server, create, self._connection.metadata(deadline=deadline))
        with self._changed:
            self._stream, self._asked_at = stream, self._clock.now()
            if self._closed:
                stream.end()
        return stream

    def _leave(self, server: Server, error: Any) -> None:
        """Turn to another server, or give up if this one refuses for a reason that others share."""
        failure = read_failure(error, what=f"watch {self._key.decode()!r}", server=server.address)
        self._connection.leave(server)
        if failure.outcome is Outcome.REFUSED:
            raise failure.error
        raise StoreUnavailableError(str(failure.error))

    def _take(self, answer: Any) -> None:
        """Take one answer of the stream."""
        with self._changed:
            self._heard_at, self._asked_at = self._clock.now(), None
            if answer.compact_revision:
                raise CompactedError(
                    f"the history up to revision {answer.compact_revision} is gone, the watch of "
                    f"{self._key.decode()!r} is at {self._revision}: list again and watch from the snapshot's "
                    "revision + 1"
                )
            if answer.canceled:
                raise self._cancelled(answer.cancel_reason)
            self._up, self._trouble = True, "the stream ended"
            first = int(answer.header.revision) + 1 if self._revision is None else self._revision
            self._revision = self._deliver(answer, first)
            self._changed.notify_all()

    def _deliver(self, answer: Any, revision: int) -> int:
        """Deliver what has changed at a revision or later; return the next one."""
        for event in answer.events:
            if event.kv.mod_revision >= revision:
                kind = EventKind.DELETE if event.type else EventKind.PUT
                key = event.kv.key.decode()[self._strip :]
                self._events.append(Event(kind, key, event.kv.value, event.kv.mod_revision))
        if answer.events:
            return max(revision, int(answer.events[-1].kv.mod_revision) + 1)
        if answer.watch_id >= 0 and not answer.created:
            # A notice of progress that etcd sent unasked: all up to here was delivered, so that a watch without news
            # is not cut off by a compaction. (Those asked for may overtake events, before etcd 3.5.8.)
            return max(revision, int(answer.header.revision) + 1)
        return revision

    def _cancelled(self, reason: str) -> StoreError:
        """Return what a cancellation by the server means: to try again, unless a fresh login is refused as well."""
        text = f"watch of {self._key.decode()!r}: etcd cancelled it: {reason or 'no reason given'}"
        fresh = self._trouble_is_login() or not self._connection.token()
        if any(part in reason for part in _LOGIN_TROUBLE) and fresh:
            return StoreError(f"{text}; grant the user's role read on the prefix")
        return StoreUnavailableError(text)

    def _trouble_is_login(self) -> bool:
        return any(part in self._trouble for part in _LOGIN_TROUBLE)

    def _note_trouble(self, text: str) -> None:
        with self._changed:
            if not self._closed:
                _log.info("%s", text)
            self._trouble = text

    def _fail(self, error: StoreError) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _pause(self, failures: int) -> None:
        end = self._clock.now() + min(_FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 1, 10), _LONGEST_PAUSE_SECONDS)
        with self._changed:
            while not self._over() and (remaining := end - self._clock.now()) > 0:
                self._clock.wait(self._changed, remaining)

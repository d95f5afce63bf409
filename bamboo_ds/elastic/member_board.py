"""What a worker hears of the board: a thread watches it, and whoever waits for news waits here.

News is an immutable record that the thread replaces with every change, in the order in which the cluster decided, so
reading it needs no lock and shows one moment. A compacted watch begins anew with a list. While the store is out of
reach the last news stands; how long that may last is the worker's to say.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from bamboo_ds.elastic import keys
from bamboo_ds.errors import BambooError, CompactedError, PeerLostError, StoreError, StoreUnavailableError
from bamboo_ds.plan import Plan, codec
from bamboo_ds.plan.job import Roster
from bamboo_ds.store import ABSENT, Entry, EventKind, Snapshot, Store, Watch

__all__ = ["Board", "News"]

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5  # of the watch: how soon silence is noticed; of a wait: how soon it looks for an outage
_RETRY_SECONDS = 0.1
_KEPT_OUTCOMES = 4  # by engine; the coordinator itself keeps only the last

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class News:
    """The board as this worker knows it.

    Attributes:
        plan: the newest plan; None before the first.
        plan_revision: of its key, for the condition that it is still the newest.
        roster: who begins the job; None before it is closed.
        finished: why the job is over; None while it is not.
        roll: the number of the last roll call, as text; empty before the first.
        failures: the first failure by scope, as written.
        outcomes: the last outcomes by (engine, number), as written.
    """

    plan: Plan | None = None
    plan_revision: int = ABSENT
    roster: Roster | None = None
    finished: str | None = None
    roll: str = ""
    failures: Mapping[str, bytes] = field(default_factory=dict)
    outcomes: Mapping[tuple[int, int], bytes] = field(default_factory=dict)

    def after(self, entry: Entry) -> News:
        """Return the news after one more key was written.

        Raises:
            ConfigError: this version of the package cannot read it.
        """
        key, value = entry.key, entry.value
        if key == keys.PLAN:
            return replace(self, plan=codec.decode(Plan, value), plan_revision=entry.revision)
        if key == keys.ROSTER:
            return replace(self, roster=codec.decode(Roster, value))
        if key == keys.FINISHED:
            return replace(self, finished=value.decode(errors="replace"))
        if key == keys.ROLL:
            return replace(self, roll=value.decode())
        if key.startswith(keys.FAILURES):
            return replace(self, failures={**self.failures, key.removeprefix(keys.FAILURES): value})
        if key.startswith(keys.DECISIONS):
            return replace(self, outcomes=_with_outcome(self.outcomes, key, value))
        return self

    def is_alarming_after(self, before: News) -> bool:
        """Return whether whoever trains must look: another plan, a failure, or the end of the job."""
        return (self.plan, self.failures, self.finished) != (before.plan, before.failures, before.finished)


def _with_outcome(outcomes: Mapping[tuple[int, int], bytes], key: str, value: bytes) -> dict[tuple[int, int], bytes]:
    engine, number = map(int, key.removeprefix(keys.DECISIONS).split("/"))
    kept = {at: old for at, old in outcomes.items() if at[0] != engine or at[1] > number - _KEPT_OUTCOMES}
    return {**kept, (engine, number): value}


class Board:
    """Follows the board of a job until it is closed.

    Args:
        store: of the job.
        outage_seconds: how long the store may be silent before waits give up.
        on_look: called from the thread after every look, often for nothing, with the news before it.

    Attributes:
        news: what is known now.
    """

    def __init__(self, store: Store, *, outage_seconds: float, on_look: Callable[[News], None]) -> None:
        self._store, self._clock, self._on_look = store, store.clock, on_look
        self._outage_seconds = outage_seconds
        self.news = News()
        self._changed = threading.Condition()
        self._silent_since: float | None = None
        self._trouble: BambooError | None = None
        self._watch: Watch | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="bamboo-board", daemon=True)

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def close(self) -> None:
        """Stop following and end all waits. May be called again."""
        with self._changed:
            self._closed = True
            watch = self._watch
            self._changed.notify_all()
        if watch is not None:
            watch.close()

    def check(self) -> None:
        """Raise when what is known here can no longer be relied on.

        Raises:
            StoreUnavailableError: nothing was heard of the store for too long.
            ConfigError: the board holds what this version of the package cannot read.
            StoreError: the board was closed, or the store refuses to be watched.
        """
        if self._trouble is not None:
            raise self._trouble
        if self._closed:
            raise StoreError("this worker has left the cluster: its view of the board was closed")
        since = self._silent_since
        if since is not None and (silence := self._clock.now() - since) > self._outage_seconds:
            raise StoreUnavailableError(
                f"nothing was heard of the cluster's store for {silence:.0f} s, and outage_seconds is "
                f"{self._outage_seconds:g}: look at the etcd servers and at the network to them"
            )

    def wait(
        self,
        ready: Callable[[News], Found | None],
        *,
        over: Callable[[News], None],
        timeout_seconds: float | None,
        what: str,
    ) -> Found:
        """Wait for news.

        Args:
            ready: returns what is waited for, or None while it is not there.
            over: raises when it will not come any more.
            timeout_seconds: how long to wait; None for as long as the store can be heard.
            what: is waited for, for messages.

        Raises:
            PeerLostError: it did not come in time.
            StoreUnavailableError: the store was silent for too long.
        """
        deadline = None if timeout_seconds is None else self._clock.now() + timeout_seconds
        with self._changed:
            while True:
                if (found := ready(self.news)) is not None:
                    return found
                over(self.news)
                self.check()
                remaining = _LOOK_SECONDS if deadline is None else deadline - self._clock.now()
                if remaining <= 0:
                    raise PeerLostError(f"{what} did not come within {timeout_seconds:g} s")
                self._clock.wait(self._changed, min(remaining, _LOOK_SECONDS))

    def await_change(self, *, since: News) -> None:
        """Wait until the news is not what it was."""
        self.wait(
            lambda news: None if news is since else news, over=lambda news: None, timeout_seconds=None, what="news"
        )

    def insist(self, call: Callable[[], Found], *, over: Callable[[News], None]) -> Found:
        """Make a request of the store, again and again through an outage.

        Args:
            call: may be repeated: doing it twice is doing it once.
            over: raises when it is not wanted any more.

        Raises:
            StoreUnavailableError: the outage lasts too long.
        """
        while True:
            over(self.news)
            try:
                return call()
            except StoreUnavailableError:
                over(self.news)
                self.check()
                with self._changed:
                    self._clock.wait(self._changed, _RETRY_SECONDS)

    def _run(self) -> None:
        try:
            while not self._closed:
                self._follow()
        except Exception as error:  # whatever it is, those who wait must hear of it
            if not self._closed:
                _log.error("cannot follow the board any more: %s", error)
                self.fail(error if isinstance(error, BambooError) else StoreError(repr(error)))

    def fail(self, error: BambooError) -> None:
        """Let all waits and checks raise an error from now on."""
        with self._changed:
            self._trouble = error
            self._changed.notify_all()
        self._on_look(self.news)

    def _follow(self) -> None:
        """List the board, then watch it until that is cut off."""
        heard = self._listen()
        if heard is None:
            return
        snapshot, watch = heard
        with watch:
            self._watch = watch
            self._take(sorted(snapshot.entries, key=lambda entry: entry.revision))
            while not self._closed:
                try:
                    self._take(self._next(watch))
                except CompactedError:
                    return

    def _listen(self) -> tuple[Snapshot, Watch] | None:
        while not self._closed:
            try:
                heard = self._store.listen(keys.BOARD)
            except StoreUnavailableError as error:
                self._note_silence(error)
                with self._changed:
                    self._clock.wait(self._changed, _RETRY_SECONDS)
            else:
                self._silent_since = None
                return heard
        return None

    def _next(self, watch: Watch) -> tuple[Entry, ...]:
        try:
            events = watch.next(_LOOK_SECONDS)
        except StoreUnavailableError as error:
            self._note_silence(error)
            return ()
        self._silent_since = None
        # What is deleted from the board is no news: a decision that everyone has seen.
        return tuple(
            Entry(event.key, event.value, event.revision, event.revision)
            for event in events
            if event.kind is EventKind.PUT
        )

    def _note_silence(self, error: StoreError) -> None:
        if self._silent_since is None:
            self._silent_since = self._clock.now()
            _log.info("the cluster's store is out of reach: %s", error)

    def _take(self, entries: Iterable[Entry]) -> None:
        before = news = self.news
        for entry in entries:
            news = news.after(entry)
        if news is not before:
            with self._changed:
                self.news = news
                self._changed.notify_all()
        self._on_look(before)

"""A node's presence in the cluster: the store, its registration, its candidacy as coordinator, and what it hears.

All of it is threads that begin with `join` and end with `close`. What the agent must know of is told to it by calls,
from these threads.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from bamboo_ds.clock import Clock
from bamboo_ds.elastic import keys
from bamboo_ds.elastic.agent_settings import AgentSettings
from bamboo_ds.elastic.coordinator import CoordinatorSettings
from bamboo_ds.elastic.events import EventLog, append_event, read_event
from bamboo_ds.elastic.follower import Follower
from bamboo_ds.elastic.leadership import Leadership
from bamboo_ds.elastic.membership import open_store
from bamboo_ds.elastic.registration import Registration, clear_former_run, ended_since
from bamboo_ds.errors import StoreError, StoreUnavailableError
from bamboo_ds.plan.cluster import Node
from bamboo_ds.plan.roster import StartRule
from bamboo_ds.store import Event, EventKind

if TYPE_CHECKING:
    from bamboo_ds.elastic.agent_metrics import MetricsFeed

__all__ = ["Presence"]

_Found = TypeVar("_Found")

_CLOSE_SECONDS = 2.0
EVENTS_FILE = "events.jsonl"


class Presence:
    """Puts a node into the cluster. Make it once this process forks no more: it opens the store.

    Args:
        settings: of the agent.
        clock: of the agent.
        on_board: is told each change of the board.
        on_lost: is told, at most a few times, why this node cannot go on: a ConflictError if another agent has taken
            its name, else a StoreError that does not pass.
        feed: of the metrics; None without metrics.

    Attributes:
        store: of the job.
        events: where the agent writes what happens.
        registration: of the node.
    """

    def __init__(
        self,
        settings: AgentSettings,
        *,
        clock: Clock,
        on_board: Callable[[Event], None],
        on_lost: Callable[[StoreError], None],
        feed: MetricsFeed | None = None,
    ) -> None:
        self._settings, self._clock, self._feed = settings, clock, feed
        self._on_board, self._on_lost = on_board, on_lost
        self._closing = contextlib.ExitStack()
        self.store = self._closing.enter_context(open_store(settings.etcd, job=settings.job, clock=clock))
        self.events = EventLog(self.store, node=settings.node)
        self.registration = Registration(
            self.store,
            Node(settings.node, settings.zone, (), address=settings.address, spot=settings.spot),
            ttl_seconds=settings.ttl_seconds,
            outage_seconds=settings.outage_seconds,
            on_end=on_lost,
        )
        self._closing.callback(self._leave)
        self._leadership: Leadership | None = None

    @property
    def leads(self) -> bool:
        """Whether this node's agent coordinates the job."""
        return self._leadership is not None and self._leadership.leading

    def ended(self, *, given_up: Callable[[], bool]) -> str:
        """Return how the job has ended for which this node was started, if it comes too late; empty if it does not.

        Args:
            given_up: as of `join`.

        Raises:
            StoreUnavailableError: the store did not answer for too long.
        """
        started = self._settings.started_at
        return "" if started is None else self._insist(lambda: ended_since(self.store, started), given_up)

    def join(self, *, given_up: Callable[[], bool]) -> tuple[int, ...]:
        """Register the node with new workers, and return their ids.

        Args:
            given_up: asked again and again while the store does not answer, which may just be starting.

        Raises:
            StoreUnavailableError: the store did not answer for too long.
            ConfigError: another node has this name.
        """
        return self._insist(self._register, given_up)

    def begin(self, *, given_up: Callable[[], bool]) -> None:
        """Stand for election and listen.

        Raises:
            StoreUnavailableError: the store did not answer for too long.
        """
        self._coordinate()
        path = self._settings.log_folder / EVENTS_FILE
        # An older file has what is there already.
        seen = self._insist(lambda: self.store.list(keys.NODES).revision, given_up) if path.exists() else 0
        self._follow(keys.EVENTS, functools.partial(_keep_event, path), from_revision=seen + 1)
        self._follow(keys.BOARD, self._on_board)
        for prefix, listener in self._feed.listeners.items() if self._feed is not None else ():
            self._follow(prefix, listener)

    def close(self) -> None:
        """Leave the cluster, in order, and close the store. Takes a few seconds at most."""
        self._closing.close()

    def _register(self) -> tuple[int, ...]:
        clear_former_run(self.store)
        self.store.delete(keys.preempt(self._settings.node))  # meant for a node that is no more
        return self.registration.join(self._settings.workers)

    def _insist(self, call: Callable[[], _Found], given_up: Callable[[], bool]) -> _Found:
        deadline = self._clock.now() + self._settings.outage_seconds
        while True:
            try:
                return call()
            except StoreUnavailableError:
                if given_up() or self._clock.now() > deadline:
                    raise

    def _coordinate(self) -> None:
        settings = self._settings
        start = StartRule(start_workers=settings.start_workers, patience_seconds=settings.patience_seconds)
        leadership = self._leadership = Leadership(
            self.store,
            node=settings.node,
            lease=self.registration.lease,
            settings=CoordinatorSettings(ttl_seconds=settings.ttl_seconds, start=start),
            on_vote=self._feed.metrics.vote if self._feed is not None else None,
        )
        thread = threading.Thread(target=leadership.run, name="leadership", daemon=True)
        thread.start()
        self._closing.callback(thread.join, _CLOSE_SECONDS)
        self._closing.callback(leadership.stop)

    def _follow(self, prefix: str, listener: Callable[[Event], None], *, from_revision: int = 0) -> None:
        follower = Follower(self.store, prefix, listener, from_revision=from_revision, on_end=self._on_lost)
        self._closing.callback(follower.close)

    def _leave(self) -> None:
        self.registration.flush(timeout_seconds=_CLOSE_SECONDS)
        self.events.flush()
        self.registration.leave(timeout_seconds=_CLOSE_SECONDS)


def _keep_event(path: Path, event: Event) -> None:
    """Add an event of the job to the file."""
    found = read_event(event.value) if event.kind is EventKind.PUT else None
    if found is not None:
        with contextlib.suppress(OSError):  # a full disk is no reason to end the training
            append_event(path, found)

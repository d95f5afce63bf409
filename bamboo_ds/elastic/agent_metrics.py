"""Feeds an agent's metrics with what it sees: the board, the nodes, the events."""

from __future__ import annotations

from collections.abc import Callable

from bamboo_ds.clock import Clock
from bamboo_ds.elastic import keys
from bamboo_ds.elastic.events import read_event
from bamboo_ds.elastic.metrics import Metrics
from bamboo_ds.errors import ConfigError
from bamboo_ds.plan import codec
from bamboo_ds.plan.commit import Outcome
from bamboo_ds.plan.job import JobSettings
from bamboo_ds.plan.plan import Plan
from bamboo_ds.store import Event, EventKind

__all__ = ["MetricsFeed"]

_SETTINGS = keys.settings(0)[:-1]


class MetricsFeed:
    """Takes the changes of some prefixes of the store, each from one thread.

    Args:
        metrics: what it feeds.
        clock: of the agent.
    """

    def __init__(self, metrics: Metrics, *, clock: Clock) -> None:
        self.metrics, self._clock = metrics, clock
        self._decided_at: dict[str, float] = {}
        self._nodes: set[str] = set()

    @property
    def listeners(self) -> dict[str, Callable[[Event], None]]:
        """What to follow, and who listens."""
        return {keys.BOARD: self._on_board, keys.NODES: self._on_node, keys.EVENTS: self._on_event}

    def _on_board(self, event: Event) -> None:
        if event.kind is EventKind.DELETE:
            return
        try:
            if event.key == keys.PLAN:
                self.metrics.plan(codec.decode(Plan, event.value))
            elif event.key.startswith(_SETTINGS):
                self.metrics.settings(codec.decode(JobSettings, event.value))
            elif event.key.startswith(keys.DECISIONS):
                self._on_decision(event)
        except ConfigError:  # written by another version of the package: whoever needs it will say so
            return

    def _on_decision(self, event: Event) -> None:
        engine, now = event.key.removeprefix(keys.DECISIONS).split("/")[0], self._clock.now()
        seconds = now - self._decided_at.get(engine, now)
        self._decided_at[engine] = now
        self.metrics.outcome(codec.decode(Outcome, event.value), seconds)

    def _on_node(self, event: Event) -> None:
        if event.kind is EventKind.PUT:
            self._nodes.add(event.key)
        else:
            self._nodes.discard(event.key)
        self.metrics.nodes(len(self._nodes))

    def _on_event(self, event: Event) -> None:
        found = read_event(event.value) if event.kind is EventKind.PUT else None
        if found is not None:
            self.metrics.event(found.kind)

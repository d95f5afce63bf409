"""What the coordinator writes with: each write carries its fence and shows in its view at once, and is told."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bamboo_ds.elastic import keys
from bamboo_ds.elastic.events import EventLog
from bamboo_ds.elastic.view import View
from bamboo_ds.store import Committed, Condition, Fence, Put, Store, Write

__all__ = ["Deed", "Pen"]


@dataclass(frozen=True, slots=True)
class Deed:
    """One thing that a step of the coordinator did."""

    kind: str
    text: str


class Pen:
    """Writes for one coordinator.

    Args:
        store: of the job.
        view: notes what is written on the board.
        fence: of the coordinator.
        node: its name.
        wall_nanoseconds: Unix time, for people.
    """

    def __init__(
        self,
        store: Store,
        *,
        view: View,
        fence: Fence,
        node: str,
        wall_nanoseconds: Callable[[], int] = time.time_ns,
    ) -> None:
        self._store, self._view, self._fence = store, view, fence
        self._events = EventLog(store, node=node, wall_nanoseconds=wall_nanoseconds)
        self._deeds: list[Deed] = []
        self.wall_nanoseconds = wall_nanoseconds

    def write(self, conditions: Sequence[Condition], writes: Sequence[Write]) -> Committed:
        """Write, all or nothing.

        Raises:
            ConflictError: a condition does not hold, or the fence fell. Nothing was written.
            StoreUnavailableError: it may or may not have been written.
        """
        committed = self._store.transact(conditions, writes, fence=self._fence)
        for write in writes:
            if isinstance(write, Put) and write.key.startswith(keys.BOARD):
                self._view.note(write.key, write.value, committed.revision)
        return committed

    def did(self, kind: str, text: str) -> None:
        """Note a deed that is no news to people."""
        self._deeds.append(Deed(kind, text))

    def tell(self, kind: str, text: str, *, about: str = "", **fields: Any) -> None:
        """Note a deed, or what was seen, as an event; see `EventLog.note`."""
        self.did(kind, text)
        self._events.note(kind, text, about=about, **fields)

    @property
    def idle(self) -> bool:
        """Whether there were no deeds since they were taken last."""
        return not self._deeds

    def take_deeds(self) -> tuple[Deed, ...]:
        """Return the deeds since the last call."""
        deeds, self._deeds = tuple(self._deeds), []
        return deeds

    def flush_events(self) -> None:
        """Write the events, as well as it goes."""
        self._events.flush(fence=self._fence)

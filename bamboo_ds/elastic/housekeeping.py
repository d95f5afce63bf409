"""Deletes the coordinator's old keys, so that the store does not grow with the run. Nothing waits for it.

All of it follows from what is there, so a coordinator that dies in the middle leaves nothing that the next would miss.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator

from bamboo_ds.elastic import keys
from bamboo_ds.elastic.events import trim_events
from bamboo_ds.elastic.view import View
from bamboo_ds.store import Condition, Delete, DeletePrefix, Fence, Store, Unchanged, Write

__all__ = ["Housekeeping"]

_WRITES = 50  # of one transaction
_TRIM_SECONDS = 60.0
_FIRST_TRIM_SECONDS = 5.0  # a new coordinator has other things to do


class Housekeeping:
    """Deletes what nobody will read again.

    Args:
        store: of the job.
        view: what is there.
        fence: of the coordinator.
        keep_seconds: how long the keys of a worker are kept after it has gone. Its agent may have been cut off and
            come back with it; after so long it is not believed to.
    """

    def __init__(self, store: Store, *, view: View, fence: Fence, keep_seconds: float) -> None:
        self._store, self._view, self._fence, self._keep_seconds = store, view, fence, keep_seconds
        self._trim_at = store.clock.now() + _FIRST_TRIM_SECONDS
        self._gone_since: dict[int, float] = {}
        self._seen_version = -1
        self._swept = (0, 0)
        self._old_rendezvous: deque[str] = deque()

    @property
    def seconds_to_next(self) -> float:
        """How long there is nothing to do, if nothing changes."""
        due = min(self._gone_since.values(), default=math.inf) + self._keep_seconds
        return max(min(due, self._trim_at) - self._store.clock.now(), 0.0)

    def committed(self, number: tuple[int, int]) -> None:
        """Note a decision under a plan: the groups of older plans are not formed any more."""
        (epoch, version), swept = number, self._swept
        if number <= swept:
            return
        self._swept = number
        self._old_rendezvous.extend(f"{keys.RENDEZVOUS}{older}." for older in range(swept[0], epoch))
        first = swept[1] if epoch == swept[0] else 0
        self._old_rendezvous.extend(f"{keys.RENDEZVOUS}{keys.dotted((epoch, v))}/" for v in range(first, version))

    def tidy(self) -> int:
        """Delete some of what is old, and return how many keys that were.

        Raises:
            ConflictError: the fence fell.
            StoreUnavailableError: the store does not answer.
        """
        writes = list(itertools.islice(self._old(), _WRITES))
        deleted = self._store.transact(self._conditions(), writes, fence=self._fence).deleted if writes else 0
        for write in writes:
            if isinstance(write, DeletePrefix) and write.prefix in self._old_rendezvous:
                self._old_rendezvous.remove(write.prefix)
        if self._store.clock.now() >= self._trim_at:
            self._trim_at = self._store.clock.now() + _TRIM_SECONDS
            deleted += trim_events(self._store, fence=self._fence)
        return deleted

    def _conditions(self) -> list[Condition]:
        """Return what must hold even if our request is slow: nobody has answered a newer roll, or reported anew."""
        return [Unchanged(key, self._view.revision(key)) for key in (keys.PLAN, keys.ROLL)]

    def _old(self) -> Iterator[Write]:
        view, plan = self._view, self._view.plan
        yield from (DeletePrefix(prefix) for prefix in self._old_rendezvous)
        for engine, commit in view.boxes:
            if commit <= view.newest_decision(engine):
                yield DeletePrefix(keys.votes(engine, commit))
        for engine, commits in view.decisions.items():
            yield from (Delete(keys.decision(engine, commit)) for commit in commits if commit < max(commits))
        if plan is None:
            return
        current = keys.dotted(plan.number)
        yield from (DeletePrefix(f"{keys.SUSPECTS}{number}/") for number in view.suspects if number != current)
        if view.answers and current not in view.suspects:
            yield DeletePrefix(keys.ANSWERS)
        yield from self._old_workers()

    def _old_workers(self) -> Iterator[Write]:
        """Yield the keys of workers that are gone for long: they run on no node, and the plan has no stage for them."""
        view, now = self._view, self._store.clock.now()
        if view.version != self._seen_version:
            self._seen_version = view.version
            placed = set(view.plan.workers) if view.plan is not None else set()
            known = view.ready.keys() | view.ended.keys() | view.left.keys()
            gone = known - view.registered.keys() - placed
            self._gone_since = {worker: self._gone_since.get(worker, now) for worker in gone}
        for worker, since in self._gone_since.items():
            if now - since >= self._keep_seconds:
                told = ((view.ready, keys.ready), (view.ended, keys.ended), (view.left, keys.left))
                yield from (Delete(key(worker)) for known_, key in told if worker in known_)

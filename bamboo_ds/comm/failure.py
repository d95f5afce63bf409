"""Tells the other workers why this one fails, before its links break.

A worker that raises takes the job with it. The others would only see a broken link; so the first cause is written to
the store, and whoever meets a broken link looks there first.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

_LOOK_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Failure:
    """The first cause of a job's end.

    Attributes:
        worker: who failed.
        kind: name of the exception's class.
        message: its text.
    """

    worker: int
    kind: str
    message: str


class FailureBoard:
    """One slot for the first failure of a job.

    Args:
        store: a torch store; it may be gone when the process that hosts it failed.
        worker: id of this worker.
        instance: distinguishes engines of one process.
    """

    def __init__(self, store: Any, *, worker: int, instance: int) -> None:
        self._store, self._worker = store, worker
        self._key, self._left = f"failure/{instance}", f"left/{instance}"

    def report(self, error: BaseException) -> None:
        """Write this worker's failure, if none came first."""
        failure = Failure(worker=self._worker, kind=type(error).__name__, message=str(error))
        _ignoring_a_lost_store(lambda: self._store.compare_set(self._key, "", json.dumps(asdict(failure))))

    def cause(self, *, wait_seconds: float) -> Failure | None:
        """Return the first failure, waiting a little for whoever failed to write it."""
        deadline = time.monotonic() + wait_seconds
        while True:
            if _ignoring_a_lost_store(lambda: self._store.check([self._key])):
                raw = _ignoring_a_lost_store(lambda: self._store.get(self._key))
                return Failure(**json.loads(raw)) if raw else None
            if time.monotonic() > deadline:
                return None
            time.sleep(_LOOK_SECONDS)

    def leave(self) -> None:
        """Count this worker as gone."""
        _ignoring_a_lost_store(lambda: self._store.add(self._left, 1))

    def await_others(self, count: int, *, wait_seconds: float) -> None:
        """Wait until `count` workers have left: the process that hosts the store leaves last."""
        deadline = time.monotonic() + wait_seconds
        while time.monotonic() < deadline:
            gone = _ignoring_a_lost_store(lambda: self._store.add(self._left, 0))
            if gone is None or gone >= count:
                return
            time.sleep(_LOOK_SECONDS)


def _ignoring_a_lost_store(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except RuntimeError:  # what torch raises when the store's host is gone
        return None

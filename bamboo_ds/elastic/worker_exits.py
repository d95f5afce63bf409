"""What the end of a worker's process means: an orderly end, a loss, or a failure that ends the job.

A user's own error must end the job with its traceback, and never be taken for a preemption and "recovered" for ever;
a preempted worker must never end the job. The exit code alone does not tell, as a worker that the cluster has evicted
or refused, or that ends because another failed, has an exit code too. The store does: whoever ends for such a reason
has written or read it there before.
"""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass
from enum import Enum

from bamboo_ds.elastic import keys
from bamboo_ds.errors import ConflictError
from bamboo_ds.plan import codec
from bamboo_ds.plan.job import Roster
from bamboo_ds.plan.plan import NOBODY, Plan
from bamboo_ds.store import ABSENT, Store

__all__ = ["JOB", "Verdict", "WorkerExit", "judge", "last_error", "publish_failure", "read_failure"]

JOB = "job"
_LOSSES = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_TRACEBACK = "Traceback (most recent call last):\n"
_EXCEPTION = re.compile(r"(?P<kind>[A-Za-z_][\w.]*)(: (?P<message>.*))?")


class Verdict(Enum):
    """What the end of a worker means."""

    LEFT = "left"
    LOST = "lost"
    EVICTED = "evicted"
    REFUSED = "refused"
    FAILED = "failed"
    FOLLOWED = "followed"
    """It ended as another had failed."""


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """A worker that has ended.

    Attributes:
        worker: its id.
        code: its exit code; negative for the signal that ended it.
        reason: why its agent ended it; empty if it did not.
    """

    worker: int
    code: int
    reason: str = ""

    @property
    def how(self) -> str:
        """What to say after "worker 3"."""
        if self.code >= 0:
            return f"exited with code {self.code}"
        return f"was ended by {self.signal_name}{f': {self.reason}' if self.reason else ''}"

    @property
    def signal_name(self) -> str:
        """The signal that ended it; empty if none did."""
        if self.code >= 0:
            return ""
        known = {int(number): number.name for number in signal.Signals}
        return known.get(-self.code, f"signal {-self.code}")

    @property
    def verdict(self) -> Verdict | None:
        """What its exit code alone says; None if the store must be asked."""
        if self.code == 0:
            return Verdict.LEFT
        return Verdict.LOST if -self.code in _LOSSES else None

    def record(self, node: str) -> bytes:
        """Return what goes to the coordinator's desk."""
        reason = f"worker {self.worker} of node {node} {self.how}"
        return json.dumps({"signal": self.signal_name, "reason": reason}).encode()


def judge(store: Store, ended: WorkerExit) -> Verdict:
    """Say what the end of a worker means.

    Raises:
        StoreUnavailableError: the store does not answer.
    """
    if ended.verdict is not None:
        return ended.verdict
    if store.get(keys.ended(ended.worker)) is not None:
        return Verdict.REFUSED
    entry = store.get(keys.PLAN)
    plan = None if entry is None else codec.decode(Plan, entry.value)
    if plan is not None and ended.worker in plan.dead:
        return Verdict.EVICTED
    if plan is not None and ended.worker not in plan.workers and not _began(store, ended.worker):
        return Verdict.LOST  # it came late and had no place yet: the others train on
    return Verdict.FOLLOWED if store.get(keys.failure(JOB)) is not None else Verdict.FAILED


def _began(store: Store, worker: int) -> bool:
    """Return whether the job was begun with a worker."""
    roster = store.get(keys.ROSTER)
    return roster is None or worker in codec.decode(Roster, roster.value).workers


def publish_failure(store: Store, ended: WorkerExit, *, log: str) -> None:
    """Write that a worker failed that did not say so itself; the job ends. Another's failure may have come first.

    Args:
        store: of the job.
        ended: the worker.
        log: the end of its log.

    Raises:
        StoreUnavailableError: the store does not answer.
    """
    said = f"its log ends:\n{log}" if log else "its log is empty"
    kind, message = last_error(log) or (ended.how, f"no traceback; {said}")
    failure = {"worker": ended.worker, "kind": kind, "message": message}
    try:
        store.compare_and_set(keys.failure(JOB), json.dumps(failure).encode(), expected=ABSENT)
    except ConflictError:
        return


def last_error(log: str) -> tuple[str, str] | None:
    """Return class and message of the exception with whose traceback a log ends; None if it ends otherwise."""
    _, found, trace = log.rpartition(_TRACEBACK)
    said = [line for line in trace.splitlines() if line and not line.startswith(" ")]
    match = _EXCEPTION.fullmatch(said[0]) if found and said else None
    return None if match is None else (match["kind"].rpartition(".")[2], "\n".join([match["message"] or "", *said[1:]]))


def read_failure(value: bytes) -> tuple[int, str]:
    """Return the worker that failed first (`NOBODY` for the coordinator) and how: `ValueError: ...`."""
    try:
        found = json.loads(value)
        text = ": ".join(filter(None, (found["kind"], found["message"])))
        return int(found["worker"]), text
    except (ValueError, KeyError, TypeError):
        return NOBODY, value.decode(errors="replace")

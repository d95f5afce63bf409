"""Failures in a cluster: they go to the board that all workers and agents follow, and verdicts come from there.

Whoever meets a broken link waits for what the cluster makes of it: a newer plan without the peer, this worker's own
eviction, or the failure that made the peer close. No roll is called among workers: the coordinator does that.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict

from bamboo_ds.elastic.member import JOB, Member
from bamboo_ds.errors import (
    BambooError,
    EvictedError,
    PeerLostError,
    PlanChangedError,
    StoreError,
    StoreUnavailableError,
)
from bamboo_ds.plan import Plan
from bamboo_ds.world.failure import Failure, consequence_of, is_consequence, mark, mark_repetition, names_of

_LOOK_SECONDS = 0.01
_COUNT_SECONDS = 1.0  # between two looks at who has left
_TRACEBACK_CHARACTERS = 50_000


class MemberFailures:
    """Where a worker of a cluster says why it fails, and finds out why others do.

    Args:
        member: its seat.
        plan: returns the plan under which it works.
        scope: `JOB`, or the name of an engine: a failure of an engine that the script survives is not one of the job.
        timeout_seconds: how long to wait for a verdict on a broken link.
    """

    def __init__(
        self, member: Member, *, plan: Callable[[], Plan | None], scope: str = JOB, timeout_seconds: float = 60.0
    ) -> None:
        self._member, self._plan, self._scope, self._timeout_seconds = member, plan, scope, timeout_seconds

    def report(self, error: BaseException) -> None:
        """Write this worker's failure if none came first; mark the error if it only repeats the first."""
        if is_consequence(error) or self._member.evicted or isinstance(error, StoreUnavailableError):
            return  # a store that cannot be reached is seen by everybody, and cannot be written to
        failure = Failure(
            worker=self._member.worker,
            kind=type(error).__name__,
            message=str(error),
            traceback="".join(traceback.format_exception(error))[-_TRACEBACK_CHARACTERS:],
        )
        first = self._member.fail(self._scope, json.dumps(asdict(failure)).encode())
        mark_repetition(error, failure, first=_read(first))

    def check(self) -> None:
        """Look whether another worker has failed.

        Raises:
            PeerLostError: one has.
        """
        if (cause := self.cause()) is not None:
            raise PeerLostError(f"worker {cause.worker} has failed: {cause.kind}")

    def answer_the_roll(self) -> None:
        """Do nothing: the seat answers the coordinator by itself."""

    def explain(self, error: PeerLostError) -> BambooError:
        """Wait for the verdict on a broken link, and return it.

        Returns:
            PlanChangedError, EvictedError, or the consequence of another worker's failure; a PeerLostError if nobody
            knows within the time-out.
        """
        deadline = time.monotonic() + self._timeout_seconds
        next_count = time.monotonic()
        while True:
            if (verdict := self._verdict()) is not None:
                return verdict
            if time.monotonic() >= next_count:
                next_count = time.monotonic() + _COUNT_SECONDS
                if left := self._left():
                    text = f"{names_of(left)} left: the script ended there while others still trained ({error})"
                    return mark(PeerLostError(text))
            if time.monotonic() > deadline:
                return PeerLostError(
                    f"{error}; within {self._timeout_seconds:g} s the cluster has not said what became of the peer: "
                    "look at the coordinator (`bamboo-ds status`) and at the network between the nodes"
                )
            time.sleep(_LOOK_SECONDS)

    def cause(self) -> Failure | None:
        """Return the first failure of this scope or of the job."""
        for scope in dict.fromkeys((self._scope, JOB)):
            if (raw := self._member.failure(scope)) is not None:
                return _read(raw)
        return None

    def leave(self) -> None:
        """Say that this worker's script has ended without an error."""
        self._member.leave()

    def depart(self) -> None:
        """Do nothing: no worker holds the store."""

    def await_others(self, *, wait_seconds: float) -> None:
        """Do nothing: nobody needs anything of this process."""

    def _verdict(self) -> BambooError | None:
        if (cause := self.cause()) is not None and not self._member.evicted:
            return consequence_of(cause)
        try:
            self._member.check(self._plan())
        except (EvictedError, PlanChangedError, StoreError) as news:
            return news
        except PeerLostError as news:
            return mark(news)
        return None

    def _left(self) -> tuple[int, ...]:
        plan = self._plan()
        try:
            return self._member.left(plan.workers) if plan is not None else ()
        except StoreError:
            return ()


def _read(raw: bytes) -> Failure:
    try:
        return Failure(**json.loads(raw))
    except (ValueError, TypeError):  # an agent's, about a worker that could not write its own, or a newer version's
        return Failure(worker=-1, kind="failure", message=raw.decode(errors="replace"))

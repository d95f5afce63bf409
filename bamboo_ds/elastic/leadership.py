"""What an agent's thread does to coordinate: stand for election, lead while elected, and begin again.

One agent of a job leads. Each of the others waits for the candidate before it to end, so a leader's end wakes one. A
leader waits for news of the store and steps; nothing in that path sleeps or polls, a loss is answered as fast as the
store tells it. The pauses between are short only so as to notice a broken lease in time (`hearing`).
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable

from bamboo_ds.elastic import keys
from bamboo_ds.elastic.coordinator import Coordinator, CoordinatorSettings
from bamboo_ds.elastic.hearing import Hearing
from bamboo_ds.elastic.view import View
from bamboo_ds.errors import BambooError, ConflictError, LeaseLostError, StoreError, StoreUnavailableError
from bamboo_ds.plan.keeping import warm_up
from bamboo_ds.plan.plan import NOBODY
from bamboo_ds.store import ABSENT, Fence, Lease, Put, Store, Unchanged

__all__ = ["Leadership"]

_log = logging.getLogger(__name__)

_CAMPAIGN_SECONDS = 30.0  # then a candidate looks anew where it stands: a thousand of them shall not do so often
_RETRY_SECONDS = 0.1
_LOOKS_PER_TTL = 6


class Leadership:
    """Coordinates the job whenever it is this agent's turn. `run` it in a thread.

    Args:
        store: of the job.
        node: name of this agent's node.
        lease: returns the lease that the node lives under now; after an outage it is another one.
        settings: of the coordinator.
        on_vote: is told how many seconds each commit took, from its first ballot to its decision; from this thread.
    """

    def __init__(
        self,
        store: Store,
        *,
        node: str,
        lease: Callable[[], Lease],
        settings: CoordinatorSettings,
        on_vote: Callable[[float], None] | None = None,
    ) -> None:
        self._store, self._node, self._lease, self._settings = store, node, lease, settings
        self._on_vote = on_vote
        self._hearing = Hearing(store.clock, ttl_seconds=settings.ttl_seconds)
        self._stopped = threading.Event()
        self._view: View | None = None
        self._leads = False

    @property
    def leading(self) -> bool:
        """Whether this agent coordinates now."""
        return self._leads

    def stop(self) -> None:
        """Ask `run` to end; it does within half a second, or when a request of its own has been answered."""
        self._stopped.set()
        view = self._view
        if view is not None:
            view.wake()

    def run(self) -> None:
        """Stand for election and lead, again and again, until `stop` is called or the store is closed."""
        warm_up()
        while not self._stopped.is_set():
            try:
                self._stand(self._lease())
            except (LeaseLostError, StoreUnavailableError) as error:
                _log.info("node %s does not coordinate for now: %s", self._node, error)
                self._hearing.lost()
            except ConflictError as error:
                _log.warning("node %s coordinates no longer: %s", self._node, error)
            except StoreError as error:
                if not self._stopped.is_set():
                    _log.error("node %s cannot coordinate: %s", self._node, error)
                return
            self._stopped.wait(_RETRY_SECONDS)

    def _stand(self, lease: Lease) -> None:
        """Wait to be elected, then lead.

        Raises:
            LeaseLostError, ConflictError: the candidacy or the leadership is over.
            StoreUnavailableError: the store does not answer.
        """
        candidacy = _Candidacy(lease, self._hearing, self._stopped)
        election = self._store.elect(keys.COORDINATOR, self._node.encode(), candidacy)
        try:
            while not election.campaign(_CAMPAIGN_SECONDS):
                pass
            self._lead(election.fence, lease)
        finally:
            if self._stopped.is_set():
                _give_up(election.resign)

    def _lead(self, fence: Fence, lease: Lease) -> None:
        try:
            with View(self._store) as self._view:
                self._leads = True
                coordinator = Coordinator(
                    self._store,
                    view=self._view,
                    fence=fence,
                    node=self._node,
                    settings=self._settings,
                    hearing=self._hearing,
                    on_vote=self._on_vote,
                )
                self._work(coordinator, self._view, lease)
        except StoreError:
            raise
        except Exception as error:
            _log.exception("the coordinator on node %s failed", self._node)
            self._end_job(error, fence)
        finally:
            self._leads, self._view = False, None

    def _work(self, coordinator: Coordinator, view: View, lease: Lease) -> None:
        """Step whenever there is news.

        Raises:
            LeaseLostError: the lease is over, and the leadership with it.
        """
        while not self._stopped.is_set():
            if not lease.alive:
                raise LeaseLostError(f"the lease of node {self._node} is over")
            self._hearing.look(lease)
            busy = bool(coordinator.step())
            pause = min(coordinator.seconds_to_next, lease.ttl_seconds / _LOOKS_PER_TTL)
            try:
                view.wait(0.0 if busy else pause)
            except StoreUnavailableError as error:
                _log.info("%s", error)
                self._hearing.lost()

    def _end_job(self, error: Exception, fence: Fence) -> None:
        """End the job with a failure of the coordinator, which would fail again on every other node."""
        why = str(error) if isinstance(error, BambooError) else repr(error)
        text = f"the coordinator, on node {self._node}, cannot go on: {why}"
        failure = {"worker": NOBODY, "kind": type(error).__name__, "message": text}
        key = keys.failure("job")
        write = Put(key, json.dumps(failure).encode())
        _give_up(lambda: self._store.transact([Unchanged(key, ABSENT)], [write], fence=fence))
        self._stopped.set()


class _Candidacy(Lease):
    """The agent's lease as its candidacy sees it: over as soon as we are told to stop.

    Each look at it is one at how well we hear the store.
    """

    def __init__(self, lease: Lease, hearing: Hearing, stopped: threading.Event) -> None:
        self.id, self.ttl_seconds, self.lost = lease.id, lease.ttl_seconds, lease.lost
        self._lease, self._hearing, self._stopped = lease, hearing, stopped

    @property
    def remaining_seconds(self) -> float:
        return 0.0 if self._stopped.is_set() else self._lease.remaining_seconds

    @property
    def alive(self) -> bool:
        self._hearing.look(self._lease)
        return not self._stopped.is_set() and self._lease.alive

    def revoke(self, *, timeout_seconds: float | None = None) -> None:
        self._lease.revoke(timeout_seconds=timeout_seconds)


def _give_up(call: Callable[[], object]) -> None:
    """Make a last request that may fail."""
    try:
        call()
    except StoreError as error:
        _log.info("%s", error)

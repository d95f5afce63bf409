"""What an agent does about its cloud, in threads of its own: says who it is, hears warnings, may keep the fleet.

One agent of a job keeps the fleet and counts the money, elected like the coordinator. Whatever goes wrong here is told
and tried again; it never ends an agent, let alone the training.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bamboo_ds.cloud import keys as fleet_keys
from bamboo_ds.cloud.bookkeeper import Bookkeeper
from bamboo_ds.cloud.identity import Identity
from bamboo_ds.cloud.keeper import Keeper, KeeperSettings
from bamboo_ds.cloud.meter import Cost
from bamboo_ds.cloud.notices import Notice, NoticeWatcher, Source
from bamboo_ds.cloud.port import Provider
from bamboo_ds.cloud.prices import PriceBook
from bamboo_ds.elastic.agent_settings import AgentPort
from bamboo_ds.errors import BambooError, ConflictError, LeaseLostError, StoreError, StoreUnavailableError
from bamboo_ds.store import Fence, Lease

__all__ = ["Attendant", "Cloud"]

_log = logging.getLogger(__name__)

_CAMPAIGN_SECONDS = 30.0
_RETRY_SECONDS = 1.0
_TROUBLE_SECONDS = 30.0
_JOIN_SECONDS = 3.0
_END_SECONDS = 15.0
"""In which the keeper of a job that is over has given back what still boots: some requests to a cloud."""
_LAST_MOMENT_SECONDS = 5.0
"""So long before its deadline a node leaves by itself: then its loss is known at once, not after its lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cloud:
    """What an agent knows of its cloud.

    Attributes:
        identity: who this machine is.
        keeper: how the fleet is kept; None if this agent neither keeps it nor counts the money.
        provider: makes the provider, in the thread that uses it; None to count only.
        prices: makes the price book, likewise.
        sources: who may warn of the end of this node.
        poll_seconds: between two looks at them; EC2 recommends 5 at most, and warns two minutes before.
        on_cost: is told of each count, from a thread.
    """

    identity: Identity
    keeper: KeeperSettings | None = None
    provider: Callable[[], Provider] | None = None
    prices: Callable[[], PriceBook] = PriceBook
    sources: Sequence[Source] = ()
    poll_seconds: float = 2.0
    on_cost: Callable[[Cost], None] | None = None


class Attendant:
    """Attends to the cloud of an agent until it is closed.

    Args:
        host: the agent, whose node has joined.
        cloud: what it knows of its cloud.
    """

    def __init__(self, host: AgentPort, cloud: Cloud) -> None:
        self._host, self._cloud = host, cloud
        self._stopped, self._lock = threading.Event(), threading.Lock()
        self._ending = threading.Event()
        self._notice: Notice | None = None
        self._timer: threading.Timer | None = None
        self._watcher: NoticeWatcher | None = None
        if cloud.sources:
            self._watcher = NoticeWatcher(cloud.sources, self._on_notice, poll_seconds=cloud.poll_seconds)
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; takes a few seconds, some more if the job is over and its fleet ours to end. May be called again."""
        self._stopped.set()
        if self._watcher is not None:
            self._watcher.close()
        self._set_timer(None)
        self._thread.join(_JOIN_SECONDS)
        if self._ending.is_set():
            self._thread.join(_END_SECONDS)

    # ---- the fleet ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._attend(self._host.lease())
            except (LeaseLostError, StoreUnavailableError, ConflictError) as error:
                _log.info("node %s does not keep the fleet for now: %s", self._host.node, error)
                self._stopped.wait(_RETRY_SECONDS)
            except StoreError as error:
                if not self._stopped.is_set():
                    _log.error("node %s cannot attend to its cloud: %s", self._host.node, error)
                return
            except Exception as error:
                _log.exception("the keeper of the fleet on node %s failed", self._host.node)
                why = str(error) if isinstance(error, BambooError) else repr(error)
                self._host.tell("fleet_trouble", f"the fleet is not kept for now: {why}", code=type(error).__name__)
                self._stopped.wait(_TROUBLE_SECONDS)

    def _attend(self, lease: Lease) -> None:
        """Say who we are, stand for election, and keep the fleet while elected.

        Raises:
            LeaseLostError, ConflictError: the candidacy is over.
            StoreUnavailableError: the store does not answer.
        """
        self._publish(lease)
        candidacy = _Candidacy(lease, self._stopped)
        if self._cloud.keeper is None:
            while candidacy.alive:
                self._stopped.wait(_RETRY_SECONDS)
            return
        election = self._host.store.elect(fleet_keys.KEEPER, self._host.node.encode(), candidacy)
        try:
            while not election.campaign(_CAMPAIGN_SECONDS):
                pass
            self._keep(election.fence, candidacy, self._cloud.keeper)
        finally:
            if self._stopped.is_set():
                with contextlib.suppress(StoreError):
                    election.resign()

    def _keep(self, fence: Fence, candidacy: Lease, settings: KeeperSettings) -> None:
        """Keep the fleet and count the money until the candidacy is over."""
        host, cloud = self._host, self._cloud
        keeper = None
        if cloud.provider is not None:
            keeper = Keeper(host.store, cloud.provider(), fence=fence, settings=settings, tell=host.tell)
        books = Bookkeeper(host.store, fence=fence, prices=cloud.prices(), on_cost=cloud.on_cost)
        try:
            while candidacy.alive:
                pause = settings.look_seconds if keeper is None else keeper.step()
                books.count(None if keeper is None else keeper.holdings)
                self._stopped.wait(min(pause, settings.look_seconds))
        finally:
            if self._stopped.is_set():
                self._end(keeper, books)

    def _end(self, keeper: Keeper | None, books: Bookkeeper) -> None:
        """End the fleet, if the job is over, and say what it has cost."""
        host = self._host
        with contextlib.suppress(StoreError):  # what comes all the same leaves by itself
            if keeper is not None and keeper.job_is_over():
                self._ending.set()
                keeper.finish()
        if (cost := books.close()) is None:
            return
        host.tell(
            "cost",
            cost.text,
            spent=cost.spent,
            per_hour=cost.mean_per_hour,
            on_demand=cost.on_demand,
            samples_per_dollar=cost.samples_per_dollar,
        )
        host.say(cost.text)

    def _publish(self, lease: Lease) -> None:
        """Write under a lease what is known of this node."""
        store, node = self._host.store, self._host.node
        store.put(fleet_keys.node(node), self._cloud.identity.encode(), lease=lease)
        with self._lock:
            if self._notice is not None:
                store.put(fleet_keys.leaving(node), self._notice.encode(), lease=lease)

    # ---- warnings ----------------------------------------------------------------------------------------------

    def _on_notice(self, notice: Notice | None) -> None:
        """Hear a warning, or that it was taken back; from the watcher's thread."""
        host = self._host
        with self._lock:
            self._notice = notice
            with contextlib.suppress(StoreError):  # it is a bonus; under a new lease it is written again
                if notice is None:
                    host.store.delete(fleet_keys.leaving(host.node))
                else:
                    host.store.put(fleet_keys.leaving(host.node), notice.encode(), lease=host.lease())
        self._set_timer(notice)
        if notice is None:
            host.tell("notice_over", f"node {host.node} stays after all: the warning was taken back")
            return
        deadline = "" if notice.deadline is None else f", in {max(notice.deadline - time.time(), 0.0):.0f} s"
        text = f"node {host.node} is warned{deadline}: {notice.text}"
        host.tell("notice", text, deadline=notice.deadline, certain=notice.certain, source=notice.source)
        host.say(text)

    def _set_timer(self, notice: Notice | None) -> None:
        """Let the node leave shortly before its end, if that is certain and its moment known."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if notice is None or notice.deadline is None or not notice.certain or self._stopped.is_set():
            return
        seconds = max(notice.deadline - time.time() - _LAST_MOMENT_SECONDS, 0.0)
        self._timer = threading.Timer(seconds, self._host.leave, [notice.text])
        self._timer.daemon = True
        self._timer.start()


class _Candidacy(Lease):
    """The node's lease as its candidacy sees it: over as soon as we are told to stop."""

    def __init__(self, lease: Lease, stopped: threading.Event) -> None:
        self.id, self.ttl_seconds, self.lost = lease.id, lease.ttl_seconds, lease.lost
        self._lease, self._stopped = lease, stopped

    @property
    def remaining_seconds(self) -> float:
        return 0.0 if self._stopped.is_set() else self._lease.remaining_seconds

    @property
    def alive(self) -> bool:
        return not self._stopped.is_set() and self._lease.alive

    def revoke(self, *, timeout_seconds: float | None = None) -> None:
        self._lease.revoke(timeout_seconds=timeout_seconds)

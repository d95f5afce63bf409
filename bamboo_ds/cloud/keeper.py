"""Keeps the fleet at P x D: looks at cloud and store, asks `fleet` what to do, and does it.

One agent of a job has the keeper, elected like the coordinator. Every write carries the fence of that election, and
every order is in the ledger before it is made::

    ledger: order 7 is open  ->  cloud: order 7  ->  ledger: order 7 brought i-1 and i-2

A keeper that dies between any two of these is replaced by one that makes order 7 again: the cloud knows its token. A
step waits for the cloud and the store only, for seconds at most, so tests drive it with a clock of their own.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from bamboo_ds.cloud import keys as fleet_keys
from bamboo_ds.cloud.fleet import FleetFacts, FleetRules, Release, fleet
from bamboo_ds.cloud.ledger import Ledger
from bamboo_ds.cloud.port import ANY_ZONE, Grant, Holdings, Order, Provider
from bamboo_ds.cloud.trouble import CloudError, Trouble
from bamboo_ds.elastic import keys
from bamboo_ds.elastic.agent_settings import Tell
from bamboo_ds.errors import StoreError
from bamboo_ds.plan.cluster import Node
from bamboo_ds.plan.codec import decode
from bamboo_ds.plan.job import JobSpec
from bamboo_ds.plan.plan import Plan
from bamboo_ds.store import Fence, Put, Store

__all__ = ["Keeper", "KeeperSettings", "instance_names"]

_QUIET_SECONDS = 600.0  # a trouble that goes on is told again after so long


@dataclass(frozen=True, slots=True)
class KeeperSettings:
    """What the keeper must know.

    Attributes:
        rules: how patient it is.
        nodes: how many nodes the fleet shall have; None for P x D, once the job has said what that is.
        workers_per_node: of all nodes.
        look_seconds: how often to look at the cloud.
    """

    rules: FleetRules = field(default_factory=FleetRules)
    nodes: int | None = None
    workers_per_node: int = 1
    look_seconds: float = 15.0


class Keeper:
    """Keeps the fleet, as long as its fence holds. It belongs to one thread.

    Args:
        store: of the job.
        provider: the cloud.
        fence: of the election that this keeper has won.
        settings: what it must know.
        tell: takes its events.
        wall: Unix seconds; they are in the ledger, so all would-be keepers need about the same.

    Attributes:
        holdings: what the cloud has given, as it was last seen; None before the first look.
    """

    def __init__(
        self,
        store: Store,
        provider: Provider,
        *,
        fence: Fence,
        settings: KeeperSettings,
        tell: Tell,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._provider, self._fence = store, provider, fence
        self._settings, self._tell, self._wall = settings, tell, wall
        self._ledger: Ledger | None = None
        self.holdings: Holdings | None = None
        self._seen_at: dict[str, float] = {}
        """By instance, when it was first seen, or last seen with its agent in the job."""
        self._came: set[str] = set()
        """Instances whose agents have been in the job."""
        self._surplus_since: float | None = None
        self._told_at: dict[tuple[str, str], float] = {}
        self._silences, self._silent_until = 0, -math.inf
        """How often in a row the cloud did not answer, and until when it is not asked."""
        self._finished = False

    def step(self) -> float:
        """Look and act; return after how many seconds to do so again.

        Raises:
            ConflictError: this keeper was replaced, and has written nothing since.
            StoreUnavailableError: nobody knows whether the ledger was written; step again.
            ConfigError: a record in the store cannot be read.
        """
        try:
            return self._step()
        except StoreError:
            self._ledger = None  # read it again before anything else
            raise

    def job_is_over(self) -> bool:
        """Say whether the job has finished or failed.

        Raises:
            StoreError: the store does not say.
        """
        return any(self._store.get(key) is not None for key in fleet_keys.OVER_KEYS)

    def finish(self) -> None:
        """See to it that nothing comes after the end of the job: it would begin the job once more.

        Raises:
            StoreError: as of `step`.
        """
        try:
            joined, granted = self._joined(), self._provider.look().instances
            late = {instance.id for instance in granted} | self._read().unlisted.keys()
            for instance in sorted(late - joined.keys() - self._came):
                self._release(Release(instance, "the job is over, and its agent has not joined"))
            if not self._finished:
                self._provider.finish()
                self._finished = True
        except CloudError as error:
            self._tell_trouble(error.trouble)

    def _step(self) -> float:
        if self.job_is_over():
            self.finish()
            return self._settings.look_seconds
        self._finished = False  # a new run has begun under the name of one that was over
        if (silent := self._silent_until - self._wall()) > 0:
            return silent
        for order in self._read().open:
            if self._may_order():  # else the next one would fail like the last
                self._place(order, again=True)
        holdings = self._look()
        if holdings is None:
            return self._silent_until - self._wall()
        self._act(holdings)
        return min([self._settings.look_seconds, *self._read().closed_seconds(self._wall()).values()])

    def _look(self) -> Holdings | None:
        """Return what the cloud has given; None if it does not say, and then it is left alone for a while."""
        rules = self._settings.rules
        try:
            self.holdings = self._provider.look()
        except CloudError as error:
            pause = min(rules.retry_seconds * 2.0 ** min(self._silences, 10), rules.retry_max_seconds)
            self._silences += 1
            self._silent_until = self._wall() + pause
            self._tell_trouble(error.trouble)
            return None
        self._silences = 0
        return self.holdings

    def _may_order(self) -> bool:
        return ANY_ZONE not in self._read().closed_seconds(self._wall())

    def _act(self, holdings: Holdings) -> None:
        for trouble in holdings.troubles:
            self._tell_trouble(trouble)
        now, ledger = self._wall(), self._read()
        joined = self._joined()
        self._remember(holdings, ledger, joined, now)
        listed = ledger.listed(holdings.instances, joined=joined.keys(), now=now)
        ours = self._seen_at.keys() | set(listed.known)
        strangers = {name: node.zone for name, node in joined.items() if name not in ours}
        listed = listed.visited(strangers, rules=self._settings.rules, now=now)
        facts = self._facts(holdings, listed, joined, now)
        wish = fleet(facts, self._settings.rules)
        for release in wish.releases:
            self._release(release)
        if wish.orders:
            total = facts.ours + sum(wish.orders.values())
            ordered = listed.ordered(wish.orders, total=total, now=now)
            self._write(ordered)
            for order in ordered.open[len(listed.open) :]:
                if self._may_order():
                    self._place(order, again=False)
        elif listed is not ledger:
            self._write(listed)

    # ---- what is there -----------------------------------------------------------------------------------------

    def _joined(self) -> dict[str, Node]:
        """Return the nodes that have joined, by the ids of their instances; by their names where none is known."""
        nodes = [decode(Node, entry.value) for entry in self._store.list(keys.NODES).entries]
        names = instance_names(self._store)
        return {names.get(node.name, node.name): node for node in nodes}

    def _facts(self, holdings: Holdings, ledger: Ledger, joined: Mapping[str, Node], now: float) -> FleetFacts:
        under_way = Counter(holdings.under_way)
        for order in ledger.open:
            under_way[order.zone] += order.nodes
        facts = FleetFacts(
            target=self._target(),
            zones=self._provider.zones,
            instances=holdings.instances,
            unlisted=tuple(one.instance for one in ledger.unlisted.values()),
            strangers={name: one.zone for name, one in ledger.strangers.items()},
            under_way=under_way,
            closed=ledger.closed_seconds(now),
            idle=self._idle(joined),
            duds=self._duds(holdings, now),
        )
        return replace(facts, surplus_seconds=self._surplus_seconds(facts, now))

    def _remember(self, holdings: Holdings, ledger: Ledger, joined: Mapping[str, Node], now: float) -> None:
        for name in ledger.unlisted:
            self._seen_at.setdefault(name, now)
        for instance in holdings.instances:
            self._seen_at.setdefault(instance.id, now)
            if instance.id in joined:
                self._seen_at[instance.id] = now
                self._came.add(instance.id)

    def _duds(self, holdings: Holdings, now: float) -> frozenset[str]:
        oldest = now - self._settings.rules.boot_seconds
        return frozenset(one.id for one in holdings.instances if self._seen_at[one.id] < oldest)

    def _idle(self, joined: Mapping[str, Node]) -> frozenset[str]:
        """Return the names of nodes that have joined and hold no stage; none before the first plan."""
        entry = self._store.get(keys.PLAN)
        if entry is None:
            return frozenset()
        busy = set(decode(Plan, entry.value).workers)
        return frozenset(name for name, node in joined.items() if busy.isdisjoint(node.workers))

    def _surplus_seconds(self, facts: FleetFacts, now: float) -> float:
        if facts.target is None or facts.total <= facts.target:
            self._surplus_since = None
            return 0.0
        self._surplus_since = now if self._surplus_since is None else self._surplus_since
        return now - self._surplus_since

    def _target(self) -> int | None:
        if self._settings.nodes is not None:
            return self._settings.nodes
        entry = self._store.get(keys.SPEC)
        if entry is None:
            return None
        bounds = decode(JobSpec, entry.value).bounds
        if bounds.pipelines is None:
            return None
        return math.ceil(bounds.num_stages * bounds.pipelines / self._settings.workers_per_node)

    # ---- what is done ------------------------------------------------------------------------------------------

    def _place(self, order: Order, *, again: bool) -> None:
        """Make an order and write down what came of it; after an indefinite error it stays open."""
        try:
            grant = self._provider.order(order, again=again)
        except CloudError as error:
            if error.indefinite:
                self._refused(replace(error.trouble, zone=ANY_ZONE))
                return
            grant = Grant(trouble=error.trouble)
        if grant.nodes < order.nodes and grant.trouble is None:
            grant = replace(grant, trouble=_partial(order, grant))
        now = self._wall()
        self._write(self._read().settled(order, grant, rules=self._settings.rules, now=now))
        for instance in grant.instances:
            self._seen_at.setdefault(instance.id, now)
        self._tell_order(order, grant)

    def _release(self, release: Release) -> None:
        try:
            self._provider.release(release.instance)
        except CloudError as error:
            self._tell_trouble(error.trouble)
            return
        self._seen_at.setdefault(release.instance, self._wall())
        self._tell("fleet_release", f"instance {release.instance} is given back: {release.why}")

    def _refused(self, trouble: Trouble) -> None:
        self._write(self._read().refused(trouble, rules=self._settings.rules, now=self._wall()))
        self._tell_trouble(trouble)

    # ---- the ledger --------------------------------------------------------------------------------------------

    def _read(self) -> Ledger:
        if self._ledger is None:
            entry = self._store.get(fleet_keys.LEDGER)
            if entry is not None:
                self._ledger = Ledger.decode(entry.value)
            else:
                self._write(Ledger())
        assert self._ledger is not None
        return self._ledger

    def _write(self, ledger: Ledger) -> None:
        # Only the one whose fence holds writes it, so the fence is condition enough.
        self._store.transact((), [Put(fleet_keys.LEDGER, ledger.encode())], fence=self._fence)
        self._ledger = ledger

    # ---- what is told ------------------------------------------------------------------------------------------

    def _tell_order(self, order: Order, grant: Grant) -> None:
        if grant.nodes:
            where = f" in zone {order.zone}" if order.zone else ""
            text = f"{grant.nodes} of {order.nodes} node(s) asked for{where} are granted"
            self._tell("fleet_order", text, zone=order.zone, nodes=order.nodes, granted=grant.nodes)
        if grant.trouble is not None:
            self._tell_trouble(grant.trouble)

    def _tell_trouble(self, trouble: Trouble) -> None:
        """Tell of a trouble once, and again only if it has gone on for long."""
        now, name = self._wall(), (trouble.code, trouble.zone)
        if now - self._told_at.get(name, -math.inf) >= _QUIET_SECONDS:
            self._told_at[name] = now
            self._tell("fleet_trouble", str(trouble), code=trouble.code, zone=trouble.zone, remedy=trouble.remedy)


def instance_names(store: Store) -> dict[str, str]:
    """Return the instance ids of the nodes whose agents have said so, by name of the node."""
    found = {entry.key: json.loads(entry.value) for entry in store.list(fleet_keys.NODES).entries}
    return {key.removeprefix(fleet_keys.NODES): str(one["instance"]) for key, one in found.items() if one["instance"]}


def _partial(order: Order, grant: Grant) -> Trouble:
    text = f"the cloud gave {grant.nodes} of {order.nodes} node(s)"
    return Trouble("PartialGrant", text, "none is needed: the rest is asked for again", order.zone)

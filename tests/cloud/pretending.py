"""A pretend cloud and a job in a `MemoryStore`, by a clock that the test moves: what the keeper's tests share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from bamboo_ds.clock import ManualClock
from bamboo_ds.cloud import keys as fleet_keys
from bamboo_ds.cloud.keeper import Keeper, KeeperSettings
from bamboo_ds.cloud.port import Grant, Holdings, Instance, Order
from bamboo_ds.cloud.pretend import PretendMarket
from bamboo_ds.cloud.trouble import CloudError, Trouble
from bamboo_ds.elastic import keys
from bamboo_ds.plan.cluster import Node
from bamboo_ds.plan.codec import encode
from bamboo_ds.plan.job import JobSpec
from bamboo_ds.store import Lease, MemoryServer, MemoryStore

TTL_SECONDS = 3.0


@dataclass
class PretendProvider:
    """A provider on a pretend market, which fails when told to."""

    market: PretendMarket
    now: Callable[[], float]
    fail_before: list[CloudError] = field(default_factory=list)
    """Raised by the next orders, which are not made."""
    fail_after: list[CloudError] = field(default_factory=list)
    """Raised by the next orders, which are made."""
    fail_look: list[CloudError] = field(default_factory=list)
    calls: list[Order] = field(default_factory=list)
    unlisted: int = 0
    """So many looks show nothing, as a real cloud's list is late."""
    finished: int = 0
    zones: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.zones = self.market.supply.zones

    def look(self) -> Holdings:
        if self.fail_look:
            raise self.fail_look.pop(0)
        if self.unlisted:
            self.unlisted -= 1
            return Holdings()
        running = self.market.running.items()
        instances = [Instance(name, zone, order=self.market.token(name)) for name, zone in sorted(running)]
        return Holdings(tuple(instances), self.market.promised)

    def order(self, order: Order, *, again: bool) -> Grant:
        self.calls.append(order)
        if self.fail_before:
            raise self.fail_before.pop(0)
        answer = self.market.order(order.token, order.nodes, order.zone, now=self.now())
        if self.fail_after:
            raise self.fail_after.pop(0)
        trouble = Trouble("NoCapacity", answer.reason, "none is needed", order.zone) if answer.reason else None
        return Grant(promised=answer.promised, trouble=trouble)

    def release(self, instance: str) -> None:
        self.market.end([instance])

    def finish(self) -> None:
        self.finished += 1


def lost_answer() -> CloudError:
    """Return the error of a request of which nobody knows whether it was heard."""
    return CloudError(Trouble("ReadTimeout", "no answer within 10 s", "none is needed"), indefinite=True)


@dataclass
class FleetJob:
    """A job whose nodes are instances of a market."""

    market: PretendMarket
    settings: KeeperSettings = field(default_factory=KeeperSettings)
    clock: ManualClock = field(default_factory=lambda: ManualClock(1000.0))
    told: list[tuple[str, str]] = field(default_factory=list)
    leases: dict[str, Lease] = field(default_factory=dict)
    workers: int = 0

    def __post_init__(self) -> None:
        self.server = MemoryServer(clock=self.clock, history_revisions=100_000)
        self.store = MemoryStore(server=self.server)
        self.provider = PretendProvider(self.market, self.clock.now)

    def publish(self, *, stages: int, pipelines: int | None) -> None:
        self.store.put(keys.SPEC, encode(JobSpec(publisher=0, num_stages=stages, num_layers=64, pipelines=pipelines)))

    def elect(self, node: str = "c0") -> tuple[Keeper, Lease]:
        store = MemoryStore(server=self.server)
        lease = store.lease(TTL_SECONDS)
        election = store.elect(fleet_keys.KEEPER, node.encode(), lease)
        assert election.campaign(), "there is another keeper"
        keeper = Keeper(
            store,
            self.provider,
            fence=election.fence,
            settings=self.settings,
            tell=lambda kind, text, **fields: self.told.append((kind, text)),
            wall=self.clock.now,
        )
        return keeper, lease

    def join(self, name: str, zone: str) -> None:
        """Let the agent of a node register."""
        self.leases[name] = self.store.lease(TTL_SECONDS)
        node = Node(name, zone, (self.workers,))
        self.workers += 1
        self.store.put(keys.node(name), encode(node), lease=self.leases[name])

    def lose(self, name: str) -> None:
        """Take a node away."""
        self.market.end([name])
        if name in self.leases:
            self.server.expire(self.leases.pop(name).id)

    def start(self, *, joining: bool = True) -> list[str]:
        """Let the market start what is due; return the names."""
        started = self.market.start(self.clock.now())
        for name, zone in started.items() if joining else ():
            self.join(name, zone)
        return list(started)

    def run(self, keeper: Keeper, seconds: float) -> None:
        """Let time pass, with the keeper stepping when it wants to."""
        end = self.clock.now() + seconds
        while self.clock.now() < end:
            self.start()
            self.clock.advance(min(keeper.step(), end - self.clock.now()))
            self.start()

    @property
    def counts(self) -> Counter[str]:
        return Counter(self.market.running.values())

    def kinds(self) -> Counter[str]:
        return Counter(kind for kind, _ in self.told)

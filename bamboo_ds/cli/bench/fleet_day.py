"""A day of a spot market in pretend time: what `bamboo-ds bench fleet` lives through, again and again."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass, field, fields
from functools import cache, lru_cache
from typing import Any, Literal

from bamboo_ds.clock import ManualClock
from bamboo_ds.cloud import keys as fleet_keys
from bamboo_ds.cloud.fleet import FleetRules, spread
from bamboo_ds.cloud.keeper import Keeper, KeeperSettings
from bamboo_ds.cloud.port import Grant, Holdings, Instance, Order
from bamboo_ds.cloud.pretend import Manners, PretendMarket, Supply
from bamboo_ds.cloud.trouble import CloudError, Trouble
from bamboo_ds.elastic import keys
from bamboo_ds.elastic.coordinator import Coordinator, CoordinatorSettings
from bamboo_ds.elastic.hearing import Hearing
from bamboo_ds.elastic.view import View
from bamboo_ds.errors import InfeasiblePlanError, StoreError
from bamboo_ds.plan.cluster import Bounds, Node, Shape, Worker
from bamboo_ds.plan.codec import encode
from bamboo_ds.plan.job import JobSpec
from bamboo_ds.plan.placement import arrange
from bamboo_ds.plan.roster import StartRule
from bamboo_ds.store import Committed, Lease, MemoryServer, MemoryStore

__all__ = ["TARGET", "ZONES", "Rehearsal", "Tally", "neighbours"]

STAGES, PIPELINES = 8, 4
TARGET = STAGES * PIPELINES
ZONES = ("a", "b", "c")
TTL_SECONDS, RESTART_SECONDS, LOOK_SECONDS = 10.0, 10.0, 15.0
KILLS_PER_HOUR = 1.0
MANNERS = Manners(refuse=0.1, partly=0.3, delay_seconds=(5.0, 60.0), forget=0.02)
LOST_ANSWERS = 0.05
"""Share of orders whose answer is lost after they were heard; as many are lost before."""
HEAD = "head"
"""An on-demand node that was started by hand: if the market takes everything, it asks for more."""

Way = Literal["idle", "before_write", "after_write", "before_order", "after_order", "in_order"]
WAYS: tuple[Way, ...] = ("idle", "before_write", "after_write", "before_order", "after_order", "in_order")


class Killed(Exception):
    """The agent that coordinates is killed at this moment."""


@dataclass(slots=True)
class Tally:
    """What is counted of a day, or of many.

    Attributes:
        over_asked: orders that asked for more than was missing of P x D.
        double_orders: orders made under a new token while nobody knew what had come of one in the same zone.
        live_seconds: of nodes, the head apart; likewise `ceiling_seconds`.
        pairs: seconds of neighbour pairs; `same_zone` and `best_same_zone` of them in one zone: as placed, and at best
            for as many nodes.
    """

    over_asked: int = 0
    double_orders: int = 0
    live_seconds: float = 0.0
    ceiling_seconds: float = 0.0
    pairs: float = 0.0
    same_zone: float = 0.0
    best_same_zone: float = 0.0
    orders: int = 0
    repeated: int = 0
    refused: int = 0
    losses: int = 0
    kills: int = 0
    epochs: int = 0

    def add(self, other: Tally) -> None:
        """Add another day."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


class FragileStore(MemoryStore):
    """A store in whose writes its process can be killed."""

    way: Way | None = None

    def transact(self, *arguments: Any, **named: Any) -> Committed:
        """Write, perhaps for the last time."""
        if self.way == "before_write":
            raise Killed
        done = super().transact(*arguments, **named)
        if self.way == "after_write":
            raise Killed
        return done


@dataclass(slots=True)
class Agent:
    """A node that has joined."""

    name: str
    zone: str
    worker: int
    store: FragileStore
    lease: Lease
    hearing: Hearing


@dataclass(slots=True)
class Leader:
    """The agent that coordinates, and keeps the fleet."""

    agent: Agent
    view: View
    coordinator: Coordinator
    keeper: Keeper


@dataclass(slots=True)
class Cloud:
    """The provider: the market, and what gets lost on the way to it."""

    day: Rehearsal
    market: PretendMarket
    draw: random.Random
    way: Way | None = None
    unanswered: dict[str, Order] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    zones: tuple[str, ...] = ZONES

    def look(self) -> Holdings:
        """Return what runs and what is promised."""
        running = sorted(self.market.running.items())
        return Holdings(tuple(Instance(name, zone) for name, zone in running), self.market.promised)

    def order(self, order: Order, *, again: bool) -> Grant:
        """Hear an order, unless it, its answer or who made it gets lost."""
        way, self.way = self.way, None
        lost = self.draw.random()
        if way in ("before_order", "in_order") or lost < LOST_ANSWERS:
            self.unanswered.setdefault(order.token, order)
            if way == "in_order":  # it is on its way and arrives later
                self.day.at(self.draw.uniform(1.0, 300.0), lambda: self.hear(order))
            raise Killed if way is not None else _lost()
        answer = self.hear(order)
        if way == "after_order" or lost < 2 * LOST_ANSWERS:
            self.unanswered.setdefault(order.token, order)
            raise Killed if way is not None else _lost()
        self.unanswered.pop(order.token, None)
        return answer

    def hear(self, order: Order) -> Grant:
        """Count an order and let the market answer it."""
        tally, market = self.day.tally, self.market
        if order.token in self.known:
            tally.repeated += 1
        else:
            self.known.add(order.token)
            tally.orders += 1
            there = len(market.running) + market.promised.total() + 1  # the head
            tally.over_asked += there + order.nodes > TARGET
            others = (one for token, one in self.unanswered.items() if token != order.token)
            tally.double_orders += any(one.zone == order.zone for one in others)
        answer = market.order(order.token, order.nodes, order.zone, now=self.day.clock.now())
        tally.refused += not answer.promised
        trouble = Trouble("NoCapacity", answer.reason, "none is needed", order.zone) if answer.reason else None
        return Grant(promised=answer.promised, trouble=trouble)

    def release(self, instance: str) -> None:
        """End an instance."""
        self.day.lose(instance)

    def finish(self) -> None:
        """Do nothing."""


def _lost() -> CloudError:
    return CloudError(Trouble("ReadTimeout", "no answer", "none is needed", patience=0.5), indefinite=True)


class Rehearsal:
    """A day. All moments are seconds of its clock.

    Args:
        supply: the market's capacity.
        seed: of all that is random.
    """

    def __init__(self, supply: Supply, *, seed: int) -> None:
        self._draw = random.Random(f"day {seed}")
        self.clock, self.tally = ManualClock(), Tally()
        self._server = MemoryServer(clock=self.clock, history_revisions=2_000)
        self._cloud = Cloud(self, PretendMarket(supply, manners=MANNERS, seed=seed), self._draw)
        self._supply, self._workers = supply, itertools.count()
        self._agents: dict[str, Agent] = {}
        self._leader: Leader | None = None
        self._agenda: list[tuple[float, int, Any]] = []
        self._order = itertools.count()
        self._look_at = 0.0
        self._store = MemoryStore(server=self._server)
        self._store.put(keys.SPEC, encode(JobSpec(0, num_stages=STAGES, num_layers=48, pipelines=PIPELINES)))
        for moment in supply.changes():
            self.at(moment, lambda: None)
        self.at(self._draw.expovariate(KILLS_PER_HOUR / 3600.0), self._kill)
        self._join(HEAD, "hand")

    def run(self, seconds: float) -> Tally:
        """Live through it."""
        while self.clock.now() < seconds:
            self._happen()
            self._lead()
            self._wait(seconds)
        plan = None if self._leader is None else self._leader.view.plan
        self.tally.epochs = 0 if plan is None else plan.epoch
        return self.tally

    def at(self, seconds: float, call: Any) -> None:
        """Let something happen after so long."""
        heapq.heappush(self._agenda, (self.clock.now() + seconds, next(self._order), call))

    # ---- what happens ------------------------------------------------------------------------------------------

    def _happen(self) -> None:
        now, market = self.clock.now(), self._cloud.market
        while self._agenda and self._agenda[0][0] <= now:
            heapq.heappop(self._agenda)[2]()
        for name in market.reclaim(now):
            self.lose(name)
        for name, zone in market.start(now).items():
            self._join(name, zone)

    def _join(self, name: str, zone: str) -> None:
        store = FragileStore(server=self._server)
        agent = Agent(
            name,
            zone,
            next(self._workers),
            store,
            store.lease(TTL_SECONDS),
            Hearing(self.clock, ttl_seconds=TTL_SECONDS),
        )
        self._agents[name] = agent
        store.put(keys.node(name), encode(Node(name, zone, (agent.worker,))), lease=agent.lease)
        store.put(keys.ready(agent.worker), name.encode())
        self._wake()

    def lose(self, name: str) -> None:
        """Take a node away."""
        self._cloud.market.end([name])
        self.tally.losses += 1
        self._die(name)

    def _die(self, name: str) -> None:
        """End an agent; its lease runs out by itself."""
        agent = self._agents.pop(name, None)
        if agent is not None:
            agent.store.close()
            self._wake()
        if self._leader is not None and self._leader.agent.name == name:
            self._leader.view.close()
            self._leader = None

    def _kill(self) -> None:
        """Let the leader be killed soon, at one of its worst moments."""
        self.at(self._draw.expovariate(KILLS_PER_HOUR / 3600.0), self._kill)
        if self._leader is None:
            return
        way = self._draw.choice(WAYS)
        if way == "idle":
            self._on_killed(self._leader.agent)
        elif way in ("before_write", "after_write"):
            self._leader.agent.store.way = way
        else:
            self._cloud.way = way

    def _on_killed(self, agent: Agent) -> None:
        """End an agent whose machine lives: it is started again, as another worker."""
        self.tally.kills += 1
        self._die(agent.name)
        self.at(TTL_SECONDS + RESTART_SECONDS, lambda: self._restart(agent.name, agent.zone))

    def _restart(self, name: str, zone: str) -> None:
        if name == HEAD or name in self._cloud.market.running:
            self._join(name, zone)

    def _wake(self) -> None:
        """Let the keeper look at its next usual moment; in between its looks would find nothing new."""
        self._look_at = min(self._look_at, self.clock.now() + self._draw.uniform(0.0, LOOK_SECONDS))

    # ---- who leads ---------------------------------------------------------------------------------------------

    def _lead(self) -> None:
        if self._leader is None:
            self._elect()
        leader = self._leader
        if leader is None:
            return
        try:
            leader.view.refresh()
            while leader.coordinator.step():
                leader.view.refresh()
            if self.clock.now() >= self._look_at:
                self._look_at = math.inf
                self._look_at = self.clock.now() + leader.keeper.step()
        except Killed:
            self._on_killed(leader.agent)
        except StoreError as error:
            raise AssertionError(f"the leader lives and its store answers: {error}") from error

    def _elect(self) -> None:
        """Elect the oldest agent, once the lease of the last leader is over."""
        for agent in self._agents.values():
            elections = [
                agent.store.elect(name, agent.name.encode(), agent.lease)
                for name in (keys.COORDINATOR, fleet_keys.KEEPER)
            ]
            if not all(election.campaign() for election in elections):
                return
            view = View(agent.store)
            coordinator = Coordinator(
                agent.store,
                view=view,
                fence=elections[0].fence,
                node=agent.name,
                settings=CoordinatorSettings(ttl_seconds=TTL_SECONDS, start=StartRule(TARGET, 600.0)),
                hearing=agent.hearing,
                wall_nanoseconds=lambda: round(self.clock.now() * 1e9) + 1,
            )
            keeper = Keeper(
                agent.store,
                self._cloud,
                fence=elections[1].fence,
                settings=KeeperSettings(rules=FleetRules(boot_seconds=math.inf), look_seconds=3600.0),
                tell=lambda kind, text, **fields: None,
                wall=self.clock.now,
            )
            self._leader = Leader(agent, view, coordinator, keeper)
            self._look_at = self.clock.now()
            return

    # ---- time --------------------------------------------------------------------------------------------------

    def _wait(self, end: float) -> None:
        """Let time pass until something happens, and count what was there."""
        now = self.clock.now()
        due = self._cloud.market.next_due()
        moments = [end]
        moments += [self._agenda[0][0]] if self._agenda else []
        moments += [due] if due is not None else []
        if self._leader is None:
            moments.append(now + 1.0)
        else:
            moments += [self._look_at, now + max(self._leader.coordinator.seconds_to_next, 0.05)]
        seconds = max(min(moments) - now, 1e-3)
        self._count(now, seconds)
        self.clock.advance(seconds)

    def _count(self, now: float, seconds: float) -> None:
        zones = Counter(self._cloud.market.running.values())
        capacity = {zone: self._supply.capacity(zone, now) for zone in ZONES}
        self.tally.live_seconds += zones.total() * seconds
        self.tally.ceiling_seconds += min(sum(capacity.values()), TARGET - 1) * seconds
        pairs, same = neighbours(tuple(sorted(zones.values())))
        self.tally.pairs += pairs * seconds
        self.tally.same_zone += same * seconds
        self.tally.best_same_zone += _fewest_in_one_zone(zones.total()) * seconds


@lru_cache(maxsize=100_000)
def neighbours(zones: tuple[int, ...]) -> tuple[int, int]:
    """Return how many neighbours there are, and how many of them in one zone, when so many nodes are placed.

    Args:
        zones: how many nodes each zone has; their names do not matter.
    """
    workers, ids = [], itertools.count()
    for zone, nodes in enumerate(zones):
        workers += [Worker(id_, str(id_), str(zone)) for id_ in itertools.islice(ids, nodes)]
    shape = _shape(len(workers))
    if shape is None:
        return 0, 0
    try:
        rows = arrange(workers, shape=shape)
    except InfeasiblePlanError:
        return 0, 0
    zone_of = {worker.id: worker.zone for worker in workers}
    rings = [[zone_of[worker] for worker in row] for row in rows]
    pairs = [pair for ring in rings for pair in zip(ring, [*ring[1:], *ring[:1]], strict=True) if len(ring) > 2]
    return len(pairs), sum(left == right for left, right in pairs)


@cache
def _fewest_in_one_zone(nodes: int) -> int:
    """Return how many neighbours are in one zone when the zones have equal shares of so many nodes."""
    return neighbours(tuple(sorted(spread(nodes, counts={}, zones=ZONES).values())))[1]


def _shape(workers: int) -> Shape | None:
    return Bounds(num_stages=STAGES, pipelines=PIPELINES).shape(workers) if workers else None

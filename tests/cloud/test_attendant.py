"""The threads of an agent that attend to its cloud, with a memory store and real time."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bamboo_ds.cloud import keys as fleet_keys
from bamboo_ds.cloud.attendant import Attendant, Cloud
from bamboo_ds.cloud.fleet import FleetRules
from bamboo_ds.cloud.identity import Identity
from bamboo_ds.cloud.keeper import KeeperSettings
from bamboo_ds.cloud.meter import Cost
from bamboo_ds.cloud.notices import FileNotices
from bamboo_ds.cloud.port import Provider
from bamboo_ds.cloud.pretend import PretendMarket, steady_supply
from bamboo_ds.cloud.prices import PriceBook
from bamboo_ds.config.cloud import PriceConfig
from bamboo_ds.elastic import keys
from bamboo_ds.elastic.agent_settings import AgentPort
from bamboo_ds.errors import ConfigError
from bamboo_ds.plan.cluster import Node
from bamboo_ds.plan.codec import encode
from bamboo_ds.store import Lease, MemoryServer, MemoryStore
from tests.cloud.pretending import PretendProvider

PRICES = PriceConfig(spot={"g5": 3600.0}, on_demand={"g5": 7200.0})
"""A dollar a second."""


@dataclass
class FakeHost:
    """An agent whose node has joined."""

    store: MemoryStore
    node: str
    told: list[tuple[str, str]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lease = self.store.lease(5.0)
        self.store.put(keys.node(self.node), encode(Node(self.node, "a", (0,))), lease=self._lease)

    @property
    def port(self) -> AgentPort:
        return AgentPort(
            store=self.store,
            node=self.node,
            zone="a",
            lease=self.lease,
            tell=self.tell,
            say=self.said.append,
            leave=self.left.append,
            registry=None,
        )

    def lease(self) -> Lease:
        return self._lease

    def tell(self, kind: str, text: str, **fields: object) -> object:
        return self.told.append((kind, text))

    def renew(self) -> None:
        """Lose the lease and take another, as after an outage."""
        self._lease.revoke()
        self._lease = self.store.lease(5.0)


@dataclass
class Place:
    """A store, a market, and what attends to them."""

    server: MemoryServer = field(default_factory=MemoryServer)
    market: PretendMarket = field(default_factory=lambda: PretendMarket(steady_supply(("a", "b"), capacity=9)))
    open: ExitStack = field(default_factory=ExitStack)

    def host(self, name: str) -> FakeHost:
        return FakeHost(MemoryStore(server=self.server), name)

    def attend(
        self,
        host: FakeHost,
        *,
        provider: Callable[[], Provider] | None = None,
        notices: Path | None = None,
        look_seconds: float = 0.02,
    ) -> Attendant:
        cloud = Cloud(
            identity=Identity("ec2", host.node, "a", "g5", True),
            keeper=KeeperSettings(rules=FleetRules(retry_seconds=0.05), nodes=4, look_seconds=look_seconds),
            provider=provider,
            prices=lambda: PriceBook(PRICES),
            sources=[] if notices is None else [FileNotices(notices)],
            poll_seconds=0.02,
        )
        attendant = Attendant(host.port, cloud)
        self.open.callback(attendant.close)
        return attendant

    def provider(self) -> PretendProvider:
        return PretendProvider(self.market, time.monotonic)


@pytest.fixture
def place() -> Iterator[Place]:
    found = Place()
    with found.open:
        yield found


def wait_for(look: Callable[[], object], within_seconds: float = 20.0) -> None:
    deadline = time.monotonic() + within_seconds
    while not look():
        assert time.monotonic() < deadline, "it has not come to that"
        time.sleep(0.01)


def test_one_keeps_the_fleet_and_another_when_it_has_gone(place: Place) -> None:
    first, second = place.host("n0"), place.host("n1")
    attending = place.attend(first, provider=place.provider)
    wait_for(lambda: place.market.promised.total() == 2)  # with n0 and n1, which were started by hand
    place.attend(second, provider=place.provider)
    attending.close()
    begin = time.time()
    wait_for(lambda: (cost := place_cost(place)) is not None and cost.at > begin)
    place.market.start(time.monotonic())
    place.market.end(list(place.market.running)[:1])
    wait_for(lambda: place.market.promised.total() == 1)
    assert [kind for kind, _ in second.told if kind == "fleet_order"]


def place_cost(place: Place) -> Cost | None:
    entry = MemoryStore(server=place.server).get(fleet_keys.COST)
    return None if entry is None else Cost.decode(entry.value)


def test_who_a_node_is_stands_in_the_store_as_long_as_it_lives(place: Place) -> None:
    host = place.host("n0")
    place.attend(host)
    wait_for(lambda: host.store.get(fleet_keys.node("n0")))
    entry = host.store.get(fleet_keys.node("n0"))
    assert entry is not None
    assert json.loads(entry.value)["type"] == "g5"
    assert entry.lease_id == host.lease().id
    host.renew()
    wait_for(lambda: (again := host.store.get(fleet_keys.node("n0"))) and again.lease_id == host.lease().id)


def test_money_is_counted_and_told_in_the_end(place: Place) -> None:
    host = place.host("n0")
    attending = place.attend(host)
    other, waiting = place.host("n1"), place.attend(place.host("n2"))
    place.attend(other)
    wait_for(lambda: (cost := place_cost(place)) is not None and cost.spent > 0.1)
    host.store.put(keys.FINISHED, b"done")
    attending.close()
    cost = place_cost(place)
    assert cost is not None
    assert cost.on_demand == pytest.approx(2 * cost.spent)
    ((kind, text),) = host.told
    assert kind == "cost"
    assert re.fullmatch(
        r"[0-9.]+ node-hours have cost \$[0-9.]+, \$[0-9.]+ per hour; on demand they would have cost \$[0-9.]+", text
    )
    assert host.said == [text]
    waiting.close()
    place.open.close()
    assert other.said == []  # one says it for all


def test_what_still_boots_when_the_job_is_over_is_given_back_by_the_keeper_that_ends_with_it(place: Place) -> None:
    host, provider = place.host("n0"), place.provider()
    # It looks again in an hour only: what it does at the end, it does as its agent ends.
    attending = place.attend(host, provider=lambda: provider, look_seconds=3600.0)
    wait_for(lambda: place.market.promised.total() == 3)
    booting = place.market.start(time.monotonic())
    host.store.put(keys.FINISHED, b"done")
    attending.close()
    assert place.market.running == {}
    assert provider.finished == 1
    released = [text for kind, text in host.told if kind == "fleet_release"]
    assert released == [
        f"instance {one} is given back: the job is over, and its agent has not joined" for one in booting
    ]


def test_a_keeper_that_leaves_before_the_end_gives_nothing_back(place: Place) -> None:
    host, provider = place.host("n0"), place.provider()
    attending = place.attend(host, provider=lambda: provider, look_seconds=3600.0)
    wait_for(lambda: place.market.promised.total() == 3)
    place.market.start(time.monotonic())
    attending.close()
    assert (len(place.market.running), provider.finished) == (3, 0)


def test_an_agent_that_leaves_before_the_end_says_nothing_of_money(place: Place) -> None:
    host = place.host("n0")
    attending = place.attend(host)
    wait_for(lambda: (cost := place_cost(place)) is not None and cost.spent > 0.1)
    attending.close()
    assert host.said == []


def test_a_provider_that_cannot_be_made_is_told_and_ends_nothing(place: Place) -> None:
    host = place.host("n0")

    def fail() -> Provider:
        raise ConfigError("the provider ec2 needs boto3")

    place.attend(host, provider=fail)
    wait_for(lambda: host.told)
    assert host.told == [("fleet_trouble", "the fleet is not kept for now: the provider ec2 needs boto3")]
    assert host.left == []


def test_a_bug_of_the_keeper_is_told_and_ends_nothing(place: Place) -> None:
    host = place.host("n0")
    place.attend(host, provider=lambda: None)  # type: ignore[arg-type, return-value]
    wait_for(lambda: host.told)
    assert "AttributeError" in host.told[0][1]


def test_a_warned_node_says_so_and_leaves_just_before_its_end(place: Place, tmp_path: Path) -> None:
    host, path = place.host("n0"), tmp_path / "notice"
    place.attend(host, notices=path)
    path.write_text(json.dumps({"deadline": time.time() + 5.5, "text": "maintenance"}))
    wait_for(lambda: host.told)
    entry = host.store.get(fleet_keys.leaving("n0"))
    assert entry is not None
    assert entry.lease_id == host.lease().id
    assert host.told[0][0] == "notice"
    assert re.fullmatch("node n0 is warned, in [345] s: maintenance", host.told[0][1])
    wait_for(lambda: host.left)
    assert host.left == ["maintenance"]


def test_a_warning_that_is_taken_back_costs_nothing(place: Place, tmp_path: Path) -> None:
    host, path = place.host("n0"), tmp_path / "notice"
    place.attend(host, notices=path)
    path.write_text(json.dumps({"deadline": time.time() + 8.0}))
    wait_for(lambda: host.told)
    at = time.monotonic()
    path.unlink()
    wait_for(lambda: len(host.told) > 1)
    assert host.told[1][0] == "notice_over"
    assert host.store.get(fleet_keys.leaving("n0")) is None
    wait_for(lambda: time.monotonic() > at + 3.5)  # it would have left after 3 s
    assert host.left == []


@pytest.mark.parametrize("notice", [{"deadline": 0.0, "certain": False}, {}])
def test_without_a_certain_deadline_a_node_stays_until_it_is_taken(
    place: Place, tmp_path: Path, notice: dict[str, object]
) -> None:
    host, path = place.host("n0"), tmp_path / "notice"
    path.write_text(json.dumps(notice))
    place.attend(host, notices=path)
    wait_for(lambda: host.told)
    time.sleep(0.1)
    assert host.left == []

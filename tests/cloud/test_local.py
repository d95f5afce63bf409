"""The provider of local nodes and the cloud that answers it, over a real socket."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bamboo_ds.cli.local_cloud import LocalCloud
from bamboo_ds.cloud.local import LocalProvider
from bamboo_ds.cloud.port import Order
from bamboo_ds.cloud.pretend import Manners, PretendMarket, Supply
from bamboo_ds.cloud.trouble import CloudError
from bamboo_ds.errors import ConfigError

ZONES = ("a", "b")


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class FakeNodes:
    """What a cluster would do."""

    def __init__(self) -> None:
        self.live: dict[str, str] = {}
        self.ended: list[tuple[str, str]] = []
        self.over = False

    def add(self, *, zone: str | None = None) -> str:
        name = f"n{len(self.live) + len(self.ended)}"
        self.live[name] = zone or ""
        return name

    def kill(self, node: str, how: str = "kill") -> float:
        if node not in self.live:
            raise ConfigError(f"node {node} has ended with code 0")
        del self.live[node]
        self.ended.append((node, how))
        return 0.0


@pytest.fixture
def nodes() -> FakeNodes:
    return FakeNodes()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cloud(tmp_path: Path, clock: Clock) -> Iterator[LocalCloud]:
    supply = Supply.of([(0.0, "a", 3), (0.0, "b", 2), (100.0, "a", -2)], zones=ZONES)
    market = PretendMarket(supply, manners=Manners(delay_seconds=(5.0, 5.0)))
    with LocalCloud(market, tmp_path / "cloud", now=clock) as found:
        clock.seconds = 1000.0
        found.begin({})
        yield found


@pytest.fixture
def provider(tmp_path: Path, cloud: LocalCloud) -> Iterator[LocalProvider]:
    """Give a provider whose launcher serves."""
    stopped, lock = threading.Event(), threading.Lock()
    go_on = cloud.go_on

    def alone(nodes: object) -> bool:
        with lock:  # in the launcher it is one thread
            return go_on(nodes)  # type: ignore[arg-type]

    cloud.go_on = alone  # type: ignore[method-assign]

    def serve() -> None:
        while not stopped.wait(0.001):
            with lock:
                cloud.serve()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield LocalProvider(tmp_path / "cloud", zones=ZONES)
    stopped.set()
    thread.join(5)


def test_an_order_becomes_a_node_that_the_launcher_starts(
    provider: LocalProvider, cloud: LocalCloud, clock: Clock, nodes: FakeNodes
) -> None:
    assert provider.order(Order("t1", 2, "a"), again=False).promised == 2
    assert provider.look().under_way == {"a": 2}
    assert cloud.go_on(nodes)
    assert nodes.live == {}
    clock.seconds += 5.0
    assert not cloud.go_on(nodes)
    assert nodes.live == {"n0": "a", "n1": "a"}
    holdings = provider.look()
    assert [(one.id, one.zone, one.order) for one in holdings.instances] == [("n0", "a", "t1"), ("n1", "a", "t1")]
    assert holdings.under_way == {}


def test_the_same_token_is_the_same_order(provider: LocalProvider) -> None:
    for _ in range(3):
        assert provider.order(Order("t1", 2, "b"), again=True).promised == 2
    assert provider.look().under_way == {"b": 2}


def test_a_full_zone_says_so(provider: LocalProvider) -> None:
    grant = provider.order(Order("t1", 5, "b"), again=False)
    assert grant.promised == 2
    assert grant.trouble is not None
    assert (grant.trouble.zone, grant.trouble.text) == ("b", "no capacity for more")


def test_the_market_takes_nodes_away_and_the_job_gives_them_back(
    provider: LocalProvider, cloud: LocalCloud, clock: Clock, nodes: FakeNodes
) -> None:
    for _ in range(3):
        cloud.market.add(nodes.add(zone="a"), "a")
    provider.release("n1")
    cloud.go_on(nodes)
    assert nodes.ended == [("n1", "term")]
    clock.seconds += 100.0
    cloud.go_on(nodes)
    assert [how for _, how in nodes.ended] == ["term", "kill"]
    assert [one.id for one in provider.look().instances] == list(nodes.live)


def test_a_node_that_has_died_is_no_longer_there(provider: LocalProvider, cloud: LocalCloud, nodes: FakeNodes) -> None:
    cloud.market.add(nodes.add(zone="a"), "a")
    cloud.go_on(nodes)
    assert len(provider.look().instances) == 1
    nodes.live.clear()
    cloud.go_on(nodes)
    assert provider.look().instances == ()


def test_a_node_that_ends_by_itself_as_it_is_given_back_is_no_trouble(
    provider: LocalProvider, cloud: LocalCloud, clock: Clock, nodes: FakeNodes
) -> None:
    for _ in range(2):
        cloud.market.add(nodes.add(zone="a"), "a")
    provider.release("n0")
    nodes.live.clear()
    clock.seconds += 100.0
    cloud.go_on(nodes)
    assert nodes.ended == []


@pytest.mark.parametrize("told_by", ["the keeper", "the agents"])
def test_after_the_end_nothing_is_started(
    told_by: str, provider: LocalProvider, cloud: LocalCloud, clock: Clock, nodes: FakeNodes
) -> None:
    provider.order(Order("t1", 1, "a"), again=False)
    if told_by == "the keeper":
        provider.finish()
    else:
        nodes.over = True
    clock.seconds += 5.0
    assert not cloud.go_on(nodes)
    assert nodes.live == {}


def test_without_a_launcher_nobody_knows_what_came_of_an_order(tmp_path: Path) -> None:
    with pytest.raises(CloudError, match="does not answer") as caught:
        LocalProvider(tmp_path / "nobody", zones=ZONES).order(Order("t1", 1, "a"), again=False)
    assert caught.value.indefinite


@pytest.mark.parametrize("text", [b"{}\n", b"no JSON\n", b'{"do": "order"}\n', b"[1]\n"])
def test_rubbish_is_answered_and_harms_nobody(provider: LocalProvider, tmp_path: Path, text: bytes) -> None:
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as connection:
        connection.settimeout(5)
        connection.connect(str(tmp_path / "cloud"))
        connection.sendall(text)
        assert "error" in json.loads(connection.makefile("rb").readline())
    assert provider.look().instances == ()

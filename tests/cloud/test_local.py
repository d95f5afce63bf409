"""The provider of local nodes and the cloud that answers it, over a real socket."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bamboo_ds.cli.local_cloud import LocalCloud, Turn
from bamboo_ds.cloud.local import LocalProvider
from bamboo_ds.cloud.port import Order
from bamboo_ds.cloud.pretend import Manners, PretendMarket, Supply
from bamboo_ds.cloud.trouble import CloudError

ZONES = ("a", "b")


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cloud(tmp_path: Path, clock: Clock) -> Iterator[LocalCloud]:
    supply = Supply.of([(0.0, "a", 3), (0.0, "b", 2), (100.0, "a", -2)], zones=ZONES)
    market = PretendMarket(supply, manners=Manners(delay_seconds=(5.0, 5.0)))
    with LocalCloud(market, tmp_path / "cloud", now=clock) as found:
        yield found


@pytest.fixture
def provider(tmp_path: Path, cloud: LocalCloud) -> Iterator[LocalProvider]:
    """Give a provider whose launcher serves."""
    stopped = threading.Event()

    def serve() -> None:
        while not stopped.wait(0.001):
            cloud.serve()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield LocalProvider(tmp_path / "cloud", zones=ZONES)
    stopped.set()
    thread.join(5)


def test_an_order_becomes_a_node_that_the_launcher_starts(
    provider: LocalProvider, cloud: LocalCloud, clock: Clock
) -> None:
    assert provider.order(Order("t1", 2, "a"), again=False).promised == 2
    assert provider.look().under_way == {"a": 2}
    assert cloud.take() == Turn({}, (), ())
    clock.seconds = 5.0
    assert sorted(cloud.take().start.values()) == ["a", "a"]
    holdings = provider.look()
    assert {(one.zone, one.order) for one in holdings.instances} == {("a", "t1")}
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
    provider: LocalProvider, cloud: LocalCloud, clock: Clock
) -> None:
    for name in ("n0", "n1", "n2"):
        cloud.market.add(name, "a")
    provider.release("n1")
    assert cloud.take() == Turn({}, (), ("n1",))
    clock.seconds = 100.0
    turn = cloud.take()
    assert len(turn.kill) == 1
    assert [one.id for one in provider.look().instances] == sorted({"n0", "n2"} - set(turn.kill))


def test_after_the_end_nothing_is_started(provider: LocalProvider, cloud: LocalCloud, clock: Clock) -> None:
    provider.order(Order("t1", 1, "a"), again=False)
    provider.finish()
    clock.seconds = 5.0
    assert cloud.take().start == {}


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

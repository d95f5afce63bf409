"""Nodes with networks of their own, whose links can be cut. Skipped where that is not permitted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from bamboo_ds.cli.local import LocalCluster
from bamboo_ds.elastic import forking, keys, namespaces
from bamboo_ds.elastic.membership import Membership
from bamboo_ds.elastic.namespaces import Network, check_own_link, enter_own_network
from bamboo_ds.errors import ConfigError
from tests.elastic.clusters import TTL_SECONDS, Look, Train, alive, await_plan, eventually


def permitted() -> bool:
    try:
        Network().close()
    except ConfigError:
        return False
    return True


needs_networks = pytest.mark.skipif(not permitted(), reason="needs root, ip and nsenter")


def links() -> set[str]:
    return {name for _, name in socket.if_nameindex()}


@pytest.fixture(autouse=True)
def no_link_is_left() -> Iterator[None]:
    before = links()
    yield
    eventually(lambda: not links() - before, within_seconds=5, what="all links are gone")


class Citizens:
    """Processes in networks of their own that listen on port 1000."""

    def __init__(self, count: int) -> None:
        def child() -> NoReturn:
            forking.forget_parent()
            forking.signal_at_parents_death(signal.SIGKILL, parent=parent)
            enter_own_network()
            server = socket.create_server(("", 1000))
            os.write(writer, b"x")
            while True:
                server.accept()

        (reader, writer), parent = os.pipe(), os.getpid()
        self.pids = [forking.fork(child) for _ in range(count)]
        assert len(os.read(reader, 1)) == 1
        for _ in range(count - 1):
            os.read(reader, 1)
        os.close(reader)
        os.close(writer)

    def end(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def reaches(address: str, *, inside: int | None = None) -> bool:
    """Whether a node can be reached from here, or from the network of a process."""
    enter = [] if inside is None else ["nsenter", f"--net=/proc/{inside}/ns/net"]
    code = f"import socket; socket.create_connection(({address!r}, 1000), timeout=0.5)"
    return subprocess.run([*enter, sys.executable, "-c", code], stderr=subprocess.DEVNULL, check=False).returncode == 0


@needs_networks
def test_nodes_reach_each_other_until_one_is_cut_off() -> None:
    citizens, network = Citizens(3), Network()
    network.attach(dict(enumerate(citizens.pids)))
    addresses = [network.node_address(index) for index in range(3)]
    assert network.address.rpartition(".")[0] == addresses[0].rpartition(".")[0]
    assert all(reaches(address) for address in addresses)
    assert reaches(addresses[1], inside=citizens.pids[0])
    network.cut(1)
    assert not reaches(addresses[1])
    assert not reaches(addresses[1], inside=citizens.pids[0])
    assert not reaches(addresses[0], inside=citizens.pids[1])
    assert reaches(addresses[2], inside=citizens.pids[0])
    citizens.end()
    network.close()
    network.close()


@needs_networks
def test_two_networks_do_not_meet() -> None:
    first, second = Network(), Network()
    assert first.address != second.address
    first.close()
    second.close()


@needs_networks
def test_nothing_is_left_of_a_network_whose_owner_is_killed() -> None:
    before = links()
    owner = os.fork()
    if owner == 0:
        network = Network()
        citizens = Citizens(2)
        network.attach(dict(enumerate(citizens.pids)))
        time.sleep(60)
        os._exit(1)
    eventually(lambda: links() - before, within_seconds=10, what="a link")
    time.sleep(0.5)
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    eventually(lambda: not links() - before, within_seconds=5, what="the link is gone")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: None)
    with pytest.raises(ConfigError, match="namespaces need the programs ip and nsenter; not found: ip, nsenter"):
        Network()


def test_who_may_not_hears_so() -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, to give it up")
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setuid(65534)
        try:
            Network()
        except ConfigError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with open(reader) as pipe:
        assert "cannot make a network namespace (Operation not permitted): run as root" in pipe.read()


def test_a_network_that_is_not_ours_is_not_cut() -> None:
    with pytest.raises(ConfigError, match="this node has no link bamboo0 to take down"):
        check_own_link()


def test_a_command_that_fails_shows_its_input() -> None:
    if shutil.which("ip") is None:
        pytest.skip("needs ip")
    with pytest.raises(ConfigError, match=r"(?s)ip -batch - failed: .*link set no-such-link down"):
        namespaces._ip(["link set no-such-link down"])


@needs_networks
def test_a_cluster_cannot_be_cut_without_networks(tmp_path: Path) -> None:
    running = LocalCluster(Train(tmp_path / "enough", stages=1), nodes=1, warm=False)
    with running, pytest.raises(ConfigError, match="make it with namespaces=True"):
        running.kill("n0", "cut")


@needs_networks
@pytest.mark.parametrize("inside", [False, True], ids=["from outside", "from inside"])
def test_a_node_that_is_cut_off_is_lost_and_the_job_goes_on(tmp_path: Path, inside: bool) -> None:
    flag = tmp_path / "enough"
    with LocalCluster(
        Train(flag, stages=2), nodes=4, warm=False, ttl_seconds=TTL_SECONDS, outage_seconds=3, namespaces=True
    ) as running:
        plan = await_plan(running)
        look = Look.at(running)
        nodes = {name: json.loads(value) for name, value in look.list(keys.NODES).items()}
        victim = next(node["name"] for node in nodes.values() if plan.owners[0][1] in node["workers"])
        assert len({node["address"] for node in nodes.values()}) == 4
        processes = running.processes(victim).everything
        at = time.monotonic()
        if inside:
            look.put(keys.preempt(victim), b"cut")
        else:
            at = running.kill(victim, "cut")
        after = await_plan(running, version=1)
        assert TTL_SECONDS * 0.5 < time.monotonic() - at < TTL_SECONDS + 2
        assert after.dead == {plan.owners[0][1]}
        if inside:  # it gives up by itself, and knows that it is no failure of the job
            eventually(lambda: running.codes[victim] is not None, within_seconds=15, what="the node gives up")
            assert running.codes[victim] == 3
        else:
            assert alive(processes) == list(processes)
        flag.touch()
        assert running.wait(20) == 0
        eventually(lambda: not alive(processes), within_seconds=5, what="all of the node ends")
        others = {code for name, code in running.codes.items() if name != victim}
        assert others == {0}


@needs_networks
def test_workers_have_the_network_of_their_node() -> None:
    def program() -> Any:
        membership = Membership.read()
        assert membership is not None
        with socket.create_server((membership.address, 0)):
            return membership.address, sorted(links())

    with LocalCluster(program, nodes=2, warm=False, namespaces=True) as running:
        assert running.wait(20) == 0
        found = list(running.results().values())
    assert len({address for address, _ in found}) == 2
    assert all("bamboo0" in names and "lo" in names and "eth0" not in names for _, names in found)


@needs_networks
def test_a_node_that_is_added_has_a_link_to_all_others_that_can_be_cut(tmp_path: Path) -> None:
    flag = tmp_path / "enough"
    options: dict[str, Any] = {"warm": False, "namespaces": True, "ttl_seconds": TTL_SECONDS}
    with LocalCluster(Train(flag, stages=1), nodes=1, **options) as running:
        await_plan(running)
        assert running.add() == "n1"
        there = ["n0", "n1"]
        eventually(lambda: sorted(joined(running)) == there, within_seconds=8, what="it has joined")
        running.kill("n1", "cut")
        eventually(lambda: joined(running) == ["n0"], within_seconds=TTL_SECONDS + 4, what="it is lost")
        flag.touch()
        assert running.wait(20) == 0


def joined(running: LocalCluster) -> list[str]:
    """Return the nodes that have joined, and are there."""
    return [key.removeprefix(keys.NODES) for key in Look.at(running).list(keys.NODES)]

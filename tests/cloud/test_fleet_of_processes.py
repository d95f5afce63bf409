"""Fleets of real processes with a real etcd: nodes come back by themselves, and a warned node leaves in time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bamboo_ds.cli.local import LocalCluster
from bamboo_ds.cli.run_cloud import local_fleet
from bamboo_ds.cloud import keys as fleet_keys
from bamboo_ds.cloud.meter import Cost
from bamboo_ds.config.cloud import CloudConfig, LocalMarketConfig, PriceConfig
from bamboo_ds.elastic import keys
from bamboo_ds.elastic.agent import FINISHED, GONE
from bamboo_ds.elastic.events import ClusterEvent
from bamboo_ds.store.embedded import EmbeddedEtcd
from tests.cloud.fake_metadata import FakeMetadata, fake_metadata
from tests.cloud.test_metadata import EC2
from tests.cloud.test_notices import ACTION
from tests.elastic.clusters import TTL_SECONDS, Look, eventually

FLEET = CloudConfig(
    provider="local",
    nodes=3,
    look_seconds=0.2,
    retry_seconds=0.5,
    local=LocalMarketConfig(delay_seconds=(0.0, 0.1)),
    prices=PriceConfig(spot={"*": 3600.0}, on_demand={"*": 7200.0}),
)


def sleeper(flag: Path) -> Callable[[], None]:
    def program() -> None:
        while not flag.exists():
            time.sleep(0.02)

    return program


def test_nodes_come_and_come_back_without_anyone_adding_them(tmp_path: Path) -> None:
    flag = tmp_path / "end"
    with local_fleet(FLEET, job="local", workers=1, zones=("a", "b")) as fleet:
        cluster = LocalCluster(
            sleeper(flag),
            nodes=2,
            zones=("a", "b"),
            ttl_seconds=TTL_SECONDS,
            log_folder=tmp_path / "logs",
            echo=False,
            warm=False,
            companions=fleet.companions,
        )
        with cluster:
            go_on = fleet.meanwhile(cluster, zones={"n0": "a", "n1": "b"})
            assert go_on is not None
            look = Look.at(cluster)

            def registered() -> set[str]:
                go_on()
                return {name.removeprefix(keys.NODES) for name in look.list(keys.NODES)}

            eventually(lambda: len(registered()) == 3, within_seconds=30, what="a third node joins by itself")
            (first,) = look.events("fleet_order")
            victim = str(first["node"])  # it keeps the fleet
            cluster.kill(victim)
            eventually(
                lambda: len(registered() - {victim}) == 3, within_seconds=40, what="a node comes for the lost keeper"
            )
            assert len(cluster.live) == 3
            cost = eventually(lambda: registered() and spent(look), within_seconds=20, what="the money is counted")
            assert cost.on_demand == pytest.approx(2 * cost.spent)
            orders = look.events("fleet_order")
            assert sum(event["granted"] for event in orders) == 2
            flag.touch()
            assert cluster.wait(60, meanwhile=go_on) == 0


def spent(look: Look) -> Cost | None:
    cost = Cost.decode(look.get(fleet_keys.COST) or b"")
    return cost if cost is not None and cost.spent > 1.0 else None


@pytest.fixture
def ec2_machine() -> Iterator[FakeMetadata]:
    with fake_metadata() as fake:
        fake.paths |= EC2
        yield fake


def run_command(server: EmbeddedEtcd, *arguments: str) -> list[str]:
    etcd = ["--etcd", server.endpoint, "--job", "train"]
    return [sys.executable, "-m", "bamboo_ds.cli.main", "run", *etcd, *arguments]


def own_environment() -> dict[str, str]:
    """Return this process's environment without what others have told about clouds and jobs."""
    given = {name: value for name, value in os.environ.items() if not name.startswith(("BAMBOO", "AWS"))}
    return {**given, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "DS_ACCELERATOR": "cpu"}


def test_an_agent_on_ec2_knows_its_place_and_leaves_before_its_end(tmp_path: Path, ec2_machine: FakeMetadata) -> None:
    (tmp_path / "train.py").write_text("import time\ntime.sleep(60)\n")
    with EmbeddedEtcd() as server:
        look = Look(server.endpoint, job="train")
        command = run_command(server, "--ttl", "2", "train.py")
        environment = {**own_environment(), "AWS_EC2_METADATA_SERVICE_ENDPOINT": ec2_machine.endpoint}
        agent = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
        try:
            node = eventually(lambda: look.get(keys.node("i-0123")), within_seconds=40, what="it joins by its id")
            assert json.loads(node)["zone"] == "eu-west-1b"
            assert json.loads(node)["spot"] is True
            machine = eventually(
                lambda: look.get(fleet_keys.node("i-0123")), within_seconds=10, what="it says its type"
            )
            assert json.loads(machine)["type"] == "g5.xlarge"
            at = time.time() + 12.0
            moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
            ec2_machine.paths[ACTION] = json.dumps({"action": "terminate", "time": moment})
            eventually(
                lambda: look.get(fleet_keys.leaving("i-0123")), within_seconds=20, what="it says that it is warned"
            )
            _, stderr = agent.communicate(timeout=30)
        finally:
            agent.kill()
            agent.wait()
        assert agent.returncode == GONE
        assert "node i-0123 leaves: EC2 will terminate this spot instance" in stderr
        assert [event["deadline"] for event in look.events("notice")] == [pytest.approx(at, abs=1.0)]


def test_a_node_that_was_started_for_a_job_and_comes_after_its_end_does_not_begin_it_anew(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('it runs')\n")
    with EmbeddedEtcd() as server:
        look = Look(server.endpoint, job="train")
        look.put(keys.FINISHED, b"all 8 worker(s) have ended in order")
        look.put(f"{keys.EVENTS}1-n0", ClusterEvent(time.time(), "n0", "finished", "all 8 have ended").encode())
        command = run_command(server, "--node", "late", "--started-for-job", "train.py")
        done = subprocess.run(
            command, cwd=tmp_path, env=own_environment(), capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == FINISHED
        assert done.stderr == "bamboo: node late comes too late and leaves: all 8 have ended\n"
        assert look.get(keys.FINISHED) is not None

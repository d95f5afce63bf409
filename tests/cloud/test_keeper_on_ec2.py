"""The keeper with its real adapters against moto's server: the fleet fills, survives a death, gets no node twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from bamboo_ds.clock import ManualClock
from bamboo_ds.cloud import keys as fleet_keys
from bamboo_ds.cloud.ec2_client import Clients
from bamboo_ds.cloud.ec2_fleet import Ec2Fleet
from bamboo_ds.cloud.ec2_group import Ec2Group
from bamboo_ds.cloud.fleet import FleetRules
from bamboo_ds.cloud.identity import Identity
from bamboo_ds.cloud.keeper import Keeper, KeeperSettings
from bamboo_ds.cloud.port import Provider
from bamboo_ds.config.cloud import Ec2Config
from bamboo_ds.elastic import keys
from bamboo_ds.plan.cluster import Node
from bamboo_ds.plan.codec import encode
from bamboo_ds.store import Lease, MemoryServer, MemoryStore
from tests.cloud.aws import Gate, LoseAnswer, Refusal
from tests.cloud.test_ec2_fleet import make_template, subnets
from tests.cloud.test_ec2_group import group

__all__ = ["group"]

NODES = 5


class Job:
    """A job in a memory store, whose fleet is EC2's."""

    def __init__(self, provider: Provider, *, boot_seconds: float = 1e6) -> None:
        self.provider, self.clock, self.boot_seconds = provider, ManualClock(1000.0), boot_seconds
        self.server = MemoryServer(clock=self.clock)
        self.store = MemoryStore(server=self.server)
        self.told: list[tuple[str, str]] = []

    def elect(self, node: str) -> tuple[Keeper, Lease]:
        store = MemoryStore(server=self.server)
        lease = store.lease(3.0)
        election = store.elect(fleet_keys.KEEPER, node.encode(), lease)
        assert election.campaign()
        settings = KeeperSettings(rules=FleetRules(boot_seconds=self.boot_seconds), nodes=NODES)
        keeper = Keeper(
            store,
            self.provider,
            fence=election.fence,
            settings=settings,
            tell=lambda kind, text, **fields: self.told.append((kind, text)),
            wall=self.clock.now,
        )
        return keeper, lease

    def run(self, keeper: Keeper, steps: int = 4) -> None:
        for _ in range(steps):
            self.clock.advance(keeper.step())

    def join(self, name: str, instance: str, zone: str, worker: int) -> None:
        """Let an agent register that has a name of its own."""
        lease = self.store.lease(3.0)
        self.store.put(keys.node(name), encode(Node(name, zone, (worker,))), lease=lease)
        self.store.put(fleet_keys.node(name), Identity("ec2", instance, zone).encode(), lease=lease)


@pytest.fixture
def fleet(ec2: Any) -> Ec2Fleet:
    make_template(ec2)
    return Ec2Fleet(Ec2Config(subnets=subnets(ec2)), job="train", clients=Clients(None))


def running(ec2: Any) -> list[dict[str, Any]]:
    alive = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
    return [one for each in ec2.describe_instances(Filters=alive)["Reservations"] for one in each["Instances"]]


def test_a_fleet_is_filled_over_the_zones(fleet: Ec2Fleet, ec2: Any) -> None:
    job = Job(fleet)
    keeper, _ = job.elect("n0")
    job.run(keeper)
    zones = Counter(one["Placement"]["AvailabilityZone"] for one in running(ec2))
    assert sorted(zones.values()) == [1, 2, 2]


def test_an_answer_that_got_lost_with_its_keeper_brings_no_second_node(fleet: Ec2Fleet, ec2: Any, aws: Gate) -> None:
    job = Job(fleet)
    keeper, lease = job.elect("n0")
    aws.faults["CreateFleet"] = [LoseAnswer()]
    keeper.step()
    job.server.expire(lease.id)
    successor, _ = job.elect("n1")
    job.clock.advance(60.0)
    job.run(successor, steps=6)
    assert len(running(ec2)) == NODES
    tags = Counter(tag["Value"] for one in running(ec2) for tag in one["Tags"] if tag["Key"] == "bamboo:order")
    assert sorted(tags.values()) == [1, 2, 2]


def test_a_terminated_instance_is_replaced(fleet: Ec2Fleet, ec2: Any) -> None:
    job = Job(fleet)
    keeper, _ = job.elect("n0")
    job.run(keeper)
    ec2.terminate_instances(InstanceIds=[running(ec2)[0]["InstanceId"]])
    job.run(keeper)
    assert len(running(ec2)) == NODES


def test_a_node_with_a_name_of_its_own_is_its_instance(fleet: Ec2Fleet, ec2: Any) -> None:
    job = Job(fleet, boot_seconds=100.0)
    keeper, _ = job.elect("n0")
    job.run(keeper)
    for worker, one in enumerate(running(ec2)):
        job.join(f"own-name-{worker}", one["InstanceId"], one["Placement"]["AvailabilityZone"], worker)
    before = {one["InstanceId"] for one in running(ec2)}
    job.run(keeper, steps=20)  # long enough for an instance without an agent to be given back
    assert {one["InstanceId"] for one in running(ec2)} == before


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Refusal("InsufficientInstanceCapacity"), "InsufficientInstanceCapacity"),
        (Refusal("MaxSpotInstanceCountExceeded"), "MaxSpotInstanceCountExceeded"),
        (Refusal("ExpiredToken"), "ExpiredToken"),
        (Refusal("UnauthorizedOperation"), "UnauthorizedOperation"),
    ],
)
def test_each_error_of_the_cloud_is_one_event_and_stops_nothing(
    fleet: Ec2Fleet, ec2: Any, aws: Gate, fault: Refusal, kind: str
) -> None:
    job = Job(fleet)
    keeper, _ = job.elect("n0")
    aws.faults["CreateFleet"] = [fault] * 4
    job.run(keeper, steps=3)
    troubles = [text for what, text in job.told if what == "fleet_trouble"]
    assert all(text.startswith(kind) for text in troubles)
    assert len(set(troubles)) == len(troubles) > 0  # one for each zone, or one for all
    aws.faults.clear()
    job.run(keeper, steps=12)
    assert len(running(ec2)) == NODES


@pytest.mark.parametrize("steps", [1, 5])
def test_a_group_is_told_its_level_and_no_more(group: Ec2Group, ec2: Any, steps: int) -> None:
    job = Job(group)
    keeper, lease = job.elect("n0")
    job.run(keeper, steps=steps)
    job.server.expire(lease.id)
    successor, _ = job.elect("n1")
    job.run(successor, steps=steps)
    assert len(running(ec2)) == NODES

"""EC2 Fleet against moto's server: orders, what comes of them, and each way in which one can fail."""

from __future__ import annotations

from typing import Any

import pytest

from bamboo_ds.cloud.ec2_client import Clients
from bamboo_ds.cloud.ec2_fleet import JOB_TAG, ORDER_TAG, Ec2Fleet, fleet_request
from bamboo_ds.cloud.ec2_prices import Ec2Prices
from bamboo_ds.cloud.port import Order
from bamboo_ds.cloud.trouble import CloudError
from bamboo_ds.config.cloud import Ec2Config
from tests.cloud.aws import Gate, LoseAnswer, Refusal, Reply

PARTLY = """<CreateFleetResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"><requestId>1</requestId>
<fleetId>fleet-1</fleetId>
<errorSet><item><errorCode>{code}</errorCode><errorMessage>There is no Spot capacity.</errorMessage>
<lifecycle>spot</lifecycle></item></errorSet>
<fleetInstanceSet>{instances}</fleetInstanceSet></CreateFleetResponse>"""
ONE = """<item><instanceIds><item>i-1</item></instanceIds><instanceType>g5.xlarge</instanceType>
<lifecycle>spot</lifecycle></item>"""


def make_template(ec2: Any, name: str = "bamboo-train") -> None:
    data = {"ImageId": "ami-12c6146b", "InstanceType": "g5.xlarge"}  # one that moto knows
    ec2.create_launch_template(LaunchTemplateName=name, LaunchTemplateData=data)


def subnets(ec2: Any) -> dict[str, str]:
    return {one["AvailabilityZone"]: one["SubnetId"] for one in ec2.describe_subnets()["Subnets"]}


@pytest.fixture
def fleet(ec2: Any) -> Ec2Fleet:
    make_template(ec2)
    config = Ec2Config(instance_types=("g5.xlarge", "g4dn.xlarge"), subnets=subnets(ec2))
    return Ec2Fleet(config, job="train", clients=Clients(None))


def test_an_order_brings_tagged_spot_instances(fleet: Ec2Fleet, ec2: Any) -> None:
    zone = fleet.zones[1]
    grant = fleet.order(Order("token-1", 3, zone), again=False)
    assert (grant.nodes, grant.trouble) == (3, None)
    assert {(one.zone, one.spot, one.order) for one in grant.instances} == {(zone, True, "token-1")}
    holdings = fleet.look()
    assert {one.id for one in holdings.instances} == {one.id for one in grant.instances}
    assert {one.order for one in holdings.instances} == {"token-1"}
    found = ec2.describe_instances(InstanceIds=[grant.instances[0].id])["Reservations"][0]["Instances"][0]
    tags = {tag["Key"]: tag["Value"] for tag in found["Tags"]}
    assert (tags[JOB_TAG], tags[ORDER_TAG]) == ("train", "token-1")


def test_instances_of_other_jobs_are_none_of_ours(fleet: Ec2Fleet) -> None:
    other = Ec2Fleet(
        fleet._config.model_copy(update={"launch_template": "bamboo-train"}), job="b", clients=Clients(None)
    )
    other.order(Order("token-1", 2, fleet.zones[0]), again=False)
    assert fleet.look().instances == ()


def test_a_released_instance_is_gone(fleet: Ec2Fleet) -> None:
    grant = fleet.order(Order("token-1", 2, fleet.zones[0]), again=False)
    fleet.release(grant.instances[0].id)
    assert [one.id for one in fleet.look().instances] == [grant.instances[1].id]


def test_an_order_whose_answer_was_lost_is_found_by_its_token(fleet: Ec2Fleet, aws: Gate) -> None:
    order = Order("token-1", 2, fleet.zones[0])
    aws.faults["CreateFleet"] = [LoseAnswer()]
    with pytest.raises(CloudError) as caught:
        fleet.order(order, again=False)
    assert caught.value.indefinite
    before = aws.calls["CreateFleet"]
    grant = fleet.order(order, again=True)
    assert grant.nodes == 2
    assert aws.calls["CreateFleet"] == before


def test_an_order_that_was_not_heard_is_made_by_its_repetition(fleet: Ec2Fleet) -> None:
    assert fleet.order(Order("token-1", 2, fleet.zones[0]), again=True).nodes == 2


def test_what_is_asked_of_ec2() -> None:
    config = Ec2Config(instance_types=("g5.xlarge", "g6.xlarge"), subnets={"z1": "subnet-1"}, max_price=0.5)
    wanted = fleet_request(config, Order("token-1", 4, "z1"), job="train")
    assert wanted["ClientToken"] == "token-1"
    assert wanted["Type"] == "instant"
    assert wanted["SpotOptions"] == {"AllocationStrategy": "price-capacity-optimized"}
    assert wanted["TargetCapacitySpecification"]["SpotTargetCapacity"] == 4
    (template,) = wanted["LaunchTemplateConfigs"]
    assert template["LaunchTemplateSpecification"]["LaunchTemplateName"] == "bamboo-train"
    assert template["Overrides"] == [
        {"SubnetId": "subnet-1", "MaxPrice": "0.5", "InstanceType": "g5.xlarge"},
        {"SubnetId": "subnet-1", "MaxPrice": "0.5", "InstanceType": "g6.xlarge"},
    ]
    on_demand = fleet_request(config.model_copy(update={"on_demand": True}), Order("token-1", 4, "z1"), job="train")
    assert on_demand["TargetCapacitySpecification"]["OnDemandTargetCapacity"] == 4
    assert "SpotOptions" not in on_demand


def test_a_full_zone_is_a_trouble_of_that_zone(fleet: Ec2Fleet, aws: Gate) -> None:
    zone = fleet.zones[0]
    aws.faults["CreateFleet"] = [Reply(PARTLY.format(code="InsufficientInstanceCapacity", instances=ONE))]
    grant = fleet.order(Order("token-1", 3, zone), again=False)
    assert [(one.id, one.zone) for one in grant.instances] == [("i-1", zone)]
    assert grant.trouble is not None
    assert (grant.trouble.code, grant.trouble.zone, grant.trouble.patience) == ("InsufficientInstanceCapacity", zone, 1)


@pytest.mark.parametrize(
    ("code", "zonal", "remedy"),
    [
        ("InsufficientInstanceCapacity", True, "none is needed"),
        ("SpotMaxPriceTooLow", True, "raise ec2.max_price"),
        ("Unsupported", True, "leave the zone or the type out"),
        ("MaxSpotInstanceCountExceeded", False, "Service Quotas"),
        ("VcpuLimitExceeded", False, "Service Quotas"),
        ("ExpiredToken", False, "renew the credentials"),
        ("RequestExpired", False, "check the clock"),
        ("AuthFailure", False, "renew the credentials"),
        ("UnauthorizedOperation", False, "bamboo-ds cloud policy"),
        ("RequestLimitExceeded", False, "none is needed"),
        ("InvalidAMIID.NotFound", False, "launch-template --create"),
        ("SomethingNew", False, "EC2 documentation"),
    ],
)
def test_each_refusal_has_its_remedy(fleet: Ec2Fleet, aws: Gate, code: str, zonal: bool, remedy: str) -> None:
    zone = fleet.zones[0]
    aws.faults["CreateFleet"] = [Refusal(code, "EC2 said so") for _ in range(3)]
    with pytest.raises(CloudError) as caught:
        fleet.order(Order("token-1", 2, zone), again=False)
    error = caught.value
    assert (error.trouble.code, error.indefinite, error.trouble.zone) == (code, False, zone if zonal else "")
    assert remedy in error.trouble.remedy
    assert "EC2 said so" in str(error)


def test_a_missing_template_is_named_with_the_command_that_makes_it(ec2: Any) -> None:
    fleet = Ec2Fleet(Ec2Config(subnets=subnets(ec2)), job="none", clients=Clients(None))
    with pytest.raises(CloudError, match="launch-template --create"):
        fleet.order(Order("token-1", 2, fleet.zones[0]), again=False)


@pytest.mark.parametrize(
    ("fault", "indefinite"),
    [
        (Refusal("RequestLimitExceeded"), True),  # this one was not made, but a former one may have been
        (Refusal("InternalError", status=500), True),
        (Refusal("InsufficientInstanceCapacity"), False),
    ],
)
def test_what_a_repetition_proves(fleet: Ec2Fleet, aws: Gate, fault: Refusal, indefinite: bool) -> None:
    aws.faults["CreateFleet"] = [fault] * 3
    with pytest.raises(CloudError) as caught:
        fleet.order(Order("token-1", 2, fleet.zones[0]), again=True)
    assert caught.value.indefinite is indefinite


def test_without_credentials_it_says_so(monkeypatch: pytest.MonkeyPatch, aws: Gate) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    fleet = Ec2Fleet(Ec2Config(subnets={"z": "subnet-1"}), job="train", clients=Clients(None))
    with pytest.raises(CloudError, match=r"NoCredentials.*renew the credentials"):
        fleet.look()


def test_without_a_region_it_says_so(monkeypatch: pytest.MonkeyPatch, aws: Gate) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    fleet = Ec2Fleet(Ec2Config(subnets={"z": "subnet-1"}), job="train", clients=Clients(None))
    with pytest.raises(CloudError, match=r"NoRegion.*ec2\.region"):
        fleet.look()


def test_an_endpoint_that_nobody_listens_at_was_certainly_not_asked(monkeypatch: pytest.MonkeyPatch, aws: Gate) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    fleet = Ec2Fleet(Ec2Config(subnets={"z": "subnet-1"}), job="train", clients=Clients(None))
    with pytest.raises(CloudError, match="EndpointConnection") as caught:
        fleet.order(Order("token-1", 2, "z"), again=False)
    assert not caught.value.indefinite


def test_spot_prices_are_asked_for_once_in_a_while(aws: Gate) -> None:
    now = [1_000_000.0]
    prices = Ec2Prices(Clients(None), wall=lambda: now[0])
    assert prices.spot("g5.xlarge", "eu-west-1a") == 0.00001  # moto's price of everything
    assert prices.spot("g5.xlarge", "nowhere") is None
    assert aws.calls["DescribeSpotPriceHistory"] == 1
    now[0] += 1801.0
    prices.spot("g5.xlarge", "eu-west-1a")
    assert aws.calls["DescribeSpotPriceHistory"] == 2


def test_prices_that_cannot_be_had_are_asked_for_again_later(aws: Gate) -> None:
    now = [1_000_000.0]
    prices = Ec2Prices(Clients(None), wall=lambda: now[0])
    aws.faults["DescribeSpotPriceHistory"] = [Refusal("UnauthorizedOperation")]
    assert prices.spot("g5.xlarge", "eu-west-1a") is None
    assert prices.spot("g5.xlarge", "eu-west-1a") is None
    assert aws.calls["DescribeSpotPriceHistory"] == 1
    now[0] += 301.0
    assert prices.spot("g5.xlarge", "eu-west-1a") == 0.00001

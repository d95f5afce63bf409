"""An Auto Scaling group against moto's server."""

from __future__ import annotations

import time
from typing import Any

import boto3
import pytest

from bamboo_ds.cloud.ec2_client import Clients
from bamboo_ds.cloud.ec2_group import Ec2Group
from bamboo_ds.cloud.port import Order
from bamboo_ds.cloud.trouble import CloudError
from tests.cloud.aws import Gate, Refusal, Reply
from tests.cloud.test_ec2_fleet import make_template, subnets

FAILED = """<DescribeScalingActivitiesResponse xmlns="http://autoscaling.amazonaws.com/doc/2011-01-01/">
<DescribeScalingActivitiesResult><Activities><member><ActivityId>1</ActivityId><StatusCode>Failed</StatusCode>
<StatusMessage>Could not launch Spot Instances. InsufficientInstanceCapacity - There is no Spot capacity available.
Launching EC2 instance failed.</StatusMessage><StartTime>{time}</StartTime></member></Activities>
</DescribeScalingActivitiesResult></DescribeScalingActivitiesResponse>"""
SHORT = """<DescribeAutoScalingGroupsResponse xmlns="http://autoscaling.amazonaws.com/doc/2011-01-01/">
<DescribeAutoScalingGroupsResult><AutoScalingGroups><member><AutoScalingGroupName>g</AutoScalingGroupName>
<DesiredCapacity>5</DesiredCapacity><MinSize>0</MinSize><MaxSize>8</MaxSize><Instances>
<member><InstanceId>i-1</InstanceId><AvailabilityZone>z1</AvailabilityZone><LifecycleState>InService</LifecycleState>
</member><member><InstanceId>i-2</InstanceId><AvailabilityZone>z2</AvailabilityZone>
<LifecycleState>Pending:Wait</LifecycleState></member><member><InstanceId>i-3</InstanceId>
<AvailabilityZone>z2</AvailabilityZone><LifecycleState>Terminating</LifecycleState></member></Instances></member>
</AutoScalingGroups></DescribeAutoScalingGroupsResult></DescribeAutoScalingGroupsResponse>"""


@pytest.fixture
def group(ec2: Any) -> Ec2Group:
    make_template(ec2)
    boto3.client("autoscaling").create_auto_scaling_group(
        AutoScalingGroupName="g",
        MinSize=0,
        MaxSize=6,
        DesiredCapacity=0,
        LaunchTemplate={"LaunchTemplateName": "bamboo-train"},
        VPCZoneIdentifier=",".join(subnets(ec2).values()),
    )
    return Ec2Group("g", clients=Clients(None))


def test_an_order_raises_the_level_and_its_repetition_does_not(group: Ec2Group) -> None:
    order = Order("token-1", 4, total=4)
    assert group.order(order, again=False).nodes == 4
    assert group.order(order, again=True).nodes == 4
    holdings = group.look()
    assert len(holdings.instances) + sum(holdings.under_way.values()) == 4


def test_a_group_that_may_not_grow_says_what_to_raise(group: Ec2Group) -> None:
    group.order(Order("token-1", 4, total=4), again=False)
    grant = group.order(Order("token-2", 4, total=8), again=False)
    assert grant.promised == 2
    assert grant.trouble is not None
    assert "MaxSize" in grant.trouble.remedy


def test_an_old_order_never_lowers_the_level(group: Ec2Group) -> None:
    group.order(Order("token-2", 6, total=6), again=False)
    assert group.order(Order("token-1", 2, total=2), again=True).nodes == 2
    assert len(group.look().instances) == 6


def test_a_released_instance_is_not_replaced(group: Ec2Group) -> None:
    group.order(Order("token-1", 4, total=4), again=False)
    gone = group.look().instances[0].id
    group.release(gone)
    holdings = group.look()
    assert gone not in {one.id for one in holdings.instances}
    assert len(holdings.instances) + sum(holdings.under_way.values()) == 3


def test_at_the_end_the_group_is_emptied(group: Ec2Group) -> None:
    group.order(Order("token-1", 4, total=4), again=False)
    group.finish()
    assert group.look().instances == ()


def test_what_it_owes_is_under_way_and_why_it_does_not_come_is_told(group: Ec2Group, aws: Gate) -> None:
    aws.faults["DescribeAutoScalingGroups"] = [Reply(SHORT)]
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    aws.faults["DescribeScalingActivities"] = [Reply(FAILED.format(time=now))]
    holdings = group.look()
    assert [(one.id, one.zone) for one in holdings.instances] == [("i-1", "z1"), ("i-2", "z2")]
    assert holdings.under_way == {"": 3}
    assert [trouble.code for trouble in holdings.troubles] == ["InsufficientInstanceCapacity"]


def test_old_failures_are_forgotten(group: Ec2Group, aws: Gate) -> None:
    aws.faults["DescribeAutoScalingGroups"] = [Reply(SHORT)]
    aws.faults["DescribeScalingActivities"] = [Reply(FAILED.format(time="2020-01-01T00:00:00Z"))]
    assert group.look().troubles == ()


def test_a_missing_group_is_named(aws: Gate) -> None:
    with pytest.raises(CloudError, match=r"no Auto Scaling group nobody.*ec2\.group"):
        Ec2Group("nobody", clients=Clients(None)).look()


def test_a_refusal_of_the_group_has_its_remedy(group: Ec2Group, aws: Gate) -> None:
    aws.faults["SetDesiredCapacity"] = [Refusal("AccessDenied", "not authorized", 403)]
    with pytest.raises(CloudError, match="bamboo-ds cloud policy"):
        group.order(Order("token-1", 4, total=4), again=False)

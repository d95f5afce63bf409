"""The IAM policy: AWS's grammar accepts it, and each call that the adapters make is in it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bamboo_ds.cloud.policy import iam_policy
from bamboo_ds.config.cloud import Ec2Config
from tests.cloud.aws import Gate

FLEET = Ec2Config(subnets={"eu-west-1a": "subnet-1"})
GROUP = Ec2Config(group="my-group")


def actions(policy: dict[str, Any]) -> set[str]:
    return {action for statement in policy["Statement"] for action in statement["Action"]}


@pytest.mark.parametrize("config", [FLEET, GROUP])
def test_iam_accepts_it(config: Ec2Config, aws: Gate) -> None:
    import boto3

    policy = iam_policy(config, job="train", role="bamboo-node", bucket="bucket/checkpoints")
    made = boto3.client("iam").create_policy(PolicyName="bamboo", PolicyDocument=json.dumps(policy))
    assert made["Policy"]["Arn"]
    assert len(json.dumps(policy, separators=(",", ":"))) < 6144  # IAM's limit of a managed policy


def test_a_fleet_may_order_and_end_what_carries_the_jobs_tag_only() -> None:
    policy = iam_policy(FLEET, job="train", role="bamboo-node")
    assert {
        "ec2:CreateFleet",
        "ec2:RunInstances",
        "ec2:CreateTags",
        "ec2:TerminateInstances",
        "iam:PassRole",
    } <= actions(policy)
    (end,) = [one for one in policy["Statement"] if "ec2:TerminateInstances" in one["Action"]]
    assert end["Condition"] == {"StringEquals": {"aws:ResourceTag/bamboo:job": "train"}}
    assert not any("*" in action for action in actions(policy))


def test_a_group_needs_no_right_to_order_instances() -> None:
    found = actions(iam_policy(GROUP, job="train", role="bamboo-node"))
    assert "autoscaling:SetDesiredCapacity" in found
    assert not {"ec2:CreateFleet", "ec2:RunInstances", "iam:PassRole"} & found


def test_checkpoints_are_bound_to_their_prefix() -> None:
    policy = iam_policy(FLEET, job="train", bucket="bucket/some/prefix/")
    (files,) = [one for one in policy["Statement"] if "s3:PutObject" in one["Action"]]
    assert files["Resource"] == "arn:aws:s3:::bucket/some/prefix/*"
    assert "s3:PutObject" not in actions(iam_policy(FLEET, job="train"))

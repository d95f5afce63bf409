"""The least that the role of the nodes must be allowed, as an IAM policy: any node may keep the fleet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bamboo_ds.cloud.ec2_fleet import JOB_TAG
from bamboo_ds.config.cloud import Ec2Config

__all__ = ["iam_policy"]


def iam_policy(config: Ec2Config, *, job: str, role: str = "", bucket: str = "") -> dict[str, Any]:
    """Return the policy document.

    Args:
        config: whether EC2 Fleet or an Auto Scaling group is asked.
        job: whose instances may be ended, and only they.
        role: name of the nodes' own role, which they hand to the nodes they order; empty if they have none.
        bucket: of the checkpoints, perhaps with a prefix (`bucket/prefix`); empty for none.
    """
    statements = [_look()]
    statements += [_group(config.group)] if config.group else [*_fleet(job), _end(job)]
    if role and not config.group:
        statements.append(_pass(role))
    if bucket:
        statements += _checkpoints(bucket)
    return {"Version": "2012-10-17", "Statement": statements}


def _allow(name: str, actions: list[str], resources: Any, condition: Mapping[str, Any] | None = None) -> dict[str, Any]:
    found = {"Sid": name, "Effect": "Allow", "Action": actions, "Resource": resources}
    return found if condition is None else {**found, "Condition": condition}


def _look() -> dict[str, Any]:
    """Nothing that only describes can be bound to a resource."""
    return _allow(
        "BambooLook",
        [
            "ec2:DescribeInstances",
            "ec2:DescribeSpotPriceHistory",
            "autoscaling:DescribeAutoScalingGroups",
            "autoscaling:DescribeScalingActivities",
        ],
        "*",
    )


def _fleet(job: str) -> list[dict[str, Any]]:
    tagged = {"StringEquals": {f"aws:RequestTag/{JOB_TAG}": job}}
    created = {"StringEquals": {"ec2:CreateAction": ["CreateFleet", "RunInstances"]}}
    others = (
        "image/*",
        "subnet/*",
        "security-group/*",
        "network-interface/*",
        "volume/*",
        "key-pair/*",
        "fleet/*",
        "snapshot/*",
    )
    return [
        _allow("BambooOrder", ["ec2:CreateFleet", "ec2:RunInstances"], "arn:aws:ec2:*:*:instance/*", tagged),
        _allow(
            "BambooOrderWith",
            ["ec2:CreateFleet", "ec2:RunInstances"],
            [
                *(f"arn:aws:ec2:*:*:{one}" for one in others),
                "arn:aws:ec2:*::image/*",
                "arn:aws:ec2:*:*:launch-template/*",
            ],
        ),
        _allow("BambooImage", ["ssm:GetParameters"], "arn:aws:ssm:*::parameter/aws/service/*"),  # resolve:ssm:...
        _allow("BambooTag", ["ec2:CreateTags"], ["arn:aws:ec2:*:*:instance/*", "arn:aws:ec2:*:*:volume/*"], created),
    ]


def _end(job: str) -> dict[str, Any]:
    mine = {"StringEquals": {f"aws:ResourceTag/{JOB_TAG}": job}}
    return _allow("BambooEnd", ["ec2:TerminateInstances"], "arn:aws:ec2:*:*:instance/*", mine)


def _group(group: str) -> dict[str, Any]:
    return _allow(
        "BambooGroup",
        [
            "autoscaling:SetDesiredCapacity",
            "autoscaling:TerminateInstanceInAutoScalingGroup",
            "autoscaling:UpdateAutoScalingGroup",
        ],
        f"arn:aws:autoscaling:*:*:autoScalingGroup:*:autoScalingGroupName/{group}",
    )


def _pass(role: str) -> dict[str, Any]:
    service = {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}}
    return _allow("BambooPassRole", ["iam:PassRole"], f"arn:aws:iam::*:role/{role}", service)


def _checkpoints(bucket: str) -> list[dict[str, Any]]:
    name, _, prefix = bucket.strip("/").partition("/")
    objects = f"arn:aws:s3:::{name}/{prefix}/*" if prefix else f"arn:aws:s3:::{name}/*"
    files = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
    return [
        _allow("BambooCheckpoints", files, objects),
        _allow("BambooListCheckpoints", ["s3:ListBucket"], f"arn:aws:s3:::{name}"),
    ]

"""`bamboo-ds cloud ...` against moto's server."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import boto3
import pytest
from typer.testing import CliRunner, Result

from bamboo_ds.cli.main import app
from tests.cloud.aws import Gate, Refusal
from tests.cloud.fake_metadata import fake_metadata
from tests.cloud.test_ec2_fleet import subnets
from tests.cloud.test_metadata import EC2

TEMPLATE = ["launch-template", "--etcd", "10.0.0.1:2379", "--image", "ami-12c6146b", "--command", "train.py --steps 9"]


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["cloud", *arguments])


@pytest.fixture
def cloud_file(ec2: Any, tmp_path: Path) -> Path:
    path = tmp_path / "cloud.json"
    config = {"provider": "ec2", "ec2": {"subnets": subnets(ec2), "instance_types": ["g5.xlarge", "g4dn.xlarge"]}}
    path.write_text(json.dumps(config))
    return path


def test_the_template_that_is_printed_is_what_ec2_takes(cloud_file: Path, ec2: Any) -> None:
    done = call(*TEMPLATE, "--cloud", str(cloud_file), "--job", "train", "--disk-gb", "100")
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    assert printed["LaunchTemplateName"] == "bamboo-train"
    ec2.create_launch_template(**printed)
    overrides = [{"SubnetId": subnet} for subnet in list(subnets(ec2).values())[:1]]
    made = ec2.create_fleet(
        Type="instant",
        LaunchTemplateConfigs=[
            {
                "LaunchTemplateSpecification": {"LaunchTemplateName": "bamboo-train", "Version": "$Default"},
                "Overrides": overrides,
            }
        ],
        TargetCapacitySpecification={"TotalTargetCapacity": 2, "DefaultTargetCapacityType": "spot"},
    )
    assert sum(len(one["InstanceIds"]) for one in made["Instances"]) == 2


def test_the_boot_script_is_what_the_template_holds(cloud_file: Path) -> None:
    plain = call(*TEMPLATE, "--cloud", str(cloud_file), "--user-data").stdout
    data = json.loads(call(*TEMPLATE, "--cloud", str(cloud_file)).stdout)["LaunchTemplateData"]
    assert base64.b64decode(data["UserData"]).decode() == plain
    assert "train.py --steps 9" in plain
    assert data["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert data["MetadataOptions"]["HttpTokens"] == "required"


def test_a_template_is_made_and_made_anew(cloud_file: Path, ec2: Any) -> None:
    command = [*TEMPLATE, "--cloud", str(cloud_file), "--job", "train", "--create"]
    assert "version 1" in call(*command).stdout
    assert "version 2" in call(*command, "--type", "g5.2xlarge").stdout
    versions = ec2.describe_launch_template_versions(LaunchTemplateName="bamboo-train", Versions=["$Default"])
    (version,) = versions["LaunchTemplateVersions"]
    assert version["LaunchTemplateData"]["InstanceType"] == "g5.2xlarge"


def test_a_fleet_is_begun_topped_up_and_ended(cloud_file: Path, ec2: Any) -> None:
    call(*TEMPLATE, "--cloud", str(cloud_file), "--job", "train", "--create")
    fleet = ["--cloud", str(cloud_file), "--job", "train"]
    assert "0 node(s) were there, 2 of 2 more are granted" in call("up", *fleet, "--nodes", "2").stdout
    assert "2 node(s) were there, 3 of 3 more are granted" in call("up", *fleet, "--nodes", "5").stdout
    assert "5 node(s) were there, 0 of 0 more are granted" in call("up", *fleet, "--nodes", "5").stdout
    running = [{"Name": "instance-state-name", "Values": ["running"]}]
    found = [one for each in ec2.describe_instances(Filters=running)["Reservations"] for one in each["Instances"]]
    zones = [one["Placement"]["AvailabilityZone"] for one in found]
    assert sorted(zones.count(zone) for zone in set(zones)) == [1, 2, 2]
    assert call("down", *fleet, "--yes").exit_code == 0
    assert ec2.describe_instances(Filters=running)["Reservations"] == []


def test_a_group_is_filled_and_emptied(cloud_file: Path, ec2: Any) -> None:
    call(*TEMPLATE, "--cloud", str(cloud_file), "--job", "train", "--create")
    groups = boto3.client("autoscaling")
    groups.create_auto_scaling_group(
        AutoScalingGroupName="g",
        MinSize=0,
        MaxSize=4,
        LaunchTemplate={"LaunchTemplateName": "bamboo-train"},
        VPCZoneIdentifier=next(iter(subnets(ec2).values())),
    )
    cloud_file.write_text('{"provider": "ec2", "ec2": {"group": "g"}}')
    done = call("up", "--cloud", str(cloud_file), "--nodes", "6")
    assert done.exit_code == 1
    assert "4 of 6 more are granted" in done.stdout
    assert "raise its MaxSize" in done.stderr
    call("down", "--cloud", str(cloud_file), "--yes")
    assert groups.describe_auto_scaling_groups()["AutoScalingGroups"][0]["DesiredCapacity"] == 0


def test_a_refusal_is_one_line_with_its_remedy(cloud_file: Path, aws: Gate) -> None:
    aws.faults["DescribeInstances"] = [Refusal("UnauthorizedOperation", "You are not authorized")]
    done = call("up", "--cloud", str(cloud_file))
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert "bamboo-ds cloud policy" in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", 'needs "ec2"'),
        ('{"provider": "ec2"}', "a subnet for each zone"),
        ('{"provider": "gcp"}', "provider"),
        ('{"provider": "ec2", "ec2": {"group": "g", "zones": 1}}', "ec2.zones: unknown key"),
        ('{"provider": "ec2", "ec2": {"group": "g"}, "look_second": 3}', 'did you mean "look_seconds"'),
        ('{"look_seconds": 0}', "look_seconds = 0: must be greater than 0"),
        ('{"local": {"delay_seconds": [2, 1]}}', "the shortest comes first"),
        ('{"prices": {"spot": {"a": -1}}}', "prices.spot.a = -1"),
    ],
)
def test_a_file_that_cannot_be_right_is_refused_by_name(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "cloud.json"
    path.write_text(text)
    done = call("policy", "--cloud", str(path))
    assert done.exit_code == 2
    assert str(path) in done.stderr
    assert message in done.stderr


def test_a_machine_can_ask_who_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_metadata() as fake:
        fake.paths |= EC2
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", fake.endpoint)
        monkeypatch.delenv("AWS_EC2_METADATA_DISABLED", raising=False)
        found = json.loads(call("whoami").stdout)
    assert found == {"cloud": "ec2", "instance": "i-0123", "zone": "eu-west-1b", "type": "g5.xlarge", "spot": True}

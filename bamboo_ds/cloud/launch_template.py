"""The launch template of a job's nodes: as data, and made on EC2."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bamboo_ds.cloud.ec2_client import Clients
from bamboo_ds.cloud.ec2_errors import request
from bamboo_ds.cloud.ec2_fleet import JOB_TAG

__all__ = ["Machine", "create_template", "template_data"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a node is.

    Attributes:
        image: id of the AMI, or `resolve:ssm:/aws/service/...`.
        type: if the fleet names none, or as its first.
        profile: name of the instance profile, whose role has the policy of `cloud.policy`.
        security_groups: ids.
        key: name of the ssh key pair; empty for none.
        disk_gb: size of the root volume; None for the image's.
        root_device: its name.
    """

    image: str
    type: str = ""
    profile: str = ""
    security_groups: Sequence[str] = ()
    key: str = ""
    disk_gb: int | None = None
    root_device: str = "/dev/sda1"


def template_data(machine: Machine, *, job: str, user_data: str) -> dict[str, Any]:
    """Return `LaunchTemplateData`: IMDSv2 only, and a machine that is shut down is terminated."""
    tags = [{"Key": JOB_TAG, "Value": job}, {"Key": "Name", "Value": f"bamboo {job}"}]
    data: dict[str, Any] = {
        "ImageId": machine.image,
        "UserData": base64.b64encode(user_data.encode()).decode(),
        "InstanceInitiatedShutdownBehavior": "terminate",
        # Two hops: an agent in a container asks, too.
        "MetadataOptions": {"HttpTokens": "required", "HttpEndpoint": "enabled", "HttpPutResponseHopLimit": 2},
        "TagSpecifications": [{"ResourceType": kind, "Tags": tags} for kind in ("instance", "volume")],
    }
    if machine.type:
        data["InstanceType"] = machine.type
    if machine.profile:
        data["IamInstanceProfile"] = {"Name": machine.profile}
    if machine.security_groups:
        data["SecurityGroupIds"] = list(machine.security_groups)
    if machine.key:
        data["KeyName"] = machine.key
    if machine.disk_gb is not None:
        disk = {"VolumeSize": machine.disk_gb, "VolumeType": "gp3", "DeleteOnTermination": True}
        data["BlockDeviceMappings"] = [{"DeviceName": machine.root_device, "Ebs": disk}]
    return data


def create_template(data: dict[str, Any], *, name: str, clients: Clients) -> int:
    """Make the template, or a new default version if there is one of this name; return the version.

    Raises:
        CloudError: EC2 refuses.
    """
    client = clients("ec2")
    filters = [{"Name": "launch-template-name", "Values": [name]}]
    found = request(client.describe_launch_templates, Filters=filters)
    if not found["LaunchTemplates"]:
        request(client.create_launch_template, LaunchTemplateName=name, LaunchTemplateData=data)
        return 1
    made = request(client.create_launch_template_version, LaunchTemplateName=name, LaunchTemplateData=data)
    version = int(made["LaunchTemplateVersion"]["VersionNumber"])
    request(client.modify_launch_template, LaunchTemplateName=name, DefaultVersion=str(version))
    return version

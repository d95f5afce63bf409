"""EC2 Fleet, order by order: each is one `instant` fleet of spot instances in one zone, of several types.

An instant fleet answers at once with what there is, so there is nothing to wait for and nothing that goes on ordering
by itself. EC2 picks among the types by price and spare capacity; the zone is ours to choose, as placement needs even
shares. The order's token is EC2's client token, and a tag of its instances: what a lost answer would have said can be
read back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from bamboo_ds.cloud.ec2_client import Clients
from bamboo_ds.cloud.ec2_errors import explain_code, request
from bamboo_ds.cloud.port import Grant, Holdings, Instance, Order
from bamboo_ds.cloud.trouble import Trouble
from bamboo_ds.config.cloud import Ec2Config

__all__ = ["JOB_TAG", "ORDER_TAG", "Ec2Fleet", "alive", "fleet_request", "instance_of", "template_name"]

JOB_TAG, ORDER_TAG = "bamboo:job", "bamboo:order"
ALIVE = ("pending", "running")


def template_name(job: str) -> str:
    """Return the name of a job's launch template."""
    return f"bamboo-{job}"


class Ec2Fleet:
    """The provider.

    Args:
        config: what to ask for.
        job: name of the job, a tag of its instances.
        clients: of boto3.
    """

    def __init__(self, config: Ec2Config, *, job: str, clients: Clients) -> None:
        self._config, self._job, self._clients = config, job, clients

    @property
    def zones(self) -> tuple[str, ...]:
        """Where there is a subnet."""
        return tuple(sorted(self._config.subnets))

    def look(self) -> Holdings:
        """Return the instances of this job that run or boot."""
        return Holdings(tuple(alive(self._clients("ec2"), {JOB_TAG: self._job})))

    def order(self, order: Order, *, again: bool) -> Grant:
        """Ask for nodes in one zone; if that may have been done before, look first for what came of it."""
        client = self._clients("ec2")
        if again and (found := tuple(alive(client, {ORDER_TAG: order.token}))):
            return Grant(found)
        wanted = fleet_request(self._config, order, job=self._job)
        answer = request(client.create_fleet, zone=order.zone, again=again, **wanted)
        instances = tuple(_granted(answer.get("Instances", ()), order))
        missing = order.nodes - len(instances)
        return Grant(instances, trouble=_why(answer.get("Errors", ()), order) if missing > 0 else None)

    def release(self, instance: str) -> None:
        """End an instance."""
        request(self._clients("ec2").terminate_instances, InstanceIds=[instance])

    def finish(self) -> None:
        """Do nothing: instant fleets order nothing by themselves, and nodes end with the job (`user_data`)."""


def fleet_request(config: Ec2Config, order: Order, *, job: str) -> dict[str, Any]:
    """Return the arguments of `create_fleet` for an order."""
    where = {"SubnetId": config.subnets[order.zone]} if order.zone in config.subnets else {}
    price = {} if config.max_price is None else {"MaxPrice": f"{config.max_price:g}"}
    overrides = [{**where, **price, "InstanceType": type_} for type_ in config.instance_types]
    overrides = overrides or [one for one in [{**where, **price}] if one]
    name = config.launch_template or template_name(job)
    template: dict[str, Any] = {
        "LaunchTemplateSpecification": {"LaunchTemplateName": name, "Version": "$Default"},
        "Overrides": overrides,
    }
    spot = not config.on_demand
    tags = {JOB_TAG: job, ORDER_TAG: order.token, "Name": f"bamboo {job}"}
    return {
        "Type": "instant",
        "ClientToken": order.token,
        "LaunchTemplateConfigs": [template],
        "TargetCapacitySpecification": {
            "TotalTargetCapacity": order.nodes,
            "SpotTargetCapacity": order.nodes if spot else 0,
            "OnDemandTargetCapacity": 0 if spot else order.nodes,
            "DefaultTargetCapacityType": "spot" if spot else "on-demand",
        },
        **({"SpotOptions": {"AllocationStrategy": "price-capacity-optimized"}} if spot else {}),
        "TagSpecifications": [
            {"ResourceType": "instance", "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}
        ],
    }


def alive(client: Any, tags: Mapping[str, str]) -> Iterator[Instance]:
    """Yield the instances with these tags that run or boot.

    Raises:
        CloudError: EC2 does not say.
    """
    filters = [{"Name": f"tag:{key}", "Values": [value]} for key, value in tags.items()]
    filters.append({"Name": "instance-state-name", "Values": list(ALIVE)})
    pages = client.get_paginator("describe_instances").paginate(Filters=filters)
    found = request(lambda: [one for page in pages for each in page["Reservations"] for one in each["Instances"]])
    yield from map(instance_of, found)


def instance_of(found: Mapping[str, Any]) -> Instance:
    """Return an instance as `describe_instances` describes it."""
    tags = {tag["Key"]: tag["Value"] for tag in found.get("Tags", ())}
    return Instance(
        id=found["InstanceId"],
        zone=found.get("Placement", {}).get("AvailabilityZone", ""),
        type=found.get("InstanceType", ""),
        spot=found.get("InstanceLifecycle") == "spot",
        order=tags.get(ORDER_TAG, ""),
    )


def _granted(found: Iterable[Mapping[str, Any]], order: Order) -> Iterator[Instance]:
    for each in found:
        for id_ in each.get("InstanceIds", ()):
            spot = each.get("Lifecycle", "spot") == "spot"
            yield Instance(id_, order.zone, each.get("InstanceType", ""), spot, order.token)


def _why(errors: Sequence[Mapping[str, Any]], order: Order) -> Trouble:
    """Return the trouble of an order that was not filled: the worst that EC2 names, capacity last."""
    troubles = [
        explain_code(str(each.get("ErrorCode", "")), str(each.get("ErrorMessage", "")), zone=order.zone)
        for each in errors
    ]
    default = explain_code("UnfulfillableCapacity", "", zone=order.zone)
    return max(troubles, key=lambda trouble: trouble.patience, default=default)

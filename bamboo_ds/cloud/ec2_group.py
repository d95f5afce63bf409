"""An existing Auto Scaling group: the keeper sets its desired capacity, the group does the rest.

A level cannot be ordered twice, so nothing depends on tokens here. The group replaces what it loses by itself; what it
still owes is under way, and why it does not deliver is in its activities.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bamboo_ds.cloud.ec2_client import Clients
from bamboo_ds.cloud.ec2_errors import explain_code, request
from bamboo_ds.cloud.port import ANY_ZONE, Grant, Holdings, Instance, Order
from bamboo_ds.cloud.trouble import CloudError, Trouble

__all__ = ["Ec2Group"]

_RECENT_SECONDS = 900.0
_NEWEST_ACTIVITIES = 20
_CODE = re.compile(r"\b([A-Z][A-Za-z]+(?:Capacity|Exceeded|NotFound|Failure|Operation|Unsupported|TooLow))\b")


class Ec2Group:
    """The provider.

    Args:
        group: name of the Auto Scaling group.
        clients: of boto3.
        wall: Unix seconds.
    """

    def __init__(self, group: str, *, clients: Clients, wall: Callable[[], float] = time.time) -> None:
        self._group, self._clients, self._wall = group, clients, wall

    @property
    def zones(self) -> tuple[str, ...]:
        """None to choose: the group balances its own."""
        return ()

    def look(self) -> Holdings:
        """Return the instances of the group, what it still owes, and why."""
        found = self._describe()
        instances = tuple(_instances(found))
        owed = found["DesiredCapacity"] - len(instances)
        if owed <= 0:
            return Holdings(instances)
        return Holdings(instances, {ANY_ZONE: owed}, tuple(self._troubles()))

    def order(self, order: Order, *, again: bool) -> Grant:
        """Raise the desired capacity to the order's total, and never lower it."""
        found = self._describe()
        before, most = found["DesiredCapacity"], found["MaxSize"]
        level = max(min(order.total, most), before)
        if level > before:
            client = self._clients("autoscaling")
            request(
                client.set_desired_capacity,
                again=again,
                AutoScalingGroupName=self._group,
                DesiredCapacity=level,
                HonorCooldown=False,
            )
        promised = min(max(level - (order.total - order.nodes), 0), order.nodes)
        return Grant(promised=promised, trouble=self._too_small(order, most) if promised < order.nodes else None)

    def release(self, instance: str) -> None:
        """End an instance and lower the desired capacity with it."""
        request(
            self._clients("autoscaling").terminate_instance_in_auto_scaling_group,
            InstanceId=instance,
            ShouldDecrementDesiredCapacity=True,
        )

    def finish(self) -> None:
        """Let the group end its instances: it would begin the job once more with new ones."""
        client = self._clients("autoscaling")
        request(client.update_auto_scaling_group, AutoScalingGroupName=self._group, MinSize=0, DesiredCapacity=0)

    def _describe(self) -> Mapping[str, Any]:
        client = self._clients("autoscaling")
        found = request(client.describe_auto_scaling_groups, AutoScalingGroupNames=[self._group])
        groups = found["AutoScalingGroups"]
        if not groups:
            text, remedy = f"there is no Auto Scaling group {self._group}", "mend ec2.group in the cloud file"
            raise CloudError(Trouble("NoSuchGroup", text, remedy, patience=4.0))
        group: Mapping[str, Any] = groups[0]
        return group

    def _too_small(self, order: Order, most: int) -> Trouble:
        text = f"the group {self._group} may have {most} instances, and {order.total} are wanted"
        return Trouble("GroupTooSmall", text, "raise its MaxSize, or set nodes in the cloud file", patience=4.0)

    def _troubles(self) -> Iterator[Trouble]:
        """Yield why instances did not come lately."""
        client = self._clients("autoscaling")
        found = request(
            client.describe_scaling_activities, AutoScalingGroupName=self._group, MaxRecords=_NEWEST_ACTIVITIES
        )
        for activity in found["Activities"]:
            is_recent = self._wall() - activity["StartTime"].timestamp() < _RECENT_SECONDS
            if activity.get("StatusCode") == "Failed" and is_recent:
                said = str(activity.get("StatusMessage", ""))
                code = _CODE.search(said)
                yield explain_code(code[1] if code else "GroupFailed", said)


def _instances(group: Mapping[str, Any]) -> Iterator[Instance]:
    for found in group.get("Instances", ()):
        if found.get("LifecycleState", "").startswith(("Pending", "InService")):
            yield Instance(found["InstanceId"], found.get("AvailabilityZone", ""), found.get("InstanceType", ""))

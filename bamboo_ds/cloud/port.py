"""What the keeper of the fleet asks of a cloud. `ec2_fleet`, `ec2_group` and `local` are adapters of it.

All a cloud must promise is that an order with a token that it has seen is not a second order. Everything else may be
late, partial or refused. An instance is called as its node is: the agent takes the instance's id for its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from bamboo_ds.cloud.trouble import Trouble

__all__ = ["ANY_ZONE", "Grant", "Holdings", "Instance", "Order", "Provider"]

ANY_ZONE = ""
"""The cloud chooses."""


@dataclass(frozen=True, slots=True)
class Instance:
    """A machine that runs, or is about to.

    Attributes:
        id: of the cloud; the node's name as well.
        zone: where it runs.
        type: such as g5.xlarge; empty where there are no types.
        spot: whether the cloud may take it away.
        order: token of the order that it came by; empty if unknown.
    """

    id: str
    zone: str
    type: str = ""
    spot: bool = True
    order: str = ""


@dataclass(frozen=True, slots=True)
class Order:
    """Nodes that are asked for.

    Attributes:
        token: makes a repetition of this order no second one.
        nodes: how many.
        zone: where; `ANY_ZONE` leaves it to the cloud.
        total: how many nodes the cloud will have given when this is filled, for clouds that are told a level.
        at: when it was written down, in Unix seconds.
    """

    token: str
    nodes: int
    zone: str = ANY_ZONE
    total: int = 0
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer to an order.

    Attributes:
        instances: that were started.
        promised: how many more will be; `Holdings.under_way` has them until they are there.
        trouble: why it is less than what was asked for.
    """

    instances: tuple[Instance, ...] = ()
    promised: int = 0
    trouble: Trouble | None = None

    @property
    def nodes(self) -> int:
        """How many nodes came of the order."""
        return len(self.instances) + self.promised


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the cloud has given.

    Attributes:
        instances: that run or are about to.
        under_way: by zone, how many are promised and have no instance yet.
        troubles: what the cloud says went wrong lately, by itself.
    """

    instances: tuple[Instance, ...] = ()
    under_way: Mapping[str, int] = field(default_factory=dict)
    troubles: tuple[Trouble, ...] = ()


class Provider(Protocol):
    """A cloud. Each call ends within seconds, or raises `CloudError`; none is made by two threads at once."""

    @property
    def zones(self) -> tuple[str, ...]:
        """Where nodes can be ordered; empty if the cloud chooses."""
        ...

    def look(self) -> Holdings:
        """Return what this job has of the cloud."""
        ...

    def order(self, order: Order, *, again: bool) -> Grant:
        """Ask for nodes.

        Args:
            order: what is asked for.
            again: whether the same may have been asked before: then what came of it is the answer.

        Raises:
            CloudError: `indefinite` when nobody knows what came of it: the same order must be made again.
        """
        ...

    def release(self, instance: str) -> None:
        """End an instance for which no other shall come."""
        ...

    def finish(self) -> None:
        """See to it that no new instance comes once the job is over."""
        ...

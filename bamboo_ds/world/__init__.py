"""Who is there: this process among the others, how it joins and leaves, and the world of one that DeepSpeed sees."""

from bamboo_ds.world.bootstrap import World, host_agent, init_distributed, local_device
from bamboo_ds.world.exit import close_at_exit, end_in_order
from bamboo_ds.world.failure import FailureBoard, Failures, Guard
from bamboo_ds.world.hosting import shared_settings
from bamboo_ds.world.member_failures import MemberFailures
from bamboo_ds.world.solo import world_of_one

__all__ = [
    "FailureBoard",
    "Failures",
    "Guard",
    "MemberFailures",
    "World",
    "close_at_exit",
    "end_in_order",
    "host_agent",
    "init_distributed",
    "local_device",
    "shared_settings",
    "world_of_one",
]

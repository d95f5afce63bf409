"""Who is there: this process among the others, and the world of one that DeepSpeed sees."""

from bamboo_ds.world.bootstrap import World, init_distributed, local_device
from bamboo_ds.world.solo import world_of_one

__all__ = ["World", "init_distributed", "local_device", "world_of_one"]

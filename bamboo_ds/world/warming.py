"""Does beforehand what costs seconds at first use: while a standby waits, or once for all in the parent of forks.

Importing torch, DeepSpeed and `torch._dynamo`, which the first optimizer imports, takes five seconds of CPU. A fork
inherits what was imported, but no accelerator context: that is each worker's own.
"""

from __future__ import annotations

import functools
import gc
import importlib

import torch
from deepspeed.accelerator import get_accelerator

HEAVY_MODULES = ("torch", "torch.distributed.nn", "torch._dynamo", "deepspeed", "deepspeed.runtime.pipe.engine")


@functools.cache
def import_heavy_modules() -> None:
    """Import all that is heavy. What was imported is not looked at again by the garbage collector.

    A full collection takes up to a second, and in a fork it would touch, and so copy, every page.
    """
    for name in HEAVY_MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


@functools.cache
def open_accelerator() -> None:
    """Make the accelerator's context, if there is an accelerator; a process that has one cannot fork workers."""
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        torch.empty(1, device=accelerator.current_device_name())

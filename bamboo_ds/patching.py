"""Lets an unmodified DeepSpeed script use Bamboo.

`deepspeed.initialize` is replaced by ours, which hands everything without a `bamboo` block to the original. A
pipeline module that stock DeepSpeed has built by then is adopted: it keeps its class name and its parameters, so
optimizers and lists made of them stay valid.
"""

from __future__ import annotations

import sys

import deepspeed

from bamboo_ds.initialization import initialize
from bamboo_ds.world import end_in_order
from bamboo_ds.world.bootstrap import name_missing_variables

_STOCK = deepspeed.initialize  # ours was not there before this module


def patch() -> None:
    """Make `deepspeed.initialize` use Bamboo for pipeline modules whose config has a `bamboo` block.

    Call it before `deepspeed.initialize`, and before or after anything else: imports, `deepspeed.init_distributed`,
    `torch.distributed.init_process_group`. A module that has said `from deepspeed import initialize` gets ours too; a
    reference kept elsewhere (an attribute, a default argument) cannot be found. Calling it again changes nothing.
    """
    end_in_order()
    name_missing_variables()
    deepspeed.initialize = initialize
    for name, module in list(sys.modules.items()):
        if not name.startswith("bamboo_ds"):
            _rebind(getattr(module, "__dict__", {}))


def _rebind(names: dict[str, object]) -> None:
    """Replace stock's function under every name that a module has given it."""
    for name, value in list(names.items()):
        if value is _STOCK:
            names[name] = initialize

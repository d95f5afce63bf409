"""Lets an unmodified DeepSpeed script use Bamboo.

`deepspeed.initialize` is replaced by ours, which hands everything without a `bamboo` block to the original. A
pipeline module that stock DeepSpeed has built by then is adopted: it keeps its
class name and its parameters, so optimizers and lists made of them stay valid.
"""

from __future__ import annotations

import deepspeed

from bamboo_ds.initialization import initialize


def patch() -> None:
    """Make `deepspeed.initialize` use Bamboo for pipeline modules whose config has a `bamboo` block.

    Calling it again changes nothing.
    """
    if deepspeed.initialize is initialize:
        return
    deepspeed.initialize = initialize

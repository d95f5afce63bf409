"""Bamboo on DeepSpeed: pipeline training on preemptible instances that loses nothing when they vanish."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from bamboo_ds import errors
from bamboo_ds.importing import divert, forbid_shared_memory_op

if TYPE_CHECKING:
    from bamboo_ds.engine import BambooPipelineEngine
    from bamboo_ds.initialization import initialize
    from bamboo_ds.module import BambooPipelineModule
    from bamboo_ds.patching import patch
    from bamboo_ds.world import init_distributed

__version__ = "0.1.0"
__all__ = ["BambooPipelineEngine", "BambooPipelineModule", "errors", "init_distributed", "initialize", "patch"]

_HOMES = {
    "BambooPipelineEngine": "bamboo_ds.engine",
    "BambooPipelineModule": "bamboo_ds.module",
    "init_distributed": "bamboo_ds.world",
    "initialize": "bamboo_ds.initialization",
    "patch": "bamboo_ds.patching",
}


def _join_when_asked() -> None:
    """In a worker of an agent: let the script's own calls for a process group join the cluster."""

    def home() -> Any:
        from bamboo_ds.world import bootstrap

        return bootstrap

    divert("deepspeed.comm.comm", "mpi_discovery", lambda: home().discover)
    divert("torch.distributed.distributed_c10d", "init_process_group", lambda: home().init_process_group)
    if "torch.distributed" in sys.modules:  # it has copied the name
        module = sys.modules["torch.distributed.distributed_c10d"]
        sys.modules["torch.distributed"].init_process_group = module.init_process_group  # type: ignore[attr-defined]


forbid_shared_memory_op()
if "BAMBOO_MEMBERSHIP" in os.environ:
    _join_when_asked()


def __getattr__(name: str) -> Any:
    """Import the heavy parts (torch, DeepSpeed) when first asked for, so that the command line starts at once."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value

"""Orders the work of a step; knows no tensors.

What reasons about time (costs, timing, windows, bound, grid, check) is pure and imports in milliseconds. The classes
that DeepSpeed must recognise load DeepSpeed, so they load when they are first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bamboo_ds.schedule.costs import StageCosts
from bamboo_ds.schedule.operations import Kind, Operation, clock, clock_order, shadow_of
from bamboo_ds.schedule.timing import Event, Timeline, Window, simulate
from bamboo_ds.schedule.windows import MODES, Redundancy, eager_bound, frc_share, worker_orders

if TYPE_CHECKING:
    from bamboo_ds.schedule.inference import BambooInferenceSchedule
    from bamboo_ds.schedule.train import BambooTrainSchedule

__all__ = [
    "MODES",
    "BambooInferenceSchedule",
    "BambooTrainSchedule",
    "Event",
    "Kind",
    "Operation",
    "Redundancy",
    "StageCosts",
    "Timeline",
    "Window",
    "clock",
    "clock_order",
    "eager_bound",
    "frc_share",
    "shadow_of",
    "simulate",
    "worker_orders",
]

_NEEDS_DEEPSPEED = {"BambooTrainSchedule": "train", "BambooInferenceSchedule": "inference"}


def __getattr__(name: str) -> Any:
    if name in _NEEDS_DEEPSPEED:
        return getattr(import_module(f"{__name__}.{_NEEDS_DEEPSPEED[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

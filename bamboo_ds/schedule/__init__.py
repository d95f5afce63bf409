"""Orders the work of a step; knows no tensors.

What reasons about orders and time (words, costs, timing, windows, bound, takeover, disturbance, grid, check) is pure
and imports in milliseconds. The classes that DeepSpeed must recognise load DeepSpeed, so they load when they are first
asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bamboo_ds.schedule.costs import StageCosts
from bamboo_ds.schedule.disturbance import Disturbance, disturb
from bamboo_ds.schedule.operations import Kind, Operation, clock, clock_order, shadow_of, shadowed_stage
from bamboo_ds.schedule.timing import Event, Timeline, Window, simulate
from bamboo_ds.schedule.windows import MODES, Redundancy, eager_bound, frc_share, worker_orders

if TYPE_CHECKING:
    from bamboo_ds.schedule.failover import FailoverSchedule
    from bamboo_ds.schedule.inference import BambooInferenceSchedule
    from bamboo_ds.schedule.train import BambooTrainSchedule

__all__ = [
    "MODES",
    "BambooInferenceSchedule",
    "BambooTrainSchedule",
    "Disturbance",
    "Event",
    "FailoverSchedule",
    "Kind",
    "Operation",
    "Redundancy",
    "StageCosts",
    "Timeline",
    "Window",
    "clock",
    "clock_order",
    "disturb",
    "eager_bound",
    "frc_share",
    "shadow_of",
    "shadowed_stage",
    "simulate",
    "worker_orders",
]

_NEEDS_DEEPSPEED = {
    "BambooTrainSchedule": "train",
    "BambooInferenceSchedule": "inference",
    "FailoverSchedule": "failover",
}


def __getattr__(name: str) -> Any:
    if name in _NEEDS_DEEPSPEED:
        return getattr(import_module(f"{__name__}.{_NEEDS_DEEPSPEED[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

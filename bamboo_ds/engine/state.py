"""What a worker keeps of the running step. All of it is dropped at the commit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from bamboo_ds.comm import Message
from bamboo_ds.errors import ScheduleError

Value = torch.Tensor | tuple[torch.Tensor, ...]


@dataclass(slots=True)
class Slot:
    """One micro-batch on one stage.

    Attributes:
        inputs: what the stage read: leaves, so that their `.grad` is what goes back.
        outputs: what it produced, with its autograd graph, until its backward.
        sent: the detached outputs, until the commit: redundant forwards read them.
        output_gradients: gradients of the outputs that need one, in order.
        loss: of the last stage.
        digest: checksum of the batch, carried from the first to the last stage.
    """

    inputs: Value | None = None
    outputs: Value | None = None
    sent: Message | None = None
    output_gradients: tuple[torch.Tensor, ...] = ()
    loss: Any = None
    digest: int = 0


@dataclass(slots=True)
class StepState:
    """One step of one worker.

    Attributes:
        step: optimizer steps committed before (negative numbers count evaluation batches).
        share: positions of this pipeline's micro-batches in the global batch.
        slots: by (stage, micro-batch) for owned stages.
        redundant: likewise for redundant forwards.
        losses: detached loss by micro-batch of the share.
        additional_losses: sums of the module's own named losses.
    """

    step: int
    share: range = range(0)
    slots: dict[tuple[int, int], Slot] = field(default_factory=dict)
    redundant: dict[tuple[int, int], Slot] = field(default_factory=dict)
    losses: dict[int, Any] = field(default_factory=dict)
    additional_losses: dict[str, torch.Tensor] = field(default_factory=dict)

    def slot(self, stage: int, micro_batch: int) -> Slot:
        """Return the slot of a micro-batch on an owned stage."""
        return self.slots.setdefault((stage, micro_batch), Slot())


@dataclass(slots=True)
class Statistics:
    """Counts since the last `reset`.

    Attributes:
        frc_done: redundant forwards run.
        frc_possible: micro-batches for which one could have run.
        host_peak_bytes: most host memory held at once for recovery: what redundant forwards saved, and the journal
            of sent tensors.
        swap_saved_bytes: the part of it that would have stayed on the accelerator without the activation swap.
    """

    frc_done: int = 0
    frc_possible: int = 0
    host_peak_bytes: int = 0
    swap_saved_bytes: int = 0

    def reset(self) -> None:
        """Set all counts to 0."""
        self.frc_done = self.frc_possible = self.host_peak_bytes = self.swap_saved_bytes = 0


def required(value: Any) -> Any:
    """Return what an earlier instruction must have left.

    Raises:
        ScheduleError: it has not.
    """
    if value is None:
        raise ScheduleError("an instruction ran before the one that it depends on")
    return value


def tensors_of(value: Value) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a stage's value."""
    return value if isinstance(value, tuple) else (value,)


def like(value: Value, tensors: tuple[torch.Tensor, ...]) -> Value:
    """Return `tensors` in the form (one or tuple) of `value`."""
    return tensors if isinstance(value, tuple) else tensors[0]

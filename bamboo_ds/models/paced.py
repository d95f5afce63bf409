"""Layers that take a fixed time, for timing pipelines of many workers on few cores.

The trick: a paced layer does a little real maths (so losses, gradients and weights are real) and then sleeps until
its fixed time has passed, in forward and in backward. The sleep stands for an accelerator at work: it needs no core,
so eight workers on two cores keep their bubbles and their overlap of transfer and compute. A figure that was taken
with paced layers must say so.

The whole layer is one autograd function. That way its backward has one start and one end, whether or not its input
needs a gradient, and what it saves passes through saved-tensor hooks as in any other layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from deepspeed.pipe import LayerSpec

SPIN_SECONDS = 200e-6
"""How long before the deadline the sleep ends: a sleep overshoots by 60 to 200 microseconds (timer slack, virtual
machines). The rest is spun away; more spinning would take cores from the other workers."""


def sleep_until(deadline: float) -> None:
    """Sleep until ``time.perf_counter()`` reaches a deadline, to well within 0.1 ms on an idle core.

    Args:
        deadline: A value of ``time.perf_counter()`` in seconds; one in the past returns at once.
    """
    remaining = deadline - time.perf_counter()
    if remaining > SPIN_SECONDS:
        time.sleep(remaining - SPIN_SECONDS)
    while time.perf_counter() < deadline:
        pass


class _Paced(torch.autograd.Function):
    """``x + tanh(x W^T + b)``, held to a fixed time in both directions."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        forward_seconds: float,
        backward_seconds: float,
    ) -> torch.Tensor:
        deadline = time.perf_counter() + forward_seconds
        bent = torch.tanh(nn.functional.linear(inputs, weight, bias))
        ctx.save_for_backward(inputs, weight, bent)
        ctx.backward_seconds = backward_seconds
        outputs = inputs + bent
        sleep_until(deadline)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        deadline = time.perf_counter() + ctx.backward_seconds
        inputs, weight, bent = ctx.saved_tensors
        grad_linear = grad_outputs * (1 - bent * bent)
        grad_inputs = torch.addmm(grad_outputs.flatten(0, -2), grad_linear.flatten(0, -2), weight)
        grad_weight = grad_linear.flatten(0, -2).T @ inputs.flatten(0, -2)
        grad_bias = grad_linear.flatten(0, -2).sum(0)
        sleep_until(deadline)
        return grad_inputs.view_as(inputs), grad_weight, grad_bias, None, None


class PacedLayer(nn.Module):
    """A residual layer whose forward and backward each take a fixed time.

    The time counts from the start of the layer's own work, so the real maths is part of it. A layer whose maths
    takes longer than its time (a wide one, a crowded machine) takes longer; it never sleeps less than asked.

    Args:
        hidden: Width of the input and of the output, which have the shape ``[..., hidden]``.
        forward_seconds: Time of one forward, with or without gradients.
        backward_seconds: Time of one backward (of this layer alone).

    Raises:
        ValueError: If a time is negative or the width is not positive.
    """

    def __init__(self, hidden: int, forward_seconds: float, backward_seconds: float) -> None:
        super().__init__()
        if hidden < 1 or forward_seconds < 0 or backward_seconds < 0:
            raise ValueError(
                f"PacedLayer(hidden={hidden}, forward_seconds={forward_seconds}, backward_seconds={backward_seconds}): "
                "hidden must be at least 1 and no time may be negative"
            )
        self.linear = nn.Linear(hidden, hidden)
        self.forward_seconds = forward_seconds
        self.backward_seconds = backward_seconds

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return ``inputs + tanh(linear(inputs))`` after ``forward_seconds``."""
        weights = self.linear.weight, self.linear.bias
        apply: Callable[..., torch.Tensor] = _Paced.apply
        return apply(inputs, *weights, self.forward_seconds, self.backward_seconds)

    def extra_repr(self) -> str:
        """Show the times, as the other facts are shown by the linear layer."""
        return f"forward_seconds={self.forward_seconds}, backward_seconds={self.backward_seconds}"


def paced_layers(count: int, hidden: int, forward_seconds: float, backward_seconds: float) -> list[LayerSpec]:
    """List equal paced layers for a ``PipelineModule``.

    Args:
        count: Number of layers; their cost is equal, so any even partition is balanced.
        hidden: Width of every layer.
        forward_seconds: Time of one layer's forward.
        backward_seconds: Time of one layer's backward.

    Returns:
        One ``LayerSpec`` per layer.
    """
    from deepspeed.pipe import LayerSpec

    return [LayerSpec(PacedLayer, hidden, forward_seconds, backward_seconds) for _ in range(count)]

"""Mixed precision: low-precision weights with fp32 masters, parameter by parameter.

DeepSpeed's bf16 and fp16 optimizers flatten all weights into one tensor and clip by their local norm. Layers that
come and go need state that follows the parameter, and the norm is a global fact decided at the commit; so masters,
gradients and optimizer state are kept per parameter here, and clipping is done before `step`.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler


class MixedPrecisionOptimizer(DeepSpeedOptimizer):
    """Wraps an optimizer of low-precision parameters so that it steps fp32 masters.

    Args:
        optimizer: its parameters of low precision are replaced by masters; fp32 parameters are stepped as they are.
        loss_scaler: DeepSpeed's loss scaler (fp16); None for bf16.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, loss_scaler: Any = None) -> None:
        self.optimizer = optimizer
        self.loss_scaler = loss_scaler
        self.overflow = False
        self.masters: dict[torch.Tensor, torch.nn.Parameter] = {}
        for group in optimizer.param_groups:
            group["params"] = [self._with_master(parameter) for parameter in group["params"]]

    def _with_master(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        if parameter.dtype not in (torch.float16, torch.bfloat16):
            return parameter
        self.masters[parameter] = torch.nn.Parameter(parameter.detach().float())
        return self.masters[parameter]

    def admit(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        """Make the master of one more parameter, where it needs one, and return what is to be stepped for it."""
        return self._with_master(parameter)

    def dismiss(self, parameter: torch.Tensor) -> None:
        """Forget a parameter and its master."""
        self.masters.pop(parameter, None)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of the wrapped optimizer (learning rates live there)."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        """State of the wrapped optimizer, by master."""
        return self.optimizer.state

    @property
    def loss_scale(self) -> float:
        """Factor in the loss; 1 without a scaler."""
        return float(self.loss_scaler.loss_scale) if self.loss_scaler is not None else 1.0

    cur_scale = loss_scale

    def step(self, closure: Any = None) -> None:
        """Step the masters and cast them into the weights; after an overflow only lower the loss scale."""
        if not self.overflow:
            self.optimizer.step()
            self.cast_masters()
        if self.loss_scaler is not None:
            self.loss_scaler.update_scale(self.overflow)

    @torch.no_grad()
    def cast_masters(self) -> None:
        """Overwrite the weights with their masters."""
        for parameter, master in self.masters.items():
            parameter.copy_(master)

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Overwrite the masters with the weights, after these were loaded."""
        for parameter, master in self.masters.items():
            master.copy_(parameter)

    refresh_fp32_params = refresh_masters

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients; not by way of the wrapped optimizer, as DeepSpeed's know other arguments."""
        stepped = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter in (*stepped, *self.masters):
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer, the masters in order and the loss scaler."""
        return {
            "optimizer_state_dict": self.optimizer.state_dict(),
            "masters": [master.detach() for master in self.masters.values()],
            "loss_scaler": self.loss_scaler,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any], **_: Any) -> None:
        """Load what `state_dict` returned."""
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        for master, saved in zip(self.masters.values(), state_dict["masters"], strict=True):
            master.copy_(saved)
        if self.loss_scaler is not None:
            self.loss_scaler = state_dict["loss_scaler"]
        self.cast_masters()


def loss_scaler(engine: Any) -> Any:
    """Return DeepSpeed's loss scaler for the `fp16` block of an engine's config."""
    return CreateLossScaler(
        dtype=torch.float16,
        static_loss_scale=engine.loss_scale(),
        dynamic_scaling=engine.dynamic_loss_scale(),
        dynamic_loss_args=engine.dynamic_loss_scale_args(),
    )


def target_of(parameter: torch.nn.Parameter, optimizer: Any) -> torch.nn.Parameter:
    """Return the tensor that the optimizer steps for a parameter: its master, or itself."""
    if isinstance(optimizer, MixedPrecisionOptimizer):
        return optimizer.masters.get(parameter, parameter)
    return parameter


class LocalGradients:
    """The gradients of this worker's own backwards, by stage, kept until the commit.

    They are taken out of `.grad` after each backward where autograd must not add to them by itself: low-precision
    gradients are summed in fp32, as the sum over micro-batches would otherwise be rounded at each addition; and where
    a worker runs several stages, a tied parameter's gradients are summed by stage, as they come from several seats.

    Args:
        stage: the worker's own.
    """

    def __init__(self, stage: int) -> None:
        self._stage, self._by_stage = stage, False
        self._sums: dict[tuple[int, torch.nn.Parameter], torch.Tensor] = {}

    @torch.no_grad()
    def collect(self, stage: int, parameters: list[torch.nn.Parameter]) -> None:
        """Take in what the last backward of a stage left in `.grad` of its parameters."""
        for parameter in parameters:
            if parameter.grad is None or not (self._by_stage or _is_low(parameter)):
                continue
            if (stage, parameter) in self._sums:
                self._sums[stage, parameter].add_(parameter.grad)
            else:
                self._sums[stage, parameter] = parameter.grad.float() if _is_low(parameter) else parameter.grad
            parameter.grad = None

    def tell_stages_apart(self, parameters: list[torch.nn.Parameter]) -> None:
        """From now on, sum by stage. What `.grad` of the parameters holds came from the worker's own stage."""
        self._by_stage = True
        self.collect(self._stage, parameters)

    def of(self, stage: int, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Return the sum over the micro-batches of a stage so far; None when nothing of it reached the parameter."""
        in_place = parameter.grad if stage == self._stage and not self._by_stage else None
        return self._sums.get((stage, parameter), in_place)

    def clear(self) -> None:
        """Drop all sums."""
        self._sums = {}


def _is_low(parameter: torch.nn.Parameter) -> bool:
    return parameter.dtype in (torch.float16, torch.bfloat16)

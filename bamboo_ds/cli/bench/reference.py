"""The one-process reference: a plain PyTorch loop that shares no code with either engine.

It says what the right numbers are. Only the conventions are the engine's: the seed of each layer's random numbers, the
order of sums (micro-batches in order, layers in order) and fp32 accumulation under bf16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec

from bamboo_ds.cli.bench.job import ADAM_EPSILON, WEIGHT_DECAY, Job, Outcome
from bamboo_ds.plan.seeds import layer_seed


@dataclass(slots=True)
class _Model:
    """The layers as functions, and their modules: a tied one stands at each of its indices."""

    functions: list[Callable[[Any], Any]] = field(default_factory=list)
    modules: list[torch.nn.Module] = field(default_factory=list)

    def unique_modules(self) -> list[torch.nn.Module]:
        return list(dict.fromkeys(self.modules))  # in order of their first index

    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for module in self.unique_modules() for parameter in module.parameters()]

    def weights(self) -> dict[str, torch.Tensor]:
        return {
            name: value for layer, module in enumerate(self.modules) for name, value in named_weights(layer, module)
        }


def named_weights(layer: int, module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return copies of a layer's parameters and buffers as (`<layer>.<name>`, value)."""
    return [(f"{layer}.{name}", value.detach().clone()) for name, value in module.state_dict().items()]


def train_one_process(job: Job) -> Outcome:
    """Train a job in this process, one micro-batch after the other.

    Returns:
        Losses as double-precision means over the micro-batches, and final weights (the bf16 ones under bf16).
    """
    model = _build(job)
    parameters = model.parameters()
    masters = [parameter.detach().float().clone() for parameter in parameters]
    optimizer = _optimizer(job, masters)
    outcome = Outcome()
    for step in range(job.steps):
        for master in masters:
            master.grad = torch.zeros_like(master)
        outcome.losses.append(_accumulate(job, model, parameters, masters, step))
        _clip(job, model, masters)
        optimizer.step()
        for parameter, master in zip(parameters, masters, strict=True):
            parameter.data.copy_(master)
    outcome.weights = model.weights()
    return outcome


def _build(job: Job) -> _Model:
    """Build every layer under its own seed; a tied one at its first index only."""
    model = _Model()
    tied: dict[str, torch.nn.Module] = {}
    for index, spec in enumerate(job.layers()):
        if not isinstance(spec, LayerSpec):
            raise TypeError(f"layer {index} of the job is a {type(spec).__name__}; the benches use LayerSpec only")
        key = spec.key if isinstance(spec, TiedLayerSpec) else f"layer {index}"
        if key not in tied:
            torch.manual_seed(job.base_seed + index)
            module = spec.build()
            tied[key] = module.bfloat16() if job.precision == "bf16" else module
        model.modules.append(tied[key])
        model.functions.append(_function(spec, tied[key]))
    return model


def _function(spec: Any, module: torch.nn.Module) -> Callable[[Any], Any]:
    forward_fn = getattr(spec, "forward_fn", None)
    return module if forward_fn is None else lambda inputs: forward_fn(module, inputs)


def _optimizer(job: Job, masters: list[torch.Tensor]) -> torch.optim.Optimizer:
    # DeepSpeed's "Adam" decouples weight decay unless told otherwise: it is AdamW.
    if job.optimizer == "Adam":
        return torch.optim.AdamW(masters, lr=job.learning_rate, weight_decay=WEIGHT_DECAY, eps=ADAM_EPSILON)
    return torch.optim.SGD(masters, lr=job.learning_rate, weight_decay=WEIGHT_DECAY)


def _accumulate(
    job: Job, model: _Model, parameters: list[torch.nn.Parameter], masters: list[torch.Tensor], step: int
) -> float:
    """Add the gradients of every micro-batch to the masters' (fp32), in order; return the mean loss."""
    total = 0.0
    for micro_batch in range(job.micro_batches):
        outputs, labels = job.batch(step, micro_batch)
        for index, function in enumerate(model.functions):
            torch.manual_seed(layer_seed(job.seed, step=step, micro_batch=micro_batch, layer=index))
            outputs = function(outputs)
        loss = job.loss_fn(outputs, labels)
        torch.autograd.backward(loss / job.micro_batches)
        total += float(loss.detach())
        for parameter, master in zip(parameters, masters, strict=True):
            if parameter.grad is not None and master.grad is not None:
                master.grad += parameter.grad
            parameter.grad = None
    return total / job.micro_batches


def _clip(job: Job, model: _Model, masters: list[torch.Tensor]) -> None:
    """Scale the gradients so that their norm over all layers, each parameter once, is at most `job.clipping`."""
    remaining, total = iter(masters), 0.0
    for module in model.unique_modules():
        gradients = [next(remaining).grad for _ in module.parameters()]
        total += sum(float(gradient.double().square().sum()) for gradient in gradients if gradient is not None)
    coefficient = job.clipping / (math.sqrt(total) + 1e-6)
    if 0 < coefficient < 1:
        for master in masters:
            if master.grad is not None:
                master.grad *= coefficient

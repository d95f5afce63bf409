"""What the engine tests share: a training job as data, one process and workers that train it, and what must agree.

The one process is a plain PyTorch loop over the same layers. It shares with the engine only its conventions: the seed
of each layer's random numbers, the micro-batches in order, the division of every loss by M, fp32 sums under bf16.
"""

from __future__ import annotations

import copy
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from bamboo_ds.cli.bench.workers import WorkerResult, values
from bamboo_ds.plan.seeds import layer_seed

BASE_SEED, SEED = 1234, 7
MODES = ("off", "lflb", "fit", "eflb")
Optimizer = Callable[[Any], torch.optim.Optimizer]
Weights = dict[str, torch.Tensor]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2, eps=1e-6)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


@dataclass(frozen=True, slots=True)
class Training:
    """What is trained, on what, and how.

    Attributes:
        layers: makes the layer specifications afresh.
        batch: micro-batch (inputs, labels) of (step, index in the global batch).
        loss_fn: of (outputs, labels); None when the last layer returns the loss.
        optimizer: makes it from parameters or groups; given to the engine as it is, unless `config` has one.
        micro_batches: M of the global batch.
        steps: optimizer steps.
        clipping: largest norm of the gradient; 0 for none.
        config: further keys of the DeepSpeed config; those of `bamboo` are merged into its block.
        module: further arguments of the module.
        arguments: makes further arguments of `initialize` from the module.
        bf16: train in bf16 with fp32 masters.
    """

    layers: Callable[[], list[Any]]
    batch: Callable[[int, int], tuple[Any, Any]]
    loss_fn: Callable[..., Any] | None = nn.functional.mse_loss
    optimizer: Optimizer = adam
    micro_batches: int = 5
    steps: int = 3
    clipping: float = 0.5
    config: Mapping[str, Any] = field(default_factory=dict)
    module: Mapping[str, Any] = field(default_factory=dict)
    arguments: Callable[[Any], dict[str, Any]] | None = None
    bf16: bool = False

    def deepspeed_config(self, redundancy: str) -> dict[str, Any]:
        block = {"redundancy": redundancy, "seed": SEED, "timeout_seconds": 20.0, **self.config.get("bamboo", {})}
        return {
            "train_batch_size": 2 * self.micro_batches,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": self.clipping,
            "steps_per_print": 10**9,
            "bf16": {"enabled": self.bf16},
            **self.config,
            "bamboo": block,
        }


@dataclass(slots=True)
class Outcome:
    """What training left.

    Attributes:
        losses: mean loss of every step.
        norms: norm of the whole gradient, before clipping, of every step.
        weights: final parameters and buffers of the owned layers, by `<layer>.<name>`.
        digests: by step, of every layer that the worker holds: (layer, digest).
        frc_done: redundant forwards in the whole run.
        extra: whatever a test wants of the engine.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: Weights = field(default_factory=dict)
    digests: list[list[tuple[int, str]]] = field(default_factory=list)
    frc_done: int = 0
    extra: Any = None


# ---- one process ---------------------------------------------------------------------------------------------------


class Model:
    """The layers of a training as functions, a tied module once at each of its places."""

    def __init__(self, training: Training) -> None:
        self.functions: list[Callable[[Any], Any]] = []
        self.modules: dict[int, nn.Module] = {}
        tied: dict[str, nn.Module] = {}
        for index, spec in enumerate(training.layers()):
            module, function = _built(spec, index, tied)
            self.functions.append(function)
            if isinstance(module, nn.Module):
                self.modules[index] = module.bfloat16() if training.bf16 else module

    def unique_modules(self) -> list[nn.Module]:
        return list(dict.fromkeys(self.modules.values()))

    def parameters(self) -> list[nn.Parameter]:
        return [p for module in self.unique_modules() for p in module.parameters() if p.requires_grad]

    def weights(self) -> Weights:
        return {name: value for index, module in self.modules.items() for name, value in named(index, module)}

    def run(self, inputs: Any, *, step: int, micro_batch: int) -> Any:
        value = cloned(inputs)
        for layer, function in enumerate(self.functions):
            torch.manual_seed(layer_seed(SEED, step=step, micro_batch=micro_batch, layer=layer))
            value = function(value)
        return value

    def training(self, mode: bool) -> None:
        for module in self.unique_modules():
            module.train(mode)


def _built(spec: Any, index: int, tied: dict[str, nn.Module]) -> tuple[Any, Callable[[Any], Any]]:
    if not isinstance(spec, LayerSpec):
        return spec, spec
    if not isinstance(spec, TiedLayerSpec):
        torch.manual_seed(BASE_SEED + index)
        module = spec.build()
        return module, module
    if spec.key not in tied:
        torch.manual_seed(BASE_SEED + index)
        tied[spec.key] = spec.build()
    module, forward = tied[spec.key], spec.forward_fn
    return module, module if forward is None else lambda value: forward(module, value)


class OneProcess:
    """Trains a job in this process, one micro-batch after the other."""

    def __init__(self, training: Training, *, groups: Callable[[Model], Any] | None = None) -> None:
        self.job, self.model = training, Model(training)
        self.parameters = self.model.parameters()
        self.masters = [p.detach().float().clone().requires_grad_() if training.bf16 else p for p in self.parameters]
        self.optimizer = training.optimizer(self.masters if groups is None else groups(self.model))
        self.step_number = 0
        self.norm = 0.0

    def train_batch(self, batches: Sequence[Any] | None = None) -> float:
        """Train one step; return the mean loss."""
        job = self.job
        drawn = batches or [job.batch(self.step_number, m) for m in range(job.micro_batches)]
        sums: dict[int, torch.Tensor] = {}
        total = 0.0
        for micro_batch, batch in enumerate(drawn):
            total += self._accumulate(sums, batch, micro_batch, len(drawn))
        self._step(sums)
        self.step_number += 1
        return total / len(drawn)

    def _accumulate(self, sums: dict[int, torch.Tensor], batch: Any, micro_batch: int, count: int) -> float:
        outputs = self.model.run(batch[0], step=self.step_number, micro_batch=micro_batch)
        loss = outputs if self.job.loss_fn is None else self.job.loss_fn(outputs, batch[1])
        if loss.requires_grad:
            (loss / count).backward()
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                gradient = parameter.grad.float() if self.job.bf16 else parameter.grad
                sums[index] = sums[index] + gradient if index in sums else gradient
                parameter.grad = None
        return float(loss.detach())

    def _step(self, sums: dict[int, torch.Tensor]) -> None:
        self.norm = self._norm(sums)
        coefficient = min(1.0, self.job.clipping / (self.norm + 1e-6)) if self.job.clipping else 1.0
        for index, master in enumerate(self.masters):
            master.grad = sums[index] * coefficient if index in sums else None
        self.optimizer.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.grad = master.grad = None
            parameter.data.copy_(master.data)

    def _norm(self, sums: dict[int, torch.Tensor]) -> float:
        """Sum layer by layer in double precision, as the commit does; each parameter once."""
        index, total = 0, 0.0
        for module in self.model.unique_modules():
            part = torch.zeros((), dtype=torch.float64)
            for _ in (p for p in module.parameters() if p.requires_grad):
                part = part + (sums[index].abs().double().square().sum() if index in sums else 0.0)
                index += 1
            total += float(part)
        return math.sqrt(total)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Any]) -> tuple[float, Any]:
        """Return the mean loss in evaluation mode, and the outputs of the last batch."""
        self.model.training(False)
        outputs, losses = None, []
        for batch in batches:
            outputs = self.model.run(batch[0], step=0, micro_batch=0)
            losses.append(float(self.job.loss_fn(outputs, batch[1]) if self.job.loss_fn else outputs))
        self.model.training(True)
        return sum(losses) / len(losses), outputs


def train_one_process(training: Training) -> Outcome:
    """Train all steps in this process."""
    outcome, one = Outcome(), OneProcess(training)
    for _ in range(training.steps):
        outcome.losses.append(one.train_batch())
        outcome.norms.append(one.norm)
    outcome.weights = one.model.weights()
    return outcome


# ---- workers -------------------------------------------------------------------------------------------------------


def build_engine(training: Training, num_stages: int, redundancy: str = "eflb") -> Any:
    """Build an engine in this worker."""
    import bamboo_ds

    module = bamboo_ds.BambooPipelineModule(
        training.layers(),
        num_stages=num_stages,
        loss_fn=training.loss_fn,
        **{"seed_layers": True, "base_seed": BASE_SEED, "partition_method": "uniform", **training.module},
    )
    arguments = training.arguments(module) if training.arguments else {}
    if "optimizer" not in training.config:
        arguments.setdefault("optimizer", training.optimizer)
    engine, *_ = bamboo_ds.initialize(model=module, config=training.deepspeed_config(redundancy), **arguments)
    return engine


def batches(training: Training, engine: Any, step: int) -> Iterator[Any]:
    """Yield the micro-batches of this engine's pipeline."""
    return iter([training.batch(step, m) for m in engine.micro_batch_range])


def train(rank: int, training: Training, num_stages: int, redundancy: str = "eflb") -> Outcome:
    """Train all steps as one worker; a target for `run_workers`."""
    del rank  # the launcher's variables say it
    engine, outcome = build_engine(training, num_stages, redundancy), Outcome()
    for step in range(training.steps):
        train_step(engine, training, step, outcome)
    outcome.weights = own_weights(engine)
    outcome.frc_done = engine.statistics.frc_done
    engine.close()
    return outcome


def linger(rank: int) -> None:
    """Let the process that hosts the store leave last, as the exit of a script does, so that the others can read it."""
    time.sleep(1.0 if rank == 0 else 0.0)


def train_step(engine: Any, training: Training, step: int, outcome: Outcome) -> None:
    outcome.losses.append(float(engine.train_batch(batches(training, engine, step))))
    outcome.norms.append(float(engine.get_global_grad_norm()))
    outcome.digests.append(held_digests(engine))


def own_weights(engine: Any) -> Weights:
    layers = [item for stage in engine.owned_stages for item in engine.module.layers_of(stage).items()]
    return {name: value for index, module in layers for name, value in named(index, module)}


def held_digests(engine: Any) -> list[tuple[int, str]]:
    """Return the digest of every layer held, the redundant ones too."""
    module = engine.module
    return [
        (index, digest(layer)) for stage in module.held_stages() for index, layer in module.layers_of(stage).items()
    ]


def digest(module: nn.Module) -> str:
    """Return a checksum of all bits of a module's parameters and buffers."""
    total = hashlib.sha256()
    for name, value in module.state_dict().items():
        total.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        total.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


# ---- what must agree -----------------------------------------------------------------------------------------------


def named(index: int, module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(f"{index}.{name}", value.detach().clone()) for name, value in module.state_dict().items()]


def cloned(value: Any) -> Any:
    return tuple(part.clone() for part in value) if isinstance(value, tuple) else value.clone()


def single(numbers: Sequence[float]) -> list[float]:
    """Round to fp32, in which the engine returns losses."""
    return torch.tensor(numbers, dtype=torch.float32).tolist()


def relative(ours: Any, expected: Any) -> float:
    ours, expected = torch.as_tensor(ours), torch.as_tensor(expected)
    if not expected.is_complex():
        ours, expected = ours.double(), expected.double()
    return float((ours - expected).norm() / expected.norm().clamp_min(1e-12)) if expected.numel() else 0.0


def largest(ours: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference of two equally long lists; NaN differs from everything."""
    differences = [relative(*pair) for pair in zip(ours, expected, strict=True)]
    return max(math.inf if math.isnan(by) else by for by in differences)


def assert_equals_one_process(
    outcomes: Sequence[Outcome],
    expected: Outcome,
    *,
    exact: bool,
    loss_bound: float = 1e-6,
    weight_bound: float = 1e-5,
) -> None:
    """Hold every worker's losses and norms, and the weights of all layers, against one process.

    Args:
        outcomes: of all workers.
        expected: of one process.
        exact: demand equal bits (only P differs and no layer is tied).
        loss_bound: largest relative difference of losses otherwise.
        weight_bound: likewise of weights.
    """
    if exact:
        loss_bound = weight_bound = 0.0
    losses = single(expected.losses)
    for outcome in outcomes:
        assert largest(outcome.losses, losses) <= loss_bound, (outcome.losses, losses)
        assert largest(outcome.norms, expected.norms) <= 10 * weight_bound, (outcome.norms, expected.norms)
        wrong = {name: relative(value, expected.weights[name]) for name, value in outcome.weights.items()}
        assert {name: by for name, by in wrong.items() if not by <= weight_bound} == {}
    assert {name for outcome in outcomes for name in outcome.weights} == set(expected.weights)


def check(
    workers: Callable[..., list[WorkerResult]],
    job: Training,
    shape: tuple[int, int],
    *,
    redundancy: str = "eflb",
    tied: Sequence[Sequence[int]] = (),
    exact: bool | None = None,
    **bounds: float,
) -> list[Outcome]:
    """Train a job in (stages, pipelines); hold it against one process, and the copies of a layer against each other."""
    stages, pipelines = shape
    outcomes = values(workers(train, stages * pipelines, args=(job, stages, redundancy), timeout_seconds=60))
    exact = pipelines == 1 and not tied if exact is None else exact
    assert_equals_one_process(outcomes, train_one_process(job), exact=exact, **bounds)
    assert_copies_equal(outcomes, tied=tied)
    return outcomes


def assert_copies_equal(outcomes: Sequence[Outcome], *, tied: Sequence[Sequence[int]] = ()) -> None:
    """Check that all copies of a layer, own and redundant, had equal bits after every step.

    Args:
        outcomes: of all workers.
        tied: layers that share their weights, so must be equal to one another too.
    """
    first = {layer: min(same) for same in tied for layer in same}
    for by_worker in zip(*(outcome.digests for outcome in outcomes), strict=True):
        seen: dict[int, str] = {}
        for layer, checksum in (pair for pairs in by_worker for pair in pairs):
            key = first.get(layer, layer)
            assert seen.setdefault(key, checksum) == checksum, f"copies of layer {layer} differ"


def state_copy(engine: Any) -> dict[str, Any]:
    """Return a deep copy of an engine's optimizer state, by position."""
    return copy.deepcopy(engine.optimizer.state_dict())

"""The same job on Bamboo, and what a worker can tell of its layers after every step."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bamboo_ds.cli.bench.job import Job, Outcome

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class BambooOutcome(Outcome):
    """An outcome with the digest of every layer held, own and redundant, after every step.

    Attributes:
        digests: By step, pairs of layer index and digest of its weights.
        steps_with_frc: Forward redundant computations done in the whole run.
    """

    digests: list[list[tuple[int, str]]] = field(default_factory=list)
    frc_done: int = 0


def build_bamboo_engine(job: Job, *, num_stages: int, redundancy: str, timeout_seconds: float = 30.0) -> Any:
    """Build a Bamboo engine in this worker (its environment says which)."""
    import bamboo_ds

    block = {"redundancy": redundancy, "seed": job.seed, "timeout_seconds": timeout_seconds}
    module = bamboo_ds.BambooPipelineModule(
        layers=job.layers(), num_stages=num_stages, loss_fn=job.loss_fn, seed_layers=True, base_seed=job.base_seed
    )
    engine, *_ = bamboo_ds.initialize(model=module, config={**job.deepspeed_config(), "bamboo": block})
    return engine


def train_bamboo(rank: int, job: Job, num_stages: int, redundancy: str) -> BambooOutcome:
    """Train a job as one worker of Bamboo; a target for `run_workers`. The weights are those of the own layers."""
    from bamboo_ds.cli.bench.reference import named_weights

    del rank  # the engine reads it from the environment
    engine = build_bamboo_engine(job, num_stages=num_stages, redundancy=redundancy)
    outcome = BambooOutcome()
    for step in range(job.steps):
        outcome.losses.append(float(engine.train_batch(job.batches(step, engine.micro_batch_range))))
        outcome.digests.append([(layer, digest(module)) for layer, module in held_layers(engine)])
    for layer, module in engine.module.layers_of(engine.module.own_stage).items():
        outcome.weights.update(named_weights(layer, module))
    outcome.frc_done = engine.statistics.frc_done
    return outcome


def held_layers(engine: Any) -> list[tuple[int, torch.nn.Module]]:
    """Return (layer index, module) of every layer this worker holds, own layers first."""
    stages = [engine.module.own_stage, engine.module.redundant_stage]
    return [pair for stage in stages if stage is not None for pair in engine.module.layers_of(stage).items()]


def digest(module: torch.nn.Module) -> str:
    """Return the SHA-256 of the bits of a layer's parameters and buffers."""
    import torch

    total = hashlib.sha256()
    for name, value in module.state_dict().items():
        total.update(f"{name} {value.dtype} {tuple(value.shape)};".encode())
        total.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()

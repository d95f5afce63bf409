"""The same job on stock DeepSpeed: its own `PipelineEngine`, its own collectives, gloo."""

from __future__ import annotations

import os
from typing import Any

from bamboo_ds.cli.bench.job import Job, Outcome


def build_stock_engine(job: Job, *, num_stages: int) -> Any:
    """Build a stock engine in this worker (its environment says which); micro-batches must divide among pipelines.

    Raises:
        ValueError: D does not divide M, which stock DeepSpeed cannot express.
    """
    import deepspeed
    from deepspeed.pipe import PipelineModule

    pipelines = int(os.environ["WORLD_SIZE"]) // num_stages
    if job.micro_batches % pipelines:
        raise ValueError(f"stock DeepSpeed wants D to divide M: {pipelines} does not divide {job.micro_batches}")
    deepspeed.init_distributed("gloo", verbose=False)
    # "parameters", the default, fails with seed_layers in DeepSpeed 0.19.8 (numpy integers as seeds).
    module = PipelineModule(
        job.layers(),
        num_stages=num_stages,
        loss_fn=job.loss_fn,
        seed_layers=True,
        base_seed=job.base_seed,
        partition_method="uniform",
    )
    config = job.deepspeed_config()
    engine, *_ = deepspeed.initialize(model=module, config=config, model_parameters=list(module.parameters()))
    return engine


def stock_share(engine: Any) -> range:
    """Return which micro-batches of the global batch we hand to this engine's pipeline."""
    pipeline = engine.grid.get_data_parallel_rank()
    return range(pipeline * engine.micro_batches, (pipeline + 1) * engine.micro_batches)


def train_stock(rank: int, job: Job, num_stages: int) -> Outcome:
    """Train a job as one worker of stock DeepSpeed; a target for `run_workers`. Weights are not collected."""
    del rank  # DeepSpeed reads it from the environment
    engine = build_stock_engine(job, num_stages=num_stages)
    outcome = Outcome()
    for step in range(job.steps):
        outcome.losses.append(float(engine.train_batch(job.batches(step, stock_share(engine)))))
    return outcome

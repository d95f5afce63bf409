"""What each worker of a chaos run does: train, write down every step, and in the end tell the census."""

from __future__ import annotations

import faulthandler
import signal
import time
from pathlib import Path
from typing import Any

from bamboo_ds.cli.chaos.journal import Journal, Pass, StepLine

__all__ = ["STACKS_SIGNAL", "train"]

STACKS_SIGNAL = signal.SIGUSR2
"""Lets a worker write the stacks of all its threads to its log."""


def train(job: Any, folder: Path) -> list[int] | None:
    """Train until the journal says that it is enough.

    Args:
        job: a `ChaosJob`.
        folder: of the journal and the checkpoints.

    Returns:
        How often each sample has gone into the weights; None if this worker does not hold those that know.
    """
    import bamboo_ds
    from bamboo_ds.cli.chaos.job import Samples, parameter_groups
    from bamboo_ds.models.gpt import language_model_loss

    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    journal = Journal(folder)
    reference = job.reference(steps=0)
    model = bamboo_ds.BambooPipelineModule(
        layers=job.layers(),
        num_stages=job.stages,
        loss_fn=language_model_loss,
        seed_layers=True,
        base_seed=reference.base_seed,
    )
    engine, *_ = bamboo_ds.initialize(
        model=model,
        model_parameters=parameter_groups(list(model.named_parameters())),
        training_data=Samples(),
        config=job.deepspeed_config(folder),
    )
    timing = _Timing(engine) if job.timed else None
    while engine.global_steps < journal.steps:
        loss = float(engine.train_batch())
        journal.write(
            StepLine(
                step=engine.global_steps - 1,
                loss=loss,
                at=time.time(),
                worker=engine.module.worker,
                stages=engine.plan.num_stages,
                pipelines=engine.plan.num_pipelines,
                **({} if timing is None else timing.of_step()),
            )
        )
    census = counted(engine)
    engine.close()
    return census


class _Timing:
    """Notes when an engine runs what.

    Args:
        engine: from now on.
    """

    def __init__(self, engine: Any) -> None:
        from bamboo_ds.schedule.instructions import BackwardPass, ForwardPass, ReduceGrads

        self._engine, self._execute, self._reduce = engine, engine._execute, ReduceGrads
        self._kinds = {ForwardPass: "forward", BackwardPass: "backward"}
        self._computed = 0.0
        self._passes: list[Pass] = []
        engine._execute = self._noting

    def _noting(self, instruction: Any) -> None:
        began, kind = time.time(), self._kinds.get(type(instruction))
        if isinstance(instruction, self._reduce):
            self._computed = began
        self._execute(instruction)
        if kind is not None:
            self._passes.append(Pass(kind, instruction.stage, instruction.micro_batch, began, time.time()))

    def of_step(self) -> dict[str, Any]:
        """Return these fields of the line of the step that has ended."""
        passes, self._passes = tuple(self._passes), []
        return {"pipeline": self._engine.pipeline_id, "computed": self._computed, "passes": passes}


def counted(engine: Any) -> list[int] | None:
    """Return the census, where the first layer is held."""
    held = [engine.module.own_stage, engine.module.redundant_stage]
    for stage in (stage for stage in held if stage is not None):
        layer = engine.module.layers_of(stage).get(0)
        if layer is not None:
            counts: list[int] = layer.counts()
            return counts
    return None

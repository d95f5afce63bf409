"""What is the same on all workers of a job, and what one that comes later takes over from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bamboo_ds.checkpoint import UnitState
from bamboo_ds.checkpoint.plain import from_plain, to_plain
from bamboo_ds.engine.parameters import GroupOf, adopt_settings, settings_of
from bamboo_ds.engine.precision import MixedPrecisionOptimizer
from bamboo_ds.engine.sampler import Position

if TYPE_CHECKING:
    from bamboo_ds.engine.engine import BambooPipelineEngine

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


@dataclass(frozen=True, slots=True)
class CommonState:
    """Counters and schedules of an engine, as JSON tells them.

    Attributes:
        counters: DeepSpeed's: steps, samples, micro-steps, skipped steps.
        trained: whether training has begun: who comes later does not load a checkpoint any more.
        evaluations: that were begun.
        micro_batches: M of the global batch.
        position: where training is in the training data: epoch and offset; empty without any.
        scheduler: state of the learning-rate schedule; None without one.
        scaler: of the loss scaler; None without one.
        groups: what stands in the optimizer's parameter groups besides parameters.
    """

    counters: Mapping[str, int]
    trained: bool
    evaluations: int
    micro_batches: int
    position: Sequence[int] = ()
    scheduler: Any = None
    scaler: Any = None
    groups: Sequence[Mapping[str, Any]] = field(default_factory=tuple)

    @classmethod
    def of(cls, engine: BambooPipelineEngine) -> CommonState:
        """Return that of an engine.

        Raises:
            ConfigError: its schedule keeps something that cannot be told.
        """
        scaler = _scaler_of(engine)
        position = engine.data_position()
        return cls(
            counters={name: getattr(engine, name) for name in _COUNTERS},
            trained=engine._trained,
            evaluations=engine._evaluations,
            micro_batches=engine._training_micro_batches,
            position=() if position is None else (position.epoch, position.offset),
            scheduler=to_plain(_scheduler_state(engine), name="lr_scheduler"),
            scaler=None if scaler is None else to_plain(_plain_members(scaler), name="loss_scaler"),
            groups=settings_of(engine.optimizer),
        )

    def give_to(self, engine: BambooPipelineEngine) -> None:
        """Let an engine go on from here. The data follow when it takes its place."""
        for name in _COUNTERS:
            setattr(engine, name, self.counters[name])
        engine._trained, engine._came_later = self.trained, self.trained and engine._came_late
        engine._evaluations = self.evaluations
        engine._training_micro_batches = self.micro_batches
        engine._position = Position(*self.position) if self.position else None
        adopt_settings(engine.optimizer, self.groups)
        if engine.lr_scheduler is not None and self.scheduler is not None:
            engine.lr_scheduler.load_state_dict(from_plain(self.scheduler))
        if self.scaler is not None:
            vars(_scaler_of(engine)).update(from_plain(self.scaler))


@dataclass(frozen=True, slots=True)
class Restored:
    """What a worker has read of a checkpoint, to go on from there.

    Attributes:
        tag: of the checkpoint.
        step: optimizer steps committed.
        states: of the units that were asked for, by name.
        groups: where their parameters stood in an optimizer, by the name that all workers share.
        common: counters, schedules and settings.
    """

    tag: str
    step: int
    states: Mapping[str, UnitState]
    groups: Mapping[str, GroupOf]
    common: CommonState


def _scheduler_state(engine: BambooPipelineEngine) -> Any:
    return None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict()


def _scaler_of(engine: BambooPipelineEngine) -> Any:
    return engine.optimizer.loss_scaler if isinstance(engine.optimizer, MixedPrecisionOptimizer) else None


def _plain_members(scaler: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(scaler).items() if isinstance(value, bool | int | float)}

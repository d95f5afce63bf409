"""The commit: all live workers agree that a step's gradients are complete, and on the three facts that are global.

Each worker casts a `Vote` when the sums of its own and of its redundant stage have arrived; `tally` makes the one
`Decision` of them. It is pure, so the plain exchange between workers and a coordinator that reads votes from a store
decide alike.

Sums are taken in the order of layers and micro-batches, in double precision, never in the order of workers: the norm
and the loss then have the same bits for every number of stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from bamboo_ds.errors import NonFiniteLossError


@dataclass(frozen=True, slots=True)
class Vote:
    """What one worker knows of a finished step.

    Attributes:
        worker: who votes.
        step: optimizer steps committed before.
        pipeline: its pipeline.
        stage: its stage.
        squared_norms: sum of squares of the reduced gradient, by reduction unit (a layer's index, or `tied:<key>` at
            its first layer), of units it owns.
        losses: loss by micro-batch of the global batch (last stages only).
        additional_losses: the module's own named losses, mean over the pipeline's micro-batches (last stages only).
        overflow: whether a reduced gradient is not finite (fp16 only; else that is an error).
        forward_seconds: measured time of one forward of the own stage; likewise `backward_seconds`. 0 when not
            measured.
        checkpoint_due: whether the voter wants a checkpoint of the weights after this step.
        checkpoint_busy: whether it still writes the last one.
    """

    worker: int
    step: int
    pipeline: int
    stage: int
    squared_norms: Mapping[str, float] = field(default_factory=dict)
    losses: Mapping[int, float] = field(default_factory=dict)
    additional_losses: Mapping[str, float] = field(default_factory=dict)
    overflow: bool = False
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    checkpoint_due: bool = False
    checkpoint_busy: bool = False


@dataclass(frozen=True, slots=True)
class Ballot:
    """The votes of one pipeline, as its spokesman writes them to the store.

    Attributes:
        votes: one per live worker of the pipeline.
        loss_scale: factor that is still in the gradients (fp16).
        rows: in place of votes, what an evaluation wants all workers to see, as text.
        boundary: whether no step runs, and the next thing that all workers do is to train: another epoch may begin.
    """

    votes: tuple[Vote, ...]
    loss_scale: float = 1.0
    rows: tuple[str, ...] = ()
    boundary: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the coordinator writes when all ballots are in: a decision, or why there can be none.

    Attributes:
        decision: None when the step cannot be committed.
        refusal: text of the `NonFiniteLossError` that all workers raise.
        rows: those of all ballots, by pipeline.
    """

    decision: Decision | None = None
    refusal: str = ""
    rows: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """What all workers do at the end of a step.

    Attributes:
        step: optimizer steps committed before.
        mean_loss: over all micro-batches of the global batch.
        pipeline_losses: mean loss by pipeline.
        additional_losses: mean over pipelines, weighted by micro-batches.
        global_norm: 2-norm of the whole gradient, each parameter once.
        overflow: skip the optimizer step (fp16).
        stage_seconds: median (forward, backward) seconds by stage; empty until every stage has measured.
        reshape: whether another epoch would be better: all meet at a boundary before they train again.
        checkpoint: whether all begin a checkpoint: a voter wants one, and none is busy with the last.
    """

    step: int
    mean_loss: float
    pipeline_losses: tuple[float, ...]
    additional_losses: Mapping[str, float]
    global_norm: float
    overflow: bool
    stage_seconds: tuple[tuple[float, float], ...]
    reshape: bool = False
    checkpoint: bool = False


def settle(ballots: Iterable[Ballot]) -> Outcome:
    """Make the outcome of a step, or of an evaluation, of the ballots of all pipelines in their order."""
    cast = list(ballots)
    votes = [vote for ballot in cast for vote in ballot.votes]
    if not votes:
        return Outcome(rows=tuple(row for ballot in cast for row in ballot.rows))
    try:
        return Outcome(decision=tally(votes, loss_scale=cast[0].loss_scale))
    except NonFiniteLossError as error:
        return Outcome(refusal=str(error))


def tally(votes: Iterable[Vote], *, loss_scale: float = 1.0) -> Decision:
    """Make the one decision of the votes of a step.

    Args:
        votes: one per live worker.
        loss_scale: factor that is still in the gradients (fp16).

    Raises:
        NonFiniteLossError: a loss is not finite without fp16's overflow, or the gradient is not; says where.
    """
    ballots = sorted(votes, key=lambda vote: (vote.pipeline, vote.stage))
    step = ballots[0].step
    overflow = any(vote.overflow for vote in ballots)
    losses = {micro_batch: loss for vote in ballots for micro_batch, loss in vote.losses.items()}
    if not overflow:
        _refuse_non_finite(losses, ballots, step)
    return Decision(
        step=step,
        mean_loss=_mean(losses),
        pipeline_losses=tuple(_mean(vote.losses) for vote in ballots if vote.losses),
        additional_losses=_mean_additional(ballots),
        global_norm=_norm(ballots) / loss_scale,
        overflow=overflow,
        stage_seconds=_stage_seconds(ballots),
        checkpoint=any(vote.checkpoint_due for vote in ballots) and not any(vote.checkpoint_busy for vote in ballots),
    )


def _mean(losses: Mapping[int, float]) -> float:
    return sum(losses[micro_batch] for micro_batch in sorted(losses)) / len(losses) if losses else 0.0


def _mean_additional(ballots: list[Vote]) -> dict[str, float]:
    reporting = [vote for vote in ballots if vote.additional_losses]
    total = sum(len(vote.losses) for vote in reporting)
    names = reporting[0].additional_losses if reporting else {}
    return {name: sum(vote.additional_losses[name] * len(vote.losses) for vote in reporting) / total for name in names}


def _unit_norms(ballots: list[Vote]) -> dict[str, float]:
    """Squared norm by unit, each once: every pipeline reports the same sums, and a tied unit has several owners."""
    norms: dict[str, float] = {}
    for vote in ballots:
        for unit, value in vote.squared_norms.items():
            norms.setdefault(unit, value)
    return norms


def _norm(ballots: list[Vote]) -> float:
    norms = _unit_norms(ballots)
    total = 0.0
    for unit in sorted(norms, key=_unit_order):
        total += norms[unit]
    return math.sqrt(total) if math.isfinite(total) else math.inf


def _unit_order(unit: str) -> tuple[int, str]:
    layer, _, key = unit.partition(":")
    return int(layer), key


def _refuse_non_finite(losses: Mapping[int, float], ballots: list[Vote], step: int) -> None:
    for micro_batch, loss in sorted(losses.items()):
        if not math.isfinite(loss):
            raise NonFiniteLossError(
                f"loss is {loss} in step {step}, micro-batch {micro_batch} of the global batch; "
                "look at that batch, the learning rate and the initial weights (nothing was stepped)"
            )
    for unit, value in sorted(_unit_norms(ballots).items(), key=lambda item: _unit_order(item[0])):
        if not math.isfinite(value):
            raise NonFiniteLossError(
                f"the gradient of layer {unit} is not finite in step {step} while every loss is (nothing was stepped)"
            )


def _stage_seconds(ballots: list[Vote]) -> tuple[tuple[float, float], ...]:
    stages = sorted({vote.stage for vote in ballots})
    by_stage = [[vote for vote in ballots if vote.stage == stage] for stage in stages]
    seconds = [
        (_median(vote.forward_seconds for vote in same), _median(vote.backward_seconds for vote in same))
        for same in by_stage
    ]
    return tuple(seconds) if all(forward > 0 and backward > 0 for forward, backward in seconds) else ()


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]

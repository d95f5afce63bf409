"""Whether a job whose plan runs should begin a new epoch: speed and risk, before and after, in numbers.

A plan is worn when workers own two stages: it is slower, and the loss of such a worker or of its neighbour aborts the
step. What could replace it is always the largest shape that the live workers make, whole. It does when that

(a) trains faster, by enough to pay for the stall within the horizon;
(b) saves layers that hang on one worker: its loss would cost all steps since the last checkpoint;
(c) is about as fast, while half of the workers or more could each abort the step. Where standbys just fill the gaps of
    the same shape, and nothing is slower for it, fewer will do.

The model of time is 1F1B's: a pipeline lets its first micro-batch through, then the worker with the most to do sets the
pace. In (c) only the pace is compared. Fewer pipelines also fill and empty more slowly in relation to their work, by a
few percent of a step; that is the price of being safe.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bamboo_ds.plan.cluster import Bounds, Shape
from bamboo_ds.plan.model import Model
from bamboo_ds.plan.moving import moving
from bamboo_ds.plan.plan import Plan, static_plan

FASTER = 1.05
"""From this speed on, relative to the present plan, a new one is called faster; down to its inverse, as fast."""

HALF = 0.5
"""From this share of workers on whose loss would abort the step, that is a reason to act."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What a new epoch costs, and when it must have paid.

    Attributes:
        step_seconds: a step as measured under the present plan; None while unknown, then the stall is not weighed.
        stall_seconds: for which nobody trains, besides the transfer of what moves.
        bytes_per_second: that a worker receives. None: the transfer is in `stall_seconds`.
        horizon_steps: how many steps the new plan is expected to last.
    """

    step_seconds: float | None = None
    stall_seconds: float = 0.5
    bytes_per_second: float | None = None
    horizon_steps: int = 100


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whether to begin a new epoch, and why, for people."""

    reshape: bool
    reason: str


def weigh(plan: Plan, *, shape: Shape, bounds: Bounds, costs: Costs, workers: int) -> Judgement:
    """Judge whether a running plan should give way to a whole one of another or the same shape.

    Args:
        plan: all its workers are alive.
        shape: the largest that the live workers make.
        bounds: of the job.
        costs: of a new epoch.
        workers: how many are alive, for the reason.
    """
    now = f"{plan.num_stages}x{plan.num_pipelines}"
    if plan.owners == plan.homes and shape == Shape(plan.num_stages, plan.num_pipelines):
        return Judgement(False, f"{workers} workers: {now} is whole and nothing larger can be made: keep")
    after = _whole(shape, bounds.model)
    speed = step_cost(plan, bounds.model) / step_cost(after, bounds.model)
    merged = sum(plan.num_stages - len(set(owners)) for owners in plan.owners)
    worn = f" with {merged} merged stage(s)" if merged else ""
    told = (
        f"{workers} workers: {shape.num_stages}x{shape.num_pipelines} whole would train {speed:.2f} of what "
        f"{now}{worn} does"
    )
    reasons = [_faster(plan, shape=shape, speed=speed, bounds=bounds, costs=costs)]
    if bounds.redundancy:
        reasons += [_less_fatal(plan, after), _less_aborting(plan, after, speed=speed, model=bounds.model)]
    given = " and ".join(filter(None, reasons))
    return Judgement(bool(given), f"{told}: {given}" if given else f"{told}: keep")


def step_cost(plan: Plan, model: Model) -> float:
    """Return how long a step takes under a plan; 1 is what all layers take for one micro-batch on one worker."""
    if model.micro_batches is None:
        return _pace(plan, model)
    return max(
        (len(plan.share(pipeline, micro_batches=model.micro_batches)) - 1) * bottleneck + 1
        for pipeline, bottleneck in enumerate(_bottlenecks(plan, model))
    )


def fatal_workers(plan: Plan, *, redundancy: bool) -> frozenset[int]:
    """Return the workers that alone hold some stage: only a checkpoint could give it back."""
    holders = (plan.holders(frozenset({stage}), redundancy=redundancy) for stage in range(plan.num_stages))
    return frozenset(found[0] for found in holders if len(found) == 1)


def aborting_workers(plan: Plan, *, redundancy: bool) -> frozenset[int]:
    """Return the workers whose loss would abort the step, as nobody else in the pipeline holds a stage of theirs."""
    aborting = set()
    for owners, homes in zip(plan.owners, plan.homes, strict=True):
        for stage, owner in enumerate(owners):
            holders = (homes[stage], homes[plan.shadow_stage(stage)]) if redundancy else (owner,)
            if all(holder == owner or holder in plan.dead for holder in holders):
                aborting.add(owner)
    return frozenset(aborting)


def _faster(plan: Plan, *, shape: Shape, speed: float, bounds: Bounds, costs: Costs) -> str:
    """Say how reason (a) is met; nothing when it is not."""
    if speed < FASTER:
        return ""
    if costs.step_seconds is None:
        return "it is faster"
    saved = costs.horizon_steps * costs.step_seconds * (1 - 1 / speed)
    stall = costs.stall_seconds
    if costs.bytes_per_second is not None:
        moves = moving(plan, num_stages=shape.num_stages, bounds=bounds)
        stall += moves.most / costs.bytes_per_second if moves.measured else 0.0
    return f"{costs.horizon_steps} steps save {saved:.3g} s for a stall of {stall:.3g} s" if saved > stall else ""


def _less_fatal(plan: Plan, after: Plan) -> str:
    """Say how reason (b) is met."""
    fatal, left = (len(fatal_workers(each, redundancy=True)) for each in (plan, after))
    return f"each of {fatal} worker(s) alone holds a stage, then {left} would" if left < fatal else ""


def _less_aborting(plan: Plan, after: Plan, *, speed: float, model: Model) -> str:
    """Say how reason (c) is met."""
    aborting, left = (len(aborting_workers(each, redundancy=True)) for each in (plan, after))
    share, share_left = aborting / len(plan.workers), left / len(after.workers)
    refills = speed >= 1 and (after.num_stages, after.num_pipelines) == (plan.num_stages, plan.num_pipelines)
    as_fast = _pace(plan, model) >= _pace(after, model) / FASTER
    if share_left >= share or not as_fast or not (refills or share >= HALF):
        return ""
    return f"the loss of any of {aborting} in {len(plan.workers)} workers would abort the step, then of {left}"


def _pace(plan: Plan, model: Model) -> float:
    """Return the time per micro-batch when there are so many that filling and emptying the pipelines do not count."""
    return max(_bottlenecks(plan, model)) / plan.num_pipelines


def _bottlenecks(plan: Plan, model: Model) -> list[float]:
    """Return what the worker with the most to do has to do for one micro-batch, by pipeline."""
    costs = model.stage_costs(plan.parts, num_stages=plan.num_stages)
    return [_most_of_a_worker(owners, costs) for owners in plan.owners]


def _most_of_a_worker(owners: tuple[int, ...], costs: tuple[float, ...]) -> float:
    owned = dict.fromkeys(owners, 0.0)
    for owner, cost in zip(owners, costs, strict=True):
        owned[owner] += cost
    return max(owned.values())


def _whole(shape: Shape, model: Model) -> Plan:
    """Return a plan of a shape, of nobody in particular."""
    plan = static_plan(world_size=shape.num_stages * shape.num_pipelines, num_stages=shape.num_stages)
    return replace(plan, parts=model.parts(shape.num_stages))

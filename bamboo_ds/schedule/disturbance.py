"""A step in which a worker is lost, in simulated time: what it takes, and which part of that is the failover.

The step goes undisturbed until the victim is gone; the others go on as far as its messages carry them; then the shadow
takes over and runs what `takeover` says. Compared with
- the same step without loss, all is extra that follows from the loss: work done again, the time until the shadow took
  over, and one worker running two stages until the step ends;
- the same step with the victim's work handed to the shadow for nothing (`free_seconds`), only the first two are: this
  is the pause.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bamboo_ds.errors import ScheduleError
from bamboo_ds.schedule.costs import StageCosts
from bamboo_ds.schedule.operations import Kind, Operation, clock_order, shadow_of, shadowed_stage, validate_owners
from bamboo_ds.schedule.takeover import Takeover
from bamboo_ds.schedule.timing import Simulation, Timeline, simulate
from bamboo_ds.schedule.windows import Orders, Redundancy, worker_orders
from bamboo_ds.schedule.words import REDUCE, STEP, Word, computed, expand


@dataclass(frozen=True, slots=True)
class Disturbance:
    """A step that lost a worker.

    Args:
        victim: The stage whose worker was lost.
        before: The instruction that it did not reach.
        shadow: The home stage of the worker that took over.
        lost_seconds: When, from the start of the step.
        takeover: What the shadow knew and had left to do.
        timeline: When everything ran; the victim's events end with the loss.
        plain_seconds: The step without loss.
        free_seconds: The step if the victim's work had been handed to its shadow at once and for nothing.
    """

    victim: int
    before: Word
    shadow: int
    lost_seconds: float
    takeover: Takeover
    timeline: Timeline
    plain_seconds: float
    free_seconds: float

    @property
    def step_seconds(self) -> float:
        """The step with the loss."""
        return self.timeline.step_seconds

    @property
    def pause_seconds(self) -> float:
        """What the failover itself took: lost work done again, and the time until the shadow took over.

        It can be a little below zero, where the different order happens to suit the others.
        """
        return self.step_seconds - self.free_seconds


def worker_words(orders: Orders, worker: int, *, stages: int) -> tuple[Word, ...]:
    """Return the instructions of a worker that owns its home stage only, with the end of the step."""
    around = (word for operation in orders[worker] for word in expand(operation, stages=stages, owned=(worker,)))
    return (*around, REDUCE, STEP)


def disturb(
    stages: int,
    *,
    micro_batches: int,
    victim: int,
    before: int,
    costs: StageCosts,
    redundancy: Redundancy = "off",
    owners: Sequence[int] | None = None,
    latency_seconds: float = 0.0,
    reroute_seconds: float = 0.0,
) -> Disturbance:
    """Return the step in which the worker of a stage is lost right before one of its instructions.

    Args:
        stages: Number of stages of the pipeline.
        micro_batches: Micro-batches of the pipeline in the step.
        victim: The stage whose worker is lost.
        before: How many instructions of its schedule the victim has finished (see `worker_words`).
        costs: Seconds per operation.
        redundancy: Which redundant forwards run.
        owners: By stage, the home stage of its owner before this loss; None while every stage has its own.
        latency_seconds: From the end of an operation to its result at another worker.
        reroute_seconds: From the loss until the shadow takes over; meanwhile it goes on as before.

    Raises:
        ScheduleError: When a number is out of range, the costs are of another shape, or nobody could take over.
    """
    chosen = validate_owners(owners, stages=stages)
    shadow = _shadow(victim, chosen)
    orders = worker_orders(stages, micro_batches=micro_batches, redundancy=redundancy, costs=costs, owners=chosen)
    words = worker_words(orders, victim, stages=stages)
    if not 0 <= before < len(words):
        raise ScheduleError(f"before={before}: the worker of stage {victim} has instructions 0..{len(words) - 1}")
    plain = simulate(orders, costs, latency_seconds=latency_seconds)
    ended = plain.events[victim][: sum(computed((word,)) is not None for word in words[:before])]
    lost_seconds = ended[-1].finish_seconds if ended else 0.0
    loss = _Loss(orders, micro_batches, costs, latency_seconds, victim, shadow, frozenset(words[:before]))
    takeover, timeline = loss.fail_over(lost_seconds + reroute_seconds)
    return Disturbance(
        victim=victim,
        before=words[before],
        shadow=shadow,
        lost_seconds=lost_seconds,
        takeover=takeover,
        timeline=Timeline({**timeline.events, victim: ended}),
        plain_seconds=plain.step_seconds,
        free_seconds=loss.hand_over(lost_seconds).step_seconds,
    )


def _shadow(victim: int, owners: Sequence[int]) -> int:
    """Return who takes over, or raise ScheduleError."""
    stages = len(owners)
    if not 0 <= victim < stages:
        raise ScheduleError(f"victim={victim}: must be a stage, 0..{stages - 1}")
    shadow = owners[shadow_of(victim, stages=stages)]
    if shadowed_stage(shadow, owners=owners) != victim:
        raise ScheduleError(f"victim={victim}: with owners={tuple(owners)} nobody can take over its work")
    return shadow


@dataclass(frozen=True, slots=True)
class _Loss:
    """The orders of a step, and what of them the victim had done."""

    orders: Orders
    micro_batches: int
    costs: StageCosts
    latency_seconds: float
    victim: int
    shadow: int
    done: frozenset[Word]

    def fail_over(self, resumed_seconds: float) -> tuple[Takeover, Timeline]:
        """Let the shadow run all of the victim's work."""
        sent = [operation for operation, words in self.victims_words() if self.done.issuperset(words)]
        simulation = self.until(resumed_seconds, sent)
        takeover = Takeover(
            home=self.shadow,
            stages=self.costs.stages,
            micro_batches=self.micro_batches,
            done=frozenset(word for operation in self.ran(simulation) for word in self.words(operation, self.shadow)),
            held_by_successor=sum(word.letters == "SA" for word in self.done) if self.costs.stages > 2 else 0,
        )
        order = tuple(filter(None, map(computed, takeover.steps)))
        return takeover, self.resume(simulation, order, resumed_seconds)

    def hand_over(self, resumed_seconds: float) -> Timeline:
        """Let the shadow run what the victim had not done, as if it had the results of all the rest."""
        ended = [operation for operation, words in self.victims_words() if computed(self.done.intersection(words))]
        simulation = self.until(resumed_seconds, ended)
        ran = self.ran(simulation)
        both = clock_order((self.shadow, self.victim), stages=self.costs.stages, micro_batches=self.micro_batches)
        left = [operation for operation in both if operation not in ended and operation not in ran]
        promoted = {operation._replace(kind=Kind.FORWARD) for operation in ran if operation.kind is Kind.REDUNDANT}
        order = [one._replace(kind=Kind.PROMOTED) if one in promoted else one for one in left]
        return self.resume(simulation, order, resumed_seconds)

    def until(self, seconds: float, victims: Sequence[Operation]) -> Simulation:
        """Run the step as far as it gets if the victim runs only these; the shadow starts nothing after `seconds`."""
        simulation = Simulation(
            {**self.orders, self.victim: victims},
            self.costs,
            latency_seconds=self.latency_seconds,
            until={self.shadow: seconds},
        )
        simulation.run()
        return simulation

    def resume(self, simulation: Simulation, order: Sequence[Operation], seconds: float) -> Timeline:
        """Run the rest of the step with the shadow's new order."""
        simulation.replace(self.shadow, order, start_seconds=seconds)
        simulation.run()
        return simulation.finish()

    def ran(self, simulation: Simulation) -> list[Operation]:
        """Return what the shadow has run."""
        return [event.operation for event in simulation.events[self.shadow]]

    def victims_words(self) -> list[tuple[Operation, tuple[Word, ...]]]:
        """Return all operations of the victim with their instructions."""
        return [(operation, self.words(operation, self.victim)) for operation in self.orders[self.victim]]

    def words(self, operation: Operation, worker: int) -> tuple[Word, ...]:
        """Return the instructions of an operation of a worker that owns its home stage only."""
        return expand(operation, stages=self.costs.stages, owned=(worker,))

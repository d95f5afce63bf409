"""Holds a simulated job against a real one that had the same nodes at the same times, with costs measured elsewhere.

What the real cluster decides follows from the trace alone only if everything that a change leads to is over before the
next one: so a trace is `spaced` before it is played.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from bamboo_ds.errors import ConfigError
from bamboo_ds.plan.policy import Action
from bamboo_ds.plan.reshape import Costs
from bamboo_ds.plan.roster import StartRule
from bamboo_ds.schedule.windows import Redundancy
from bamboo_ds.simulator.bamboo import BambooJob
from bamboo_ds.simulator.comparison import Comparison
from bamboo_ds.simulator.constants import Constants
from bamboo_ds.simulator.fleet import Change, PolicyFleet
from bamboo_ds.simulator.membership import instants
from bamboo_ds.simulator.trace import Trace
from bamboo_ds.simulator.workload import Workload

__all__ = ["TOLERANCE", "Course", "Validation", "changes", "simulated", "spaced"]

TOLERANCE = 0.1
"""How far the throughput may be off, either way."""


@dataclass(frozen=True, slots=True)
class Course:
    """What came of a job, simulated or real.

    Attributes:
        samples_per_second: trained.
        failovers: how often nodes were lost at once and shadows took over, so that the step went on.
        reconfigurations: epochs after the first, those from a checkpoint among them.
        aborts: how often nodes were lost at once and the step with them.
        shapes: P x D of each epoch that has begun and whose shape is not that of the one before.
    """

    samples_per_second: float
    failovers: int
    reconfigurations: int
    aborts: int
    shapes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Validation:
    """A simulated and a real course.

    Raises:
        ConfigError: the real job has trained nothing.
    """

    simulated: Course
    real: Course

    def __post_init__(self) -> None:
        if not self.real.samples_per_second > 0:
            raise ConfigError(f"the real job trained {self.real.samples_per_second:g} samples/s: nothing to compare")

    @property
    def throughput_ratio(self) -> float:
        """Simulated over measured."""
        return self.simulated.samples_per_second / self.real.samples_per_second

    @property
    def ok(self) -> bool:
        """Whether the throughput is within the tolerance and the decisions were as many."""
        same = all(left == right for left, right in (self._pair("failovers"), self._pair("reconfigurations")))
        return same and abs(self.throughput_ratio - 1) <= TOLERANCE

    def as_json(self) -> dict[str, Any]:
        """Return it for JSON; pairs are simulated and real."""
        return {
            "ok": self.ok,
            "throughput_ratio": float(f"{self.throughput_ratio:.4g}"),
            **{name: self._pair(name) for name in ("failovers", "reconfigurations", "aborts", "shapes")},
            "samples_per_second": [float(f"{value:.4g}") for value in self._pair("samples_per_second")],
        }

    def _pair(self, name: str) -> list[Any]:
        return [getattr(course, name) for course in (self.simulated, self.real)]


def spaced(trace: Trace, *, speedup: float, gap_seconds: float, seconds: float) -> Trace:
    """Return a trace faster, its instants so far apart that what one leads to is over before the next, and cut.

    Args:
        trace: of a market.
        speedup: seconds of the trace in one second.
        gap_seconds: the least between two instants, and from the last to the end.
        seconds: how long it lasts at most.

    Raises:
        ConfigError: it then has no losses or no joins.
    """
    events, at = [], 0.0
    for number, (instant, group) in enumerate(trace.instants()):
        first = trace.events[0].seconds
        at = 0.0 if number == 0 else max((instant - first) / speedup, at + gap_seconds)
        if at > seconds - gap_seconds:
            break
        events += [replace(event, seconds=at) for event in group]
    cut = Trace.of(trace.name, events, seconds=max((event.seconds for event in events), default=0.0) + gap_seconds)
    if not cut.preemptions or len(cut.events) - cut.preemptions <= cut.live()[0][1]:
        raise ConfigError(
            f"trace {trace.name}: {speedup:g} times as fast, its changes {gap_seconds:g} s apart, {seconds:g} s of it "
            "hold no loss or no join: play it faster or longer"
        )
    return cut


def simulated(workload: Workload, trace: Trace, *, constants: Constants, redundancy: Redundancy = "fit") -> Course:
    """Play a trace whose first nodes begin the job at its second 0, and return what came of it.

    Args:
        workload: what is trained.
        trace: nodes that come train after `warm_up_seconds`, but for the first: they are warm.
        constants: of everything else.
        redundancy: which redundant forwards run.
    """
    comparison = Comparison(workload, constants=constants, redundancy=redundancy, kept=False)
    start, warm_up = constants.reconfigure_seconds, constants.warm_up_seconds
    first = trace.events[0].seconds
    # The first step begins once the first plan is in force.
    events = (
        replace(event, seconds=-warm_up if event.seconds == first else event.seconds + start) for event in trace.events
    )
    shifted = Trace(trace.name, tuple(events), trace.seconds + start)
    rule = StartRule(trace.live()[0][1], constants.patience_seconds)
    fleet = _Fleet(comparison.bounds(redundancy), rule=rule, costs=Costs(), record=True)
    job = BambooJob(fleet, paces=comparison.paces(redundancy, zones=len(trace.zones) > 1), constants=constants)
    ledger = job.play(instants(shifted, warm_up_seconds=warm_up), seconds=shifted.seconds)
    epochs = [decision.plan for decision in fleet.decisions if decision.plan is not None and not decision.plan.version]
    return Course(
        samples_per_second=ledger.samples / trace.seconds,
        failovers=job.counts[Action.FAILOVER],
        reconfigurations=job.counts[Action.RECONFIGURE] + job.counts[Action.RESTORE],
        aborts=job.counts[Action.ABORT],
        shapes=changes(f"{plan.num_stages}x{plan.num_pipelines}" for plan in epochs if plan.epoch not in fleet.unbegun),
    )


class _Fleet(PolicyFleet):
    """A fleet that knows its epochs in which no step was trained: they were aborted before they had begun."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.unbegun: set[int] = set()

    def lose(self, nodes: Iterable[str], *, settled: bool) -> Change:
        """Lose nodes at once."""
        change = super().lose(nodes, settled=settled)
        if change.action is Action.ABORT and not settled and self.plan is not None:
            self.unbegun.add(self.plan.epoch)
        return change


def changes(values: Iterable[str]) -> tuple[str, ...]:
    """Return values without those that are the one before again."""
    return tuple(value for value, _ in groupby(values))

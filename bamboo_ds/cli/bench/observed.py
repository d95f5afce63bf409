"""What a disturbed run tells: what things cost there, when which nodes were there, and what was decided.

All of it is read from what agents and workers wrote down, on the one clock of this machine.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise, takewhile
from typing import Any

from bamboo_ds.cli.chaos.drive import Deed
from bamboo_ds.cli.chaos.journal import Pass, StepLine
from bamboo_ds.cli.chaos.report import EPOCHS, Timeline, at_once
from bamboo_ds.errors import BambooError
from bamboo_ds.simulator.trace import Change, NodeEvent, Trace
from bamboo_ds.simulator.validation import Course, changes
from bamboo_ds.simulator.workload import Layer

__all__ = ["Costs", "costs_of", "course_of", "played"]

Events = Sequence[Mapping[str, Any]]

WARM_STEPS = 3
"""Of the beginning, which are not timed."""


# ---- what things cost ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Costs:
    """What things took in a run, in seconds.

    Attributes:
        forward: of a micro-batch, by stage; likewise `backward`.
        fixed: what all else takes, by the names of the simulation's constants.
        step: undisturbed, as a whole.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    fixed: Mapping[str, float]
    step: float

    def layers(self, layers: Sequence[Layer], *, parts: Sequence[int]) -> tuple[Layer, ...]:
        """Return layers that take together what their stages took.

        Args:
            layers: as each was timed by itself.
            parts: the layer bounds of the stages.
        """
        found: list[Layer] = []
        for (start, stop), forward, backward in zip(pairwise(parts), self.forward, self.backward, strict=True):
            own = layers[start:stop]
            forwards = forward / sum(layer.forward_seconds for layer in own)
            backwards = backward / sum(layer.backward_seconds for layer in own)
            found += (
                replace(
                    layer,
                    forward_seconds=layer.forward_seconds * forwards,
                    backward_seconds=layer.backward_seconds * backwards,
                )
                for layer in own
            )
        return tuple(found)


def costs_of(lines: Sequence[StepLine], deeds: Sequence[Deed], events: Events) -> Costs:
    """Return what things took in a run, on the mean.

    Steps are timed until the first loss, all else over the whole run.

    Args:
        lines: of all workers of a job that is `timed`.
        deeds: what was done to the nodes: at least a loss, the loss of a node that coordinates, and a join.
        events: of the agents.

    Raises:
        BambooError: something did not happen in this run, or nobody has told of it.
    """
    lost = min((deed.at for deed in deeds if deed.change is Change.REMOVE), default=math.inf)
    steps = _steps([line for line in lines if line.at < lost and line.step >= WARM_STEPS])
    reshaped = [event["seconds"] for event in events if event["kind"] == "reshaped" and event["number"][0] > 0]
    rerouted = [event["reroute_ms"] / 1000 for event in events if event["kind"] == "recovered"]
    latency = _mean("message", chain.from_iterable(map(_latencies, steps)))
    fixed = {
        "latency_seconds": latency,
        "commit_seconds": _mean("end of a step", (after.began - step.computed for step, after in pairwise(steps))),
        "detect_seconds": _mean("loss", _noticed(deeds, events, coordinates=False)),
        "lease_seconds": _mean("loss of a coordinator", _noticed(deeds, events, coordinates=True)),
        "reroute_seconds": _mean("failover", rerouted),
        "reconfigure_seconds": _mean("reconfiguration", reshaped),
        "warm_up_seconds": _mean("join", _warm_ups(deeds, events)),
    }
    return Costs(
        forward=_by_stage(steps, "forward", latency),
        backward=_by_stage(steps, "backward", latency),
        fixed=fixed,
        step=_mean("step", (after.began - step.began for step, after in pairwise(steps))),
    )


Where = tuple[int, str, int, int]
"""Of a pass: pipeline, kind, stage and micro-batch."""


class _Step:
    """A step of the whole job.

    Args:
        computed: when the last worker had computed its gradients.
        passes: of all workers, each of which owns one stage.
    """

    def __init__(self, computed: float, passes: Mapping[Where, Pass]) -> None:
        self.computed, self.passes = computed, passes
        self.began = min(each.began for each in passes.values())
        self.orders: dict[tuple[int, int], list[Where]] = {}
        for where in sorted(passes, key=lambda where: passes[where].began):
            self.orders.setdefault((where[0], where[2]), []).append(where)
        self._before = {after: before for order in self.orders.values() for before, after in pairwise(order)}

    def source(self, where: Where) -> Pass | None:
        """Return the pass of another worker that this one waits for; there is none at the ends of a pipeline."""
        pipeline, kind, stage, micro_batch = where
        return self.passes.get((pipeline, kind, stage + (-1 if kind == "forward" else 1), micro_batch))

    def due(self, where: Where, latency_seconds: float) -> float:
        """Return when its worker was free for a pass and had its input; its own beginning for the first of a step."""
        source, before = self.source(where), self._before.get(where)
        arrival = self.began if source is None else source.ended + latency_seconds
        free = self.passes[where].began if before is None else self.passes[before].ended
        return min(max(arrival, free), self.passes[where].began)


def _steps(lines: Iterable[StepLine]) -> list[_Step]:
    """Put what the workers wrote of each step together, in order."""
    by_step: dict[int, list[StepLine]] = {}
    for line in lines:
        if line.passes:
            by_step.setdefault(line.step, []).append(line)
    return [
        _Step(
            max(line.computed for line in same),
            {(line.pipeline, *each[:3]): each for line in same for each in line.passes},
        )
        for _, same in sorted(by_step.items())
    ]


def _by_stage(steps: Sequence[_Step], kind: str, latency_seconds: float) -> tuple[float, ...]:
    """Return how long a pass of a kind takes, by stage: from the moment at which a simulated worker would begin it."""
    seconds: dict[int, list[float]] = {}
    for step in steps:
        for where, each in step.passes.items():
            if each.kind == kind:
                seconds.setdefault(each.stage, []).append(each.ended - step.due(where, latency_seconds))
    return tuple(statistics.fmean(seconds[stage]) for stage in sorted(seconds))


def _latencies(step: _Step) -> Iterator[float]:
    """Yield how long activations and their gradients travelled where they were waited for.

    Every stage waits for its first forward, and for its last backward.
    """
    for order in step.orders.values():
        for where in (order[0], order[-1]):
            source = step.source(where)
            if source is not None:
                yield step.passes[where].began - source.ended


def _noticed(deeds: Sequence[Deed], events: Events, *, coordinates: bool) -> Iterator[float]:
    """Yield the seconds from each loss to the plan that answers it."""
    for deed, until in _losses(deeds):
        leaders = [event["node"] for event in events if event["kind"] == "coordinator" and event["time"] <= deed.at]
        answers = [
            event["time"] for event in events if event["kind"] == "failover" and deed.at <= event["time"] < until
        ]
        if answers and (leaders[-1:] == [deed.node]) is coordinates:
            yield answers[0] - deed.at


def _losses(deeds: Sequence[Deed]) -> Iterator[tuple[Deed, float]]:
    """Yield each loss, and when the next thing happened."""
    for deed, after in pairwise([*deeds, None]):
        if deed is not None and deed.change is Change.REMOVE:
            yield deed, float("inf") if after is None else after.at


def _warm_ups(deeds: Sequence[Deed], events: Events) -> Iterator[float]:
    """Yield the seconds from each node that came after the first ones to a worker that can be given a stage."""
    workers = _workers(events)
    first = deeds[0].live
    for deed in deeds[first:]:
        worker = workers.get(deed.node, (None, ""))[0]
        ready = [event["time"] for event in events if event["kind"] == "worker_ready" and worker in event["workers"]]
        if deed.change is Change.ADD and ready:
            yield ready[-1] - deed.at


def _workers(events: Events) -> dict[str, tuple[int, str]]:
    """Return worker and zone of each node that has joined."""
    joined = (event for event in events if event["kind"] == "node_joined")
    return {event["node"]: (event["workers"][0], event["zone"]) for event in joined}


def _mean(what: str, seconds: Iterable[float]) -> float:
    found = list(seconds)
    if not found:
        raise BambooError(f"the calibration run has seen no {what}: see its logs (--logs)")
    return statistics.fmean(found)


# ---- what happened ---------------------------------------------------------------------------------------------------


def played(timeline: Timeline, events: Events) -> Trace:
    """Return the trace as it was played, from the end of the first step on until that of the last.

    Nodes that come at once are in the order in which they have registered; those that go at once go at the same second.
    """
    begin, end = timeline.steps[0].at, timeline.steps[-1].at
    workers = _workers(events)
    happened: list[tuple[float, int, NodeEvent]] = []
    for deed, moment in zip(timeline.deeds, _moments(timeline.deeds), strict=True):
        if moment <= end:
            at = max(moment - begin, 0.0)
            worker, zone = workers.get(deed.node, (len(workers), ""))
            added = deed.change is Change.ADD
            happened.append((at, worker, NodeEvent(at, deed.change, deed.node, zone if added else "")))
    ordered = [event for *_, event in sorted(happened, key=lambda one: one[:2])]
    return Trace("played", tuple(ordered), end - begin)


def _moments(deeds: Sequence[Deed]) -> Iterator[float]:
    """Yield when each deed was done; for nodes that were removed at once, when the first of them was."""
    bulks = {deed: group[0].at for group in at_once(deeds, Change.REMOVE) for deed in group}
    for deed in deeds:
        yield bulks.get(deed, deed.at)


def course_of(timeline: Timeline, events: Events, *, batch: int) -> Course:
    """Return what came of a run, from the end of its first step on until that of the last.

    Args:
        timeline: of the run.
        events: of its agents.
        batch: samples of a step.
    """
    begin, end = timeline.steps[0].at, timeline.steps[-1].at
    told = [(event["time"], event["action"]) for event in events if begin <= event["time"] <= end and "action" in event]
    answers = [[action for at, action in told if since <= at < until] for since, until in _disturbances(timeline.deeds)]
    return Course(
        samples_per_second=batch * timeline.steps_per_second,
        failovers=sum(map(_held, answers)),
        reconfigurations=sum(action in EPOCHS for _, action in told),
        aborts=sum("abort" in actions for actions in answers),
        shapes=changes(f"{step.stages}x{step.pipelines}" for step in timeline.steps),
    )


def _held(actions: Sequence[str]) -> bool:
    """Return whether of what was decided on nodes that were lost at once a failover held: no abort undid it.

    An abort after the next epoch has begun is one of that epoch.
    """
    step = list(takewhile(lambda action: action not in EPOCHS, actions))
    return "failover" in step and "abort" not in step


def _disturbances(deeds: Sequence[Deed]) -> Iterator[tuple[float, float]]:
    """Yield of each time that nodes were lost at once: when, and until when what follows belongs to it."""
    removed = [group[0].at for group in at_once(deeds, Change.REMOVE)]
    yield from pairwise([*removed, math.inf])

"""Traces and workloads that tests tell in a few words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from bamboo_ds.plan.cluster import Bounds
from bamboo_ds.plan.reshape import Costs
from bamboo_ds.plan.roster import StartRule
from bamboo_ds.simulator.bamboo import BambooJob, Paces
from bamboo_ds.simulator.constants import Constants
from bamboo_ds.simulator.fleet import Fleet, PolicyFleet
from bamboo_ds.simulator.kept import KeptFleet
from bamboo_ds.simulator.membership import instants
from bamboo_ds.simulator.precedents import Precedents
from bamboo_ds.simulator.step_time import StepTimes
from bamboo_ds.simulator.trace import Change, NodeEvent, Trace
from bamboo_ds.simulator.workload import Layer, Workload

SIMPLE = Constants(
    warm_up_seconds=0.0, latency_seconds=0.0, zone_latency_seconds=0.0, bandwidth=1e18, zone_bandwidth=1e18,
    commit_seconds=0.0, commit_seconds_per_pipeline=0.0, detect_seconds=0.0, lease_seconds=0.0, reroute_seconds=0.0,
    reconfigure_seconds=2.0, copy_bandwidth=1e18, restart_seconds=10.0, drop_seconds=5.0, oobleck_seconds=5.0,
)  # fmt: skip
"""Everything that can be instantaneous is; a new epoch takes 2 s."""


def even(layers: int = 4, *, pipelines: int = 2, micro_batches: int = 8, min_stages: int = 1, **sizes: int) -> Workload:
    """Return a model whose layers all take 1 s forward and 2 s backward, a stage each."""
    return Workload(
        name="even",
        layers=tuple(Layer(str(index), 1.0, 2.0, **sizes) for index in range(layers)),
        micro_batch_samples=3,
        micro_batches=micro_batches,
        num_stages=layers,
        pipelines=pipelines,
        min_stages=min_stages,
        on_demand_stages=max(layers // 2, min_stages),
    )


def story(*words: str, seconds: float, zones: Sequence[str] = ("",)) -> Trace:
    """Return a trace told as `0 +8` (8 nodes come at second 0) and `12 -3,4` (nodes n3 and n4 go).

    Args:
        words: as above.
        seconds: how long the trace lasts.
        zones: given to nodes in turn.
    """
    events: list[NodeEvent] = []
    made = 0
    for word in words:
        at, change = word.split()
        if change.startswith("+"):
            for _ in range(int(change[1:])):
                events.append(NodeEvent(float(at), Change.ADD, f"n{made}", zones[made % len(zones)]))
                made += 1
        else:
            events += [NodeEvent(float(at), Change.REMOVE, f"n{node}") for node in change[1:].split(",")]
    return Trace.of("story", events, seconds=seconds)


def bounds_of(workload: Workload, *, redundancy: bool = True) -> Bounds:
    """Return what a job allows."""
    return Bounds(
        workload.num_stages, workload.pipelines, workload.min_stages, redundancy=redundancy, model=workload.model
    )


def fleet_of(workload: Workload, *, kept: bool = False, patience: float = 30.0) -> Fleet:
    """Return a fleet of nobody yet."""
    rule = StartRule(workload.most_workers, patience)
    if kept:
        return KeptFleet(Precedents(bounds_of(workload), costs=Costs()), rule=rule)
    return PolicyFleet(bounds_of(workload), rule=rule, costs=Costs(), record=True)


def job_of(workload: Workload, fleet: Fleet, *, constants: Constants = SIMPLE) -> BambooJob:
    """Return a job that has not begun."""
    return BambooJob(fleet, paces=_paces(workload, constants), constants=constants, record=True)


@lru_cache(maxsize=32)
def _paces(workload: Workload, constants: Constants) -> Paces:
    """Return the paces of lazy redundancy, which costs nothing; what is worked out once serves many tests."""
    plain = StepTimes(workload, constants, "off")
    return Paces(StepTimes(workload, constants, "lflb"), plain=plain, constants=constants)


def played(workload: Workload, trace: Trace, *, kept: bool = False, constants: Constants = SIMPLE) -> BambooJob:
    """Return a job that has played a trace."""
    job = job_of(workload, fleet_of(workload, kept=kept, patience=constants.patience_seconds), constants=constants)
    job.play(instants(trace, warm_up_seconds=constants.warm_up_seconds), seconds=trace.seconds)
    return job


def names(events: Iterable[NodeEvent]) -> list[str]:
    """Return events as `12 -n3`."""
    signs = {Change.ADD: "+", Change.REMOVE: "-"}
    return [f"{event.seconds:g} {signs[event.change]}{event.node}" for event in events]

"""The simulator has no rules of its own: the real coordinator, over the memory store, comes to the same plans.

A trace is played in pretend time. What happened to the fleet is then done to a job in a store, in the same order: nodes
register and lapse, pipelines vote, and the coordinator steps. After each event both must have the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import pytest

from bamboo_ds.elastic import keys
from bamboo_ds.elastic.coordinator import CoordinatorSettings
from bamboo_ds.plan.codec import encode
from bamboo_ds.plan.commit import Ballot
from bamboo_ds.plan.job import JobSettings, JobSpec
from bamboo_ds.plan.plan import Plan
from bamboo_ds.plan.policy import Action
from bamboo_ds.plan.roster import StartRule
from bamboo_ds.simulator.fleet import Change, PolicyFleet, Step
from bamboo_ds.simulator.market import Market, generate
from bamboo_ds.simulator.membership import instants
from bamboo_ds.simulator.trace import NodeEvent, Trace
from bamboo_ds.simulator.workload import Workload
from tests.elastic.coordinating import TTL_SECONDS, Chair, Job, ballot
from tests.simulator.markets import even, fleet_of, job_of, story

PATIENCE_SECONDS = 30.0


@dataclass
class Watched:
    """A fleet that tells what it was asked."""

    fleet: PolicyFleet
    told: list[tuple[str, Any]] = field(default_factory=list)

    @property
    def step(self) -> Step | None:
        return self.fleet.step

    @property
    def coordinator(self) -> str | None:
        return self.fleet.coordinator

    def unplaced(self, nodes: Iterable[str]) -> tuple[str, ...]:
        return self.fleet.unplaced(nodes)

    def begin(self, *, waited_seconds: float) -> Change:
        self.told.append(("begin", waited_seconds))
        return self.fleet.begin(waited_seconds=waited_seconds)

    def join(self, nodes: Sequence[NodeEvent]) -> Change:
        self.told.append(("join", list(nodes)))
        return self.fleet.join(nodes)

    def lose(self, nodes: Iterable[str], *, settled: bool) -> Change:
        lost = list(nodes)
        self.told.append(("lose", (lost, settled)))
        return self.fleet.lose(lost, settled=settled)

    def boundary(self, *, step_seconds: float | None) -> Change:
        self.told.append(("boundary", step_seconds is not None))
        return self.fleet.boundary(step_seconds=step_seconds)


class Cluster:
    """A job in a store, to which the same things happen."""

    def __init__(self, workload: Workload) -> None:
        start = StartRule(workload.most_workers, PATIENCE_SECONDS)
        self.job = Job(CoordinatorSettings(ttl_seconds=TTL_SECONDS, start=start))
        self.chair: Chair = self.job.elect()
        self.made, self.commit = 0, 0
        self.plans: list[Plan] = []
        self.spec = JobSpec(
            publisher=0,
            num_stages=workload.num_stages,
            num_layers=len(workload.layers),
            pipelines=workload.pipelines,
            min_stages=workload.min_stages,
            partitions=workload.model.partitions,
            layer_costs=workload.model.layer_costs,
            layer_bytes=workload.model.layer_bytes,
            micro_batches=workload.micro_batches,
        )
        self.job.publish(self.spec)
        settings = JobSettings(publisher=0, micro_batches=workload.micro_batches)
        self.job.store.put(keys.settings(0), encode(settings))

    def run(self) -> None:
        """Let the coordinator step until it has nothing to do, and note each new plan."""
        while self.chair.step():
            plan = self.plan
            if plan is not None and (not self.plans or self.plans[-1].number != plan.number):
                self.plans.append(plan)

    def join(self, nodes: Sequence[NodeEvent]) -> None:
        for node in nodes:
            self.job.join(node.node, self.made, zone=node.zone)
            self.made += 1
        self.run()

    def begin(self, waited_seconds: float) -> None:
        self.job.advance(waited_seconds)
        self.run()

    def lose(self, lost: Sequence[str], settled: bool) -> None:
        if settled:
            self.settle()
        for node in lost:
            self.job.lapse(node)
        self.run()

    def boundary(self, stepped: bool) -> None:
        """Commit a step, and meet before the next one; after an abort nobody votes."""
        if not stepped:
            self.run()
            return
        self.settle()
        self.vote(lambda pipeline: ballot(self.commit, pipeline))
        self.vote(lambda pipeline: Ballot(votes=(), boundary=True))

    def settle(self) -> None:
        """Let all say that they have everything, in the first round of an epoch."""
        plan = self.plan
        if plan is not None and not plan.aborted and self.chair.view.settled < plan.epoch:
            self.vote(lambda pipeline: Ballot(votes=()))

    def vote(self, cast: Callable[[int], Ballot]) -> None:
        plan = self.plan
        assert plan is not None, "nobody votes without a plan"
        for pipeline in range(plan.num_pipelines):
            self.job.store.put(keys.vote(0, self.commit, plan.number, pipeline), encode(cast(pipeline)))
        self.commit += 1
        self.run()

    @property
    def plan(self) -> Plan | None:
        return self.job.plan if self.job.has(keys.PLAN) else None


def replayed(workload: Workload, trace: Trace) -> list[Plan]:
    """Play a trace in pretend time, then for the real coordinator; return the plans, which must be the same."""
    fleet = fleet_of(workload, patience=PATIENCE_SECONDS)
    assert isinstance(fleet, PolicyFleet)
    watched = Watched(fleet)
    job_of(workload, watched).play(instants(trace, warm_up_seconds=0), seconds=trace.seconds)
    cluster = Cluster(workload)
    for kind, what in watched.told:
        if kind == "join":
            cluster.join(what)
        elif kind == "begin":
            cluster.begin(what)
        elif kind == "lose":
            cluster.lose(*what)
        else:
            cluster.boundary(what)
    ours = [decision.plan for decision in fleet.decisions if decision.plan is not None]
    assert [told(plan) for plan in cluster.plans] == [told(plan) for plan in ours]
    return cluster.plans


def told(plan: Plan) -> dict[str, object]:
    """Return a plan but for the words of its cause."""
    return {each.name: getattr(plan, each.name) for each in fields(Plan) if each.name != "cause"}


@pytest.mark.parametrize(("seed", "zones", "rate"), [(1, 1, 0.6), (2, 3, 0.6), (3, 2, 0.9), (4, 1, 0.9)])
def test_the_real_coordinator_makes_the_same_plans(seed: int, zones: int, rate: float) -> None:
    workload = even(4, pipelines=3, micro_batches=8, min_stages=2, state_bytes=1000)
    trace = generate(Market(nodes=12, hours=3, rate=rate, zones=zones, delay_seconds=300), seed=seed)
    plans = replayed(workload, trace)
    assert len(plans) > 12
    assert plans[-1].epoch > 4
    assert any(plan.version for plan in plans)


def test_also_when_too_few_begin_and_all_are_lost() -> None:
    workload = even(4, pipelines=2, micro_batches=8, min_stages=2)
    words = ("0 +5", "200 +3", "300 -1,3", "301 -0", "700 -2,4,5,6,7", "800 +6", "1500 -9,10")
    plans = replayed(workload, story(*words, seconds=2500))
    assert len(plans) > 4
    assert plans[-1].epoch >= 3


def test_decisions_are_those_of_the_policy() -> None:
    workload = even(4, pipelines=2)
    fleet = fleet_of(workload)
    assert isinstance(fleet, PolicyFleet)
    job = job_of(workload, fleet)
    trace = story("0 +8", "100 -2", "200 +1", "300 -4,6", "900 +2", seconds=2000)
    job.play(instants(trace, warm_up_seconds=0), seconds=trace.seconds)
    actions = [decision.action for decision in fleet.decisions]
    assert actions[:3] == [Action.START, Action.FAILOVER, Action.RECONFIGURE]
    assert all(decision.reason for decision in fleet.decisions)
    numbers = [decision.plan.number for decision in fleet.decisions if decision.plan is not None]
    assert numbers == sorted(numbers)

"""Several ways to train, on the same nodes: the figures of each.

A `Comparison` is for one workload; what it has worked out for one trace serves the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from bamboo_ds.errors import ConfigError
from bamboo_ds.plan.cluster import Bounds
from bamboo_ds.plan.policy import Action
from bamboo_ds.plan.reshape import Costs
from bamboo_ds.plan.roster import StartRule
from bamboo_ds.schedule.windows import Redundancy
from bamboo_ds.simulator.bamboo import BambooJob, Paces
from bamboo_ds.simulator.coarse import CoarseJob, Way
from bamboo_ds.simulator.constants import Constants
from bamboo_ds.simulator.fleet import Fleet, PolicyFleet
from bamboo_ds.simulator.kept import KeptFleet
from bamboo_ds.simulator.ledger import Ledger
from bamboo_ds.simulator.membership import Instant, dollars, instants
from bamboo_ds.simulator.peers import Checkpointing, Dropping, Replicas, Restarting
from bamboo_ds.simulator.precedents import Precedents
from bamboo_ds.simulator.step_time import StepTimes
from bamboo_ds.simulator.trace import Trace
from bamboo_ds.simulator.workload import Workload

__all__ = ["DEFAULT_POLICIES", "POLICIES", "Comparison", "Figures", "Run"]

POLICIES: Mapping[str, str] = {
    "bamboo": "ours, with the redundancy that is asked for",
    "bamboo_eflb": "ours, with the paper's redundancy: every redundant forward",
    "bamboo_lflb": "ours, without redundant forwards",
    "checkpoint": "restart from the last checkpoint on every loss",
    "sample_dropping": "drop the samples of pipelines that lost a node",
    "varuna": "rough model: checkpoints, restart on every change, best shape",
    "oobleck": "rough model: pipelines of unequal depth, reconfigured from replicas",
    "on_demand": "machines that stay, no redundancy",
}
"""What can be compared."""

DEFAULT_POLICIES = ("bamboo", "checkpoint", "sample_dropping", "varuna", "oobleck", "on_demand")

KEPT_ABOVE = 200
"""Nodes above which placement is kept (`kept`): the policy looks at all workers anew, which takes it longer."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What one way to train made of a trace.

    Attributes:
        throughput: samples per second, over the whole trace.
        cost_per_hour: dollars.
        value: samples per dollar.
        goodput: throughput over that of undisturbed training at full capacity times the mean share of nodes there.
        failovers: decisions to let shadows take over.
        reconfigurations: decisions for a new shape or placement; also restarts without a loss.
        fatal_losses: losses that cost the running step, an epoch that had not begun, or more.
        restores: how often a checkpoint was gone back to.
        preemptions: nodes that were lost.
        mean_nodes: nodes there, on the mean.
        samples: trained and not lost; likewise `steps`.
        seconds_by_cause: where the time went.
    """

    throughput: float
    cost_per_hour: float
    value: float
    goodput: float
    failovers: float
    reconfigurations: float
    fatal_losses: float
    restores: float
    preemptions: float
    mean_nodes: float
    samples: float
    steps: float
    seconds_by_cause: Mapping[str, float]

    def as_json(self) -> dict[str, Any]:
        """Return them for JSON, with five significant digits."""
        found = asdict(self)
        by_cause = {cause: round(seconds, 1) for cause, seconds in found.pop("seconds_by_cause").items()}
        return {**{name: float(f"{value:.5g}") for name, value in found.items()}, "seconds_by_cause": by_cause}


@dataclass(frozen=True, slots=True)
class Run:
    """One way on one trace.

    Attributes:
        figures: what came of it.
        ledger: with segments, if they were recorded.
        trace: as it was played.
    """

    figures: Figures
    ledger: Ledger
    trace: Trace


class Comparison:
    """Plays traces with a workload.

    Args:
        workload: what is trained.
        constants: of everything else.
        redundancy: of the policy `bamboo`.
        kept: whether placement is kept; None decides by the number of nodes.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        constants: Constants,
        redundancy: Redundancy = "fit",
        kept: bool | None = None,
    ) -> None:
        self.workload, self.constants, self._redundancy = workload, constants, redundancy
        self.kept = workload.most_workers > KEPT_ABOVE if kept is None else kept
        self._times: dict[tuple[Redundancy, bool, int], StepTimes] = {}
        self._paces: dict[tuple[Redundancy, bool], Paces] = {}
        self._precedents: dict[Redundancy, Precedents] = {}
        self._last: tuple[Trace, Trace, list[Instant]] | None = None

    @property
    def most_nodes(self) -> int:
        """P x D: of a trace with more, the rest is not taken."""
        return self.workload.most_workers

    def run(self, trace: Trace, policy: str, *, record: bool = False) -> Run:
        """Play a trace in one of the ways of `POLICIES`.

        Raises:
            ConfigError: there is no such policy.
        """
        played, _ = self._played(trace)
        zones = len(played.zones) > 1
        if policy in ("bamboo", "bamboo_eflb", "bamboo_lflb"):
            modes: dict[str, Redundancy] = {"bamboo_eflb": "eflb", "bamboo_lflb": "lflb"}
            return self._run_bamboo(trace, modes.get(policy, self._redundancy), zones=zones, record=record)
        if policy == "on_demand":
            return self._run_on_demand(played)
        if policy not in POLICIES:
            raise ConfigError(f"there is no policy {policy}: choose of {', '.join(POLICIES)}")
        return self._run_peer(trace, policy, zones=zones, record=record)

    def _played(self, trace: Trace) -> tuple[Trace, list[Instant]]:
        """Return a trace without the nodes that are not taken, and what a job sees of it; all ways play the same."""
        if self._last is None or self._last[0] is not trace:
            limited = trace.limited(self.most_nodes)
            seen = instants(limited, warm_up_seconds=self.constants.warm_up_seconds)
            self._last = (trace, limited, seen)
        return self._last[1:]

    # ---- Bamboo ----

    def _run_bamboo(self, trace: Trace, redundancy: Redundancy, *, zones: bool, record: bool) -> Run:
        paces = self.paces(redundancy, zones=zones)
        job = BambooJob(self._fleet(redundancy), paces=paces, constants=self.constants, record=record)
        played, seen = self._played(trace)
        ledger = job.play(seen, seconds=played.seconds)
        stages, pipelines = self.workload.num_stages, self.workload.pipelines
        counts = {
            "failovers": job.counts[Action.FAILOVER],
            "reconfigurations": job.counts[Action.RECONFIGURE],
            "fatal_losses": job.counts[Action.ABORT],
            "restores": job.counts[Action.RESTORE],
        }
        full = self.workload.batch / paces.times.whole_seconds(stages, pipelines)
        return Run(self._figures(played, ledger, counts, full=full), ledger, played)

    def _fleet(self, redundancy: Redundancy) -> Fleet:
        rule = StartRule(self.most_nodes, self.constants.patience_seconds)
        if not self.kept:
            return PolicyFleet(self.bounds(redundancy), rule=rule, costs=Costs())
        if redundancy not in self._precedents:
            self._precedents[redundancy] = Precedents(self.bounds(redundancy), costs=Costs())
        return KeptFleet(self._precedents[redundancy], rule=rule)

    def bounds(self, redundancy: Redundancy) -> Bounds:
        """Return what the job allows its plans."""
        workload = self.workload
        return Bounds(
            num_stages=workload.num_stages,
            pipelines=workload.pipelines,
            min_stages=workload.min_stages,
            redundancy=redundancy != "off",
            model=workload.model,
        )

    def paces(self, redundancy: Redundancy, *, zones: bool) -> Paces:
        """Return what steps take."""
        key = (redundancy, zones)
        if key not in self._paces:
            plain = self._times_of("off", zones, self.workload)
            times = self._times_of(redundancy, zones, self.workload)
            self._paces[key] = Paces(times, plain=plain, constants=self.constants)
        return self._paces[key]

    def _times_of(self, redundancy: Redundancy, zones: bool, workload: Workload) -> StepTimes:
        key = (redundancy, zones, workload.pipelines)
        if key not in self._times:
            self._times[key] = StepTimes(workload, self.constants, redundancy, zones)
        return self._times[key]

    # ---- others ----

    def _run_on_demand(self, trace: Trace) -> Run:
        workload, stages = self.workload, self.workload.on_demand_stages
        rate = workload.batch / self._times_of("off", False, workload).whole_seconds(stages, workload.pipelines)
        ledger = Ledger(record=True)
        ledger.segments.append((0.0, trace.seconds, rate))
        ledger.samples, ledger.steps = rate * trace.seconds, int(rate * trace.seconds / workload.batch)
        figures = self._figures(replace(trace, events=()), ledger, {}, full=rate)
        nodes = stages * workload.pipelines
        per_hour = nodes * self.constants.on_demand_price
        by_cause = {**figures.seconds_by_cause, "training": trace.seconds}
        return Run(
            replace(
                figures,
                cost_per_hour=per_hour,
                value=rate * 3600 / per_hour if per_hour else 0.0,
                goodput=1.0,
                mean_nodes=nodes,
                seconds_by_cause=by_cause,
            ),
            ledger,
            trace,
        )

    def _run_peer(self, trace: Trace, policy: str, *, zones: bool, record: bool) -> Run:
        """Play a trace without redundancy, in as many pipelines as the nodes make with the stages that this needs."""
        ours, constants = self.workload, self.constants
        count = max(min(ours.most_workers // ours.on_demand_stages, ours.micro_batches), 1)
        times = self._times_of("off", zones, replace(ours, pipelines=count))
        way = _way(policy, times, constants)
        state_bytes = sum(layer.state_bytes for layer in ours.layers)
        job = CoarseJob(
            way,
            checkpoint_seconds=constants.restart_checkpoint_seconds,
            write_seconds=state_bytes / (constants.storage_bandwidth * ours.on_demand_stages),
            record=record,
        )
        played, seen = self._played(trace)
        ledger = job.play(seen, seconds=played.seconds)
        full = ours.batch / times.whole_seconds(ours.on_demand_stages, count)
        counts = {
            "fatal_losses": job.roll_backs,
            "restores": job.roll_backs,
            "reconfigurations": job.reactions - job.roll_backs,
        }
        return Run(self._figures(played, ledger, counts, full=full), ledger, played)

    def _figures(self, trace: Trace, ledger: Ledger, counts: Mapping[str, int], *, full: float) -> Figures:
        spent = dollars(trace, price=self.constants.spot_price)
        hours = trace.seconds / 3600
        throughput = ledger.samples / trace.seconds if trace.seconds else 0.0
        mean_nodes = trace.mean_live()
        ceiling = full * mean_nodes / self.most_nodes
        return Figures(
            throughput=throughput,
            cost_per_hour=spent / hours if hours else 0.0,
            value=ledger.samples / spent if spent else 0.0,
            goodput=throughput / ceiling if ceiling else 0.0,
            failovers=counts.get("failovers", 0),
            reconfigurations=counts.get("reconfigurations", 0),
            fatal_losses=counts.get("fatal_losses", 0),
            restores=counts.get("restores", 0),
            preemptions=trace.preemptions,
            mean_nodes=mean_nodes,
            samples=ledger.samples,
            steps=ledger.steps,
            seconds_by_cause={cause.value: seconds for cause, seconds in ledger.seconds.items()},
        )


def _way(policy: str, times: StepTimes, constants: Constants) -> Way:
    workload = times.workload
    copy = max(times.workload.sums(workload.on_demand_stages, "state_bytes")) / constants.copy_bandwidth
    usual = Checkpointing(constants.restart_checkpoint_seconds, copy)
    if policy == "checkpoint":
        return Restarting(times, constants=constants, checkpointing=usual)
    if policy == "varuna":
        stalling = replace(usual, stall_seconds=constants.varuna_checkpoint_stall_seconds)
        return Restarting(times, constants=constants, checkpointing=stalling, morphs=True)
    if policy == "sample_dropping":
        return Dropping(times, constants=constants, checkpointing=usual)
    return Replicas(times, constants=constants, checkpointing=usual)

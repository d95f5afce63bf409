"""How long a step takes, under any plan: simulated orders of the real schedules, plus what ends a step.

The slowest pipeline sets the pace. What one takes depends on three things only: its stages, its micro-batches and who
owns which of its stages. There are few such triples, however many nodes, so each is simulated once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from bamboo_ds.schedule.costs import StageCosts
from bamboo_ds.schedule.disturbance import disturb, worker_words
from bamboo_ds.schedule.timing import Timeline, simulate
from bamboo_ds.schedule.windows import Orders, Redundancy, worker_orders
from bamboo_ds.schedule.words import computed
from bamboo_ds.simulator.constants import Constants
from bamboo_ds.simulator.workload import Workload

__all__ = ["StepTimes"]

SAMPLES = 3
"""A loss is simulated at so many stages and so many moments of a step; of others, the nearest stands for it. What is
asked for is small, and a disturbed step takes as long to simulate as five others."""

Owners = tuple[int, ...]
"""By stage of a pipeline, the home stage of its owner."""


@dataclass
class StepTimes:
    """The step times of a workload.

    Args:
        workload: what is trained.
        constants: of network and commit.
        redundancy: which redundant forwards run; "off" also leaves redundant layers out of the reduction.
        zones: whether neighbours are in different zones, as placement puts them where there are several.
    """

    workload: Workload
    constants: Constants
    redundancy: Redundancy
    zones: bool = False
    _pipelines: dict[tuple[int, int, Owners], float] = field(default_factory=dict)
    _extras: dict[tuple[int, int, int, int], float] = field(default_factory=dict)
    _costs: dict[int, StageCosts] = field(default_factory=dict)
    _timelines: dict[tuple[int, int], tuple[Timeline, Orders]] = field(default_factory=dict)
    _ends: dict[tuple[int, int], float] = field(default_factory=dict)

    def costs(self, num_stages: int) -> StageCosts:
        """Return the cost of a micro-batch on each of P stages."""
        if num_stages not in self._costs:
            self._costs[num_stages] = self.workload.stage_costs(num_stages)
        return self._costs[num_stages]

    @property
    def bandwidth(self) -> float:
        """Bytes per second of a link."""
        return self.constants.zone_bandwidth if self.zones else self.constants.bandwidth

    def latency_seconds(self, num_stages: int) -> float:
        """Return how long activations or their gradients travel, on the mean over the borders of stages."""
        borders = self.workload.borders(num_stages)
        latency = self.constants.zone_latency_seconds if self.zones else self.constants.latency_seconds
        return latency + (sum(borders) / len(borders) / self.bandwidth if borders else 0.0)

    def pipeline_seconds(self, micro_batches: int, owners: Owners) -> float:
        """Return what one pipeline computes for, until its last backward."""
        key = (len(owners), micro_batches, owners)
        if key not in self._pipelines:
            self._pipelines[key] = self._simulated(micro_batches, owners)
        return self._pipelines[key]

    def end_seconds(self, num_stages: int, num_pipelines: int) -> float:
        """Return what ends a step: the reduction of gradients and the commit."""
        key = (num_stages, num_pipelines)
        if key not in self._ends:
            votes = self.constants.commit_seconds + self.constants.commit_seconds_per_pipeline * num_pipelines
            self._ends[key] = votes + self._reduce_seconds(num_stages, num_pipelines)
        return self._ends[key]

    def whole_seconds(self, num_stages: int, num_pipelines: int) -> float:
        """Return the step of a plan in which every stage has its own owner."""
        most = math.ceil(self.workload.micro_batches / num_pipelines)
        return self.pipeline_seconds(most, tuple(range(num_stages))) + self.end_seconds(num_stages, num_pipelines)

    def failover_seconds(self, micro_batches: int, num_stages: int, *, stage: int, share: float) -> float:
        """Return how much longer a whole pipeline computes if the owner of a stage is lost in the middle of the step.

        Args:
            micro_batches: of the pipeline.
            num_stages: P.
            stage: home stage of who is lost.
            share: of the undisturbed computation that is over, 0 to 1.
        """
        nearest = round(stage / max(num_stages - 1, 1) * (SAMPLES - 1)) * (num_stages - 1) // (SAMPLES - 1)
        moment = min(int(max(share, 0.0) * SAMPLES), SAMPLES - 1)
        key = (num_stages, micro_batches, nearest, moment)
        if key not in self._extras:
            self._extras[key] = self._disturbed(micro_batches, num_stages, nearest, (moment + 0.5) / SAMPLES)
        return self._extras[key]

    def _simulated(self, micro_batches: int, owners: Owners) -> float:
        stages, costs = len(owners), self.costs(len(owners))
        # What fits into idle windows stretches no step: its orders, which are dearer to make, need not be simulated.
        mode: Redundancy = "off" if self.redundancy == "fit" else self.redundancy
        orders = worker_orders(stages, micro_batches=micro_batches, redundancy=mode, costs=costs, owners=owners)
        return simulate(orders, costs, latency_seconds=self.latency_seconds(stages)).step_seconds

    def _disturbed(self, micro_batches: int, stages: int, stage: int, share: float) -> float:
        disturbance = disturb(
            stages,
            micro_batches=micro_batches,
            victim=stage,
            before=self._instruction(micro_batches, stages, stage, share),
            costs=self.costs(stages),
            redundancy=self.redundancy,
            latency_seconds=self.latency_seconds(stages),
            reroute_seconds=self.constants.detect_seconds + self.constants.reroute_seconds,
        )
        return max(disturbance.step_seconds - disturbance.plain_seconds, 0.0)

    def _instruction(self, micro_batches: int, stages: int, stage: int, share: float) -> int:
        """Return the number of the instruction that a worker is at when so much of the computation is over."""
        key = (stages, micro_batches)
        if key not in self._timelines:
            costs = self.costs(stages)
            orders = worker_orders(stages, micro_batches=micro_batches, redundancy=self.redundancy, costs=costs)
            self._timelines[key] = simulate(orders, costs, latency_seconds=self.latency_seconds(stages)), orders
        timeline, orders = self._timelines[key]
        moment = share * timeline.step_seconds
        done = sum(event.finish_seconds <= moment for event in timeline.events[stage])
        words = worker_words(orders, stage, stages=stages)
        places = [index for index, word in enumerate(words) if computed((word,)) is not None]
        return places[done] if done < len(places) else len(words) - 1

    def _reduce_seconds(self, num_stages: int, num_pipelines: int) -> float:
        """Return the time of the reductions: rings of all owners and shadows of a stage, all stages at once."""
        own = self.workload.sums(num_stages, "gradient_bytes")
        shadowed = self.redundancy != "off" and num_stages > 1
        members = num_pipelines * (2 if shadowed else 1)
        held = [own[s] + (own[(s + 1) % num_stages] if shadowed else 0) for s in range(num_stages)]
        return 2 * (members - 1) / members * max(held) / self.bandwidth

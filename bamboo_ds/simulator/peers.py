"""Other ways to train on the same nodes, as rough models.

- `Restarting`: checkpoints, and on a loss all processes start again from the last one. With `morphs` it is Varuna,
  which does so on every change and takes the best shape for the nodes there are.
- `Dropping`: a pipeline that lost a node is left out, and so are its samples, until nodes fill another one.
- `Replicas`: Oobleck, whose pipelines of unequal depth use all nodes; what is lost comes from another pipeline.

None needs redundant layers, so their pipelines have the stages of machines that stay.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import pairwise

from bamboo_ds.plan.cluster import Bounds, Shape
from bamboo_ds.simulator.coarse import Reaction
from bamboo_ds.simulator.constants import Constants
from bamboo_ds.simulator.ledger import Cause, Pace
from bamboo_ds.simulator.step_time import StepTimes

__all__ = ["Dropping", "Replicas", "Restarting"]

_GRID = 240
"""Into how many pieces a model is cut to see whether some layer is lost: it is a multiple of usual depths."""


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """What checkpoints cost the steps between them."""

    interval_seconds: float
    stall_seconds: float

    def slowed(self, seconds: float, samples: float) -> Pace:
        """Return the pace of a step that takes so long by itself."""
        return Pace(seconds, checkpoint=seconds * self.stall_seconds / self.interval_seconds, samples=samples)


class Restarting:
    """Everything starts again from the last checkpoint: on each loss of a node in use, and when more nodes help.

    Args:
        times: without redundancy.
        constants: how long a restart takes.
        checkpointing: what checkpoints cost.
        morphs: whether it may take another number of stages.
    """

    def __init__(
        self, times: StepTimes, *, constants: Constants, checkpointing: Checkpointing, morphs: bool = False
    ) -> None:
        self._times, self._checkpointing, self._morphs = times, checkpointing, morphs
        self._restart_seconds = constants.restart_seconds
        self._spare: dict[str, None] = {}  # a dict keeps the order
        self._used: dict[str, None] = {}
        self._shape: Shape | None = None

    @property
    def pace(self) -> Pace | None:
        """What a step takes and gives now."""
        if self._shape is None:
            return None
        return self._checkpointing.slowed(self._seconds(self._shape), self._times.workload.batch)

    def change(self, gone: Collection[str], joined: Collection[str]) -> Reaction | None:
        """Start again if a node in use is lost, or if there are enough for a better shape."""
        lost = _remove(self._used, gone)
        _remove(self._spare, gone)
        self._spare.update(dict.fromkeys(joined))
        best = self._best(len(self._used) + len(self._spare))
        if not lost and best == self._shape:
            return None
        begins = self._shape is None
        self._shape = best
        count = best.num_stages * best.num_pipelines if best else 0
        while len(self._used) > count:
            self._spare[self._used.popitem()[0]] = None
        for node in list(self._spare)[: count - len(self._used)]:
            del self._spare[node]
            self._used[node] = None
        return Reaction(self._restart_seconds, Cause.RESTART, rolls_back=bool(lost) or not begins)

    def _best(self, nodes: int) -> Shape | None:
        workload = self._times.workload
        depths = [workload.on_demand_stages]
        if self._morphs:
            depths = list(range(workload.on_demand_stages, workload.num_stages + 1))
        shapes = (Bounds(depth, workload.pipelines, min_stages=depth).shape(nodes) for depth in depths)
        return min(filter(None, shapes), key=self._seconds, default=None)

    def _seconds(self, shape: Shape) -> float:
        return self._times.whole_seconds(shape.num_stages, shape.num_pipelines)


class Dropping:
    """A pipeline that lost a node drops its samples until spare nodes make a whole one again.

    Args:
        times: without redundancy.
        constants: how long a pipeline takes to be left out, or to come back.
        checkpointing: what checkpoints cost.
    """

    def __init__(self, times: StepTimes, *, constants: Constants, checkpointing: Checkpointing) -> None:
        self._times, self._constants, self._checkpointing = times, constants, checkpointing
        self._stages = times.workload.on_demand_stages
        self._pipelines: list[set[str]] = []
        self._spare: dict[str, None] = {}
        self._state_bytes = sum(layer.state_bytes for layer in times.workload.layers)

    @property
    def pace(self) -> Pace | None:
        """What a step takes and gives now: every pipeline keeps its share, whatever happens to the others."""
        count, workload = len(self._pipelines), self._times.workload
        if not count:
            return None
        share = math.ceil(workload.micro_batches / workload.pipelines)
        seconds = self._times.pipeline_seconds(share, tuple(range(self._stages)))
        samples = workload.batch * count / workload.pipelines
        return self._checkpointing.slowed(seconds + self._times.end_seconds(self._stages, count), samples)

    def change(self, gone: Collection[str], joined: Collection[str]) -> Reaction | None:
        """Leave pipelines out that lost a node, and make new ones of spare nodes."""
        before, lost = len(self._pipelines), set(gone)
        broken = [pipeline for pipeline in self._pipelines if not pipeline.isdisjoint(lost)]
        for pipeline in broken:
            self._pipelines.remove(pipeline)
        nobody = before > 0 and not self._pipelines
        _remove(self._spare, gone)
        self._spare.update(dict.fromkeys(node for pipeline in broken for node in sorted(pipeline - lost)))
        self._spare.update(dict.fromkeys(joined))
        made = self._make()
        if not broken and not made:
            return None
        if nobody:
            restore = self._state_bytes / (self._constants.storage_bandwidth * self._stages)
            return Reaction(self._constants.restart_seconds + restore, Cause.RESTART, rolls_back=True)
        return Reaction(self._constants.drop_seconds, Cause.RECONFIGURATION)

    def _make(self) -> int:
        """Make as many pipelines as the spare nodes fill."""
        made = 0
        while len(self._spare) >= self._stages and len(self._pipelines) < self._times.workload.pipelines:
            nodes = list(self._spare)[: self._stages]
            _remove(self._spare, nodes)
            self._pipelines.append(set(nodes))
            made += 1
        return made


class Replicas:
    """Pipelines of unequal depth on all nodes; a loss is answered by new pipelines, with layers from the others.

    Args:
        times: without redundancy.
        constants: how long that takes.
        checkpointing: what checkpoints cost, needed when no pipeline has some layer.
    """

    def __init__(self, times: StepTimes, *, constants: Constants, checkpointing: Checkpointing) -> None:
        self._times, self._constants, self._checkpointing = times, constants, checkpointing
        workload = times.workload
        self._least, self._most = workload.on_demand_stages, workload.num_stages
        self._nodes: dict[str, None] = {}
        self._pipelines: list[list[str]] = []

    @property
    def pace(self) -> Pace | None:
        """What a step takes and gives now; deeper pipelines get more of the batch."""
        if not self._pipelines:
            return None
        total, workload = sum(map(len, self._pipelines)), self._times.workload
        seconds = 0.0
        for depth in {len(pipeline) for pipeline in self._pipelines}:
            share = max(math.ceil(workload.micro_batches * depth / total), 1)
            end = self._times.end_seconds(depth, len(self._pipelines))
            seconds = max(seconds, self._times.pipeline_seconds(share, tuple(range(depth))) + end)
        return self._checkpointing.slowed(seconds, workload.batch)

    def change(self, gone: Collection[str], joined: Collection[str]) -> Reaction | None:
        """Make new pipelines of all nodes."""
        lost = set(gone)
        hit = [row for row in self._pipelines if not lost.isdisjoint(row)]
        begins, fatal = not self._pipelines, self._loses_a_layer(lost, hit)
        _remove(self._nodes, gone)
        self._nodes.update(dict.fromkeys(joined))
        bounds = self._bounds()
        if not hit and [len(row) for row in self._pipelines] == [stop - start for start, stop in pairwise(bounds)]:
            return None
        nodes = list(self._nodes)
        self._pipelines = [nodes[start:stop] for start, stop in pairwise(bounds)]
        if fatal or begins:
            return Reaction(self._constants.restart_seconds, Cause.RESTART, rolls_back=not begins)
        return Reaction(self._constants.oobleck_seconds, Cause.RECONFIGURATION)

    def _bounds(self) -> list[int]:
        """Return where to cut the nodes, into as many pipelines as they make, of about even depth."""
        count = min(len(self._nodes) // self._least, self._times.workload.pipelines)
        used = min(len(self._nodes), count * self._most)
        return [index * used // count for index in range(count + 1)] if count else []

    def _loses_a_layer(self, lost: set[str], hit: list[list[str]]) -> bool:
        """Return whether some piece of the model is lost in every pipeline at once."""
        if not hit or len(hit) < len(self._pipelines):
            return False
        missing = set(range(_GRID))
        for row in hit:
            pieces = set[int]()
            for stage, node in enumerate(row):
                if node in lost:
                    pieces.update(range(stage * _GRID // len(row), (stage + 1) * _GRID // len(row)))
            missing &= pieces
        return bool(missing)


def _remove(nodes: dict[str, None], gone: Iterable[str]) -> list[str]:
    """Remove nodes that are there, and return them."""
    found = [node for node in gone if node in nodes]
    for node in found:
        del nodes[node]
    return found

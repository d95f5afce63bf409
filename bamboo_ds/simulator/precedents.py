"""What the policy says, asked once for each case that differs to it.

What the policy says of a plan depends on few things: which stages of a pipeline are dead; and for a new epoch, which
pipelines are worn, by how much, and which shape the live workers make. With thousands of nodes the same few cases come
again and again. Each is put to the real functions once, on a plan that is made for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import chain

from bamboo_ds.plan.cluster import Bounds, Cluster, Node, Shape
from bamboo_ds.plan.membership import Cause, Loss
from bamboo_ds.plan.moving import moving
from bamboo_ds.plan.plan import NOBODY, Plan
from bamboo_ds.plan.policy import Lost, decide, unheld_stages
from bamboo_ds.plan.reshape import Costs, weigh
from bamboo_ds.simulator.fleet import unreported

__all__ = ["Dead", "Precedents", "owners_of"]

Dead = frozenset[int]
"""Stages of a pipeline whose home is dead."""

_Worn = tuple[int, Dead]
"""A pipeline with dead homes: its micro-batches, and which."""


class Precedents:
    """What the policy has said of plans, by all that counts for it. May be shared by jobs with the same bounds.

    Args:
        bounds: of the jobs.
        costs: of a new epoch.
    """

    def __init__(self, bounds: Bounds, *, costs: Costs) -> None:
        self.bounds, self._costs = bounds, costs
        self._judged: dict[tuple[Shape, Shape, tuple[_Worn, ...]], bool] = {}
        self._tables: dict[tuple[int, int], tuple[tuple[int, ...], ...]] = {}
        self._costs_of: dict[int, tuple[float, ...]] = {}
        self._firsts: dict[tuple[int, int, float], Dead] = {}

    def reshape(
        self, stages: int, rows: int, dead: Mapping[int, Dead], shape: Shape, step_seconds: float | None
    ) -> bool:
        """Return whether a plan with dead homes should give way to one of another or the same shape.

        Args:
            stages: P of the plan.
            rows: D of the plan.
            dead: by pipeline that has them.
            shape: the largest that the live workers make.
            step_seconds: of the plan.
        """
        now, worn = Shape(stages, rows), [(self._share(row, rows), each) for row, each in dead.items()]
        if rows - len(dead) >= 2 and stages > 3:
            worn = self._alike(worn, now)
        key = (now, shape, tuple(sorted(worn, key=lambda one: (one[0], sorted(one[1])))))
        if key not in self._judged:
            self._judged[key] = self._weigh(now, shape, key[2], step_seconds)
        return self._judged[key]

    def table(self, before: int, after: int) -> tuple[tuple[int, ...], ...]:
        """Return the bytes that a worker lacks, by its stage before (last: it had none) and its stage after."""
        if (before, after) not in self._tables:
            plan = _plan(Shape(before, 1), {}, self.bounds)
            self._tables[before, after] = moving(plan, num_stages=after, bounds=self.bounds).table
        return self._tables[before, after]

    def aborts(self, stages: int, before: Dead, lost: Dead, *, settled: bool) -> bool:
        """Return whether a pipeline whose homes `before` are dead cannot go on when it loses others."""
        return _after(stages, before, lost, settled, self.bounds.redundancy).aborted

    def unreported(self, stages: int, before: Dead, lost: Dead) -> bool:
        """Return whether a pipeline whose homes `before` are dead has nobody who can report the loss of others."""
        return _unreported(stages, before, lost, self.bounds.redundancy)

    def has_unheld_stages(self, stages: int, rows: int, dead: Mapping[int, Dead]) -> bool:
        """Return whether the layers of some stage are with nobody alive."""
        plan = _plan(Shape(stages, rows), dead, self.bounds)
        alive = set(chain.from_iterable(plan.homes)) - plan.dead
        return bool(unheld_stages(plan, alive=alive, redundancy=self.bounds.redundancy))

    def _share(self, row: int, rows: int) -> int:
        """Return how many micro-batches a row has of a global batch (`Plan.share`)."""
        total = self.bounds.model.micro_batches or 0
        return (row + 1) * total // rows - row * total // rows

    def _alike(self, worn: list[_Worn], now: Shape) -> list[_Worn]:
        """Return worn pipelines that may stand for these before the policy.

        As long as two pipelines are whole, every layer has several holders. Then only counts what the slowest have to
        do, and how many workers' loss would abort the step; where in a pipeline its dead homes are does not.
        """
        stages = now.num_stages
        if not worn:
            return []
        slowest = max(worn, key=lambda one: (one[0] * self._load(one[1], stages), one[0], sorted(one[1])))
        widest = max(worn, key=lambda one: (self._load(one[1], stages), one[0], sorted(one[1])))
        least, others = min(share for share, _ in worn), list(worn)
        for one in {slowest, widest}:
            others.remove(one)
        danger = sum(_danger(dead, stages) for _, dead in others)
        pace = [(share, self._first_like(dead, stages)) for share, dead in {slowest, widest}]
        alike = pace + [(least, dead) for dead in self._as_dangerous(danger, stages)]
        there = Counter(self._share(row, now.num_pipelines) for row in range(now.num_pipelines))
        return alike if Counter(share for share, _ in alike) <= there else worn

    def _first_like(self, dead: Dead, stages: int) -> Dead:
        """Return the first dead homes met that count like these."""
        return self._firsts.setdefault((stages, _danger(dead, stages), self._load(dead, stages)), dead)

    def _as_dangerous(self, danger: int, stages: int) -> list[Dead]:
        """Return dead homes of other pipelines that are as dangerous together, and slow nothing down."""
        odd: list[Dead] = []
        if danger % 2:
            pairs = (frozenset({stage, (stage + 2) % stages}) for stage in range(stages))
            odd = [min(pairs, key=lambda each: self._load(each, stages))]
        single = min((frozenset({stage}) for stage in range(stages)), key=lambda each: self._load(each, stages))
        return [*odd, *[single] * ((danger - 3 * len(odd)) // 2)]

    def _load(self, dead: Dead, stages: int) -> float:
        """Return what the busiest worker of a pipeline has to do when these homes are dead."""
        if stages not in self._costs_of:
            model = self.bounds.model
            self._costs_of[stages] = model.stage_costs(model.parts(stages), num_stages=stages)
        costs = self._costs_of[stages]
        return round(max(*costs, *(costs[stage] + costs[stage - 1] for stage in dead)), 9)

    def _weigh(self, now: Shape, shape: Shape, worn: Iterable[_Worn], step_seconds: float | None) -> bool:
        rows = list(range(now.num_pipelines))
        placed: dict[int, Dead] = {}
        for share, dead in worn:
            row = next(row for row in rows if self._share(row, now.num_pipelines) == share)
            rows.remove(row)
            placed[row] = dead
        plan, costs = _plan(now, placed, self.bounds), replace(self._costs, step_seconds=step_seconds)
        return weigh(plan, shape=shape, bounds=self.bounds, costs=costs, workers=len(plan.workers)).reshape


@lru_cache(maxsize=4096)
def _after(stages: int, before: Dead, lost: Dead, settled: bool, redundancy: bool) -> Plan:
    """Return what the policy makes of one pipeline whose homes `before` are dead on losing others; ids are stages."""
    plan = Plan(owners=(tuple(range(stages)),))
    if before:
        plan = _after(stages, frozenset(), before, True, redundancy)
    losses = tuple(Loss(worker, Cause.LEASE, "gone") for worker in sorted(lost))
    nodes = tuple(Node(str(stage), "", (stage,)) for stage in range(stages) if stage not in before | lost)
    decision = decide(Cluster(Bounds(stages, redundancy=redundancy), nodes), plan, Lost(losses, settled=settled))
    return plan if decision.plan is None else decision.plan


@lru_cache(maxsize=4096)
def _unreported(stages: int, before: Dead, lost: Dead, redundancy: bool) -> bool:
    return unreported(_after(stages, frozenset(), before, True, redundancy), lost, redundancy=redundancy)


def owners_of(stages: int, dead: Dead) -> tuple[int, ...]:
    """Return the owners of a pipeline that goes on although these homes are dead."""
    return _after(stages, frozenset(), dead, True, True).owners[0] if dead else tuple(range(stages))


def _danger(dead: Dead, stages: int) -> int:
    """Return how many workers' loss would abort the step: who owns a dead home's stage, and who has no shadow left."""
    return 2 * len(dead) - sum((stage + 2) % stages in dead for stage in dead)


def _plan(shape: Shape, worn: Mapping[int, Dead], bounds: Bounds) -> Plan:
    """Return a plan with these homes dead; worker ids count up along the pipelines."""
    stages = shape.num_stages
    homes = tuple(tuple(range(row * stages, (row + 1) * stages)) for row in range(shape.num_pipelines))
    owners = list(homes)
    for row, dead in worn.items():
        owners[row] = tuple(NOBODY if owner == NOBODY else homes[row][owner] for owner in owners_of(stages, dead))
    gone = frozenset(homes[row][stage] for row, dead in worn.items() for stage in dead)
    return Plan(owners=tuple(owners), homes=homes, dead=gone, parts=bounds.model.parts(stages))

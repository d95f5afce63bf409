"""A fleet for thousands of nodes: the same decisions as `PolicyFleet`'s, with a placement that is kept as it is.

What the policy says of a plan depends on few things: which stages of a pipeline are dead, and for a new epoch which
pipelines are worn and which shape the live workers make. Each such case is put to the real functions once, on a plan
made for it. Only who stands where is our own: workers stay, and whoever is missing is replaced by a spare worker, of
another zone than its neighbours' if there is one. `plan.placement` aims at the same, fewest bytes and spread zones,
but looks at all workers anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain

from bamboo_ds.plan.cluster import Bounds, Cluster, Node, Shape
from bamboo_ds.plan.membership import Cause, Loss
from bamboo_ds.plan.moving import moving
from bamboo_ds.plan.plan import NOBODY, Plan
from bamboo_ds.plan.policy import Action, Lost, decide, unheld_stages
from bamboo_ds.plan.reshape import Costs, weigh
from bamboo_ds.plan.roster import StartRule, close_roster
from bamboo_ds.simulator.fleet import Change, Hit, Step
from bamboo_ds.simulator.trace import NodeEvent

__all__ = ["KeptFleet", "Precedents"]

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
        if rows - len(dead) >= 2:
            worn = self._alike(worn, stages)
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

    def _share(self, row: int, rows: int) -> int:
        """Return how many micro-batches a row has of a global batch (`Plan.share`)."""
        total = self.bounds.model.micro_batches or 0
        return (row + 1) * total // rows - row * total // rows

    def _alike(self, worn: Sequence[_Worn], stages: int) -> list[_Worn]:
        """Return worn pipelines that may stand for these before the policy.

        As long as two pipelines are whole, every layer has several holders. Then only counts what the slowest have to
        do, and how many workers' loss would abort the step; where in a pipeline its dead homes are does not.
        """
        if not worn:
            return []
        slowest = max(worn, key=lambda one: (one[0] * self._load(one[1], stages), one[0], sorted(one[1])))
        widest = max(worn, key=lambda one: (self._load(one[1], stages), one[0], sorted(one[1])))
        least, others = min(share for share, _ in worn), list(worn)
        for one in {slowest, widest}:
            others.remove(one)
        danger = sum(_danger(dead, stages) for _, dead in others)
        pace = [(share, self._first_like(dead, stages)) for share, dead in {slowest, widest}]
        return pace + [(least, dead) for dead in self._as_dangerous(danger, stages)]

    def _first_like(self, dead: Dead, stages: int) -> Dead:
        """Return the first dead homes met that count like these."""
        return self._firsts.setdefault((stages, _danger(dead, stages), self._load(dead, stages)), dead)

    def _as_dangerous(self, danger: int, stages: int) -> list[Dead]:
        """Return dead homes of other pipelines that are as dangerous together, and slow nothing down."""
        if danger % 2 and stages > 3:
            pairs = (frozenset({stage, (stage + 2) % stages}) for stage in range(stages))
            odd = [min(pairs, key=lambda each: self._load(each, stages))]
        else:
            odd = []
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


class KeptFleet:
    """Rows of workers that are repaired.

    Args:
        precedents: what the policy says.
        rule: when the job begins.
    """

    def __init__(self, precedents: Precedents, *, rule: StartRule) -> None:
        self._precedents, self._bounds, self._rule = precedents, precedents.bounds, rule
        self._rows: list[list[str]] = []
        self._dead: dict[int, Dead] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self._spare = _Spare()
        self._zones: dict[str, str] = {}
        self._aborted = True

    @property
    def step(self) -> Step | None:
        """The current plan; None while nobody can train."""
        if self._aborted:
            return None
        stages = len(self._rows[0])
        return Step(Shape(stages, len(self._rows)), {row: _owners(stages, dead) for row, dead in self._dead.items()})

    def begin(self, *, waited_seconds: float) -> Change:
        """Begin the job if those who are ready may."""
        roster = close_roster(self._rule, ready=range(len(self._spare)), waited_seconds=waited_seconds)
        shape = None if roster is None else self._bounds.shape(len(self._spare))
        return Change(Action.WAIT) if shape is None else self._new_epoch(Action.START, shape)

    def join(self, nodes: Sequence[NodeEvent]) -> Change:
        """Let nodes become ready."""
        for node in nodes:
            self._zones[node.node] = node.zone
            self._spare.add(node.node, node.zone)
        return Change(Action.STANDBY)

    def lose(self, nodes: Iterable[str], *, settled: bool) -> Change:
        """Lose nodes at once."""
        lost: dict[int, set[int]] = {}
        for node in nodes:
            zone = self._zones.pop(node)
            place = self._places.pop(node, None)
            if place is None:
                self._spare.remove(node, zone)
            else:
                lost.setdefault(place[0], set()).add(place[1])
        if not lost:
            return Change(Action.KEEP)
        hits = list(chain.from_iterable(self._hit(row, frozenset(stages), settled) for row, stages in lost.items()))
        return Change(Action.ABORT) if self._aborted else Change(Action.FAILOVER, tuple(hits))

    def boundary(self, *, step_seconds: float | None) -> Change:
        """Decide when no step runs."""
        shape = self._bounds.shape(len(self._places) + len(self._spare))
        if shape is None:
            return Change(Action.WAIT if self._aborted else Action.KEEP)
        if self._aborted:
            unheld = len(self._dead) == len(self._rows) and self._has_unheld_stages()
            return self._new_epoch(Action.RESTORE if unheld else Action.RECONFIGURE, shape)
        if self._precedents.reshape(len(self._rows[0]), len(self._rows), self._dead, shape, step_seconds):
            return self._new_epoch(Action.RECONFIGURE, shape)
        return Change(Action.KEEP)

    # ---- what the policy says ----

    def _hit(self, row: int, stages: Dead, settled: bool) -> Iterator[Hit]:
        """Lose stages of a row; yield those that change hands."""
        count, before = len(self._rows[row]), self._dead.get(row, frozenset())
        self._dead[row] = before | stages
        if _after(count, before, stages, settled, self._bounds.redundancy).aborted:
            self._aborted = True
        elif not self._aborted:
            yield from (Hit(row, stage) for stage in sorted(stages))

    def _has_unheld_stages(self) -> bool:
        plan = _plan(Shape(len(self._rows[0]), len(self._rows)), self._dead, self._bounds)
        alive = set(chain.from_iterable(plan.homes)) - plan.dead
        return bool(unheld_stages(plan, alive=alive, redundancy=self._bounds.redundancy))

    # ---- who stands where ----

    def _new_epoch(self, action: Action, shape: Shape) -> Change:
        """Give all places of a shape to workers, and say how much the busiest of them must receive."""
        before = len(self._rows[0]) if self._rows else shape.num_stages
        surplus = len(self._rows) - shape.num_pipelines if before == shape.num_stages else len(self._rows)
        homes = self._drop(max(surplus, 0))
        filled = [*self._repair(), *self._extend(shape)]
        self._dead, self._aborted = {}, False
        table = self._precedents.table(before, shape.num_stages)
        moved = (table[homes.get(node, NOBODY)][self._places[node][1]] for node in filled)
        return Change(action, moved_bytes=max(moved, default=0))

    def _drop(self, count: int) -> dict[str, int]:
        """Dissolve so many rows, the most worn first; return their workers, who become spare, with their stages."""
        order = sorted(range(len(self._rows)), key=lambda row: (-len(self._dead.get(row, ())), -row))
        homes = {}
        for row in order[:count]:
            for stage, node in self._alive(row):
                del self._places[node]
                self._spare.add(node, self._zones[node])
                homes[node] = stage
        for gap in sorted(order[:count], reverse=True):
            self._close(gap)
        return homes

    def _alive(self, row: int) -> Iterator[tuple[int, str]]:
        dead = self._dead.get(row, frozenset())
        return ((stage, node) for stage, node in enumerate(self._rows[row]) if stage not in dead)

    def _close(self, gap: int) -> None:
        """Remove a row; the last one takes its number."""
        self._dead.pop(gap, None)
        last = len(self._rows) - 1
        moved = self._rows.pop()
        if gap == last:
            return
        self._rows[gap] = moved
        if last in self._dead:
            self._dead[gap] = self._dead.pop(last)
        for stage, node in self._alive(gap):
            self._places[node] = (gap, stage)

    def _repair(self) -> Iterator[str]:
        """Fill the places of the dead; yield who fills them."""
        for row, dead in self._dead.items():
            for stage in sorted(dead):
                yield self._fill(row, stage)

    def _extend(self, shape: Shape) -> Iterator[str]:
        """Add the rows that are missing; yield who fills them."""
        for row in range(len(self._rows), shape.num_pipelines):
            self._rows.append([""] * shape.num_stages)
            for stage in range(shape.num_stages):
                yield self._fill(row, stage)

    def _fill(self, row: int, stage: int) -> str:
        nodes = self._rows[row]
        beside = {self._zones.get(nodes[stage - 1]), self._zones.get(nodes[(stage + 1) % len(nodes)])}
        node = self._spare.take(beside)
        nodes[stage] = node
        self._places[node] = (row, stage)
        return node


class _Spare:
    """Workers without a place, by zone; the oldest of a zone comes first."""

    def __init__(self) -> None:
        self._by_zone: dict[str, dict[str, None]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, node: str, zone: str) -> None:
        self._by_zone.setdefault(zone, {})[node] = None
        self._count += 1

    def remove(self, node: str, zone: str) -> None:
        del self._by_zone[zone][node]
        self._count -= 1

    def take(self, avoided: set[str | None]) -> str:
        """Take one of the fullest zone that is not to be avoided, or of the fullest."""
        filled = [zone for zone, nodes in self._by_zone.items() if nodes]
        zone = max(filled, key=lambda zone: (zone not in avoided, len(self._by_zone[zone])))
        node = next(iter(self._by_zone[zone]))
        self.remove(node, zone)
        return node


@lru_cache(maxsize=4096)
def _after(stages: int, before: Dead, lost: Dead, settled: bool, redundancy: bool) -> Plan:
    """Return what the policy makes of one pipeline whose homes `before` are dead when it loses others: ids are stages."""
    plan = Plan(owners=(tuple(range(stages)),))
    if before:
        plan = _after(stages, frozenset(), before, True, redundancy)
    losses = tuple(Loss(worker, Cause.LEASE, "gone") for worker in sorted(lost))
    nodes = tuple(Node(str(stage), "", (stage,)) for stage in range(stages) if stage not in before | lost)
    decision = decide(Cluster(Bounds(stages, redundancy=redundancy), nodes), plan, Lost(losses, settled=settled))
    return plan if decision.plan is None else decision.plan


def _owners(stages: int, dead: Dead) -> tuple[int, ...]:
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
        owners[row] = tuple(NOBODY if owner == NOBODY else homes[row][owner] for owner in _owners(stages, dead))
    gone = frozenset(homes[row][stage] for row, dead in worn.items() for stage in dead)
    return Plan(owners=tuple(owners), homes=homes, dead=gone, parts=bounds.model.parts(stages))

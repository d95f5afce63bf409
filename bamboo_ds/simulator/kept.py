"""A fleet for thousands of nodes: the decisions are the policy's (`precedents`), and the placement is kept as it is.

Who stands where is our own: workers stay, and whoever is missing is replaced by a spare worker, of another zone than
its neighbours' if there is one. `plan.placement` aims at the same, fewest bytes moved and spread zones, but looks at
all workers anew each time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from bamboo_ds.plan.cluster import Shape
from bamboo_ds.plan.plan import NOBODY
from bamboo_ds.plan.policy import Action
from bamboo_ds.plan.roster import StartRule, close_roster
from bamboo_ds.simulator.fleet import Change, Hit, Step
from bamboo_ds.simulator.precedents import Dead, Precedents, owners_of
from bamboo_ds.simulator.trace import NodeEvent

__all__ = ["KeptFleet"]


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
        return Step(Shape(stages, len(self._rows)), {row: owners_of(stages, dead) for row, dead in self._dead.items()})

    @property
    def coordinator(self) -> str | None:
        """The node that coordinates."""
        return next(iter(self._zones), None)

    def unplaced(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """Return those of some nodes that have no stage."""
        return tuple(node for node in nodes if node not in self._places) if self._rows else ()

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
        coordinator = self.coordinator
        for node in nodes:
            zone = self._zones.pop(node)
            place = self._places.pop(node, None)
            if place is None:
                self._spare.remove(node, zone)
            else:
                lost.setdefault(place[0], set()).add(place[1])
        by_lease = coordinator not in self._zones or self._is_unreported(lost)
        if not lost:
            return Change(Action.KEEP, by_lease=by_lease)
        hits = list(chain.from_iterable(self._hit(row, frozenset(stages), settled) for row, stages in lost.items()))
        action = Action.ABORT if self._aborted else Action.FAILOVER
        return Change(action, () if self._aborted else tuple(hits), by_lease=by_lease)

    def boundary(self, *, step_seconds: float | None) -> Change:
        """Decide when no step runs."""
        shape = self._bounds.shape(len(self._places) + len(self._spare))
        if shape is None:
            return Change(Action.WAIT if self._aborted else Action.KEEP)
        if self._aborted:
            size = (len(self._rows[0]), len(self._rows))
            unheld = len(self._dead) == len(self._rows) and self._precedents.has_unheld_stages(*size, self._dead)
            return self._new_epoch(Action.RESTORE if unheld else Action.RECONFIGURE, shape)
        if self._precedents.reshape(len(self._rows[0]), len(self._rows), self._dead, shape, step_seconds):
            return self._new_epoch(Action.RECONFIGURE, shape)
        return Change(Action.KEEP)

    def _is_unreported(self, lost: Mapping[int, Collection[int]]) -> bool:
        """Return whether in some row nobody can report the stages that it loses."""
        nobody = frozenset[int]()
        return any(
            self._precedents.unreported(len(self._rows[row]), self._dead.get(row, nobody), frozenset(stages))
            for row, stages in lost.items()
        )

    def _hit(self, row: int, stages: Dead, settled: bool) -> Iterator[Hit]:
        """Lose stages of a row; yield those that change hands."""
        before = self._dead.get(row, frozenset())
        self._dead[row] = before | stages
        if self._precedents.aborts(len(self._rows[row]), before, stages, settled=settled):
            self._aborted = True
        elif not self._aborted:
            yield from (Hit(row, stage) for stage in sorted(stages))

    # ---- who stands where ----

    def _new_epoch(self, action: Action, shape: Shape) -> Change:
        """Give all places of a shape to workers, and say how much the busiest of them must receive."""
        before = len(self._rows[0]) if self._rows else shape.num_stages
        surplus = len(self._rows) - shape.num_pipelines if before == shape.num_stages else len(self._rows)
        homes = self._drop(max(surplus, 0))
        filled = [*self._repair(), *self._extend(shape)]
        self._dead, self._aborted = {}, False
        table = self._precedents.table(before, shape.num_stages)
        if action is Action.START:
            return Change(action)  # everybody makes its own layers
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

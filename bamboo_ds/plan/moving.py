"""What a new epoch moves: which bytes each worker lacks for each stage that it may be given.

A worker holds the layers of its home and, with redundancy, of the next stage; whoever took a stage over in a failover
held it before. So what a worker lacks depends on its old home alone, and one small table says it for all.

The trick for models whose cut is unknown: P and P' stages of even size are both made of whole pieces when the model is
cut into lcm(P, P') of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm

from bamboo_ds.plan.cluster import Bounds
from bamboo_ds.plan.plan import Place, Plan


@dataclass(frozen=True, slots=True)
class Moving:
    """What giving the stages of a new epoch to workers moves.

    Attributes:
        homes: place of each worker in the epoch before; joiners have none.
        table: bytes that a worker lacks, by its old home's stage and by new stage. The last row is of who has nothing.
        measured: whether these are bytes; else they are parts of the model, good for comparison only.
    """

    homes: Mapping[int, Place]
    table: tuple[tuple[int, ...], ...]
    measured: bool

    def kind(self, worker: int) -> int:
        """Return the index of a worker's row in the table: workers of one kind lack the same."""
        home = self.homes.get(worker)
        return len(self.table) - 1 if home is None else home.stage

    def row(self, worker: int) -> tuple[int, ...]:
        """Return, by new stage, the bytes that a worker must receive before it can own it and shadow the next one."""
        return self.table[self.kind(worker)]

    def total(self, owners: Iterable[Sequence[int]]) -> int:
        """Return the bytes that all workers of a layout must receive."""
        return sum(self.row(worker)[stage] for pipeline in owners for stage, worker in enumerate(pipeline))

    @property
    def most(self) -> int:
        """The most that one worker may have to receive: all that it needs."""
        return max(self.table[-1])


def moving(plan: Plan, *, num_stages: int, bounds: Bounds) -> Moving:
    """Return what moves when the epoch after `plan` has `num_stages` stages.

    Args:
        plan: the plan whose epoch ends; its workers hold what they were given when it began.
        num_stages: P of the new epoch.
        bounds: redundancy, and what is known of the model.
    """
    parts, layer_bytes = bounds.model.parts(num_stages), bounds.model.layer_bytes
    old = plan.parts
    if not (old and parts):
        pieces = lcm(plan.num_stages, num_stages)
        old, parts = _even(plan.num_stages, pieces), _even(num_stages, pieces)
        layer_bytes = ()
    sizes = layer_bytes or (1,) * parts[-1]
    held = [*_needed(old, redundancy=bounds.redundancy), frozenset[int]()]
    wanted = _needed(parts, redundancy=bounds.redundancy)
    return Moving(
        homes={
            worker: Place(pipeline=pipeline, stage=stage)
            for pipeline, homes in enumerate(plan.homes)
            for stage, worker in enumerate(homes)
        },
        table=tuple(tuple(sum(sizes[layer] for layer in need - have) for need in wanted) for have in held),
        measured=bool(layer_bytes),
    )


def _even(stages: int, pieces: int) -> tuple[int, ...]:
    return tuple(range(0, pieces + 1, pieces // stages))


def _needed(parts: tuple[int, ...], *, redundancy: bool) -> list[frozenset[int]]:
    """Return the layers that the worker of each stage has: its own and, with redundancy, those of the next stage."""
    own = [frozenset(range(start, stop)) for start, stop in pairwise(parts)]
    return [layers | own[(stage + 1) % len(own)] if redundancy else layers for stage, layers in enumerate(own)]

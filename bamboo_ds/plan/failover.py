"""What is left of a plan when workers are lost: the shadow of each lost stage owns it, in the same epoch.

The trick: inside an epoch the owner of a stage is a function of the homes and the dead alone. It is the worker whose
home the stage is; when that one is dead, its shadow, which has held the layers since the epoch began; when that one is
dead too, nobody. So the order of losses does not matter, and no stage can go to a worker that does not hold it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from bamboo_ds.plan.plan import NOBODY, Place, Plan


@dataclass(frozen=True, slots=True)
class Takeover:
    """One stage that changes hands.

    Attributes:
        place: pipeline and stage.
        victim: who owned it.
        shadow: who owns it now; `NOBODY` when it is lost.
    """

    place: Place
    victim: int
    shadow: int


def fail_over(plan: Plan, lost: Iterable[int], *, redundancy: bool, cause: str = "") -> Plan:
    """Return the plan's next version, in which the shadows own the stages of the lost workers.

    It is aborted when a stage is lost: its owner and its shadow are both gone, or there is no shadow (P = 1, no
    redundancy). What was aborted stays so until the epoch ends.

    Args:
        plan: the plan before.
        lost: ids of workers that are gone.
        redundancy: whether shadows hold redundant layers.
        cause: why, for people.
    """
    dead = plan.dead.union(lost)
    owners = tuple(
        row if dead.isdisjoint(row) else _owners(homes, dead, redundancy=redundancy)
        for row, homes in zip(plan.owners, plan.homes, strict=True)
    )
    aborted = plan.aborted or any(NOBODY in row for row in owners)
    return replace(plan, owners=owners, version=plan.version + 1, dead=dead, aborted=aborted, cause=cause)


def takeovers(before: Plan, after: Plan) -> tuple[Takeover, ...]:
    """Return the places whose owner differs between two versions of one epoch, by pipeline and stage."""
    return tuple(
        Takeover(place=Place(pipeline=pipeline, stage=stage), victim=victim, shadow=after.owners[pipeline][stage])
        for pipeline, owners in enumerate(before.owners)
        if owners != after.owners[pipeline]
        for stage, victim in enumerate(owners)
        if victim != after.owners[pipeline][stage]
    )


def _owners(homes: tuple[int, ...], dead: frozenset[int], *, redundancy: bool) -> tuple[int, ...]:
    """Return the owners of one pipeline; `homes[stage - 1]` is the shadow, also of stage 0."""
    shadows = (homes[-1], *homes[:-1]) if redundancy else (NOBODY,) * len(homes)
    return tuple(
        home if home not in dead else shadow if shadow not in dead else NOBODY
        for home, shadow in zip(homes, shadows, strict=True)
    )

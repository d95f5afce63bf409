"""What a worker without a place builds by, so that it has everything ready when it is given one.

A standby must not hold the others up while it imports, opens files and builds layers. So it builds an engine for the
place that it may be given most likely, and waits with it. If it is given another, it rebuilds those layers only.
"""

from __future__ import annotations

from bamboo_ds.plan.plan import Place, Plan

BEFORE_ALL = -1
"""The epoch of a plan that is nobody's but the worker's own: every plan of the job is newer."""


def stand_in(plan: Plan, worker: int) -> Plan:
    """Return the plan as it would be with a worker in the place of another. Nobody trains under it.

    The place is one whose home is dead, if there is one; else places are taken in turn, by the worker's id.

    Args:
        plan: the newest.
        worker: id of a worker that has no place in it.
    """
    gone = [
        Place(pipeline=pipeline, stage=stage)
        for pipeline, homes in enumerate(plan.homes)
        for stage, home in enumerate(homes)
        if home in plan.dead
    ]
    place = gone[worker % len(gone)] if gone else Place(pipeline=0, stage=worker % plan.num_stages)
    homes = [list(row) for row in plan.homes]
    homes[place.pipeline][place.stage] = worker
    return Plan(
        owners=tuple(tuple(row) for row in homes), epoch=BEFORE_ALL, cause="it waits for a place", parts=plan.parts
    )

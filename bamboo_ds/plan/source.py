"""Where a worker's plan comes from.

The engine never asks the cluster: it is handed a `PlanSource`. This one never changes; an elastic one watches the
cluster store.
"""

from __future__ import annotations

from typing import Protocol

from bamboo_ds.plan.plan import Plan


class PlanSource(Protocol):
    """The current plan, and word of a newer one."""

    @property
    def worker(self) -> int:
        """Id of this worker; never changes."""
        ...

    def current(self) -> Plan:
        """Return the newest plan."""
        ...

    def check(self, plan: Plan) -> None:
        """Raise when `plan` is no longer the newest: every wait of the engine calls this while it waits."""
        ...


class StaticPlanSource:
    """A plan that holds for the whole job."""

    def __init__(self, plan: Plan, *, worker: int) -> None:
        self._plan, self._worker = plan, worker

    @property
    def worker(self) -> int:
        """Id of this worker."""
        return self._worker

    def current(self) -> Plan:
        """Return the one plan."""
        return self._plan

    def check(self, plan: Plan) -> None:
        """Do nothing: a static plan is never replaced."""

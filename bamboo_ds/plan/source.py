"""Where a worker's plan comes from.

The engine never asks the cluster: it is handed a `PlanSource`. The static one never changes; the elastic one
(`bamboo_ds.elastic.member.Member`) watches the cluster's store.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from bamboo_ds.errors import InfeasiblePlanError
from bamboo_ds.plan.plan import Plan


class PlanSource(Protocol):
    """The current plan, and word of a newer one."""

    @property
    def worker(self) -> int:
        """Id of this worker; never changes."""
        ...

    @property
    def elastic(self) -> bool:
        """Whether a newer plan may come: then who meets a broken link waits for what the cluster says of it."""
        ...

    def current(self) -> Plan:
        """Return the newest plan."""
        ...

    def await_place(self, plan: Plan) -> None:
        """Wait for a newer plan; if this worker has no place in `plan`, say that it can be given one."""
        ...

    def check(self, plan: Plan) -> None:
        """Raise when `plan` is no longer the newest: every wait of the engine calls this while it waits."""
        ...

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Let `listener` be called, from another thread, whenever `check` may have something new to say.

        Returns:
            What ends it.
        """
        ...

    @property
    def cut(self) -> Callable[[], None] | None:
        """What takes this worker's node off the network; None where that cannot be done."""
        ...

    def tell(self, kind: str, text: str, **fields: Any) -> None:
        """Let people know of something that happened. Takes a second at most, and never raises."""
        ...

    def left(self, workers: tuple[int, ...]) -> tuple[int, ...]:
        """Return which of these workers' scripts have ended in order."""
        ...

    def report(self, suspect: int, detail: str, *, plan: Plan) -> None:
        """Say that this worker's link to another one, made under `plan`, broke. Never waits, never raises."""
        ...


class StaticPlanSource:
    """A plan that holds for the whole job."""

    elastic = False
    cut = None

    def __init__(self, plan: Plan, *, worker: int) -> None:
        self._plan, self._worker = plan, worker

    @property
    def worker(self) -> int:
        """Id of this worker."""
        return self._worker

    def current(self) -> Plan:
        """Return the one plan."""
        return self._plan

    def await_place(self, plan: Plan) -> None:
        """Refuse: a static plan is never replaced.

        Raises:
            InfeasiblePlanError: always.
        """
        raise InfeasiblePlanError(f"worker {self._worker} awaits a newer plan in a job whose plan is fixed")

    def check(self, plan: Plan) -> None:
        """Do nothing: a static plan is never replaced."""

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Do nothing: there is never news."""
        return lambda: None

    def tell(self, kind: str, text: str, **fields: Any) -> None:
        """Do nothing: there is no log of events."""

    def left(self, workers: tuple[int, ...]) -> tuple[int, ...]:
        """Return nobody: it is not known here."""
        return ()

    def report(self, suspect: int, detail: str, *, plan: Plan) -> None:
        """Do nothing: there is nobody to judge it."""

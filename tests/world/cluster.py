"""What tests need of a cluster: a coordinator's pen, members, and runs that are timed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from bamboo_ds.elastic import keys
from bamboo_ds.plan import Decision, Plan, codec
from bamboo_ds.plan.commit import Outcome
from bamboo_ds.plan.job import Roster
from bamboo_ds.store import Store


def two_stages(*, version: int = 0, dead: frozenset[int] = frozenset(), owners: tuple[int, int] = (3, 5)) -> Plan:
    """Return a plan of workers 3 and 5."""
    return Plan(owners=(owners,), version=version, homes=((3, 5),), dead=dead, cause="the test says so")


def decision(step: int) -> Outcome:
    """Return an outcome that can be told from others."""
    return Outcome(
        Decision(
            step=step, mean_loss=0.5, pipeline_losses=(0.5,), additional_losses={}, global_norm=1.0, overflow=False,
            stage_seconds=(),
        )
    )  # fmt: skip


@dataclass
class Pen:
    """Writes what a coordinator writes."""

    store: Store

    def roster(self, *workers: int) -> None:
        self.store.put(keys.ROSTER, codec.encode(Roster(workers, "all are there")))

    def plan(self, plan: Plan) -> None:
        self.store.put(keys.PLAN, codec.encode(plan))

    def outcome(self, engine: int, number: int, outcome: Outcome) -> None:
        self.store.put(keys.decision(engine, number), codec.encode(outcome))

    def finish(self, why: str = "all workers have left") -> None:
        self.store.put(keys.FINISHED, why.encode())

    def fail(self, scope: str = "job", **failure: Any) -> None:
        import json

        shown = {"worker": 9, "kind": "ValueError", "message": "no such layer\nat all", **failure}
        self.store.put(keys.failure(scope), json.dumps(shown).encode())


def dead(plan: Plan, worker: int) -> Plan:
    """Return the next version, in which a worker is dead and its neighbour owns all."""
    owners = tuple(tuple(next(w for w in row if w != worker) if w == worker else w for w in row) for row in plan.owners)
    return replace(
        plan,
        owners=owners,
        version=plan.version + 1,
        dead=plan.dead | {worker},
        homes=plan.homes,
        cause="it was killed",
    )


@dataclass
class Wait:
    """A call in a thread of its own."""

    result: Any = None
    error: BaseException | None = None
    seconds: float = 0.0
    thread: threading.Thread = field(default_factory=threading.Thread)

    def end(self, within_seconds: float = 5.0) -> Wait:
        self.thread.join(within_seconds)
        assert not self.thread.is_alive(), f"it still waits after {within_seconds} s"
        return self


def start(call: Callable[[], Any]) -> Wait:
    """Run a call in a thread and give it the time to begin to wait."""
    wait = Wait()

    def run() -> None:
        began = time.monotonic()
        try:
            wait.result = call()
        except BaseException as error:
            wait.error = error
        wait.seconds = time.monotonic() - began

    wait.thread = threading.Thread(target=run, daemon=True)
    wait.thread.start()
    time.sleep(0.05)
    return wait


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Fail when the block takes longer."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took <= seconds, f"took {took:.3f} s, not at most {seconds} s"


def eventually(condition: Callable[[], Any], *, within_seconds: float = 5.0) -> Any:
    """Wait until something is true, and return it."""
    deadline = time.monotonic() + within_seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {within_seconds} s"
        time.sleep(0.005)
    return found

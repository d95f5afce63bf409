"""The coordinator's part of a commit: when every pipeline has voted, one transaction decides.

It names the plan that was voted under, so that it fails if that is no longer the plan; it writes the outcome and takes
away the ballots and the outcome before it. A pipeline that votes for the next commit has taken in the one before, all
of its workers, so nobody waits for that any more.

With the decision on a step goes word of whether another epoch would be better; then all meet once more, when they are
about to train, and the answer to that round comes with the new plan in one transaction.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from bamboo_ds.elastic import keys
from bamboo_ds.elastic.pen import Pen
from bamboo_ds.elastic.view import Box, View
from bamboo_ds.errors import StoreUnavailableError
from bamboo_ds.plan.codec import decode, encode
from bamboo_ds.plan.commit import Ballot, Decision, settle
from bamboo_ds.plan.plan import Plan
from bamboo_ds.plan.policy import PlanDecision
from bamboo_ds.store import ABSENT, Delete, DeletePrefix, Put, Store, Unchanged, Write

__all__ = ["Commits"]

_PROGRESS_SECONDS = 1.0


class Commits:
    """Decides commits.

    Args:
        store: of the job.
        view: what is in it.
        pen: of the coordinator.
        reshape: returns what the policy says of a new epoch, with its plan if there should be one.
        on_vote: is told how many seconds each commit took, from the first ballot heard to the decision written.

    Attributes:
        step_seconds: of late; None while it is unknown.
    """

    def __init__(
        self,
        store: Store,
        *,
        view: View,
        pen: Pen,
        reshape: Callable[[], PlanDecision],
        on_vote: Callable[[float], None] | None = None,
    ) -> None:
        self._clock, self._view, self._pen, self._on_vote = store.clock, view, pen, on_vote
        self._reshape = reshape
        self._number: tuple[int, int] | None = None
        self._engines: set[int] = set()
        self._progress_at, self._steps = -math.inf, 0
        self.step_seconds: float | None = None

    def settle(self, plan: Plan) -> bool:
        """Decide every commit whose ballots under a plan are all there; return whether there was one.

        Raises:
            ConflictError: the plan has changed, or the fence fell.
            StoreUnavailableError: a decision may or may not have been written.
            ConfigError: a ballot cannot be read.
        """
        view = self._view
        if plan.aborted:
            return False
        if plan.number != self._number:
            self._number, self._engines = plan.number, set()
        full = [where for where, box in view.boxes.items() if self._full(box, plan)]
        ready = [(engine, commit) for engine, commit in full if commit > view.newest_decision(engine)]
        for engine, commit in sorted(ready):
            self._decide(plan, engine, commit, view.boxes[engine, commit])
        return bool(ready)

    def _full(self, box: Box, plan: Plan) -> bool:
        ballots = box.ballots.get(keys.dotted(plan.number), {})
        return len(ballots) >= plan.num_pipelines and all(d in ballots for d in range(plan.num_pipelines))

    def _decide(self, plan: Plan, engine: int, commit: int, box: Box) -> None:
        told = box.ballots[keys.dotted(plan.number)]
        ballots = [decode(Ballot, told[pipeline]) for pipeline in range(plan.num_pipelines)]
        outcome, key = settle(ballots), keys.decision(engine, commit)
        stepped = outcome.decision is not None
        change = self._change(plan, engine, stepped=stepped, boundary=ballots[0].boundary)
        if change is not None and outcome.decision is not None:
            outcome = replace(outcome, decision=replace(outcome.decision, reshape=True))
        after = change.plan if change is not None and ballots[0].boundary else None
        old = [*self._old(engine, commit), *self._formed(plan, engine, stepped=stepped)]
        self._pen.write(
            [*self._conditions(after is not None), Unchanged(key, ABSENT)],
            [Put(key, encode(outcome)), *self._settled(plan), *old, *_new_plan(after)],
        )
        self._view.forget_votes(engine, commit)
        if stepped:
            self._engines.add(engine)
        self._pen.did("decision", f"{engine}/{commit}")
        if change is not None and after is not None:
            self._pen.tell("reconfigure", change.reason, plan=keys.dotted(after.number), action=change.action.value)
        seconds = self._clock.now() - box.heard_at
        if self._on_vote is not None:
            self._on_vote(seconds)
        if outcome.decision is not None:
            self._report(outcome.decision, engine, seconds)

    def _change(self, plan: Plan, engine: int, *, stepped: bool, boundary: bool) -> PlanDecision | None:
        """Return the new epoch that there should be, if this round may say so. Only a script of one engine moves."""
        if not (stepped or boundary) or self._view.decisions.keys() - {engine} or self._view.settled < plan.epoch:
            return None
        decision = self._reshape()
        return decision if decision.plan is not None else None

    def _conditions(self, changes_plan: bool) -> list[Unchanged]:
        conditions = [Unchanged(keys.PLAN, self._view.revision(keys.PLAN))]
        if changes_plan:
            conditions += [Unchanged(keys.failure("job"), ABSENT), Unchanged(keys.FINISHED, ABSENT)]
        return conditions

    def _settled(self, plan: Plan) -> Iterable[Write]:
        """Yield the note that all workers of this epoch have their layers, at its first decision."""
        if self._view.settled < plan.epoch:
            yield Put(keys.SETTLED, str(plan.epoch).encode())

    def _old(self, engine: int, commit: int) -> Iterable[Write]:
        """Yield what goes with a decision."""
        yield DeletePrefix(keys.votes(engine, commit))
        if commit > 0:
            yield Delete(keys.decision(engine, commit - 1))

    def _formed(self, plan: Plan, engine: int, *, stepped: bool) -> Iterable[Write]:
        """Yield what groups formed by, when all groups of this engine have: they have summed its gradients."""
        if stepped and engine not in self._engines:
            yield DeletePrefix(keys.rendezvous(plan.number, f"engine-{engine}"))

    def _report(self, decision: Decision, engine: int, vote_seconds: float) -> None:
        """Write how far the job is, at most once a second; nobody needs it."""
        now = self._clock.now()
        self._steps += 1
        elapsed = now - self._progress_at
        if elapsed < _PROGRESS_SECONDS:
            return
        step_seconds = elapsed / self._steps if math.isfinite(elapsed) and elapsed > 0 else None
        self.step_seconds = step_seconds
        size = self._batch_size(engine)
        progress = {
            "step": decision.step + 1,
            "loss": decision.mean_loss,
            "samples_per_second": size / step_seconds if size and step_seconds else None,
            "step_seconds": step_seconds,
            "time": self._pen.wall_nanoseconds() / 1e9,
            "vote_seconds": vote_seconds,
        }
        self._progress_at, self._steps = now, 0
        try:
            self._pen.write((), [Put(keys.PROGRESS, json.dumps(progress).encode())])
        except StoreUnavailableError:
            return  # the next one will do

    def _batch_size(self, engine: int) -> int | None:
        settings = self._view.settings(engine)
        try:
            size = None if settings is None else json.loads(settings.settings.get("train_batch_size", "null"))
        except ValueError:
            return None
        return size if isinstance(size, int) else None


def _new_plan(plan: Plan | None) -> list[Write]:
    return [] if plan is None else [Put(keys.PLAN, encode(plan))]

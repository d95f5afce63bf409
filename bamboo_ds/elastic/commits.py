"""The coordinator's part of a commit: when every pipeline has voted, one transaction decides.

It names the plan that was voted under, so that it fails if that is no longer the plan; it writes the outcome and takes
away the ballots and the outcome before it. A pipeline that votes for the next commit has taken in the one before, all
of its workers, so nobody waits for that any more.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable

from bamboo_ds.elastic import keys
from bamboo_ds.elastic.pen import Pen
from bamboo_ds.elastic.view import Box, View
from bamboo_ds.errors import StoreUnavailableError
from bamboo_ds.plan.codec import decode, encode
from bamboo_ds.plan.commit import Ballot, Decision, settle
from bamboo_ds.plan.plan import Plan
from bamboo_ds.store import ABSENT, Delete, DeletePrefix, Put, Store, Unchanged, Write

__all__ = ["Commits"]

_PROGRESS_SECONDS = 1.0


class Commits:
    """Decides commits.

    Args:
        store: of the job.
        view: what is in it.
        pen: of the coordinator.
        on_vote: is told how many seconds each commit took, from the first ballot heard to the decision written.
    """

    def __init__(self, store: Store, *, view: View, pen: Pen, on_vote: Callable[[float], None] | None = None) -> None:
        self._clock, self._view, self._pen, self._on_vote = store.clock, view, pen, on_vote
        self._number: tuple[int, int] | None = None
        self._engines: set[int] = set()
        self._progress_at, self._steps = -math.inf, 0

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
        ballots = box.ballots[keys.dotted(plan.number)]
        outcome = settle(decode(Ballot, ballots[pipeline]) for pipeline in range(plan.num_pipelines))
        key = keys.decision(engine, commit)
        self._pen.write(
            [Unchanged(keys.PLAN, self._view.revision(keys.PLAN)), Unchanged(key, ABSENT)],
            [Put(key, encode(outcome)), *self._old(plan, engine, commit)],
        )
        self._view.forget_votes(engine, commit)
        self._engines.add(engine)
        self._pen.did("decision", f"{engine}/{commit}")
        seconds = self._clock.now() - box.heard_at
        if self._on_vote is not None:
            self._on_vote(seconds)
        if outcome.decision is not None:
            self._report(outcome.decision, engine, seconds)

    def _old(self, plan: Plan, engine: int, commit: int) -> Iterable[Write]:
        """Yield what goes with a decision. All groups of this engine have formed: they have summed its gradients."""
        yield DeletePrefix(keys.votes(engine, commit))
        if commit > 0:
            yield Delete(keys.decision(engine, commit - 1))
        if engine not in self._engines:
            yield DeletePrefix(keys.rendezvous(plan.number, f"engine-{engine}"))

    def _report(self, decision: Decision, engine: int, vote_seconds: float) -> None:
        """Write how far the job is, at most once a second; nobody needs it."""
        now = self._clock.now()
        self._steps += 1
        elapsed = now - self._progress_at
        if elapsed < _PROGRESS_SECONDS:
            return
        step_seconds = elapsed / self._steps if math.isfinite(elapsed) and elapsed > 0 else None
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

"""The coordinator: looks at the view, decides, compares and sets. It runs in one agent, elected through the store.

A step waits for nothing but the store's answers, so tests drive it with a clock of their own. All it decides on is in
the store; what it remembers besides (since when it waits, what it has told) only times it. So a coordinator that dies
between any two writes is replaced by one that goes on from what is written.

Every write carries the fence of the election: a coordinator that was stopped, and wakes up after another was elected,
writes nothing. A plan replaces the one it was decided on, and a decision names the plan it was voted under. So the two
never cross::

    all ballots of plan 0.1 are in  ->  the decision, if the plan still is 0.1     whichever is first is true,
    a worker of plan 0.1 is lost    ->  plan 0.2, if the plan still is 0.1         the other is thought over again

After an indefinite error, or a conflict that does not end its leadership, it reads everything anew before it decides.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from bamboo_ds.elastic import keys
from bamboo_ds.elastic.commits import Commits
from bamboo_ds.elastic.hearing import Hearing
from bamboo_ds.elastic.herald import Herald, listed
from bamboo_ds.elastic.housekeeping import Housekeeping
from bamboo_ds.elastic.pen import Deed, Pen
from bamboo_ds.elastic.view import Report, View
from bamboo_ds.errors import ConflictError, StoreUnavailableError
from bamboo_ds.plan.cluster import Bounds, Cluster, Node
from bamboo_ds.plan.codec import encode
from bamboo_ds.plan.job import JobSpec, Roster
from bamboo_ds.plan.membership import Cause, Evidence, Loss, judge
from bamboo_ds.plan.plan import Plan
from bamboo_ds.plan.policy import Action, Boundary, Event, Joined, Launched, Lost, PlanDecision, decide
from bamboo_ds.plan.reshape import Costs
from bamboo_ds.plan.roster import StartRule, close_roster
from bamboo_ds.store import ABSENT, Fence, Put, Store, Unchanged

__all__ = ["Coordinator", "CoordinatorSettings", "Deed"]

_log = logging.getLogger(__name__)

_KINDS = {Action.START: "plan", Action.FAILOVER: "failover", Action.ABORT: "abort"}
_DOUBT_SECONDS = 0.05  # before everything is read again
_JOB_FAILURE = keys.failure("job")


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """What the coordinator must know.

    Attributes:
        ttl_seconds: how long a node is believed to live without a word from its agent.
        start: when the job begins.
        keep_seconds: how long the keys of a worker are kept after it has gone.
    """

    ttl_seconds: float = 10.0
    start: StartRule = field(default_factory=StartRule)
    keep_seconds: float = 60.0


class Coordinator:
    """Decides for a job, as long as its fence holds. It belongs to one thread.

    Args:
        store: of the job.
        view: what is in it. Whoever calls `step` brings it up to date before.
        fence: of the election that this coordinator has won.
        node: its name.
        settings: what it must know.
        hearing: how well this process hears the store.
        wall_nanoseconds: Unix time, for people.
        on_vote: is told how many seconds each commit took, from its first ballot to its decision.
    """

    def __init__(
        self,
        store: Store,
        *,
        view: View,
        fence: Fence,
        node: str,
        settings: CoordinatorSettings,
        hearing: Hearing,
        wall_nanoseconds: Callable[[], int] = time.time_ns,
        on_vote: Callable[[float], None] | None = None,
    ) -> None:
        self._store, self._view, self._fence = store, view, fence
        self._settings, self._hearing, self._clock = settings, hearing, store.clock
        self._pen = Pen(store, view=view, fence=fence, node=node, wall_nanoseconds=wall_nanoseconds)
        self._commits = Commits(store, view=view, pen=self._pen, reshape=self._reshape, on_vote=on_vote)
        self._advice: tuple[tuple[int, tuple[int, int]], PlanDecision] | None = None
        self._housekeeping = Housekeeping(store, view=view, fence=fence, keep_seconds=settings.keep_seconds)
        self._in_doubt = False
        self._seen_version, self._look_at = -1, math.inf
        self._joined_at = self._clock.now()
        self._wait_reason = ""
        self._herald = Herald(view, pen=self._pen, hearing=hearing, ttl_seconds=settings.ttl_seconds)
        self._pen.tell("coordinator", f"node {node} coordinates")

    @property
    def seconds_to_next(self) -> float:
        """How long there is nothing to do if nothing changes."""
        if self._in_doubt:
            return _DOUBT_SECONDS
        return max(min(self._look_at - self._clock.now(), self._housekeeping.seconds_to_next), 0.0)

    def step(self) -> tuple[Deed, ...]:
        """Decide what can be decided now, and return what was done; nothing when there is nothing to do.

        Raises:
            ConflictError: this coordinator leads no longer, and has written nothing since.
            ConfigError: a record in the store cannot be read: the job cannot go on.
        """
        try:
            self._act()
        except StoreUnavailableError as error:
            _log.info("nothing is decided until the store was read again: %s", error)
            self._hearing.lost()
            self._in_doubt = True
        except ConflictError as error:
            _log.info("%s", error)
            self._in_doubt = True
            self._check_fence(error)
        return self._pen.take_deeds()

    def _act(self) -> None:
        if self._in_doubt:
            self._view.reload()
            self._in_doubt = False
        if not self._view.over and not self._settle_commits() and self._is_due():
            self._look_around()
        if self._pen.idle:
            self._housekeeping.tidy()
            self._pen.flush_events()

    def _settle_commits(self) -> bool:
        plan = self._view.plan
        if plan is None or not self._commits.settle(plan):
            return False
        self._housekeeping.committed(plan.number)
        return True

    def _check_fence(self, conflict: ConflictError) -> None:
        """Raise a conflict again if it is the end of our leadership."""
        try:
            found = self._store.get(self._fence.key)
        except StoreUnavailableError:
            self._hearing.lost()
            return
        if found is None or found.create_revision != self._fence.create_revision:
            raise conflict

    def _is_due(self) -> bool:
        return self._view.version != self._seen_version or self._clock.now() >= self._look_at

    def _look_again_in(self, seconds: float) -> None:
        self._look_at = min(self._look_at, self._clock.now() + seconds)

    def _look_around(self) -> None:
        """Decide on what has changed, the votes apart."""
        view = self._view
        self._seen_version, self._look_at = view.version, math.inf
        if self._herald.tell():
            self._joined_at = self._clock.now()
        if self._herald.unsure:
            self._look_again_in(self._hearing.seconds_to_certainty)
        if view.plan is not None:
            self._follow(view.plan)
        elif view.roster is None or self._is_deserted(view.roster):
            self._close_roster()
        elif not self._finish([worker for worker in view.roster.workers if self._takes_part(worker)]):
            self._start(view.roster)

    # Who is there

    def _takes_part(self, worker: int) -> bool:
        """Return whether a worker trains, will, or has ended in order."""
        view = self._view
        return worker in view.left or (worker in view.registered and worker not in view.ended)

    def _is_unclear(self, workers: Collection[int]) -> bool:
        """Return whether one of them is gone without a reason, after a break: its node may come back."""
        view = self._view
        told = (view.registered, view.ended, view.left)
        if self._hearing.certain or all(any(worker in known for known in told) for worker in workers):
            return False
        self._look_again_in(self._hearing.seconds_to_certainty)
        return True

    def _cluster(self, bounds: Bounds, *, only: Collection[int] | None = None) -> Cluster:
        """Return the registered nodes, with all of their workers or some."""
        nodes = tuple(self._view.nodes.values())
        return Cluster(bounds, nodes if only is None else tuple(_with_only(node, only) for node in nodes))

    # The beginning

    def _is_deserted(self, roster: Roster) -> bool:
        """Return whether nobody who was to begin takes part any more."""
        return not any(map(self._takes_part, roster.workers)) and not self._is_unclear(roster.workers)

    def _close_roster(self) -> None:
        view, rule = self._view, self._settings.start
        waited = self._clock.now() - self._joined_at
        roster = close_roster(rule, ready=view.present, waited_seconds=waited)
        if roster is None:
            if view.present:
                self._look_again_in(rule.patience_seconds - waited)
            return
        conditions = [Unchanged(keys.ROSTER, view.revision(keys.ROSTER)), Unchanged(_JOB_FAILURE, ABSENT)]
        self._pen.write(conditions, [Put(keys.ROSTER, encode(roster))])
        text = f"worker(s) {listed(roster.workers)} begin: {roster.cause}"
        self._pen.tell("roster", text, workers=roster.workers)

    def _start(self, roster: Roster) -> None:
        """Make the first plan, once the specification is there: of those who begin, or of all if they are too few."""
        view, spec = self._view, self._view.spec
        if spec is None or self._is_unclear(roster.workers):
            return
        begin = view.present & set(roster.workers)
        launched = spec.launched
        if launched is not None and begin.issuperset(set(launched.workers) & set(roster.workers)):
            self._decide(self._cluster(spec.bounds, only=view.present), Launched(launched))
            return
        if spec.bounds.shape(len(begin)) is None:
            begin = view.present
        self._decide(self._cluster(spec.bounds, only=begin), Joined(tuple(sorted(begin))))

    # While it runs

    def _follow(self, plan: Plan) -> None:
        """Decide whether the plan still stands, and whether the job is over."""
        spec = self._view.spec
        if spec is None:
            return  # It was there before the plan: somebody deletes keys by hand.
        reports = [report for report in self._view.reports(plan.number) if not self._is_about_left(report)]
        losses, unclear = self._judge(plan, spec, reports)
        if losses:
            self._lose(spec, plan, losses)
        elif self._finish(plan.workers):
            return
        elif plan.aborted and not unclear:
            self._decide(self._cluster(self._bounds(spec), only=self._view.present), Boundary())
        elif reports and not plan.aborted:
            self._call_the_roll(reports)

    def _is_about_left(self, report: Report) -> bool:
        """Return whether a link was reported that broke because a worker has ended in order."""
        return bool({report.report.reporter, report.report.suspect} & self._view.left.keys())

    def _judge(self, plan: Plan, spec: JobSpec, reports: list[Report]) -> tuple[tuple[Loss, ...], bool]:
        """Return who is lost for certain, and whether there are more who may be."""
        view = self._view
        evidence = Evidence(
            reports=tuple(report.report for report in reports),
            ended=frozenset(view.ended),
            answering=self._answering(reports),
        )
        verdicts = judge(self._cluster(spec.bounds), plan, evidence)
        losses = tuple(_explained(loss, view.ended) for loss in verdicts if loss.worker not in view.left)
        if self._hearing.certain or all(loss.cause is not Cause.LEASE for loss in losses):
            return losses, False
        self._look_again_in(self._hearing.seconds_to_certainty)
        return tuple(loss for loss in losses if loss.cause is not Cause.LEASE), True

    def _lose(self, spec: JobSpec, plan: Plan, losses: tuple[Loss, ...]) -> None:
        settled = plan.epoch <= self._view.settled
        if self._decide(self._cluster(spec.bounds), Lost(losses, settled=settled)):
            for loss in losses:
                if loss.cause is Cause.EVICTED:
                    node = self._view.registered.get(loss.worker, "")
                    self._pen.tell("evicted", loss.reason, about=node, workers=[loss.worker])

    def _reshape(self) -> PlanDecision:
        """Return what the policy says of a new epoch at a boundary; thought over when something has changed."""
        view = self._view
        plan, spec = view.plan, view.spec
        if plan is None or spec is None or not view.left.keys().isdisjoint(plan.workers):
            return PlanDecision(Action.KEEP, "the job ends")
        if spec.reconfigure == "needed":
            return PlanDecision(Action.KEEP, "the job keeps its shape as long as it can")
        seen = view.version, plan.number
        if self._advice is None or self._advice[0] != seen:
            cluster = self._cluster(self._bounds(spec), only=view.present)
            self._advice = seen, decide(cluster, plan, Boundary(costs=self._costs(), leaving=self._leaving()))
        return self._advice[1]

    def _leaving(self) -> frozenset[int]:
        """Return the workers whose node has been told that it will be taken away."""
        view = self._view
        return frozenset(worker for worker, node in view.registered.items() if node in view.leaving)

    def _costs(self) -> Costs:
        return Costs(step_seconds=self._commits.step_seconds)

    def _bounds(self, spec: JobSpec) -> Bounds:
        """Return what the job allows: no pipeline may be without work, and how much there is the engine knows."""
        settings, bounds = self._view.settings(0), spec.bounds
        micro_batches = None if settings is None else settings.micro_batches
        if micro_batches is None:
            return bounds
        most = micro_batches if bounds.pipelines is None else min(bounds.pipelines, micro_batches)
        return replace(bounds, pipelines=most, model=replace(bounds.model, micro_batches=micro_batches))

    def _call_the_roll(self, reports: list[Report]) -> None:
        """Ask all workers to answer, once for each set of reports. Only what is answered afterwards counts."""
        view = self._view
        if self._is_called(reports):
            return
        number = view.roll + 1
        self._pen.write([Unchanged(keys.ROLL, view.revision(keys.ROLL))], [Put(keys.ROLL, str(number).encode())])
        broken = (f"{report.report.reporter} to {report.report.suspect}" for report in reports)
        text = f"broken links are reported, of worker {', '.join(broken)}; who lives answers roll {number}"
        self._pen.tell("roll", text, details=[report.report.detail for report in reports])

    def _is_called(self, reports: list[Report]) -> bool:
        """Return whether the last roll was called after the last of these reports was made."""
        return self._view.revision(keys.ROLL) > max((report.revision for report in reports), default=0)

    def _answering(self, reports: list[Report]) -> frozenset[int]:
        if not reports or not self._is_called(reports):
            return frozenset()
        text = str(self._view.roll).encode()
        return frozenset(worker for worker, answer in self._view.answers.items() if answer == text)

    def _finish(self, members: Collection[int]) -> bool:
        """End the job if all members have left; return whether it has ended."""
        if not members or not all(worker in self._view.left for worker in members):
            return False
        text = f"all {len(members)} worker(s) have ended in order"
        self._pen.write(self._if_nothing_came_between(), [Put(keys.FINISHED, text.encode())])
        self._pen.tell("finished", text)
        return True

    def _decide(self, cluster: Cluster, event: Event) -> bool:
        """Write the plan that follows from an event, if one does; return whether one did."""
        decision = decide(cluster, self._view.plan, event)
        if decision.plan is None:
            if decision.action is Action.WAIT and decision.reason != self._wait_reason:
                self._wait_reason = decision.reason
                self._pen.tell("wait", decision.reason)
            return False
        self._pen.write(self._if_nothing_came_between(), [Put(keys.PLAN, encode(decision.plan))])
        self._wait_reason = ""
        kind = _KINDS.get(decision.action, "reconfigure")
        number = keys.dotted(decision.plan.number)
        self._pen.tell(kind, decision.reason, plan=number, action=decision.action.value)
        return True

    def _if_nothing_came_between(self) -> list[Unchanged]:
        """Return the conditions of a decision on the job: the plan is what it was, and nobody has ended the job."""
        return [
            Unchanged(keys.PLAN, self._view.revision(keys.PLAN)),
            Unchanged(_JOB_FAILURE, ABSENT),
            Unchanged(keys.FINISHED, ABSENT),
        ]


def _explained(loss: Loss, ended: Mapping[int, bytes]) -> Loss:
    """Return a loss with what the agent said of it as its reason."""
    if loss.cause is not Cause.EXIT:
        return loss
    try:
        reason = str(json.loads(ended[loss.worker])["reason"])
    except (ValueError, KeyError, TypeError):
        return loss
    name = f"worker {loss.worker}"
    return replace(loss, reason=reason if name in reason else f"{name}: {reason}") if reason else loss


def _with_only(node: Node, workers: Collection[int]) -> Node:
    return replace(node, workers=tuple(worker for worker in node.workers if worker in workers))

"""Bamboo on a trace: steps, failovers inside of them, and reconfigurations between them.

Between two events nothing changes, so all whole steps that fit are counted at once. After each event the real policy is
asked what follows; at the commit after it, whether to reconfigure.

::

    waiting --START--> stalled --> a step --commit--> boundary --KEEP--> steps, until an event
       ^                  ^          | FAILOVER: this step takes longer, the next ones are merged
       |                  |          | ABORT: this step is lost; boundary at once
       +------ WAIT ------+-- RECONFIGURE, RESTORE
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from bamboo_ds.plan.cluster import Shape
from bamboo_ds.plan.policy import Action
from bamboo_ds.simulator.constants import Constants
from bamboo_ds.simulator.fleet import Change, Fleet, Hit, Step
from bamboo_ds.simulator.ledger import Cause, Checkpoints, Ledger, Pace
from bamboo_ds.simulator.membership import Instant
from bamboo_ds.simulator.step_time import StepTimes

__all__ = ["BambooJob", "Paces"]

_ROUNDING = 1e-9
"""Of steps that fit before an event."""


class Paces:
    """What steps take, by cause; every plan's is worked out once.

    Args:
        times: how long steps take.
        plain: the same without redundancy, to tell what redundancy costs.
        constants: of checkpoints.
    """

    def __init__(self, times: StepTimes, *, plain: StepTimes, constants: Constants) -> None:
        self._times, self._plain, self._constants = times, plain, constants
        self._shapes: dict[Shape, tuple[float, float, float, float]] = {}

    @property
    def times(self) -> StepTimes:
        """How long steps take."""
        return self._times

    def pace(self, step: Step) -> Pace:
        """Return what a step takes and gives."""
        whole, plain, end, copy = self._of_shape(step.shape)
        seconds = whole
        for pipeline, owners in step.merged.items():
            seconds = max(seconds, self._times.pipeline_seconds(self.micro_batches(pipeline, step), owners) + end)
        return Pace(
            training=min(plain, whole),
            redundancy=max(whole - plain, 0.0),
            merged=seconds - whole,
            checkpoint=seconds * copy / self._constants.checkpoint_seconds,
            samples=self._times.workload.batch,
        )

    def micro_batches(self, pipeline: int, step: Step) -> int:
        """Return how many micro-batches a pipeline has of a global batch (`Plan.share`)."""
        total, count = self._times.workload.micro_batches, step.shape.num_pipelines
        return (pipeline + 1) * total // count - pipeline * total // count

    def _of_shape(self, shape: Shape) -> tuple[float, float, float, float]:
        """Return the seconds of a whole step, of one without redundancy, of its end, and of copying a checkpoint."""
        if shape not in self._shapes:
            size = (shape.num_stages, shape.num_pipelines)
            copy = max(self._times.workload.sums(shape.num_stages, "state_bytes")) / self._constants.copy_bandwidth
            whole, plain = self._times.whole_seconds(*size), self._plain.whole_seconds(*size)
            self._shapes[shape] = (whole, plain, self._times.end_seconds(*size), copy)
        return self._shapes[shape]


@dataclass(slots=True)
class _Running:
    """The step that runs.

    Attributes:
        since: when it began.
        pace: what it takes undisturbed.
        step: its plan when it began.
        added: what losses have added to the pipelines they hit.
        late: what they add to the step.
    """

    since: float
    pace: Pace
    step: Step
    added: dict[int, float] = field(default_factory=dict)
    late: float = 0.0

    @property
    def until(self) -> float:
        return self.since + self.pace.seconds + self.late


class BambooJob:
    """A job that plays a trace, event by event.

    Args:
        fleet: decides.
        paces: what steps take.
        constants: what else takes time.
        record: whether the ledger keeps segments for a picture.

    Attributes:
        ledger: where the time went.
        counts: how many decisions there were, by action.
    """

    def __init__(self, fleet: Fleet, *, paces: Paces, constants: Constants, record: bool = False) -> None:
        self.ledger = Ledger(record)
        self.counts = dict.fromkeys(Action, 0)
        self._fleet, self._paces, self._times, self._constants = fleet, paces, paces.times, constants
        self._state_bytes = sum(layer.state_bytes for layer in self._times.workload.layers)
        self._checkpoints = Checkpoints(
            self.ledger,
            interval_seconds=constants.checkpoint_seconds,
            write_seconds=self._storage_seconds(self._times.workload.num_stages),
        )
        self._now = 0.0  # time is accounted for until here; while a step runs, until its beginning
        self._running: _Running | None = None
        self._resume_at, self._stall = math.inf, Cause.WAITING
        self._begun = self._changed = self._settled = False
        self._begin_at = math.inf
        self._silent: dict[str, float] = {}  # nodes that are gone, and when their leases end

    def play(self, instants: Sequence[Instant], *, seconds: float) -> Ledger:
        """Play a whole trace and return where the time went."""
        for instant in instants:
            self._end_leases(instant.seconds)
            self._advance(instant.seconds)
            if instant.gone:
                self._lose(instant)
            if instant.joined:
                self._join(instant)
        self._end_leases(seconds)
        self._advance(seconds)
        if self._running is not None:  # what the end cuts off
            self.ledger.spend(Cause.TRAINING, seconds - self._running.since)
        return self.ledger

    # ---- time passes ----

    def _advance(self, until: float) -> None:
        """Let time pass, to just before what happens at `until`."""
        if self._begin_at <= until:
            self._pass(self._begin_at)
            self._begin(waited_seconds=self._constants.patience_seconds)
        while self._running is not None or self._resume_at <= until:
            if self._running is None:
                self._pass(self._resume_at)
                self._start_step()
            elif self._running.until <= until:
                self._commit(self._running, until)
            else:
                return
        self._pass(until)

    def _pass(self, until: float) -> None:
        self.ledger.spend(self._stall, until - self._now)
        self._now = until

    def _start_step(self) -> None:
        step = self._fleet.step
        assert step is not None, "nobody stops waiting without a plan"
        self._resume_at, self._settled = math.inf, True  # a stall ends with a round of all workers
        self._running = _Running(self._now, self._paces.pace(step), step)

    def _commit(self, running: _Running, until: float) -> None:
        """End the running step, decide, and count all whole steps after it if nothing changes."""
        if running.late:
            self.ledger.spend(Cause.FAILOVER, running.late)
        self._train(running.pace, 1, since=running.since)
        self._now = running.until
        if self._changed:
            self._running = None
            self._boundary(step_seconds=running.pace.seconds)
        else:
            steps = int((until - self._now) / running.pace.seconds + _ROUNDING)
            self._train(running.pace, steps, since=self._now)
            self._now += steps * running.pace.seconds
            self._running = _Running(self._now, running.pace, running.step)

    def _train(self, pace: Pace, steps: int, *, since: float) -> None:
        if steps > 0:
            self.ledger.train(pace, steps, since=since)
            self._checkpoints.note(pace, steps, since=since)

    # ---- events ----

    def _begin(self, *, waited_seconds: float) -> None:
        """Begin the job if it may."""
        self._begin_at = math.inf
        change = self._fleet.begin(waited_seconds=waited_seconds)
        if change.action is Action.START:
            self._begun = True
            self._resolve(change)

    def _join(self, instant: Instant) -> None:
        self._fleet.join(instant.joined)
        self._changed = True
        if not self._begun:
            self._begin(waited_seconds=0.0)
            if not self._begun:
                self._begin_at = instant.seconds + self._constants.patience_seconds
        elif self._fleet.step is None:
            self._boundary(step_seconds=None)

    def _lose(self, instant: Instant) -> None:
        """Lose nodes. Nobody misses one without a stage before its lease ends, unless the coordinator goes with it."""
        fleet, constants, at = self._fleet, self._constants, instant.seconds
        together = not constants.lease_seconds or fleet.coordinator in instant.gone
        silent = () if together else fleet.unplaced(instant.gone)
        self._silent.update(dict.fromkeys(silent, at + constants.lease_seconds))
        gone = [node for node in instant.gone if node not in self._silent]
        if gone:
            change = fleet.lose(gone, settled=self._settled)
            noticed = max(constants.lease_seconds if change.by_lease else 0.0, constants.detect_seconds)
            self._answer(change, at=at, noticed_seconds=noticed)

    def _end_leases(self, until: float) -> None:
        """Lose the nodes that nobody missed, as their leases end; a new epoch may have counted on them."""
        while self._silent and (at := min(self._silent.values())) <= until:
            self._advance(at)
            gone = [node for node, end in self._silent.items() if end <= at]
            for node in gone:
                del self._silent[node]
            self._answer(self._fleet.lose(gone, settled=self._settled), at=at, noticed_seconds=0.0)

    def _answer(self, change: Change, *, at: float, noticed_seconds: float) -> None:
        """Go on after a loss that is noticed so much later."""
        self.counts[change.action] += 1
        self._changed = True
        running, detect = self._running, self._constants.detect_seconds
        if change.action is Action.ABORT:
            self._drop_step(at)
            self._boundary(step_seconds=None, after_seconds=noticed_seconds)
        elif change.action is Action.FAILOVER and running is not None:
            self._fail_over(running, change.hits, at=at, later=noticed_seconds - detect)
        elif change.by_lease and running is not None:  # no step is decided without a coordinator
            running.late = max(running.late, at + noticed_seconds - running.since - running.pace.seconds)

    def _fail_over(self, running: _Running, hits: Sequence[Hit], *, at: float, later: float) -> None:
        """Let the running step take longer, by `later` seconds more than if the loss were reported at once."""
        shape = running.step.shape
        end = self._times.end_seconds(shape.num_stages, shape.num_pipelines)
        base = running.pace.seconds - running.pace.checkpoint - end  # when the last pipeline is through
        for pipeline in {hit.pipeline for hit in hits}:
            running.added[pipeline] = running.added.get(pipeline, 0.0) + later
        for hit in hits:
            micro_batches = self._paces.micro_batches(hit.pipeline, running.step)
            extra = self._times.failover_seconds(
                micro_batches, shape.num_stages, stage=hit.stage, share=(at - running.since) / base
            )
            running.added[hit.pipeline] += extra
            owners = running.step.merged.get(hit.pipeline, tuple(range(shape.num_stages)))
            seconds = self._times.pipeline_seconds(micro_batches, owners) + running.added[hit.pipeline]
            running.late = max(running.late, seconds - base)

    def _drop_step(self, at: float) -> None:
        """Lose the work of the running step; a stall needs no such thing, its time is accounted for."""
        if self._running is not None:
            self.ledger.spend(Cause.LOST, at - self._running.since)
            self._now, self._running = at, None

    # ---- decisions between steps ----

    def _boundary(self, *, step_seconds: float | None, after_seconds: float = 0.0) -> None:
        """Ask whether to go on under this plan or under which; no step runs."""
        self._changed = False
        change = self._fleet.boundary(step_seconds=step_seconds)
        self._resolve(change, after_seconds=after_seconds)

    def _resolve(self, change: Change, *, after_seconds: float = 0.0) -> None:
        """Begin to wait, or to stall, or the next step."""
        self.counts[change.action] += 1
        if change.action in (Action.START, Action.RECONFIGURE, Action.RESTORE):
            self._settled = self._changed = False
            restored = change.action is Action.RESTORE
            if restored:
                self._checkpoints.roll_back(self._now)
            seconds = self._restore_seconds() if restored else self._move_seconds(change)
            self._stall = Cause.RESTART if restored else Cause.RECONFIGURATION
            # An epoch that counts on who is dead does not begin: it is aborted when the lease ends.
            dead = len(self._fleet.unplaced(self._silent)) < len(self._silent)
            self._resume_at = math.inf if dead else self._now + after_seconds + seconds
        elif self._fleet.step is None:
            self._stall, self._resume_at = Cause.WAITING, math.inf
        else:
            self._resume_at = self._now

    def _move_seconds(self, change: Change) -> float:
        constants = self._constants
        return constants.reconfigure_seconds + constants.transfer_factor * change.moved_bytes / self._times.bandwidth

    def _restore_seconds(self) -> float:
        step = self._fleet.step
        assert step is not None, "a restored job has a plan"
        workers = step.shape.num_stages * step.shape.num_pipelines
        return self._constants.reconfigure_seconds + self._storage_seconds(workers)

    def _storage_seconds(self, workers: int) -> float:
        """Return how long so many workers need to write or read all state."""
        return self._state_bytes / (self._constants.storage_bandwidth * workers)

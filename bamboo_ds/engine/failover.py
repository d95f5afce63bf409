"""Runs a schedule to its end although the plan changes under it.

A newer version of the plan is looked for between instructions and in every wait. Adopting it is the same for everybody:
links to the dead are dropped and made anew to whoever owns their stage now. Only the new owner's instructions change
(`FailoverSchedule`); everyone else goes on with the next one of its own.

The commit divides what is redone from what is not: a round that the coordinator has answered is over, whatever the
plan says by now; one without an answer is run again by all.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.utils import logger

from bamboo_ds.comm import Kind
from bamboo_ds.engine.commit import Committer
from bamboo_ds.engine.execution import Execution
from bamboo_ds.engine.faults import FaultInjector
from bamboo_ds.engine.gradients import Replicas
from bamboo_ds.errors import PeerLostError, PlanChangedError
from bamboo_ds.plan import Place, Plan, PlanSource
from bamboo_ds.plan.failover import Takeover, takeovers
from bamboo_ds.schedule import FailoverSchedule, instructions

_LOOK_SECONDS = 0.005


@dataclass(slots=True)
class Work:
    """What is left of a step, and what was done.

    Attributes:
        todo: instructions to run.
        done: instructions that have run, of the schedule that is being run.
        count: instructions run in the step, of all its schedules.
    """

    todo: deque[Any]
    done: list[Any] = field(default_factory=list)
    count: int = 0

    def begin(self, schedule: Iterable[Any]) -> None:
        """Go on with another schedule."""
        self.todo, self.done = deque(_flat(schedule)), []


@dataclass(slots=True)
class FailoverReport:
    """One plan change as this worker went through it.

    Attributes:
        number: of the new plan.
        victims: workers whose stages changed hands in this worker's pipeline.
        taken: the stage that this worker took over; None if it took none.
        noticed: seconds (monotonic clock) at which it stopped its own work.
        rerouted: when its links were there again.
        caught_up: when it had redone what was lost; the same as `rerouted` for those who took nothing over.
        bytes_resent: of messages sent a second time.
        redone: backwards of the lost stage that the victim had done, as far as this worker can know.
    """

    number: tuple[int, int]
    victims: tuple[int, ...]
    taken: int | None
    noticed: float
    rerouted: float = 0.0
    caught_up: float = 0.0
    bytes_resent: int = 0
    redone: int = 0


class Failover(Execution):
    """The part of the engine that goes on when a worker dies."""

    _source: PlanSource
    _committer: Committer
    _replicas: Replicas
    _faults: FaultInjector
    failovers: list[FailoverReport]
    instructions_run: int = 0
    """Instructions of the last training step."""
    _recovering: FailoverReport | None

    def _run_to_the_end(self, schedule: Iterable[Any]) -> None:
        """Run all instructions of a training step; of a failover's, when there is one in between."""
        work = Work(deque(_flat(schedule)))
        while work.todo:
            with self._through_plan_changes(lambda: self._adopt_newest(work)):
                self._look()
                self._run_next(work)
        self.instructions_run = work.count

    def _run_once(self, schedule: Iterable[Any]) -> None:
        """Run all instructions of a schedule, or raise when the plan changes."""
        for instruction in _flat(schedule):
            self._look()
            self._execute(instruction)

    def _run_next(self, work: Work) -> None:
        instruction = work.todo[0]
        self._faults.before(step=self._state.step, instruction=work.count)
        self._execute(instruction)
        work.todo.popleft()
        work.done.append(instruction)
        work.count += 1
        self._note_caught_up(work)

    def _execute(self, instruction: Any) -> None:
        self._INSTRUCTION_MAP[type(instruction)](self, **instruction.kwargs)

    def _look(self) -> None:
        """Raise when there is a newer plan, unless the running round is decided: then it ends under the old one."""
        if not self._committer.decided():
            self._source.check(self.plan)

    @contextlib.contextmanager
    def _through_plan_changes(self, adopt: Callable[[], None]) -> Iterator[None]:
        """Adopt the newest plan when the block ends because of a plan change or a broken link."""
        try:
            yield
        except PlanChangedError:
            if not self._committer.decided():
                adopt()
        except PeerLostError as error:
            self._await_verdict(error, beyond=self.plan)

    def _await_verdict(self, error: PeerLostError, *, beyond: Plan) -> None:
        """Wait until the cluster knows who is lost. Returns then; raises the error itself if it does not learn it.

        Args:
            error: what was met.
            beyond: the plan under which it was met.

        Raises:
            PeerLostError: the job is fixed, or nobody found a loss within the time-out.
        """
        if not self._source.elastic:
            raise error
        deadline = time.monotonic() + self.bamboo.timeout_seconds
        while time.monotonic() < deadline:
            if self._committer.decided() or self._source.current().number > beyond.number:
                return
            self._source.check(beyond)
            time.sleep(_LOOK_SECONDS)
        raise error

    # ---- adopting a plan ---------------------------------------------------------------------------------------

    def _adopt_newest(self, work: Work | None = None) -> None:
        """Adopt the newest plan, and any that replaces it meanwhile.

        Args:
            work: of the running training step; None outside of one.
        """
        noticed = time.monotonic()
        while (plan := self._source.current()).number > self.plan.number:
            try:
                self._adopt(plan, work, noticed=noticed)
            except PlanChangedError:
                if self._source.current().number <= plan.number:  # not for yet another one
                    raise
            except PeerLostError as error:
                self._await_verdict(error, beyond=plan)

    def _adopt(self, plan: Plan, work: Work | None, *, noticed: float) -> None:
        if plan.aborted or plan.epoch != self.plan.epoch or self._has_no_place:
            self._reshape(plan, work)
            return
        changed = [takeover for takeover in takeovers(self.plan, plan) if takeover.place.pipeline == self.pipeline_id]
        report = FailoverReport(
            number=plan.number, victims=tuple({takeover.victim for takeover in changed}), taken=None, noticed=noticed
        )
        sent_to_myself = self._gradients_for_stage_before()
        report.bytes_resent = self.network.adopt(plan)
        self.plan = plan
        report.taken = self._take_over(changed)
        if report.taken is not None and report.taken == self.stage_id - 1:
            for micro_batch, gradients in sent_to_myself.items():
                self._state.slot(report.taken, micro_batch).output_gradients = gradients
        report.rerouted = time.monotonic()
        if work is not None:
            self._reorder(work, report)
        self._record(report)

    @property
    def _has_no_place(self) -> bool:
        """Whether this worker waits for a place in a plan."""
        return self.network is None

    def _reshape(self, plan: Plan, work: Work | None) -> None:
        """Drop the running step and follow a plan of another epoch."""
        raise NotImplementedError  # `Reshaping` does

    def _gradients_for_stage_before(self) -> dict[int, tuple[torch.Tensor, ...]]:
        """Return the gradients that this worker has sent to the stage before its own in this step.

        In a pipeline of two stages whose first is lost, the receiver is this worker itself.
        """
        sent = self.network.sent(Kind.GRADIENT, self.stage_id)
        return {message.header.address.micro_batch: message.tensors for message in sent}

    def _take_over(self, changed: list[Takeover]) -> int | None:
        """Become the owner of a lost stage, if this worker is its shadow; return the stage."""
        before = self.owned_stages
        self.module.follow(self.plan)
        self.owned_stages = self.module.owned_stages
        self.grid = self.mpu = self.module.mpu()
        self.global_rank, self.world_size = self.grid.get_global_rank(), self.grid.world_size
        gained = [stage for stage in self.owned_stages if stage not in before]
        if not gained:
            return None
        self._local.tell_stages_apart(self._reducer.parameters(self.stage_id))
        self._draw_from_now_on()
        logger.warning(
            f"worker {self._source.worker} owns stages {self.owned_stages} of pipeline {self.pipeline_id} from now on: "
            f"{self.plan.cause}"
        )
        return gained[0]

    def _draw_from_now_on(self) -> None:
        """Open the training data, if a stage that needs it was taken over."""
        raise NotImplementedError  # the engine has the data

    def _reorder(self, work: Work, report: FailoverReport) -> None:
        if report.taken is not None:
            report.redone = sum(
                isinstance(one, instructions.RecvGrad) and one.stage == self.stage_id for one in work.done
            )
            self._recovering = report
            work.begin(self._failover_schedule(report.taken, work.done))
        elif not any(isinstance(instruction, instructions.ReduceGrads) for instruction in work.todo):
            # Groups that have lost a member sum again; the others keep what they have.
            work.todo = deque([instructions.ReduceGrads(), instructions.OptimizerStep()])

    def _failover_schedule(self, stage: int, done: list[Any]) -> FailoverSchedule:
        if self._replicas.changed(stage):
            self._restart_buffers(stage)
        kept = [one for one in done if not isinstance(one, instructions.RedundantForward) or self._is_kept(one)]
        return FailoverSchedule(
            self.micro_batches,
            self.num_stages,
            self.stage_id,
            victim=stage,
            done=kept,
            held_by_successor=self.network.held(stage, step=self._state.step),
        )

    def _is_kept(self, redundant_forward: instructions.RedundantForward) -> bool:
        return (redundant_forward.stage, redundant_forward.micro_batch) in self._state.redundant

    def _restart_buffers(self, stage: int) -> None:
        """Replay a stage whose forwards write buffers from the first micro-batch on, unless none was left out.

        Running statistics depend on the order of micro-batches; redundant forwards may have left some out.
        """
        made = sorted(m for s, m in self._state.redundant if s == stage)
        if made == list(range(len(made))) and not self._replicas.followed:
            return
        self._replicas.restore([stage])
        for micro_batch in made:
            del self._state.redundant[stage, micro_batch]

    def _note_caught_up(self, work: Work) -> None:
        """Note when the new owner is where the lost one was: it has sent or computed something nobody had before."""
        if self._recovering is None:
            return
        redone = sum(
            isinstance(one, instructions.BackwardPass) and one.stage == self._recovering.taken for one in work.done
        )
        if redone >= self._recovering.redone:
            self._recovering.caught_up = time.monotonic()
            self._tell(self._recovering)
            self._recovering = None

    def _record(self, report: FailoverReport) -> None:
        self.failovers.append(report)
        if self._recovering is not report:
            report.caught_up = report.rerouted
            if report.taken is not None:
                self._tell(report)

    def _tell(self, report: FailoverReport) -> None:
        """Let people know of a failover: one event, from the worker that took over."""
        place = Place(pipeline=self.pipeline_id, stage=report.taken if report.taken is not None else -1)
        self._source.tell(
            "recovered",
            f"worker {self._source.worker} took over stage {place.stage} of pipeline {place.pipeline} from worker(s) "
            f"{', '.join(map(str, report.victims))} in step {self.global_steps}: rerouted in "
            f"{1000 * (report.rerouted - report.noticed):.0f} ms, {report.redone} backward(s) redone in "
            f"{1000 * (report.caught_up - report.rerouted):.0f} ms",
            shadow=self._source.worker,
            victims=list(report.victims),
            pipeline=place.pipeline,
            stage=place.stage,
            step=self.global_steps,
            reroute_ms=round(1000 * (report.rerouted - report.noticed), 3),
            recompute_ms=round(1000 * (report.caught_up - report.rerouted), 3),
            bytes_resent=report.bytes_resent,
            micro_batches_redone=report.redone,
        )

    def _drop_step(self) -> None:
        """Forget the running step: weights and optimizer state are those from before it."""
        self._replicas.restore(self.module.held_stages())
        self._local.clear()
        self._state.slots.clear()
        self._state.redundant.clear()
        for parameter in (*self.module.parameters(), *self.module.redundant_parameters()):
            parameter.grad = None


def _flat(schedule: Iterable[Any]) -> Iterator[Any]:
    return (instruction for group in schedule for instruction in group)

"""`BambooPipelineEngine`: a DeepSpeed `PipelineEngine` whose stages live in other processes that may vanish.

DeepSpeed constructs it as the engine of a job of one process. Then it takes its place in the plan: its stage, its
share of the micro-batches, its links. From there on DeepSpeed's own code still runs the step (timers, schedules,
learning rates, monitors, printing) and Bamboo runs what crosses a process boundary.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, cast

import torch
from deepspeed.runtime.pipe.engine import BATCH_INPUT_TIMER
from deepspeed.utils import logger
from deepspeed.utils.timer import BACKWARD_MICRO_TIMER, FORWARD_MICRO_TIMER, STEP_GLOBAL_TIMER, STEP_MICRO_TIMER
from torch.utils.data import DataLoader

from bamboo_ds.comm import Network
from bamboo_ds.config import BambooConfig, BatchSizes, gradient_clipping
from bamboo_ds.engine.checkpointing import Checkpointing
from bamboo_ds.engine.clock import OperationClock, follow
from bamboo_ds.engine.commit import Committer
from bamboo_ds.engine.data import StepBatches
from bamboo_ds.engine.execution import EXECUTION_MAP
from bamboo_ds.engine.failover import Work
from bamboo_ds.engine.faults import FaultInjector
from bamboo_ds.engine.gradients import GradientReducer, Replicas
from bamboo_ds.engine.loading import TrainingData
from bamboo_ds.engine.parameters import Places
from bamboo_ds.engine.precision import LocalGradients, MixedPrecisionOptimizer, loss_scaler, target_of
from bamboo_ds.engine.sampler import Position, Share
from bamboo_ds.engine.state import Statistics, StepState
from bamboo_ds.engine.swap import ActivationSwap
from bamboo_ds.errors import ConfigError, EngineStoppedError, PeerLostError
from bamboo_ds.module import BambooPipelineModule, untouched_randomness
from bamboo_ds.plan import Decision, Plan, PlanSource, Vote
from bamboo_ds.plan.standby import BEFORE_ALL
from bamboo_ds.schedule import (
    BambooInferenceSchedule,
    BambooTrainSchedule,
    FailoverSchedule,
    StageCosts,
    instructions,
)
from bamboo_ds.world import Guard, close_at_exit, world_of_one
from bamboo_ds.world.failure import Failures

_LOGGED_TIMERS = [BATCH_INPUT_TIMER, FORWARD_MICRO_TIMER, BACKWARD_MICRO_TIMER, STEP_MICRO_TIMER]


class BambooPipelineEngine(Checkpointing):
    """Trains a pipeline with redundant layers; made by `bamboo_ds.initialize`.

    Args:
        model: the module, which holds its redundant layers already.
        bamboo: the `bamboo` block.
        sizes: the global batch.
        source: where plans come from.
        committer: how workers agree.
        network: links and groups of the plan; None on a worker that waits for a place.
        connect: makes those of a plan, and hangs out a row for all of its workers.
        failures: where workers say why they fail.
        places: where the redundant parameters are in the optimizer.
        training_data: as given to `initialize`.
        collate_fn: likewise.
        engine_arguments: the rest of what DeepSpeed's engine takes.
    """

    training_data: Any
    training_dataloader: DataLoader[Any] | None
    _position: Position | None
    """Where training is in the training data, until those are opened there."""

    def __init__(
        self,
        *,
        model: BambooPipelineModule,
        bamboo: BambooConfig,
        sizes: BatchSizes,
        source: PlanSource,
        committer: Committer,
        network: Network | None,
        connect: Callable[[Plan, bytes], Network],
        failures: Failures,
        places: Places,
        training_data: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        **engine_arguments: Any,
    ) -> None:
        self.bamboo, self.plan, self.network, self._connect = bamboo, model.plan, cast(Network, network), connect
        self._source, self._failures, self._stopped = source, failures, ""
        self._places, self._seed, self._committer = places, bamboo.seed, committer
        solo = model.solo_grid()
        model._grid = solo
        try:
            with world_of_one(quiet=source.worker != 0):
                super().__init__(model=model, mpu=solo, training_data=None, collate_fn=collate_fn, **engine_arguments)
        finally:
            model.answer_truly()
        self._prepare(sizes.micro_batches)
        self._take_place(self.plan)
        with self._guarded():
            self._begin()
        self._set_training_data(training_data, position=self._position)
        self._position = None
        close_at_exit(self)

    # ---- construction ------------------------------------------------------------------------------------------

    def _prepare(self, micro_batches: int) -> None:
        self.training_data = None
        self._position = None
        self.statistics = Statistics()
        self.failovers, self.reshapes, self._recovering = [], [], None
        self._swap = ActivationSwap(enabled=self.bamboo.activation_swap == "cpu", parameters=self._held_parameters)
        self._decision: Decision | None = None
        self._evaluations, self._attempt, self._trained = 0, 0, False
        self._training_micro_batches = micro_batches
        self._settled, self._reshape_wanted, self._kept = False, False, {}
        self._missing = set() if self.network is not None else set(self._held_units())
        self._came_late = self.plan.epoch == BEFORE_ALL
        self._state = StepState(step=0)

    def _take_place(self, plan: Plan) -> None:
        """Adopt place and share of a plan: what DeepSpeed believed of its world of one is replaced by the truth."""
        place = plan.place(self._source.worker)
        self.grid = self.mpu = self.module.mpu()
        self.global_rank, self.world_size = self.grid.get_global_rank(), self.grid.world_size
        self.num_stages, self.stage_id, self.pipeline_id = plan.num_stages, place.stage, place.pipeline
        self.owned_stages = self.module.owned_stages
        self.prev_stage, self.next_stage = self.stage_id - 1, self.stage_id + 1
        self.dp_world_size = self.seq_dp_world_size = plan.num_pipelines
        self.is_pipe_parallel, self.is_data_parallel = self.num_stages > 1, plan.num_pipelines > 1
        self._take_share(self._training_micro_batches)
        self._name_checkpoint_files()
        self.stage_costs: StageCosts | None = None
        self._local, self._clock = LocalGradients(self.stage_id), OperationClock()
        self._reducer, self._replicas = GradientReducer(self.module, self.network), Replicas(self.module, self.network)
        first = place if plan.epoch == 0 else None
        self._faults = FaultInjector(self.bamboo.fault_injection, worker=self._source.worker, home=first)
        if self.training_data is not None:
            self._set_training_data(self.training_data, position=self._position)
            self._position = None

    def _take_share(self, micro_batches: int) -> None:
        self._training_micro_batches = micro_batches
        self._config.gradient_accumulation_steps = micro_batches
        self._config.train_batch_size = micro_batches * self.micro_batch_size
        self.micro_batch_range = self.plan.share(self.pipeline_id, micro_batches=micro_batches)
        self.micro_batches = len(self.micro_batch_range)

    def _begin(self) -> None:
        """Make all copies of a layer equal, or wait for a place and take over all from those who have it.

        In a cluster nobody trains before all have everything, whoever dies meanwhile.
        """
        self._adopt_newest()
        while not self._settled:
            with self._through_plan_changes(self._adopt_newest):
                if not self._committer.decided():
                    self._replicas.synchronise()
                if self._source.elastic:
                    self._committer.share("")
                self._settled = True
                if isinstance(self.optimizer, MixedPrecisionOptimizer):
                    self.optimizer.refresh_masters()

    def _held_parameters(self) -> Iterator[torch.Tensor]:
        yield from self.module.parameters()
        yield from self.module.redundant_parameters()

    def _configure_distributed_model(self, model: BambooPipelineModule) -> None:
        super()._configure_distributed_model(model)
        dtype, _ = self._mixed_precision_dtypes()
        if dtype is not None:
            model.cast_redundant_layers(dtype)

    def _configure_bf16_optimizer(self, optimizer: Any) -> Any:
        return optimizer and MixedPrecisionOptimizer(optimizer)

    def _configure_fp16_optimizer(self, optimizer: Any, low_precision_dtype: torch.dtype) -> Any:
        scaler = loss_scaler(self) if low_precision_dtype == torch.float16 else None
        return MixedPrecisionOptimizer(optimizer, loss_scaler=scaler)

    # ---- data --------------------------------------------------------------------------------------------------

    def _set_training_data(self, training_data: Any, *, position: Position | None = None) -> None:
        """Draw from `training_data` where training is, what the present share says.

        Args:
            training_data: as given to `initialize`; None to draw from it no more.
            position: that `global_samples` have led to, where a checkpoint or another worker says it.
        """
        if training_data is not self.training_data:
            if self.training_data is not None:
                self._data.close()
            self.training_data = training_data
            if training_data is not None:
                self._data: TrainingData = TrainingData(
                    training_data,
                    settings=self.bamboo.data,
                    seed=self._seed,
                    collate_fn=self.collate_fn,
                    timeout_seconds=self.bamboo.timeout_seconds,
                )
        if training_data is None:
            return
        share = Share(
            step=self.global_steps,
            samples=self.global_samples,
            micro_batch_size=self.micro_batch_size,
            micro_batches=self._training_micro_batches,
            drawn=self.micro_batch_range,
        )
        self._data.tell(share, position=position)
        shadows_last = self.module.redundant_stage == self.num_stages - 1
        if self._draws() or (self._data.streams and shadows_last):
            self.data_iterator = self._data.open()
        else:
            self._data.close()
            self.data_iterator = None
        self.training_dataloader = self._data.loader

    def data_position(self) -> Position | None:
        """Return where training is in the training data; None without any, or where the user iterates over it."""
        return None if self.training_data is None else self._data.position(self.global_samples)

    def _draws(self) -> bool:
        return self.is_first_stage() or self.is_last_stage()

    def is_first_stage(self) -> bool:
        """Return whether this worker runs the first stage."""
        return 0 in self.owned_stages

    def is_last_stage(self) -> bool:
        """Return whether this worker runs the last stage."""
        return self.num_stages - 1 in self.owned_stages

    @property
    def _follows_data(self) -> bool:
        """Whether this worker draws batches that it has no use for yet: it may have to stand in for the last stage.

        An iterator cannot be opened in the middle, so the shadow of the last stage keeps pace with it. (The shadow of
        the first stage is the last stage's worker, which draws anyway.)
        """
        shadows_last = self.module.redundant_stage == self.num_stages - 1
        return shadows_last and not self._draws() and self.data_iterator is not None

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """Train on another iterator. DeepSpeed drops it in mid-pipeline; here any worker may have to draw."""
        self.training_dataloader = None
        self.data_iterator = iterator

    def _draw_from_now_on(self) -> None:
        """Open the training data, if a stage that needs it was taken over."""
        if self.data_iterator is not None or self.training_data is None or not self._draws():
            return
        self._set_training_data(self.training_data)
        if hasattr(self, "_batches"):  # not before the first step
            self._batches.use(self.data_iterator)

    def gradient_accumulation_steps(self) -> int:
        """Return how many micro-batches this pipeline draws per step.

        DeepSpeed's own config holds those of the whole global batch.
        """
        return getattr(self, "micro_batches", self._config.gradient_accumulation_steps)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch size from the next step on; the micro-batch size stays.

        Raises:
            ConfigError: it is no multiple of the micro-batch size, or leaves a pipeline without work.
        """
        micro_batches, rest = divmod(train_batch_size, self.micro_batch_size)
        if rest or micro_batches < self.plan.num_pipelines:
            raise ConfigError(
                f"train_batch_size ({train_batch_size}) must be a multiple of the micro-batch size "
                f"({self.micro_batch_size}) with at least one micro-batch for each of "
                f"{self.plan.num_pipelines} pipelines"
            )
        if self.training_data is not None:
            self._data.check(batch=train_batch_size)
        self._take_share(micro_batches)
        self._set_training_data(self.training_data)

    # ---- one step ----------------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Train one global batch.

        Args:
            data_iter: yields this pipeline's micro-batches as (inputs, labels); absent: the training data.

        Returns:
            The mean loss over the global batch, on every worker.

        Raises:
            DataExhaustedError: the data ended inside the step; no worker has stepped.
            NonFiniteLossError: a loss or gradient is not finite; no worker has stepped.
            PeerLostError: another worker failed.
            EngineStoppedError: this engine has failed before.
        """
        if self.optimizer is None:
            raise ConfigError(
                "train_batch() needs an optimizer: add `optimizer` to the DeepSpeed config or give one to initialize()"
            )
        with self._guarded(), world_of_one(quiet=self.global_rank != 0), untouched_randomness():
            self._adopt_newest()
            self._meet_at_boundary()
            self._trained = True
            with self._ends_with_the_others():
                return super().train_batch(data_iter)

    @contextlib.contextmanager
    def _ends_with_the_others(self) -> Iterator[None]:
        """End a script that counts its own steps, and has come later than the others, when all of these have ended."""
        try:
            yield
        except PeerLostError:
            others = tuple(worker for worker in self.plan.workers if worker != self._source.worker)
            if not self._came_late or self._source.left(others) != others:
                raise
            logger.warning(
                f"worker {self._source.worker} ends at step {self.global_steps}: the scripts of all others have ended. "
                "Let a script train `while engine.global_steps < steps`, then it ends with them"
            )
            raise SystemExit(0) from None

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        self._begin_step()
        self._run_to_the_end(pipe_schedule)

    def _begin_step(self) -> None:
        self._draw_from_now_on()  # a stage may have been taken over in an evaluation, which has data of its own
        self._replicas.begin_step()
        self._reducer.begin_step()
        self._attempt = 0
        self._state = StepState(step=self.global_steps, share=self.micro_batch_range)
        self._batches = self._step_batches()
        self._swap.begin_step()

    def _restart_step(self, work: Work) -> None:
        if self.training_data is None:
            self.data_iterator = self._batches.put_back()
        self._begin_step()
        work.begin(self._train_schedule())

    def _step_batches(self) -> StepBatches:
        return StepBatches(
            self.data_iterator,
            transform=self.batch_fn,
            step=self._state.step,
            share=self._state.share,
            seed=self._seed,
            device=self.device,
        )

    def _train_schedule(self) -> BambooTrainSchedule | FailoverSchedule:
        if len(self.owned_stages) == 1 and self.module.redundant_stage is not None:
            self.statistics.frc_possible += self.micro_batches
        taken = [stage for stage in self.owned_stages if stage != self.stage_id]
        if taken and self.network.held(taken[0], step=self.global_steps):
            # The lost worker had begun this step before this one did.
            return self._failover_schedule(taken[0], [])
        return BambooTrainSchedule(
            self.micro_batches,
            self.num_stages,
            self.stage_id,
            owned=self.owned_stages,
            owners=self.plan.owner_stages(self.pipeline_id),
            redundancy=self.bamboo.redundancy,
            costs=self.stage_costs,
        )

    def _inference_schedule(self, micro_batches: int) -> BambooInferenceSchedule:
        return BambooInferenceSchedule(micro_batches, self.num_stages, self.stage_id, owned=self.owned_stages)

    def _exec_reduce_grads(self) -> None:
        self._reducer.reduce(self._local)
        self._replicas.follow_buffers()

    def _exec_optimizer_step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Commit the step: agree with all workers, then step."""
        self._decision = self._committer.decide(self._votes(), loss_scale=self._loss_scale())
        self._reshape_wanted = self._decision.reshape
        self._clock.end_step()
        self._count_host_bytes()
        with self._breakdown(STEP_MICRO_TIMER, STEP_GLOBAL_TIMER):
            self._install_gradients(self._decision)
            self._take_model_step(lr_kwargs)
        self.network.forget()
        self._local.clear()
        self._drop_gradients()
        self.stage_costs = follow(self.stage_costs, self._decision)
        self._report_step()
        self._after_commit(checkpoint=self._decision.checkpoint)

    def _votes(self) -> list[Vote]:
        """Return one vote for each owned stage."""
        return [self._vote(stage) for stage in self.owned_stages]

    def _vote(self, stage: int) -> Vote:
        norms, last = self._reducer.squared_norms(stage), stage == self.num_stages - 1
        additional = self._state.additional_losses if last else {}
        return Vote(
            worker=self._source.worker,
            step=self._state.step,
            pipeline=self.pipeline_id,
            stage=stage,
            squared_norms=norms,
            losses={self.micro_batch_range[m]: float(loss) for m, loss in self._state.losses.items()} if last else {},
            additional_losses={name: float(total) / self.micro_batches for name, total in additional.items()},
            overflow=self.fp16_enabled() and not all(map(math.isfinite, norms.values())),
            forward_seconds=self._clock.seconds("forward", stage),
            backward_seconds=self._clock.seconds("backward", stage),
            checkpoint_due=self._wants_checkpoint(),
            checkpoint_busy=self._writes_checkpoint(),
        )

    @torch.no_grad()
    def _install_gradients(self, decision: Decision) -> None:
        """Hand the summed gradients, clipped by the global norm, to the optimizer."""
        coefficient = 1.0 / self._loss_scale()
        limit = gradient_clipping(self.config)
        if limit > 0:
            coefficient *= min(1.0, limit / (decision.global_norm + 1e-6))
        for parameter, total in self._reducer.sums():
            target = target_of(parameter, self.optimizer)
            target.grad = total
            if total is not None and coefficient != 1.0:
                total.mul_(coefficient)
        self._global_grad_norm = decision.global_norm
        if isinstance(self.optimizer, MixedPrecisionOptimizer):
            self.optimizer.overflow = decision.overflow

    def clip_fp32_gradients(self) -> None:
        """Do nothing: the commit clipped by the global norm; DeepSpeed's own norm is that of one stage."""

    def _drop_gradients(self) -> None:
        for parameter, _ in self._reducer.sums():
            parameter.grad = None
            target_of(parameter, self.optimizer).grad = None

    def _count_host_bytes(self) -> None:
        journal = sum(
            meta.bytes
            for link in self.network.outbound.values()
            for sent in link.journal()
            for meta in sent.header.tensors
        )
        swapped = self._swap.saved_bytes if self.bamboo.activation_swap == "cpu" else 0
        self.statistics.swap_saved_bytes = max(self.statistics.swap_saved_bytes, swapped)
        self.statistics.host_peak_bytes = max(self.statistics.host_peak_bytes, swapped + journal)

    def _aggregate_total_loss(self) -> torch.Tensor:
        assert self._decision is not None
        self.agg_additional_losses = {
            name: torch.tensor(value, device=self.device) for name, value in self._decision.additional_losses.items()
        } or None
        self.dp_group_loss = torch.tensor(self._decision.pipeline_losses[self.pipeline_id], device=self.device)
        self._state = StepState(step=self.global_steps)
        return torch.tensor(self._decision.mean_loss, dtype=torch.float32, device=self.device)

    def _report_step(self) -> None:
        """Write learning rate and loss scale to the monitor, and times to the log, as DeepSpeed does."""
        if self.global_rank == 0 and self.monitor.enabled:
            events = [("Train/Samples/lr", self.get_lr()[0], self.global_samples)]
            if self.fp16_enabled():
                events.append(("Train/Samples/loss_scale", self._loss_scale(), self.global_samples))
            self.monitor.write_events(events)
        if self.wall_clock_breakdown() and self.steps_per_print() and self.global_steps % self.steps_per_print() == 0:
            self.timers.log(_LOGGED_TIMERS)

    _INSTRUCTION_MAP: ClassVar[dict[type, Any]] = {
        **EXECUTION_MAP,
        instructions.ReduceGrads: _exec_reduce_grads,
        instructions.OptimizerStep: _exec_optimizer_step,
    }

    # ---- failing and ending ------------------------------------------------------------------------------------

    def _guarded(self) -> Guard:
        """Let every worker hear why one fails, and none wait for it."""
        if self._stopped:
            raise EngineStoppedError(f"this engine stopped earlier: {self._stopped}; start the job again")
        return Guard(self._failures, self._stop)

    def _stop(self, error: BaseException) -> None:
        self._stopped = f"{type(error).__name__}: {error}"
        self._set_training_data(None)
        self._close_network()

    def fail(self, error: BaseException) -> None:
        """Tell the other workers that this one ends with `error`."""
        if not self._stopped:
            self._failures.report(error)
            self._stop(error)

    def close(self) -> None:
        """End links and groups; the engine cannot train afterwards. Called at exit if not before."""
        if not self._stopped:
            self._stopped = "it was closed"
            self._finish_checkpoints()
            self._set_training_data(None)
            self._close_network()

    def destroy(self) -> None:
        """Close, and free what DeepSpeed's engine holds."""
        self.close()
        super().destroy()

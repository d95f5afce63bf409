"""Executes the instructions of a schedule on tensors: one method per instruction.

Every method names a stage and a micro-batch; what it reads and leaves is in the `StepState`. DeepSpeed's own
`_exec_*` work on numbered buffers and on blocking sends between ranks, and are all replaced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import (
    BATCH_INPUT_TIMER,
    PIPE_RECV_GRAD_TIMER,
    PIPE_RECV_INPUT_TIMER,
    PIPE_SEND_GRAD_TIMER,
    PIPE_SEND_OUTPUT_TIMER,
    PipelineEngine,
)
from deepspeed.utils.timer import BACKWARD_GLOBAL_TIMER, BACKWARD_MICRO_TIMER, FORWARD_GLOBAL_TIMER, FORWARD_MICRO_TIMER

from bamboo_ds.comm import Address, Kind, Message, Network, make_message
from bamboo_ds.engine.clock import OperationClock
from bamboo_ds.engine.data import StepBatches, check_same
from bamboo_ds.engine.gradients import GradientReducer
from bamboo_ds.engine.precision import LocalGradients
from bamboo_ds.engine.state import Slot, Statistics, StepState, Value, like, required, tensors_of
from bamboo_ds.engine.swap import ActivationSwap
from bamboo_ds.errors import ConfigError
from bamboo_ds.module import BambooPipelineModule, seed_all
from bamboo_ds.plan import Plan
from bamboo_ds.plan.seeds import layer_seed
from bamboo_ds.schedule import instructions


class Execution(PipelineEngine):
    """The instruction half of the engine."""

    module: BambooPipelineModule
    plan: Plan
    network: Network
    micro_batch_range: range
    owned_stages: tuple[int, ...] = (0,)  # of DeepSpeed's world of one, until the worker takes its place
    _state: StepState
    _batches: StepBatches
    _local: LocalGradients
    _clock: OperationClock
    _swap: ActivationSwap
    _seed: int
    _training_micro_batches: int
    _attempt: int
    _reducer: GradientReducer
    statistics: Statistics
    data_iterator: Any

    # ---- loading and computing ---------------------------------------------------------------------------------

    def _exec_load_micro_batch(self, stage: int, micro_batch: int) -> None:
        with self._breakdown(BATCH_INPUT_TIMER):
            batch = self._batches.batch(micro_batch)
            if stage == 0:
                slot = self._state.slot(stage, micro_batch)
                slot.inputs, slot.digest = batch.inputs, batch.digest

    def _exec_forward_pass(self, stage: int, micro_batch: int) -> None:
        slot = self._state.slot(stage, micro_batch)
        if stage > 0 and stage - 1 in self.owned_stages:
            self._hand_over_activation(stage, micro_batch)
        with self._breakdown(FORWARD_MICRO_TIMER, FORWARD_GLOBAL_TIMER), self._clock.timed("forward", stage):
            slot.outputs = self._run(stage, micro_batch, slot.inputs)
            self._finish_forward(stage, micro_batch)
        if self._follows_data:
            self._batches.batch(micro_batch)

    @property
    def _follows_data(self) -> bool:
        """Whether this worker draws batches that it has no use for yet."""
        return False

    def _finish_forward(self, stage: int, micro_batch: int) -> None:
        """Take the loss of the last stage; make the message that carries the outputs of any other."""
        slot = self._state.slot(stage, micro_batch)
        if stage == self.num_stages - 1:
            self._take_loss(slot, micro_batch)
            return
        produced: Value = required(slot.outputs)
        slot.sent = make_message(
            self._address(Kind.ACTIVATION, stage + 1, micro_batch),
            tensors_of(produced),
            is_tuple=isinstance(produced, tuple),
            requires_grad=[tensor.requires_grad for tensor in tensors_of(produced)],
            digest=slot.digest,
        )

    def _hand_over_activation(self, stage: int, micro_batch: int) -> None:
        """Give this worker's own outputs to the next stage, which is its own too, as a link would."""
        before, slot = self._state.slot(stage - 1, micro_batch), self._state.slot(stage, micro_batch)
        slot.inputs, slot.digest = self._received(required(before.sent)), before.digest
        if not torch.is_grad_enabled():
            before.inputs = before.outputs = before.sent = None

    def _exec_promote_forward(self, stage: int, micro_batch: int) -> None:
        """Take a redundant forward for that of the stage's owner, who is lost."""
        saved, slot = self._state.redundant.pop((stage, micro_batch)), self._state.slot(stage, micro_batch)
        before = self._batches.batch(micro_batch) if stage == 0 else self._state.slot(stage - 1, micro_batch)
        slot.inputs, slot.outputs, slot.digest = saved.inputs, saved.outputs, before.digest
        self._finish_forward(stage, micro_batch)

    def _run(self, stage: int, micro_batch: int, inputs: Value | None) -> Any:
        """Run a stage on copies of its inputs, so that a layer which works in place spoils nothing still needed."""
        given: Value = required(inputs)
        copies = tuple(tensor.clone() for tensor in tensors_of(given))
        outputs = self.module.run_stage(
            stage, like(given, copies), seed_of=lambda layer: self._seed_of(micro_batch, layer=layer)
        )
        if stage < self.num_stages - 1:
            outputs = self._apart_from_buffers(stage, _checked(outputs, stage))
        return outputs

    def _seed_of(self, micro_batch: int, *, layer: int) -> int:
        position = self._state.share[micro_batch]
        return layer_seed(self._seed, step=self._state.step, micro_batch=position, layer=layer)

    def _apart_from_buffers(self, stage: int, outputs: Value) -> Value:
        """Copy outputs that are buffers: the next forward may overwrite them while they are under way or kept."""
        layers = self.module.layers_of(stage).values()
        buffers = {buffer.untyped_storage().data_ptr() for layer in layers for buffer in layer.buffers()}
        apart = (part.clone() if part.untyped_storage().data_ptr() in buffers else part for part in tensors_of(outputs))
        return like(outputs, tuple(apart)) if buffers else outputs

    def _take_loss(self, slot: Slot, micro_batch: int) -> None:
        batch = self._batches.batch(micro_batch)
        if self.num_stages > 1:
            check_same(slot.digest, batch.digest, step=self._state.step, micro_batch=self._state.share[micro_batch])
        if self.eval_return_logits:
            self.outputs = slot.outputs
        # A loss that draws must draw alike when the forward was run ahead of it, by the shadow.
        seed_all(self._seed_of(micro_batch, layer=len(self.module._layer_specs)))
        has_loss_fn = self._compute_loss and self.module.loss_fn is not None
        self.loss = self.module.loss_fn(slot.outputs, batch.labels) if has_loss_fn else slot.outputs
        slot.loss = self.loss
        self._state.losses[micro_batch] = _detached(self.loss)
        for name, value in (self.module.get_additional_losses() or {}).items():
            known = self._state.additional_losses.get(name)
            self._state.additional_losses[name] = value.detach() if known is None else known + value.detach()
        if not torch.is_grad_enabled():
            slot.outputs = slot.loss = None

    def _exec_backward_pass(self, stage: int, micro_batch: int) -> None:
        slot = self._state.slot(stage, micro_batch)
        with self._breakdown(BACKWARD_MICRO_TIMER, BACKWARD_GLOBAL_TIMER), self._clock.timed("backward", stage):
            if stage == self.num_stages - 1:
                self._backward_loss(slot)
            else:
                produced: Value = required(slot.outputs)
                outputs = [tensor for tensor in tensors_of(produced) if tensor.requires_grad]
                if outputs:
                    torch.autograd.backward(outputs, list(slot.output_gradients))
            self._local.collect(stage, self._reducer.parameters(stage))
        if stage > 0 and stage - 1 in self.owned_stages:
            gradients = self._gradient_message(stage, micro_batch).tensors
            self._state.slot(stage - 1, micro_batch).output_gradients = gradients
            slot.inputs = None
        slot.outputs, slot.loss, slot.output_gradients = None, None, ()
        self.loss = _detached(self.loss)  # else the last graph would live until the next step

    def _backward_loss(self, slot: Slot) -> None:
        if not isinstance(slot.loss, torch.Tensor) or slot.loss.numel() != 1:
            raise ConfigError(
                "the last stage must end in a scalar loss: give loss_fn, or let the last layer return one"
            )
        if slot.loss.requires_grad:
            (slot.loss * (self._loss_scale() / self._training_micro_batches)).backward()

    def _exec_redundant_forward(self, stage: int, micro_batch: int) -> None:
        """Run the next stage's forward as its owner does, and keep what its backward would need in host memory."""
        inputs = self._redundant_inputs(stage, micro_batch)
        with self._swap.hooks():
            outputs = self._run(stage, micro_batch, inputs)
        self._state.redundant[stage, micro_batch] = Slot(inputs=inputs, outputs=outputs)
        self.statistics.frc_done += 1

    def _redundant_inputs(self, stage: int, micro_batch: int) -> Value:
        if stage == 0:
            return self._batches.batch(micro_batch).inputs
        return self._received(required(self._state.slot(stage - 1, micro_batch).sent))

    # ---- sending and receiving ---------------------------------------------------------------------------------

    def _exec_send_activations(self, stage: int, micro_batch: int) -> None:
        slot = self._state.slot(stage, micro_batch)
        with self._breakdown(PIPE_SEND_OUTPUT_TIMER):
            self.network.outbound[Kind.ACTIVATION, stage].send(required(slot.sent))
        if not torch.is_grad_enabled():
            slot.inputs = slot.outputs = slot.sent = None

    def _exec_recv_activations(self, stage: int, micro_batch: int) -> None:
        with self._breakdown(PIPE_RECV_INPUT_TIMER):
            message = self.network.inbound[Kind.ACTIVATION, stage].receive(
                self._address(Kind.ACTIVATION, stage, micro_batch)
            )
            slot = self._state.slot(stage, micro_batch)
            slot.inputs, slot.digest = self._received(message), message.header.digest

    def _received(self, message: Message) -> Value:
        """Return a message's tensors as leaves on the device; those whose sender expects a gradient require one."""
        leaves = tuple(
            tensor.to(self.device).requires_grad_(meta.requires_grad and torch.is_grad_enabled())
            for tensor, meta in zip(
                (tensor.detach() for tensor in message.tensors), message.header.tensors, strict=True
            )
        )
        return leaves if message.header.is_tuple else leaves[0]

    def _exec_send_grads(self, stage: int, micro_batch: int) -> None:
        with self._breakdown(PIPE_SEND_GRAD_TIMER):
            self.network.outbound[Kind.GRADIENT, stage].send(self._gradient_message(stage, micro_batch))
        self._state.slot(stage, micro_batch).inputs = None

    def _gradient_message(self, stage: int, micro_batch: int) -> Message:
        """Return a gradient for each input tensor that asks for one; zero where the stage did not use it."""
        received: Value = required(self._state.slot(stage, micro_batch).inputs)
        asked = [tensor for tensor in tensors_of(received) if tensor.requires_grad]
        gradients = [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in asked]
        address = self._address(Kind.GRADIENT, stage - 1, micro_batch)
        return make_message(address, gradients, is_tuple=True, requires_grad=[False] * len(gradients))

    def _exec_recv_grads(self, stage: int, micro_batch: int) -> None:
        with self._breakdown(PIPE_RECV_GRAD_TIMER):
            message = self.network.inbound[Kind.GRADIENT, stage].receive(
                self._address(Kind.GRADIENT, stage, micro_batch)
            )
            gradients = tuple(tensor.to(self.device) for tensor in message.tensors)
            self._state.slot(stage, micro_batch).output_gradients = gradients

    def _address(self, kind: Kind, stage: int, micro_batch: int) -> Address:
        return Address(
            kind=kind,
            epoch=self.plan.epoch,
            attempt=self._attempt,
            step=self._state.step,
            stage=stage,
            micro_batch=micro_batch,
        )

    # ---- timers ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _breakdown(self, *names: str) -> Iterator[None]:
        """Run DeepSpeed's timers around a block when `wall_clock_breakdown` asks for them."""
        if not self.wall_clock_breakdown():
            yield
            return
        for name in names:
            self.timers(name).start()
        yield
        for name in names:
            self.timers(name).stop()

    def _loss_scale(self) -> float:
        return float(getattr(self.optimizer, "loss_scale", 1.0))


# DeepSpeed dispatches by exact class through this map of functions, so overriding methods alone would change nothing.
EXECUTION_MAP: dict[type, Any] = {
    instructions.LoadMicroBatch: Execution._exec_load_micro_batch,
    instructions.ForwardPass: Execution._exec_forward_pass,
    instructions.PromoteForward: Execution._exec_promote_forward,
    instructions.BackwardPass: Execution._exec_backward_pass,
    instructions.RedundantForward: Execution._exec_redundant_forward,
    instructions.SendActivation: Execution._exec_send_activations,
    instructions.RecvActivation: Execution._exec_recv_activations,
    instructions.SendGrad: Execution._exec_send_grads,
    instructions.RecvGrad: Execution._exec_recv_grads,
}


def _checked(outputs: Any, stage: int) -> Value:
    if isinstance(outputs, list):
        outputs = tuple(outputs)
    parts = outputs if isinstance(outputs, tuple) else (outputs,)
    strangers = [name for name in map(_stranger, parts) if name]
    if strangers:
        raise ConfigError(
            f"the last layer of stage {stage} returned {', '.join(strangers)}; "
            "between stages only a tensor or a tuple of tensors can pass"
        )
    return outputs


def _stranger(part: Any) -> str:
    """Name what cannot pass between stages; empty for what can."""
    if not isinstance(part, torch.Tensor):
        return type(part).__name__
    return "" if part.layout == torch.strided else f"a tensor of layout {part.layout}"


def _detached(loss: Any) -> Any:
    return loss.detach() if isinstance(loss, torch.Tensor) else [part.detach() for part in loss]

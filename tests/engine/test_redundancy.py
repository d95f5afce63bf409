"""Redundant layers are the owner's, bit for bit, and a redundant forward is worth a backward of the owner's."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as torch_distributed
from deepspeed.pipe import LayerSpec
from torch import nn

from bamboo_ds.cli.bench.workers import WorkerResult, values
from bamboo_ds.engine.state import tensors_of
from bamboo_ds.engine.swap import ActivationSwap
from bamboo_ds.schedule import instructions
from tests.engine.training import (
    MODES,
    Outcome,
    Training,
    assert_copies_equal,
    batches,
    build_engine,
    check,
    sgd,
    train,
)
from tests.engine.zoo import WIDTH, blocks, vectors

Run = Callable[..., list[WorkerResult]]
SHAPES = [(2, 1), (3, 1), (4, 1), (2, 2), (3, 2)]


class Normed(nn.Module):
    """Dropout, running statistics, and an output that is not laid out in rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        value = value + self.dropout(torch.tanh(self.linear(self.norm(value))))
        return value.t().contiguous().t()


def normed() -> list[Any]:
    return [LayerSpec(Normed) for _ in range(6)]


@pytest.mark.parametrize("redundancy", MODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_all_copies_are_equal_after_every_step_buffers_too(
    workers: Run, shape: tuple[int, int], redundancy: str
) -> None:
    job = Training(normed, vectors, steps=4)
    outcomes = values(workers(train, shape[0] * shape[1], args=(job, shape[0], redundancy), timeout_seconds=60))
    assert_copies_equal(outcomes)
    copies = [layer for outcome in outcomes for layer, _ in outcome.digests[0]]
    assert len(copies) == 6 * shape[1] * (1 if redundancy == "off" else 2), "shadows must hold the layers they shadow"


class Averaged(nn.Module):
    """Keeps a running mean in fp32, whatever its weights are in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(value.detach().float().mean(dim=0) * 0.1)
        return value + torch.tanh(self.linear(value))


@pytest.mark.parametrize("shape", [(2, 1), (3, 2)])
def test_bf16_copies_are_equal_with_running_statistics(workers: Run, shape: tuple[int, int]) -> None:
    def low(step: int, micro_batch: int) -> tuple[torch.Tensor, ...]:
        return tuple(part.bfloat16() for part in vectors(step, micro_batch))

    job = Training(lambda: [LayerSpec(Averaged) for _ in range(6)], low, bf16=True)
    assert_copies_equal(values(workers(train, shape[0] * shape[1], args=(job, shape[0]), timeout_seconds=60)))


@pytest.mark.parametrize("shape", [(2, 1), (3, 2)])
def test_no_mode_changes_a_bit_of_the_losses(workers: Run, shape: tuple[int, int]) -> None:
    job = Training(normed, vectors, steps=4)
    runs = [
        values(workers(train, shape[0] * shape[1], args=(job, shape[0], mode), timeout_seconds=60)) for mode in MODES
    ]
    assert all(outcome.losses == runs[0][0].losses for outcomes in runs for outcome in outcomes)
    done = [sum(outcome.frc_done for outcome in outcomes) for outcomes in runs]
    assert done[0] == done[1] == 0
    assert done[3] == job.steps * job.micro_batches * shape[0]
    assert 0 <= done[2] <= done[3]


# ---- what a redundant forward holds --------------------------------------------------------------------------------


def recover(rank: int, job: Training, num_stages: int) -> list[str]:
    """Train; before every commit replay the owners' backwards on redundant forwards. Return what differed."""
    engine, wrong = build_engine(job, num_stages), []
    witness = Witness(engine)
    for step in range(job.steps):
        engine.train_batch(batches(job, engine, step))
        wrong += witness.wrong
    if witness.compared != job.steps * len(engine.micro_batch_range):
        wrong.append(f"worker {rank} compared {witness.compared} redundant forwards only")
    engine.close()
    return wrong


class Witness:
    """Notes what an owner computes, and holds the shadow's redundant forwards against it before the commit."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.wrong, self.compared = engine, [], 0
        self.outputs: dict[Any, list[torch.Tensor]] = {}
        self.gradients: dict[Any, list[torch.Tensor]] = {}
        for kind, method in (
            (instructions.ForwardPass, self._forward),
            (instructions.BackwardPass, self._backward),
            (instructions.OptimizerStep, self._commit),
        ):
            self._wrap(kind, method)

    def _wrap(self, kind: type, around: Callable[..., None]) -> None:
        original = self.engine._INSTRUCTION_MAP[kind]

        def run(engine: Any, **arguments: Any) -> None:
            around(types.MethodType(original, engine), **arguments)

        self.engine._INSTRUCTION_MAP = {**self.engine._INSTRUCTION_MAP, kind: run}

    def _forward(self, original: Callable[..., None], stage: int, micro_batch: int) -> None:
        original(stage=stage, micro_batch=micro_batch)
        slot = self.engine._state.slot(stage, micro_batch)
        self.outputs[stage, micro_batch] = [part.detach().clone() for part in tensors_of(slot.outputs)]

    def _backward(self, original: Callable[..., None], stage: int, micro_batch: int) -> None:
        slot = self.engine._state.slot(stage, micro_batch)
        if stage == self.engine.num_stages - 1:
            scaled = slot.loss / self.engine._training_micro_batches
            found = list(torch.autograd.grad(scaled, list(tensors_of(slot.outputs)), retain_graph=True))
        else:
            found = [part.clone() for part in slot.output_gradients]
        self.gradients[stage, micro_batch] = found
        original(stage=stage, micro_batch=micro_batch)

    def _commit(self, original: Callable[..., None]) -> None:
        told: list[Any] = [None] * torch_distributed.get_world_size()
        engine = self.engine
        mine = (engine.pipeline_id, engine.stage_id), self.outputs, self.gradients, self._own_gradients()
        torch_distributed.all_gather_object(told, mine)
        owners = {place: rest for place, *rest in told}
        self.wrong = self._compare(*owners[engine.pipeline_id, engine.module.redundant_stage])
        self.outputs, self.gradients = {}, {}
        original()

    def _own_gradients(self) -> dict[str, torch.Tensor]:
        module = self.engine.module
        return {
            f"{index}.{name}": parameter.grad.clone()
            for index, layer in module.layers_of(module.own_stage).items()
            for name, parameter in layer.named_parameters()
        }

    def _compare(self, outputs: Any, gradients: Any, summed: dict[str, torch.Tensor]) -> list[str]:
        engine, wrong = self.engine, []
        stage = engine.module.redundant_stage
        for micro_batch in range(len(engine.micro_batch_range)):
            slot = engine._state.redundant[stage, micro_batch]
            self.compared += 1
            ours = tensors_of(slot.outputs)
            if not all(map(torch.equal, ours, outputs[stage, micro_batch])):
                wrong.append(f"outputs of stage {stage}, micro-batch {micro_batch}")
            torch.autograd.backward([part for part in ours if part.requires_grad], gradients[stage, micro_batch])
            if stage > 0:
                sent_back = self.gradients[stage - 1, micro_batch]
                asked = [part.grad for part in tensors_of(slot.inputs) if part.requires_grad]
                if len(asked) != len(sent_back) or not all(map(torch.equal, asked, sent_back)):
                    wrong.append(f"input gradients of stage {stage}, micro-batch {micro_batch}")
        return wrong + self._compare_sums(stage, summed)

    def _compare_sums(self, stage: int, summed: dict[str, torch.Tensor]) -> list[str]:
        wrong = []
        for index, layer in self.engine.module.layers_of(stage).items():
            for name, parameter in layer.named_parameters():
                if not torch.equal(parameter.grad, summed[f"{index}.{name}"]):
                    wrong.append(f"gradient of {index}.{name}")
                parameter.grad = None
        return wrong


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("checkpointing", [0, 1])
def test_a_backward_on_a_redundant_forward_gives_the_owners_gradients_bit_for_bit(
    workers: Run, shape: tuple[int, int], checkpointing: int
) -> None:
    job = Training(normed, vectors, optimizer=sgd, module={"activation_checkpoint_interval": checkpointing})
    results = values(workers(recover, shape[0] * shape[1], args=(job, shape[0]), timeout_seconds=60))
    assert results == [[]] * len(results)


class Ticking(nn.Module):
    """Hands on a buffer that it overwrites in its next forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("ticks", torch.zeros(WIDTH))

    def forward(self, value: Any) -> Any:
        value, ticks = value if isinstance(value, tuple) else (value, None)
        if ticks is not None:
            return value + torch.tanh(self.linear(value)) * ticks
        self.ticks += 0.25
        return value + torch.tanh(self.linear(value)), self.ticks


def test_a_buffer_that_is_handed_on_is_handed_on_as_it_was(workers: Run) -> None:
    """What was sent must not change while it is under way, nor before the redundant forward reads it."""

    def layers() -> list[Any]:
        return [*blocks(1), LayerSpec(Ticking), LayerSpec(Ticking), *blocks(1)]

    job = Training(layers, vectors)
    check(workers, job, (2, 1))
    assert values(workers(recover, 2, args=(job, 2), timeout_seconds=60)) == [[], []]


def test_swapped_tensors_are_activations_never_parameters() -> None:
    layer, inputs = nn.Linear(WIDTH, 64), torch.randn(4, WIDTH, requires_grad=True)
    swap = ActivationSwap(enabled=True, parameters=layer.parameters)
    swap.begin_step()
    with swap.hooks():
        # Saves its input and (a view of) its weight; tanh saves its output.
        outputs = torch.tanh(layer(inputs))
    assert swap.saved_bytes == 4 * WIDTH * 4 + 4 * 64 * 4
    outputs.sum().backward()
    expected = torch.autograd.grad(torch.tanh(layer(inputs)).sum(), inputs)[0]
    assert torch.equal(inputs.grad, expected)


def test_a_step_of_redundant_forwards_counts_what_they_hold(workers: Run) -> None:
    outcomes: list[Any] = values(
        workers(_host_bytes, 2, args=(Training(lambda: blocks(4), vectors),), timeout_seconds=60)
    )
    for eager, lazy in outcomes:
        assert eager > lazy >= 0


def _host_bytes(rank: int, job: Training) -> tuple[int, int]:
    found = []
    for mode in ("eflb", "lflb"):
        engine = build_engine(job, 2, mode)
        engine.train_batch(batches(job, engine, 0))
        found.append(engine.statistics.swap_saved_bytes)
        engine.close()
    return found[0], found[1]


def test_evaluation_between_steps_changes_no_copy_and_no_loss(workers: Run) -> None:
    job = Training(normed, vectors, steps=3)
    with_evaluation, without = (
        values(workers(_evaluating, 4, args=(job, evaluations), timeout_seconds=60)) for evaluations in (2, 0)
    )
    assert_copies_equal(with_evaluation)
    assert [outcome.losses for outcome in with_evaluation] == [outcome.losses for outcome in without]
    assert with_evaluation[0].digests == without[0].digests


def _evaluating(rank: int, job: Training, evaluations: int) -> Outcome:
    from tests.engine.training import train_step

    engine, outcome = build_engine(job, 2), Outcome()
    for step in range(job.steps):
        train_step(engine, job, step, outcome)
        for _ in range(evaluations):
            engine.eval_batch(iter([vectors(50, index) for index in range(3)]), num_micro_batches=3)
    engine.close()
    return outcome


def test_a_frozen_or_empty_stage_has_redundant_layers_too(workers: Run) -> None:
    def layers() -> list[Any]:
        return [LayerSpec(nn.Dropout, 0.1), LayerSpec(nn.BatchNorm1d, WIDTH, affine=False), *blocks(4)]

    check(workers, replace(Training(layers, vectors), steps=2), (3, 1))

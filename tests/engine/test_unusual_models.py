"""Legitimate models that break stock pipelines: each equals one process, bit for bit where only the stages differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn

from bamboo_ds.cli.bench.workers import WorkerResult
from tests.engine.training import Outcome, Training, check, sgd
from tests.engine.zoo import WIDTH, Block, blocks, tokens, vectors

Run = Callable[..., list[WorkerResult]]
SHAPES = [(3, 1), (2, 2)]


class Frozen(Block):
    """A layer of which nothing is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class LowRank(nn.Module):
    """A frozen layer with a trainable correction (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + torch.tanh(self.frozen(value) + self.up(self.down(value)))


class InPlace(nn.Module):
    """Overwrites its input and hands it on."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.relu_(value.mul_(1.1))


class InPlaceInside(Block):
    """Overwrites what it has just made."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.dropout(torch.relu_(self.linear(value))).add_(value)


class Normed(nn.Module):
    """A layer with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.linear(self.norm(value))


class Unused(nn.Module):
    """A layer with a parameter that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.spare = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + torch.tanh(self.linear(value))


class Sometimes(nn.Module):
    """A layer whose second branch sees only some micro-batches (a mixture of experts in miniature)."""

    def __init__(self) -> None:
        super().__init__()
        self.usual, self.rare = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        chosen = self.rare if value.sum() > 2 else self.usual
        return value + torch.tanh(chosen(value))


class WithLoss(nn.Module):
    """A last layer that returns the loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.linear(value).square().mean()


def frozen(count: int) -> list[Any]:
    return [LayerSpec(Frozen) for _ in range(count)]


def ready_made(count: int) -> list[Any]:
    torch.manual_seed(3)
    return [Block() for _ in range(count)]


MODELS: dict[str, Callable[[], list[Any]]] = {
    "first stage frozen": lambda: [*frozen(3), *blocks(3)],
    "last stage frozen": lambda: [*blocks(3), *frozen(3)],
    "one trainable layer in the middle": lambda: [*frozen(2), *blocks(1), *frozen(3)],
    "low-rank corrections": lambda: [LayerSpec(LowRank) for _ in range(6)],
    "frozen first stage and low-rank rest": lambda: [*frozen(3), *(LayerSpec(LowRank) for _ in range(3))],
    "stage without parameters first": lambda: [LayerSpec(nn.Tanh), torch.neg, LayerSpec(nn.Tanh), *blocks(3)],
    "stage without parameters last": lambda: [*blocks(3), LayerSpec(nn.Tanh), torch.neg, LayerSpec(nn.Tanh)],
    "stage of dropout only": lambda: [*blocks(2), LayerSpec(nn.Dropout, 0.3), LayerSpec(nn.Dropout, 0.3), *blocks(2)],
    "lambdas between layers": lambda: [*blocks(1), lambda v: v * 2, *blocks(2), lambda v: v / 2, *blocks(1)],
    "layers in place": lambda: [s for b in blocks(3) for s in (LayerSpec(InPlace), b)],
    "layers in place at the ends": lambda: [s for b in blocks(3) for s in (b, LayerSpec(InPlace))],
    "given as modules": lambda: ready_made(6),
    "unused parameters": lambda: [LayerSpec(Unused) for _ in range(6)],
    "branches that depend on the data": lambda: [LayerSpec(Sometimes) for _ in range(6)],
    "without biases of its norm": lambda: [LayerSpec(nn.LayerNorm, WIDTH, elementwise_affine=False), *blocks(5)],
}


@pytest.mark.sample(18)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MODELS)
def test_the_model_equals_one_process(workers: Run, name: str, shape: tuple[int, int]) -> None:
    check(workers, Training(MODELS[name], vectors), shape)


@pytest.mark.parametrize("shape", [(2, 1), (3, 1)])
def test_batch_norm_follows_one_process_when_only_the_stages_differ(workers: Run, shape: tuple[int, int]) -> None:
    check(workers, Training(lambda: [LayerSpec(Normed) for _ in range(6)], vectors), shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_last_layer_may_return_the_loss(workers: Run, shape: tuple[int, int]) -> None:
    check(workers, Training(lambda: [*blocks(5), LayerSpec(WithLoss)], vectors, None), shape)


@pytest.mark.parametrize("shape", [(4, 1), (6, 1)])
def test_stages_of_one_layer_and_odd_cuts_work(workers: Run, shape: tuple[int, int]) -> None:
    check(workers, Training(lambda: blocks(6), vectors), shape)


def test_integer_outputs_pass_between_stages(workers: Run) -> None:
    """A first stage that only prepares words: nothing to train, nothing to differentiate."""

    def layers() -> list[Any]:
        return [
            lambda words: (words + 1) % 16,
            lambda words: words.flip(1),
            LayerSpec(nn.Embedding, 16, WIDTH),
            *blocks(3),
        ]

    check(workers, Training(layers, tokens), (3, 1))
    check(workers, Training(layers, tokens), (2, 2))


# ---- activation checkpointing --------------------------------------------------------------------------------------


class Two(nn.Module):
    """Hands on two floats with gradients and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, value: Any) -> tuple[torch.Tensor, ...]:
        first, second, mask = value if isinstance(value, tuple) else (value, value.flip(-1), value > 0)
        return first + self.dropout(torch.tanh(self.linear(second))), second * mask + first, mask


def embedded(count: int) -> list[Any]:
    return [LayerSpec(nn.Embedding, 16, WIDTH), *blocks(count)]


def first_two(outputs: tuple[torch.Tensor, ...], labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs[0] + outputs[1], labels)


def two() -> list[Any]:
    return [LayerSpec(nn.Embedding, 16, WIDTH), *(LayerSpec(Two) for _ in range(5))]


CHECKPOINTED = {
    "an embedding first": Training(lambda: embedded(5), tokens),
    "two float outputs": Training(two, tokens, first_two),
    "a frozen first stage": Training(lambda: [*frozen(2), *blocks(4)], vectors),
    "in place": Training(lambda: [LayerSpec(InPlaceInside) for _ in range(6)], vectors),
}  # fmt: skip


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("shape", [(2, 1), (3, 2)])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_checkpointing_changes_no_bit(workers: Run, name: str, shape: tuple[int, int], interval: int) -> None:
    """Dropout included: the recomputed layer draws the same numbers. One process runs without checkpointing."""
    job = CHECKPOINTED[name]
    check(workers, replace(job, module={"activation_checkpoint_interval": interval}), shape)


def test_a_checkpoint_function_of_the_users_own_is_used(workers: Run) -> None:
    job = replace(CHECKPOINTED["an embedding first"], optimizer=sgd)
    function = {"activation_checkpoint_interval": 1, "activation_checkpoint_func": _counting}
    outcomes: list[Outcome] = check(workers, replace(job, module=function), (2, 1))
    assert outcomes


def _counting(function: Callable[..., Any], *inputs: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)

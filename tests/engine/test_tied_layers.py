"""A tied layer is one layer: every parameter of it stays equal at every place, on every worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from bamboo_ds.cli.bench.workers import WorkerResult
from tests.engine.training import MODES, Training, adam, check, sgd, train
from tests.engine.zoo import WIDTH, Block, tokens, vectors

Run = Callable[..., list[WorkerResult]]


class Tied(nn.Module):
    """A layer with a weight, a bias and a further parameter, of which DeepSpeed would keep only `weight` equal."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    @property
    def weight(self) -> torch.Tensor:
        return self.linear.weight

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + torch.tanh(self.linear(value)) * self.scale


class Embedding(nn.Module):
    """An embedding with a bias that only the head uses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(16, WIDTH) * 0.5), nn.Parameter(torch.zeros(16))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(words, self.weight)


def as_head(embedding: Embedding, value: torch.Tensor) -> torch.Tensor:
    return value @ embedding.weight.t() + embedding.bias


def next_word(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.argmax(dim=-1).flatten())


def tied_at(*places: int, count: int = 6) -> Callable[[], list[Any]]:
    def layers() -> list[Any]:
        return [TiedLayerSpec("t", Tied) if index in places else LayerSpec(Block) for index in range(count)]

    return layers


def embedding_and_head() -> list[Any]:
    return [
        TiedLayerSpec("words", Embedding),
        *(LayerSpec(Block) for _ in range(4)),
        TiedLayerSpec("words", Embedding, forward_fn=as_head),
    ]


SHAPES = [(2, 1), (3, 1), (2, 2), (3, 2)]


@pytest.mark.parametrize("shape", [(1, 1), *SHAPES, (6, 1)])
@pytest.mark.parametrize("optimizer", [adam, sgd])
def test_an_embedding_tied_to_the_head_equals_one_process_and_its_bias_too(
    workers: Run, shape: tuple[int, int], optimizer: Any
) -> None:
    job = Training(embedding_and_head, tokens, next_word, optimizer)
    outcomes = check(workers, job, shape, tied=[(0, 5)])
    weights = {name: value for outcome in outcomes for name, value in outcome.weights.items()}
    assert torch.equal(weights["0.bias"], weights["5.bias"])
    assert weights["0.bias"].abs().max() > 0


@pytest.mark.parametrize("places", [(0, 2, 5), (0, 1), (1, 2), (4, 5), (0, 1, 5), (0, 5), (0, 1, 2, 3, 4, 5)])
@pytest.mark.parametrize("shape", [(3, 1), (3, 2)])
def test_any_number_of_uses_in_any_stages_equals_one_process(
    workers: Run, places: tuple[int, ...], shape: tuple[int, int]
) -> None:
    check(workers, Training(tied_at(*places), vectors), shape, tied=[places])


def test_two_ties_at_once_equal_one_process(workers: Run) -> None:
    def layers() -> list[Any]:
        first, second = (TiedLayerSpec(key, Tied) for key in "ab")
        return [first, second, LayerSpec(Block), first, LayerSpec(Block), second]

    check(workers, Training(layers, vectors), (3, 1), tied=[(0, 3), (1, 5)])


@pytest.mark.parametrize("redundancy", MODES)
def test_tied_layers_need_no_redundancy_to_stay_equal(workers: Run, redundancy: str) -> None:
    check(workers, Training(tied_at(0, 3, 5), vectors), (3, 2), redundancy=redundancy, tied=[(0, 3, 5)])


def test_a_tied_layer_in_bf16_stays_equal(workers: Run) -> None:
    def low(step: int, micro_batch: int) -> tuple[torch.Tensor, ...]:
        return tuple(part.bfloat16() for part in vectors(step, micro_batch))

    job = Training(tied_at(0, 3, 5), low, bf16=True)
    check(workers, job, (3, 2), tied=[(0, 3, 5)], loss_bound=1e-2, weight_bound=2e-2)


def test_a_parameter_shared_by_two_layers_without_a_tie_is_refused(workers: Run) -> None:
    def layers() -> list[Any]:
        shared = nn.Linear(WIDTH, WIDTH)
        return [shared, LayerSpec(Block), shared]

    results = workers(train, 2, args=(Training(layers, vectors), 2, "off"), timeout_seconds=30)
    assert all("ConfigError: layers 0 and 2 share the parameter" in str(result.error) for result in results)

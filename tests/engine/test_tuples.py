"""Whatever tensors a stage hands on, values and gradients are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn

from bamboo_ds.cli.bench.workers import WorkerResult
from tests.engine.training import Training, check, train
from tests.engine.zoo import WIDTH, blocks, vectors

Run = Callable[..., list[WorkerResult]]
Tensors = tuple[torch.Tensor, ...]


class FloatIntFloat(nn.Module):
    """Works on the first and third member of a `(float, int, float)` tuple; passes the second on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Any) -> Tensors:
        if isinstance(value, torch.Tensor):
            value = (value, (value > 0).sum(dim=1), value.flip(1))
        first, counts, third = value
        return (
            first + torch.tanh(self.first(third)),
            counts + 1,
            third + torch.tanh(self.second(first)) * counts[:, None] / WIDTH,
        )


def first_and_third(outputs: Tensors, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs[0] + outputs[2] * outputs[1][:, None], labels)


@pytest.mark.parametrize("shape", [(2, 1), (3, 1), (4, 1), (2, 2), (3, 2)])
def test_float_int_float_tuples_pass_any_number_of_stages(workers: Run, shape: tuple[int, int]) -> None:
    check(workers, Training(lambda: [LayerSpec(FloatIntFloat) for _ in range(6)], vectors, first_and_third), shape)


INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
COMPLEX = (torch.complex64, torch.complex128)


class Zoo(nn.Module):
    """Carries a tensor of every dtype, a scalar and an empty one; floats and complex numbers have gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.turn = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH))

    def forward(self, value: Any) -> Tensors:
        if isinstance(value, torch.Tensor):
            value = self._spread(value)
        integers, floats, complexes, (scalar, empty) = value[:6], value[6:10], value[10:12], value[12:]
        mixed = torch.tanh(self.linear(floats[0])) + scalar
        mixed = mixed + sum(part.float() for part in floats[1:]) / 3 + sum(part.abs().float() for part in complexes) / 2
        mixed = mixed + integers[-1] * integers[0].float() / 255
        turned = torch.exp(1j * self.turn) * 0.9
        return (
            *(part.flip(0) for part in integers),
            *(mixed.to(part.dtype) * 0.5 + part * 0.5 for part in floats),
            *(part * turned for part in complexes),
            scalar * 0.5 + mixed.mean(),
            empty,
        )

    @staticmethod
    def _spread(value: torch.Tensor) -> Tensors:
        integers = tuple((value.abs() * 10).to(dtype) for dtype in INTEGERS)
        floats = tuple(value.to(dtype) for dtype in FLOATS)
        complexes = tuple(torch.complex(value, value.flip(1)).to(dtype) for dtype in COMPLEX)
        return (*integers, *floats, *complexes, value.mean(), value.new_empty(0, 3))


def all_floats(outputs: Tensors, labels: torch.Tensor) -> torch.Tensor:
    total = sum(part.float() for part in outputs[6:10]) + sum(part.real.float() for part in outputs[10:12])
    return nn.functional.mse_loss(total + outputs[12], labels)


@pytest.mark.parametrize("shape", [(2, 1), (3, 1), (4, 1), (3, 2)])
def test_tuples_of_every_dtype_pass_with_their_gradients(workers: Run, shape: tuple[int, int]) -> None:
    check(workers, Training(lambda: [LayerSpec(Zoo) for _ in range(4)], vectors, all_floats), shape)


def masked(value: Any, dtype: torch.dtype) -> Tensors:
    """Give a block's value a mask as companion, and apply it."""
    value, mask = value if isinstance(value, tuple) else (value, (value > -0.5).to(dtype))
    return value * mask.to(value.dtype), mask


class Masked(nn.Module):
    """A layer that applies a mask which has no gradient."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear, self.dtype = nn.Linear(WIDTH, WIDTH), dtype

    def forward(self, value: Any) -> Tensors:
        value, mask = masked(value, self.dtype)
        return value + torch.tanh(self.linear(value)), mask


def first_only(outputs: Tensors, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs[0], labels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(2, 1), (4, 1)])
def test_a_mask_without_gradient_is_sent_and_no_gradient_comes_back(
    workers: Run, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    check(workers, Training(lambda: [LayerSpec(Masked, dtype) for _ in range(4)], vectors, first_only), shape)


class Neglectful(nn.Module):
    """Hands on a second float tensor with a gradient, and ignores the one it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Any) -> Tensors:
        value = value[0] if isinstance(value, tuple) else value
        return value + torch.tanh(self.linear(value)), self.other(value)


@pytest.mark.parametrize("shape", [(2, 1), (3, 1), (4, 1), (2, 2)])
def test_an_unused_float_tensor_gets_a_zero_gradient(workers: Run, shape: tuple[int, int]) -> None:
    # The head of the last layer has no gradient at all in one process, those before it a zero or none by the split:
    # SGD without weight decay and momentum treats them alike.
    job = Training(
        lambda: [LayerSpec(Neglectful) for _ in range(4)],
        vectors,
        first_only,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    check(workers, job, shape)


class Lazy(nn.Module):
    """Returns views: transposed, expanded, conjugated, and a list instead of a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, value: Any) -> list[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            value = (value.t(), value.new_ones(1, 1).expand(WIDTH, 2), torch.complex(value, value).t().conj())
        rows, ones, turned = value
        rows = rows + torch.tanh(self.linear(rows)) * ones + turned.real - turned.imag
        return [rows.t().contiguous().t(), ones[:1].expand(WIDTH, 2), (turned * 0.5).conj()]


@pytest.mark.parametrize("shape", [(2, 1), (3, 2)])
def test_views_pass_like_the_tensors_they_stand_for(workers: Run, shape: tuple[int, int]) -> None:
    def loss(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(outputs[0].t() + outputs[2].imag.t(), labels)

    # A kernel may round otherwise on another memory layout, so this is not bit-exact.
    check(workers, Training(lambda: [LayerSpec(Lazy) for _ in range(6)], vectors, loss), shape, exact=False)


def test_a_tuple_of_one_and_a_long_tuple_pass(workers: Run) -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, value: Any) -> Tensors:
            value = value[0] if isinstance(value, tuple) else value
            return (value + torch.tanh(self.linear(value)),)

    class Many(One):
        def forward(self, value: Any) -> Tensors:
            value = torch.cat(value, dim=1) if isinstance(value, tuple) else value
            return tuple((value + torch.tanh(self.linear(value))).split(1, dim=1)) + (value[:, :0],) * 40

    def loss(outputs: Tensors, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(torch.cat(outputs, dim=1), labels)

    for kind in (One, Many):
        check(workers, Training(lambda kind=kind: [LayerSpec(kind) for _ in range(4)], vectors, loss), (4, 1))


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (lambda value: {"value": value}, "dict"),
        (lambda value: (value, (value, value)), "tuple"),
        (lambda value: (value, None), "NoneType"),
        (lambda value: value.to_sparse(), "sparse"),
    ],
)
def test_what_cannot_pass_between_stages_is_named(workers: Run, made: Callable[..., Any], named: str) -> None:
    def layers() -> list[Any]:
        return [*blocks(1), made, *blocks(2)]

    job = Training(layers, vectors, steps=1)

    results = workers(train, 2, args=(job, 2, "fit"), timeout_seconds=30, exit_naturally=True)
    assert "ConfigError" in str(results[0].error)
    assert named in str(results[0].error)
    assert "ConfigError" in str(results[1].error)

"""Paced layers: real maths, and the times they promise."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
from torch import nn

from bamboo_ds.models.paced import PacedLayer, paced_layers, sleep_until

FORWARD_SECONDS = 0.005
BACKWARD_SECONDS = 0.010
SLACK_SECONDS = 0.002
"""What calls, autograd and a crowded machine may add to the median of several tries."""


def elapsed_seconds(begin: float) -> float:
    return time.perf_counter() - begin


def test_gradients_equal_those_of_finite_differences() -> None:
    layer = PacedLayer(6, 0.0, 0.0).double()
    inputs = torch.randn(2, 3, 6, dtype=torch.double, requires_grad=True)

    def call(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {"linear.weight": weight, "linear.bias": bias}, (inputs,))

    assert torch.autograd.gradcheck(call, (inputs, layer.linear.weight, layer.linear.bias))


def test_result_and_gradients_equal_those_of_plain_autograd() -> None:
    layer = PacedLayer(16, 0.0, 0.0)
    inputs = torch.randn(4, 16, requires_grad=True)
    plain = inputs + torch.tanh(layer.linear(inputs))
    expected = torch.autograd.grad(plain.square().sum(), [inputs, *layer.parameters()])
    paced = layer(inputs)
    actual = torch.autograd.grad(paced.square().sum(), [inputs, *layer.parameters()])
    torch.testing.assert_close(paced, plain)
    torch.testing.assert_close(actual, expected)


def test_it_trains() -> None:
    layer = PacedLayer(8, 0.0, 0.0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    inputs, wanted = torch.randn(32, 8), torch.randn(32, 8)
    losses = []
    for _ in range(30):
        loss = nn.functional.mse_loss(layer(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.slow
def test_sleeping_meets_its_deadline() -> None:
    late = []
    for _ in range(20):
        deadline = time.perf_counter() + FORWARD_SECONDS
        sleep_until(deadline)
        late.append(elapsed_seconds(deadline))
    assert min(late) >= 0
    assert statistics.median(late) < 0.0005  # 0.1 ms on an idle core; tests share theirs


def test_a_deadline_in_the_past_costs_nothing() -> None:
    begin = time.perf_counter()
    sleep_until(begin - 1)
    assert elapsed_seconds(begin) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("inputs_need_gradient", [False, True])
def test_forward_and_backward_take_their_time_in_a_stack(inputs_need_gradient: bool) -> None:
    count = 3
    stack = nn.Sequential(*(PacedLayer(8, FORWARD_SECONDS, BACKWARD_SECONDS) for _ in range(count)))
    inputs = torch.randn(4, 8, requires_grad=inputs_need_gradient)
    forward_seconds, backward_seconds = [], []
    for _ in range(7):
        begin = time.perf_counter()
        loss = stack(inputs).sum()
        forward_seconds.append(elapsed_seconds(begin))
        begin = time.perf_counter()
        loss.backward()
        backward_seconds.append(elapsed_seconds(begin))
    assert min(forward_seconds) >= count * FORWARD_SECONDS
    assert min(backward_seconds) >= count * BACKWARD_SECONDS
    assert statistics.median(forward_seconds) < count * (FORWARD_SECONDS + SLACK_SECONDS)
    assert statistics.median(backward_seconds) < count * (BACKWARD_SECONDS + SLACK_SECONDS)


@pytest.mark.slow
def test_the_maths_is_part_of_the_time() -> None:
    wide = PacedLayer(512, 0.1, 0.0)
    inputs = torch.randn(512, 512)
    begin = time.perf_counter()
    wide.linear(inputs)
    assert elapsed_seconds(begin) > 0.0005, "the maths is too short for this test"
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        wide(inputs)
        seconds.append(elapsed_seconds(begin))
    assert 0.1 <= min(seconds) < 0.105


@pytest.mark.slow
def test_without_gradients_the_forward_is_the_same_and_there_is_no_backward() -> None:
    layer, inputs = PacedLayer(8, FORWARD_SECONDS, BACKWARD_SECONDS), torch.randn(4, 8)
    begin = time.perf_counter()
    with torch.no_grad():
        outputs = layer(inputs)
    assert elapsed_seconds(begin) >= FORWARD_SECONDS
    assert not outputs.requires_grad
    assert torch.equal(outputs, layer(inputs).detach())


def test_what_it_saves_passes_through_hooks() -> None:
    layer, inputs = PacedLayer(8, 0.0, 0.0), torch.randn(4, 8)
    shapes = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = layer(inputs)
    outputs.sum().backward()
    assert shapes == [(4, 8), (8, 8), (4, 8)]
    assert layer.linear.weight.grad is not None


@pytest.mark.parametrize("arguments", [(0, 0.1, 0.1), (8, -0.1, 0.1), (8, 0.1, -0.1)])
def test_impossible_arguments_are_refused(arguments: tuple[int, float, float]) -> None:
    with pytest.raises(ValueError, match="no time may be negative"):
        PacedLayer(*arguments)


def test_the_list_has_one_spec_per_layer() -> None:
    specs = paced_layers(3, 8, 0.01, 0.02)
    layers = [spec.build() for spec in specs]
    assert [type(layer) for layer in layers] == [PacedLayer] * 3
    assert {(layer.forward_seconds, layer.backward_seconds) for layer in layers} == {(0.01, 0.02)}

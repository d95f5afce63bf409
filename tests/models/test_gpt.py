"""The byte-level GPT: its shape, its loss, that it learns, and that replaying a layer is exact."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bamboo_ds.models.gpt import GPT_SIZES, GPTBlock, GPTSize, gpt_layers, language_model_loss
from bamboo_ds.models.text import ByteWindows, load_text

SMALLEST = GPTSize(layers=2, hidden=16, heads=2, sequence_length=8)


def build(size: GPTSize, *, tied: bool = True) -> tuple[nn.ModuleList, list[Callable[[torch.Tensor], torch.Tensor]]]:
    """Build all layers in one process; return the modules (a tied one once) and the functions in layer order."""
    modules, functions, built = nn.ModuleList(), [], {}
    for spec in gpt_layers(size, tied=tied):
        key = getattr(spec, "key", None)
        module = built.get(key) or spec.build()
        if key not in built:
            modules.append(module)
        if key is not None:
            built[key] = module
        forward_fn = getattr(spec, "forward_fn", None)
        functions.append(functools.partial(forward_fn, module) if forward_fn else module)
    return modules, functions


def forward(functions: list[Callable[[torch.Tensor], torch.Tensor]], tokens: torch.Tensor) -> torch.Tensor:
    return functools.reduce(lambda value, function: function(value), functions, tokens)


@pytest.mark.parametrize("name", GPT_SIZES)
def test_the_parameter_count_is_that_of_the_built_layers(name: str) -> None:
    with torch.device("meta"):
        modules, _ = build(GPT_SIZES[name])
    assert sum(parameter.numel() for parameter in modules.parameters()) == GPT_SIZES[name].parameters


def test_the_largest_size_is_gpt_2_with_1_5_billion_weights() -> None:
    assert GPT_SIZES["gpt2-xl"].parameters == pytest.approx(1.5e9, rel=0.02)


@pytest.mark.parametrize("tied", [True, False])
def test_the_first_loss_is_that_of_guessing(tied: bool) -> None:
    torch.manual_seed(0)
    _, functions = build(dataclasses.replace(GPT_SIZES["tiny"], initial_std=0.02), tied=tied)
    tokens = torch.randint(256, (4, 64))
    loss = language_model_loss(forward(functions, tokens), tokens.roll(-1))
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_a_byte_does_not_see_those_after_it() -> None:
    _, functions = build(SMALLEST)
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    logits, changed_logits = forward(functions, tokens), forward(functions, changed)
    torch.testing.assert_close(logits[:, :5], changed_logits[:, :5], rtol=0, atol=0)
    assert not torch.allclose(logits[:, 5:], changed_logits[:, 5:])


def test_the_tied_matrix_gets_the_gradients_of_both_its_places() -> None:
    tied, tied_functions = build(SMALLEST)
    untied, untied_functions = build(SMALLEST, tied=False)
    with torch.no_grad():
        for module, other in zip(untied, [*tied, tied[0]], strict=True):
            module.load_state_dict(other.state_dict())
    tokens = torch.randint(256, (2, 8))
    for functions in (tied_functions, untied_functions):
        language_model_loss(forward(functions, tokens), tokens).backward()
    torch.testing.assert_close(tied[0].weight.grad, untied[0].weight.grad + untied[-1].weight.grad)


def test_the_tied_layer_holds_nothing_but_the_shared_matrix() -> None:
    modules, _ = build(SMALLEST)
    assert [name for name, _ in modules[0].named_parameters()] == ["weight"]


def test_replaying_a_block_with_the_same_random_numbers_is_bit_equal() -> None:
    block, inputs = GPTBlock(16, 2, dropout=0.5, depth=2), torch.randn(2, 8, 16)

    def replay() -> list[torch.Tensor]:
        torch.manual_seed(3)
        outputs = block(inputs)
        return [outputs, *torch.autograd.grad(outputs.square().sum(), list(block.parameters()))]

    first, second = replay(), replay()
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert not torch.equal(first[0], block(inputs)), "dropout does nothing"


def test_evaluation_drops_nothing() -> None:
    block, inputs = GPTBlock(16, 2, dropout=0.5, depth=2).eval(), torch.randn(2, 8, 16)
    assert torch.equal(block(inputs), block(inputs))


def test_the_loss_of_bf16_logits_is_computed_in_fp32() -> None:
    logits, labels = torch.randn(2, 8, 256, dtype=torch.bfloat16), torch.randint(256, (2, 8))
    loss = language_model_loss(logits, labels)
    expected = -torch.log_softmax(logits.double(), -1).gather(-1, labels[..., None]).mean()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_deep_models_start_with_small_weights_into_the_residual_stream() -> None:
    block = GPTBlock(64, 4, depth=50)
    assert block.mlp_input.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert block.mlp_output.weight.std().item() == pytest.approx(0.002, rel=0.1)
    assert block.attention_output.weight.std().item() == pytest.approx(0.002, rel=0.1)


def test_it_learns_from_the_standard_library() -> None:
    torch.manual_seed(0)
    size = dataclasses.replace(SMALLEST, hidden=64, heads=4, sequence_length=32)
    modules, functions = build(size)
    windows = ByteWindows(load_text([]).training, sequence_length=32, seed=0)
    optimizer = torch.optim.AdamW(modules.parameters(), lr=3e-3)
    losses = []
    for step in range(60):
        rows = [windows[index] for index in range(step * 16, (step + 1) * 16)]
        tokens, labels = (torch.stack(column) for column in zip(*rows, strict=True))
        loss = language_model_loss(forward(functions, tokens), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) / 5 < 3.6 < 5.0 < losses[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, "gpt.hidden (16) is not a multiple of gpt.heads (3)"),
        ({"layers": 0}, "gpt.layers = 0"),
        ({"hidden": 16.0}, "gpt.hidden = 16.0"),
        ({"dropout": 1.0}, "gpt.dropout = 1.0"),
        ({"dropout": "high"}, "gpt.dropout = 'high'"),
        ({"initial_std": 0}, "gpt.initial_std = 0"),
    ],
)
def test_an_impossible_shape_is_refused_by_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        dataclasses.replace(SMALLEST, **change)
    assert message in str(caught.value)


def test_a_layer_list_has_the_ends_the_positions_and_the_norm_beside_the_blocks() -> None:
    assert len(gpt_layers(SMALLEST)) == SMALLEST.layers + 4

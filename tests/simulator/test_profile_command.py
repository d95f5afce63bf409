"""`bamboo-ds profile`: what layers cost and weigh."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from bamboo_ds.cli.options import command
from bamboo_ds.cli.profile import ProfileOptions, profile
from bamboo_ds.simulator.workload import Workload, read_workload

GPT = """
import torch
from bamboo_ds.models.gpt import GPTSize, gpt_layers, language_model_loss

def tiny():
    size = GPTSize(layers=2, hidden=32, heads=4, sequence_length=16, vocabulary=64)
    tokens = torch.randint(64, (3, 17))
    return gpt_layers(size, tied=True), language_model_loss, (tokens[:, :-1], tokens[:, 1:])

def paced():
    from bamboo_ds.models.paced import paced_layers
    rows = torch.randn(4, 8)
    return paced_layers(3, 8, 0.02, 0.05), torch.nn.functional.mse_loss, (rows, rows)

def frozen():
    layer = torch.nn.Linear(8, 8)
    layer.weight.requires_grad_(False)
    rows = torch.randn(4, 8)
    return [lambda x: (x, x), lambda pair: pair[0] + pair[1], layer], torch.nn.functional.mse_loss, (rows, rows)

def nothing():
    return 3

number = 4
"""


def run(folder: Path, function: str, *arguments: str) -> Result:
    (folder / "subject.py").write_text(GPT)
    app = typer.Typer(add_completion=False)
    app.command()(command(profile, ProfileOptions, name="profile"))
    output = ("--output", str(folder / "w.json"), "--repeats", "2", *arguments)
    return CliRunner().invoke(app, [f"{folder / 'subject.py'}:{function}", *output])


def profiled(folder: Path, function: str, *arguments: str) -> Workload:
    result = run(folder, function, *arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1])["output"] == str(folder / "w.json")
    return read_workload(folder / "w.json")


def test_paced_layers_take_what_they_are_told(tmp_path: Path) -> None:
    workload = profiled(tmp_path, "paced", "--json")
    # A sleep is never shorter, and other work on the machine makes it longer.
    assert all(0.019 <= layer.forward_seconds < 0.06 for layer in workload.layers)
    assert all(0.049 <= layer.backward_seconds < 0.15 for layer in workload.layers)
    assert (workload.num_stages, workload.pipelines, workload.micro_batches) == (3, 4, 24)
    assert workload.micro_batch_samples == 4
    assert "cpu" in workload.source


def test_sizes_are_those_of_tensors_and_a_tied_layer_weighs_once(tmp_path: Path) -> None:
    workload = profiled(tmp_path, "tiny", "--stages", "2", "--pipelines", "1", "--micro-batches", "6")
    layers = workload.layers
    assert len(layers) == 6  # embedding, positions, two blocks, norm, the embedding again as head
    assert layers[0].gradient_bytes == 64 * 32 * 4
    assert layers[0].state_bytes == 64 * 32 * (4 + 8)
    assert layers[-1].gradient_bytes == layers[-1].state_bytes == 0
    assert layers[2].activation_bytes == 3 * 16 * 32 * 4
    assert all(layer.forward_seconds > 0 and layer.backward_seconds > 0 for layer in layers)
    assert (workload.num_stages, workload.micro_batches) == (2, 6)


def test_low_precision_halves_what_travels_and_adds_masters(tmp_path: Path) -> None:
    first = profiled(tmp_path, "tiny", "--precision", "bf16").layers[0]
    assert first.gradient_bytes == 64 * 32 * 2
    assert first.state_bytes == 64 * 32 * (2 + 4 + 8)
    assert first.activation_bytes == 3 * 16 * 32 * 2


def test_functions_tuples_and_frozen_weights_are_layers_too(tmp_path: Path) -> None:
    layers = profiled(tmp_path, "frozen").layers
    assert layers[0].activation_bytes == 2 * 4 * 8 * 4
    assert layers[0].backward_seconds == layers[1].backward_seconds == 0
    assert layers[2].gradient_bytes == 8 * 4  # the bias
    assert layers[2].state_bytes == 8 * 12 + 64 * 4


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("nothing", (), "must return (layers, loss_fn, (inputs, labels)), not 3"),
        ("number", (), "has no function number"),
        ("missing", (), "has no function missing"),
        ("tiny", ("--precision", "int8"), "--precision int8: must be one of fp32"),
        ("tiny", ("--repeats", "0"), "--repeats 0"),
        ("tiny", ("--stages", "99"), "num_stages = 99"),
    ],
)
def test_what_cannot_be_profiled_is_said(
    tmp_path: Path, function: str, arguments: tuple[str, ...], message: str
) -> None:
    result = run(tmp_path, function, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("subject", "must be FILE.py:FUNCTION"),
        ("nowhere.py:f", "nowhere.py: no such file"),
        ("no.such:f", "cannot import"),
    ],
)
def test_a_target_that_is_not_there_is_named(target: str, message: str) -> None:
    app = typer.Typer(add_completion=False)
    app.command()(command(profile, ProfileOptions, name="profile"))
    result = CliRunner().invoke(app, [target])
    assert result.exit_code == 2
    assert message in result.stderr

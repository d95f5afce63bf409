"""Optimizers, parameter groups and learning rates do in a pipeline what they do in one process, on every copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.lr_schedules import WarmupLR
from torch import nn

from bamboo_ds.cli.bench.workers import WorkerResult, values
from tests.engine.training import (
    Model,
    OneProcess,
    Outcome,
    Training,
    assert_copies_equal,
    assert_equals_one_process,
    batches,
    build_engine,
    check,
    held_digests,
    own_weights,
    train,
)
from tests.engine.zoo import WIDTH, blocks, vectors

Run = Callable[..., list[WorkerResult]]
SHAPES = [(2, 1), (3, 2)]


def configured(kind: str, parameters: dict[str, Any], torch_optimizer: Any) -> Training:
    return Training(
        lambda: blocks(6),
        vectors,
        optimizer=torch_optimizer,
        config={"optimizer": {"type": kind, "params": parameters}},
        steps=4,
    )


CONFIGURED = {
    # DeepSpeed's "Adam" decouples weight decay unless told otherwise.
    "Adam": configured(
        "Adam",
        {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-6},
        lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1, eps=1e-6),
    ),
    "Adam coupled": configured(
        "Adam",
        {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-6, "adam_w_mode": False},
        lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1, eps=1e-6),
    ),
    "AdamW": configured(
        "AdamW",
        {"lr": 0.01, "weight_decay": 0.3, "betas": [0.8, 0.9], "eps": 1e-6},
        lambda p: torch.optim.AdamW(p, 0.01, betas=(0.8, 0.9), weight_decay=0.3, eps=1e-6),
    ),
    "SGD": configured(
        "SGD",
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    ),
    "Adagrad": configured("Adagrad", {"lr": 0.05}, lambda p: torch.optim.Adagrad(p, 0.05)),
    "RMSprop": configured("RMSprop", {"lr": 0.01, "eps": 1e-6}, lambda p: torch.optim.RMSprop(p, 0.01, eps=1e-6)),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CONFIGURED)
def test_an_optimizer_of_the_config_equals_torchs(workers: Run, name: str, shape: tuple[int, int]) -> None:
    check(workers, CONFIGURED[name], shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_client_optimizer_instance_steps_the_copies_too(workers: Run, shape: tuple[int, int]) -> None:
    def decayed(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.3, eps=1e-6)

    job = Training(
        lambda: blocks(6),
        vectors,
        optimizer=decayed,
        arguments=lambda module: {"optimizer": decayed(module.parameters())},
    )
    check(workers, job, shape)


# ---- parameter groups ----------------------------------------------------------------------------------------------


class Weightless(nn.Module):
    """A layer with one-dimensional parameters only, so that a stage of them has an empty group."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.scale


def uneven() -> list[Any]:
    return [LayerSpec(Weightless), LayerSpec(Weightless), *blocks(4)]


def grouped(parameters: Any) -> list[dict[str, Any]]:
    """Put weights and biases in groups with other rates and decays."""
    listed = list(parameters)
    return [
        {"params": [p for p in listed if p.dim() >= 2], "weight_decay": 0.3},
        {"params": [p for p in listed if p.dim() < 2], "lr": 0.05, "weight_decay": 0.0},
    ]


def full_groups(parameters: Any) -> list[dict[str, Any]]:
    """Leave empty groups out, so that stages have other numbers of groups."""
    return [group for group in grouped(parameters) if group["params"]]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-6)


def train_grouped(training: Training) -> Outcome:
    one, outcome = OneProcess(training, groups=lambda model: grouped(model.parameters())), Outcome()
    for _ in range(training.steps):
        outcome.losses.append(one.train_batch())
        outcome.norms.append(one.norm)
    outcome.weights = one.model.weights()
    return outcome


def by_stage(module: Any) -> dict[str, Any]:
    """Give each stage a learning rate of its own, in one group."""
    return {"model_parameters": [{"params": list(module.parameters()), "lr": 0.01 * (1 + module.stage_id)}]}


GROUPED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "as model_parameters": lambda module: {"model_parameters": grouped(module.parameters())},
    "as model_parameters without empty groups": lambda module: {"model_parameters": full_groups(module.parameters())},
    "in an instance": lambda module: {"optimizer": adamw(grouped(module.parameters()))},
    "in an instance without empty groups": lambda module: {"optimizer": adamw(full_groups(module.parameters()))},
}


@pytest.mark.parametrize("shape", [(3, 1), (3, 2)])
@pytest.mark.parametrize("way", GROUPED)
def test_copies_are_in_the_group_of_the_original(workers: Run, way: str, shape: tuple[int, int]) -> None:
    job = Training(uneven, vectors, optimizer=adamw, arguments=GROUPED[way])
    outcomes = values(workers(train, shape[0] * shape[1], args=(job, shape[0]), timeout_seconds=60))
    assert_equals_one_process(outcomes, train_grouped(job), exact=shape[1] == 1)
    assert_copies_equal(outcomes)


def test_copies_take_the_learning_rate_of_the_originals_stage(workers: Run) -> None:
    job = Training(lambda: blocks(6), vectors, optimizer=adamw, arguments=by_stage)
    outcomes = values(workers(train, 3, args=(job, 3), timeout_seconds=60))
    one = OneProcess(
        job,
        groups=lambda model: [
            {
                "params": [p for layer in (2 * s, 2 * s + 1) for p in model.modules[layer].parameters()],
                "lr": 0.01 * (1 + s),
            }
            for s in range(3)
        ],
    )
    expected = Outcome()
    for _ in range(job.steps):
        expected.losses.append(one.train_batch())
        expected.norms.append(one.norm)
    expected.weights = one.model.weights()
    assert_equals_one_process(outcomes, expected, exact=True)
    assert_copies_equal(outcomes)


def test_an_instance_may_hold_frozen_parameters(workers: Run) -> None:
    """`Adam(model.parameters())` with some layers frozen is common."""

    def layers() -> list[Any]:
        return [LayerSpec(Half) for _ in range(4)]

    job = Training(layers, vectors, optimizer=adamw, arguments=lambda m: {"optimizer": adamw(m.parameters())})
    check(workers, job, (2, 1))


def test_a_list_of_model_parameters_chooses_what_is_trained(workers: Run) -> None:
    """As in DeepSpeed: what is not listed stays as it is."""
    job = Training(
        lambda: blocks(6),
        vectors,
        optimizer=adamw,
        arguments=lambda m: {"model_parameters": [p for p in m.parameters() if p.dim() == 2]},
    )
    outcomes = values(workers(train, 3, args=(job, 3), timeout_seconds=60))
    one = OneProcess(job, groups=lambda model: [p for p in model.parameters() if p.dim() == 2])
    expected = Outcome(losses=[one.train_batch() for _ in range(job.steps)], weights=one.model.weights())
    expected.norms = outcomes[0].norms
    assert_equals_one_process(outcomes, expected, exact=True)
    assert_copies_equal(outcomes)


class Spare(nn.Module):
    """A layer with a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.spare = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(3))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + torch.tanh(self.linear(value))


class Half(Spare):
    """A layer whose bias is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.bias.requires_grad_(False)


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (2, 2)])
def test_weight_decay_does_not_touch_a_parameter_without_gradient(workers: Run, shape: tuple[int, int]) -> None:
    def decaying(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5, eps=1e-6)

    job = Training(lambda: [LayerSpec(Spare) for _ in range(6)], vectors, optimizer=decaying)
    for outcome in check(workers, job, shape):
        spares = [value for name, value in outcome.weights.items() if name.endswith("spare")]
        assert all(torch.equal(spare, torch.ones(3)) for spare in spares)


def test_parameters_of_another_model_are_refused(workers: Run) -> None:
    job = Training(
        lambda: blocks(4),
        vectors,
        arguments=lambda module: {"optimizer": adamw([*module.parameters(), nn.Parameter(torch.ones(1))])},
    )
    results = workers(train, 2, args=(job, 2), timeout_seconds=30)
    assert all("ConfigError: 1 of the given parameters belong to no layer" in str(result.error) for result in results)


# ---- learning rates ------------------------------------------------------------------------------------------------


def halving(epoch: int) -> float:
    return 0.5**epoch


def scheduled(rank: int, job: Training, num_stages: int) -> Outcome:
    engine, outcome = build_engine(job, num_stages), Outcome(extra=[])
    for step in range(job.steps):
        outcome.losses.append(float(engine.train_batch(batches(job, engine, step))))
        outcome.extra.append(engine.get_lr())
        outcome.norms.append(float(engine.get_global_grad_norm()))
        outcome.digests.append(held_digests(engine))
    outcome.weights = own_weights(engine)
    engine.close()
    return outcome


def expected_with(job: Training, scheduler: Callable[[torch.optim.Optimizer], Any]) -> tuple[Outcome, list[float]]:
    one, outcome = OneProcess(job), Outcome()
    schedule, rates = scheduler(one.optimizer), []
    for _ in range(job.steps):
        outcome.losses.append(one.train_batch())
        outcome.norms.append(one.norm)
        schedule.step()
        rates.append(one.optimizer.param_groups[0]["lr"])
    outcome.weights = one.model.weights()
    return outcome, rates


def instances(module: Any) -> dict[str, Any]:
    optimizer = adamw(module.parameters())
    return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, halving)}


WARMUP = {"warmup_min_lr": 0.001, "warmup_max_lr": 0.05, "warmup_num_steps": 3, "warmup_type": "linear"}
SCHEDULED: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "of the config": (
        {"config": {"scheduler": {"type": "WarmupLR", "params": WARMUP}}},
        lambda optimizer: WarmupLR(optimizer, **WARMUP),
    ),
    "as a callable": (
        {"arguments": lambda _: {"lr_scheduler": lambda o: torch.optim.lr_scheduler.LambdaLR(o, halving)}},
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, halving),
    ),
    "as an instance": (
        {"arguments": instances},
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, halving),
    ),
}


@pytest.mark.parametrize("way", SCHEDULED)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_learning_rate_schedule_moves_all_copies(workers: Run, way: str, shape: tuple[int, int]) -> None:
    fields, scheduler = SCHEDULED[way]
    job = replace(Training(lambda: blocks(6), vectors, optimizer=adamw, steps=5), **fields)
    outcomes = values(workers(scheduled, shape[0] * shape[1], args=(job, shape[0]), timeout_seconds=60))
    expected, rates = expected_with(job, scheduler)
    assert_equals_one_process(outcomes, expected, exact=shape[1] == 1)
    assert_copies_equal(outcomes)
    assert all([rate[0] for rate in outcome.extra] == rates for outcome in outcomes)
    assert len(set(rates)) > 2


def test_a_schedule_made_for_fewer_groups_than_the_copies_need_is_refused(workers: Run) -> None:
    """It would not move the learning rate of the added group, and copies would drift apart in silence."""

    def made(module: Any) -> dict[str, Any]:
        optimizer = adamw(full_groups(module.parameters()))
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, halving)}

    results = workers(train, 3, args=(Training(uneven, vectors, arguments=made), 3), timeout_seconds=30)
    assert any("ConfigError" in str(result.error) and "parameter groups" in str(result.error) for result in results)
    assert all(result.error for result in results)


def test_the_model_of_the_reference_is_the_engines(workers: Run) -> None:
    """The weights the two start from are equal; otherwise equal losses would say nothing."""
    job = Training(lambda: blocks(4), vectors, steps=0)
    outcomes = values(workers(train, 2, args=(job, 2), timeout_seconds=30))
    expected = Model(job).weights()
    found = {name: value for outcome in outcomes for name, value in outcome.weights.items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())

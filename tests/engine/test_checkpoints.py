"""Checkpoints: training goes on bit for bit, and the files are stock DeepSpeed's, both ways."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from bamboo_ds.cli.bench.workers import WorkerResult, values
from tests.engine.training import (
    Outcome,
    Training,
    assert_copies_equal,
    batches,
    build_engine,
    held_digests,
    largest,
    linger,
    sgd,
    train_step,
)
from tests.engine.zoo import WIDTH, blocks, vectors

Run = Callable[..., list[WorkerResult]]


def low(step: int, micro_batch: int) -> tuple[torch.Tensor, ...]:
    return tuple(part.bfloat16() for part in vectors(step, micro_batch))


class Counted(nn.Module):
    """A layer with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return value + torch.tanh(self.linear(value))


def tied() -> list[Any]:
    ends = [TiedLayerSpec("ends", nn.Linear, WIDTH, WIDTH) for _ in range(2)]
    return [ends[0], *blocks(3), LayerSpec(Counted), ends[1]]


def through_functions(plain: int | None) -> Callable[[], list[Any]]:
    """Tie three layers, all used through a function but the one at `plain`: the others have no file in DeepSpeed."""

    def layers() -> list[Any]:
        found = [*blocks(6)]
        for place in (0, 3, 5):
            function = None if place == plain else lambda module, value: torch.tanh(module(value))
            found[place] = TiedLayerSpec("ends", nn.Linear, WIDTH, WIDTH, forward_fn=function)
        return found

    return layers


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-6)


def uneven_groups(module: Any) -> dict[str, Any]:
    """Weights and biases apart, listed backwards, and a stage without the second group."""
    listed = list(module.parameters())[::-1]
    groups = [
        {"params": [p for p in listed if p.dim() >= 2], "weight_decay": 0.3},
        {"params": [p for p in listed if p.dim() < 2], "lr": 0.05, "weight_decay": 0.0},
    ]
    return {"model_parameters": [group for group in groups if group["params"]]}


class Weightless(nn.Module):
    """Has one-dimensional parameters only."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.scale


SCHEDULER = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.05, "warmup_num_steps": 5}}
JOBS = {
    "Adam": Training(lambda: blocks(6), vectors, config={"scheduler": SCHEDULER}),
    "Adam in bf16": Training(lambda: blocks(6), low, bf16=True),
    "tied": Training(tied, vectors),
    "momentum, tied, in bf16": Training(tied, low, bf16=True, optimizer=sgd),
    "tied through functions only": Training(through_functions(None), vectors),
    "tied, first used through a function": Training(through_functions(3), vectors),
    "uneven groups": Training(
        lambda: [LayerSpec(Weightless), LayerSpec(Weightless), *blocks(4)],
        vectors,
        optimizer=adamw,
        arguments=uneven_groups,
    ),
}
TIES = {
    "tied": [(0, 5)],
    "momentum, tied, in bf16": [(0, 5)],
    "tied through functions only": [(0, 3, 5)],
    "tied, first used through a function": [(0, 3, 5)],
}


def save_then_go_on(rank: int, job: Training, num_stages: int, folder: str) -> Outcome:
    engine, outcome = build_engine(job, num_stages), Outcome()
    for step in range(3):
        train_step(engine, job, step, Outcome())
    assert engine.save_checkpoint(folder, client_state={"mine": [1, "two"]})
    for step in range(3, 6):
        train_step(engine, job, step, outcome)
    engine.close()
    return outcome


def resume(rank: int, job: Training, num_stages: int, folder: str) -> Outcome:
    engine, outcome = build_engine(job, num_stages), Outcome()
    path, client_state = engine.load_checkpoint(folder)
    outcome.extra = path, client_state["mine"], engine.global_steps, engine.global_samples, held_digests(engine)
    for step in range(3, 6):
        train_step(engine, job, step, outcome)
    engine.close()
    return outcome


@pytest.mark.parametrize("shape", [(2, 1), (3, 2)])
@pytest.mark.parametrize("name", JOBS)
def test_a_resumed_run_goes_on_bit_for_bit(workers: Run, name: str, shape: tuple[int, int], tmp_path: Path) -> None:
    job, count = JOBS[name], shape[0] * shape[1]
    undisturbed, resumed = (
        values(workers(target, count, args=(job, shape[0], str(tmp_path)), timeout_seconds=60))
        for target in (save_then_go_on, resume)
    )
    assert [outcome.losses for outcome in resumed] == [outcome.losses for outcome in undisturbed]
    assert [outcome.norms for outcome in resumed] == [outcome.norms for outcome in undisturbed]
    assert [outcome.digests for outcome in resumed] == [outcome.digests for outcome in undisturbed]
    assert_copies_equal(resumed, tied=TIES.get(name, ()))
    assert all(outcome.extra[1:4] == ([1, "two"], 3, 30) for outcome in resumed)
    assert (tmp_path / "latest").read_text() == "global_step3"


def test_the_files_are_those_of_stock_deepspeed(workers: Run, tmp_path: Path) -> None:
    values(workers(save_then_go_on, 4, args=(JOBS["Adam"], 2, str(tmp_path)), timeout_seconds=60))
    files = sorted(path.name for path in (tmp_path / "global_step3").iterdir())
    assert [name for name in files if not name.startswith("bamboo_")] == [
        *(f"layer_{index:02d}-model_states.pt" for index in range(6)),
        "mp_rank_00_model_states.pt",
        "mp_rank_01_model_states.pt",
    ]


def test_training_data_goes_on_where_it_was(workers: Run, tmp_path: Path) -> None:
    from tests.engine.test_data import Samples, in_order

    job = replace(
        JOBS["Adam"], batch=in_order(1000, 5), arguments=lambda _: {"training_data": Samples(1000)}, config={}
    )

    def train_some(rank: int, load: bool) -> list[float]:
        engine = build_engine(job, 2)
        if load:
            engine.load_checkpoint(str(tmp_path))
        losses = [float(engine.train_batch()) for _ in range(2)]
        if not load:
            engine.save_checkpoint(str(tmp_path))
            losses = [float(engine.train_batch()) for _ in range(2)]
        engine.close()
        return losses

    first, again = (values(workers(train_some, 2, args=(load,), timeout_seconds=60)) for load in (False, True))
    assert first == again


# ---- stock DeepSpeed -----------------------------------------------------------------------------------------------

STOCK = Training(
    lambda: blocks(6, dropout=0.0),
    vectors,
    micro_batches=4,
    clipping=0.0,
    config={"optimizer": {"type": "Adam", "params": {"lr": 0.01, "eps": 1e-6, "torch_adam": True}}},
)


def build_stock(job: Training, num_stages: int) -> Any:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed("gloo", verbose=False)
    module = PipelineModule(
        job.layers(), num_stages=num_stages, loss_fn=job.loss_fn, seed_layers=True, partition_method="uniform"
    )
    config = job.deepspeed_config("off")
    del config["bamboo"]
    arguments = job.arguments(module) if job.arguments else {"model_parameters": list(module.parameters())}
    engine, *_ = deepspeed.initialize(model=module, config=config, **arguments)
    return engine


def of_stock(job: Training, step: int) -> Any:
    return iter([job.batch(step, m) for m in range(job.micro_batches)])


def stock_saves(rank: int, job: Training, folder: str) -> list[float]:
    engine = build_stock(job, 2)
    for step in range(3):
        engine.train_batch(of_stock(job, step))
    engine.save_checkpoint(folder)
    return [float(engine.train_batch(of_stock(job, step))) for step in range(3, 6)]


def stock_loads(rank: int, job: Training, folder: str) -> tuple[list[float], int]:
    engine = build_stock(job, 2)
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    steps = engine.global_steps
    return [float(engine.train_batch(of_stock(job, step))) for step in range(3, 6)], steps


def bamboo_saves(rank: int, job: Training, folder: str) -> list[float]:
    return save_then_go_on(rank, job, 2, folder).losses


def bamboo_loads(rank: int, job: Training, folder: str) -> tuple[list[float], int]:
    engine = build_engine(job, 2)
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    steps = engine.global_steps
    losses = [float(engine.train_batch(batches(job, engine, step))) for step in range(3, 6)]
    engine.close()
    return losses, steps


GROUPED = replace(STOCK, arguments=uneven_groups)


@pytest.mark.parametrize("job", [STOCK, GROUPED], ids=["plain", "groups"])
@pytest.mark.parametrize(("saves", "loads"), [(stock_saves, bamboo_loads), (bamboo_saves, stock_loads)])
def test_stock_and_bamboo_read_each_others_checkpoints(
    workers: Run, job: Training, saves: Any, loads: Any, tmp_path: Path
) -> None:
    """Optimizer state too: without it, Adam's next losses would differ at once."""
    expected = values(workers(saves, 2, args=(job, str(tmp_path)), timeout_seconds=60))
    for losses, steps in values(workers(loads, 2, args=(job, str(tmp_path)), timeout_seconds=60)):
        assert largest(losses, expected[0]) < 1e-6
        assert steps == 3


def test_stock_bf16_optimizer_state_is_refused_by_name(workers: Run, tmp_path: Path) -> None:
    job = replace(STOCK, batch=low, bf16=True)
    values(workers(stock_saves, 2, args=(job, str(tmp_path)), timeout_seconds=60))
    results = workers(bamboo_loads, 2, args=(job, str(tmp_path)), timeout_seconds=30, exit_naturally=True)
    assert all("ConfigError" in str(result.error) for result in results)
    assert "load_optimizer_states=False" in str(results[0].error)


# ---- what cannot be loaded -----------------------------------------------------------------------------------------


def try_to_load(rank: int, num_stages: int, folder: str, tag: str | None) -> str:
    engine = build_engine(JOBS["Adam"], num_stages)
    try:
        path, _ = engine.load_checkpoint(folder, tag=tag)
    except Exception as error:
        linger(rank)
        return f"{type(error).__name__}: {error}"
    return f"loaded {path}"


@pytest.fixture(scope="module")
def saved(workers: Run, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("saved"))
    values(workers(save_then_go_on, 2, args=(JOBS["Adam"], 2, folder), timeout_seconds=60))
    return folder


def test_a_missing_checkpoint_is_named_by_all(workers: Run, saved: str) -> None:
    told = values(workers(try_to_load, 2, args=(2, saved, "global_step99"), timeout_seconds=30))
    assert all(
        text.startswith("ConfigError") and "global_step99 cannot be loaded: it does not" in text for text in told
    )


def test_a_folder_without_latest_loads_nothing_as_in_deepspeed(workers: Run, tmp_path: Path) -> None:
    assert values(workers(try_to_load, 2, args=(2, str(tmp_path), None), timeout_seconds=30)) == ["loaded None"] * 2


@pytest.mark.parametrize("tag", [None, "global_step3"])
def test_a_missing_layer_file_is_named_by_all(workers: Run, saved: str, tag: str | None, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "copy")
    os.remove(folder / "global_step3" / "layer_04-model_states.pt")
    told = values(workers(try_to_load, 2, args=(2, str(folder), tag), timeout_seconds=30))
    assert all("ConfigError" in text and "layer_04-model_states.pt is missing" in text for text in told), told


def test_a_layer_of_stock_that_is_missing_is_named(workers: Run, saved: str, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "copy")
    for path in (folder / "global_step3").glob("bamboo_*"):
        path.unlink()
    os.remove(folder / "global_step3" / "layer_04-model_states.pt")
    told = values(workers(try_to_load, 2, args=(2, str(folder), None), timeout_seconds=30))
    assert any("ConfigError" in text and "layer_04" in text for text in told), told


def test_different_tags_are_refused(workers: Run, tmp_path: Path) -> None:
    def save(rank: int) -> str:
        engine = build_engine(JOBS["Adam"], 2)
        try:
            engine.save_checkpoint(str(tmp_path), tag=f"mine-{rank}")
        except Exception as error:
            linger(rank)
            return f"{type(error).__name__}: {error}"
        return "saved"

    told = values(workers(save, 2, timeout_seconds=30))
    assert all("workers give different tags: mine-0, mine-1" in text for text in told), told

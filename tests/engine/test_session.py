"""What surrounds a step: timers, monitors, printing, several engines, the environment, errors that end all workers."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn

from bamboo_ds.cli.bench.workers import WorkerResult, values
from bamboo_ds.errors import EngineStoppedError, NonFiniteLossError, PeerLostError
from tests.engine.training import (
    OneProcess,
    Training,
    batches,
    build_engine,
    check,
    largest,
    linger,
    sgd,
    single,
    train,
    train_one_process,
)
from tests.engine.zoo import WIDTH, Block, blocks, vectors

Run = Callable[..., list[WorkerResult]]
JOB = Training(lambda: blocks(6), vectors)


# ---- timers, printing, monitors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (3, 2)])
def test_the_breakdown_of_times_never_stops_training(workers: Run, shape: tuple[int, int]) -> None:
    job = replace(JOB, config={"wall_clock_breakdown": True, "steps_per_print": 1})
    check(workers, job, shape)


def test_every_step_to_print_is_printed_once(workers: Run) -> None:
    job = replace(JOB, steps=4, config={"steps_per_print": 2})
    results = workers(train, 4, args=(job, 2, "fit"), timeout_seconds=60)
    values(results)
    lines = [line for result in results for line in result.log.splitlines() if line.startswith("steps: ")]
    assert [line.split()[1] for line in lines] == ["2", "4"]
    expected = train_one_process(job).losses[1]
    assert f"loss: {expected:0.4f}" in lines[0]


def monitored(rank: int, folder: str) -> None:
    blocks_of_config = {
        name: {"enabled": True, "output_path": folder, "job_name": name} for name in ("csv_monitor", "tensorboard")
    }
    job = replace(JOB, config=blocks_of_config)
    engine = build_engine(job, 2)
    for step in range(3):
        engine.train_batch(batches(job, engine, step))
        engine.eval_batch(iter([vectors(9, 0)]), num_micro_batches=1)
    engine.close()


def test_monitors_write_once_with_deepspeeds_names(workers: Run, tmp_path: Path) -> None:
    values(workers(monitored, 4, args=(str(tmp_path),), timeout_seconds=60))
    files = {path.name: path for path in (tmp_path / "csv_monitor").iterdir()}
    assert sorted(files) == [
        "Train_Samples_eval_loss.csv",
        "Train_Samples_lr.csv",
        "Train_Samples_train_loss.csv",
    ]
    for name, path in files.items():
        rows = list(csv.reader(path.open()))[1:]
        assert [int(row[0]) for row in rows] == [10, 20, 30], name
    losses = [float(row[1]) for row in list(csv.reader(files["Train_Samples_train_loss.csv"].open()))[1:]]
    assert largest(losses, single(train_one_process(JOB).losses)) < 1e-6
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1, "one worker writes"


# ---- engines and shapes --------------------------------------------------------------------------------------------


def alternate(rank: int) -> tuple[list[float], list[float]]:
    first, second = replace(JOB), replace(JOB, layers=lambda: blocks(4), optimizer=sgd, micro_batches=3)
    one, two = build_engine(first, 2), build_engine(second, 2)
    losses: tuple[list[float], list[float]] = ([], [])
    for step in range(3):
        losses[0].append(float(one.train_batch(batches(first, one, step))))
        losses[1].append(float(two.train_batch(batches(second, two, step))))
    one.close()
    losses[1].append(float(two.train_batch(batches(second, two, 3))))
    two.close()
    return losses


def test_two_engines_in_one_process_train_alternately(workers: Run) -> None:
    second = replace(JOB, layers=lambda: blocks(4), optimizer=sgd, micro_batches=3, steps=4)
    expected = single(train_one_process(JOB).losses), single(train_one_process(second).losses)
    assert values(workers(alternate, 2, timeout_seconds=60)) == [expected] * 2


class Sequences(nn.Module):
    """A layer that takes any length."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + torch.tanh(self.linear(value)).mean(dim=1, keepdim=True)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("shape", [(3, 1), (2, 2)])
def test_shapes_may_change_with_every_micro_batch(workers: Run, shape: tuple[int, int], dynamic: bool) -> None:
    def batch(step: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(100 * step + micro_batch)
        inputs = torch.randn(1 + micro_batch % 2, 1 + (3 * step + micro_batch) % 5, WIDTH, generator=generator)
        return inputs, inputs.tanh()

    job = Training(lambda: [LayerSpec(Sequences) for _ in range(6)], batch, module={"dynamic_shape": dynamic})
    check(workers, job, shape)


def test_the_users_random_numbers_are_untouched(workers: Run) -> None:
    """Building, training and evaluating draw nothing from the generators of the script."""

    def draw(rank: int) -> tuple[float, float]:
        torch.manual_seed(5)
        expected = float(torch.rand(()))
        torch.manual_seed(5)
        engine = build_engine(JOB, 2)
        engine.train_batch(batches(JOB, engine, 0))
        engine.eval_batch(iter([vectors(9, 0)]), num_micro_batches=1)
        engine.close()
        return float(torch.rand(())), expected

    for drawn, expected in values(workers(draw, 2, timeout_seconds=60)):
        assert drawn == expected


def test_weights_do_not_depend_on_the_split_without_seed_layers_either(workers: Run) -> None:
    job = replace(JOB, module={"seed_layers": False}, steps=2)

    def losses(rank: int, stages: int) -> list[float]:
        torch.manual_seed(11)
        engine = build_engine(job, stages)
        found = [float(engine.train_batch(batches(job, engine, step))) for step in range(2)]
        engine.close()
        return found

    runs = [values(workers(losses, stages, args=(stages,), timeout_seconds=60))[0] for stages in (1, 2, 3)]
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("method", ["parameters", "uniform", "type:Block", "type:block"])
def test_every_partition_method_equals_one_process(workers: Run, method: str) -> None:
    def layers() -> list[Any]:
        return [LayerSpec(nn.Tanh), *blocks(3), LayerSpec(nn.Tanh), *blocks(2), LayerSpec(nn.Linear, WIDTH, WIDTH)]

    check(workers, Training(layers, vectors, module={"partition_method": method}), (3, 1))


# ---- the environment -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named_instead_of_asking_for_mpi(workers: Run, missing: str) -> None:
    started = time.monotonic()
    results = workers(
        lambda rank: build_engine(JOB, 1), 1, timeout_seconds=30, environment={missing: None}
    )  # fmt: skip
    assert f"ConfigError: environment variable {missing} not set" in str(results[0].error)
    assert "mpi" not in str(results[0].error).lower()
    assert time.monotonic() - started < 10


def test_no_op_is_compiled_and_nothing_stays_in_shared_memory(workers: Run, tmp_path: Path) -> None:
    def train_watched(rank: int) -> list[str]:
        import deepspeed.ops.op_builder.builder as builder

        def forbidden(*_: Any, **__: Any) -> None:
            raise AssertionError("an op is compiled")

        builder.OpBuilder.load = builder.OpBuilder.jit_load = forbidden
        sys.modules["deepspeed.comm.torch"].build_shm_op = forbidden  # type: ignore[attr-defined]
        engine = build_engine(replace(JOB, config={"optimizer": {"type": "Adam", "params": {"lr": 0.01}}}), 2)
        engine.train_batch(batches(JOB, engine, 0))
        engine.close()
        return sorted(os.listdir("/dev/shm"))

    before = set(os.listdir("/dev/shm"))
    environment = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    for found in values(workers(train_watched, 2, timeout_seconds=60, environment=environment)):
        assert not [name for name in set(found) - before if "deepspeed" in name or "shm_comm" in name]
    assert not list(tmp_path.rglob("*")), "a build folder or lock file was made"


def test_importing_bamboo_first_forbids_the_shared_memory_op() -> None:
    """A script calls `deepspeed.init_distributed` before it makes an engine, and that is where the op is built."""
    script = "import sys, bamboo_ds, deepspeed; print(sys.modules['deepspeed.comm.torch'].build_shm_op())"
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, env=environment, check=False
    )
    assert ended.stdout.splitlines()[-1:] == ["None"], ended.stderr


def test_ranks_are_true_in_user_code(workers: Run) -> None:
    def ask(rank: int) -> Any:
        import deepspeed.comm as deepspeed_comm
        import torch.distributed as torch_distributed

        engine = build_engine(JOB, 2)
        engine.train_batch(batches(JOB, engine, 0))
        told = (
            torch_distributed.get_rank(), torch_distributed.get_world_size(),
            deepspeed_comm.get_rank(), deepspeed_comm.get_world_size(),
            engine.global_rank, engine.grid.get_stage_id(), engine.grid.get_data_parallel_id(),
            engine.is_first_stage(), engine.is_last_stage(),
        )  # fmt: skip
        total = torch.tensor([rank + 1.0])
        torch_distributed.all_reduce(total)
        engine.close()
        return told, float(total)

    for rank, (told, total) in enumerate(values(workers(ask, 4, timeout_seconds=60))):
        assert told == (rank, 4, rank, 4, rank, rank // 2, rank % 2, rank < 2, rank >= 2)
        assert total == 10.0


# ---- failing -------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_a_number_ends_all_workers_and_steps_none(workers: Run) -> None:
    def poisoned(rank: int) -> tuple[str, bool, bool]:
        def batch(step: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
            inputs, labels = vectors(step, micro_batch)
            return inputs, labels * (float("nan") if (step, micro_batch) == (1, 3) else 1.0)

        job = replace(JOB, batch=batch)
        engine = build_engine(job, 2)
        engine.train_batch(batches(job, engine, 0))
        before = [parameter.detach().clone() for parameter in engine.module.parameters()]
        try:
            engine.train_batch(batches(job, engine, 1))
        except NonFiniteLossError as error:
            message = str(error)
        unchanged = all(map(torch.equal, before, engine.module.parameters()))
        try:
            engine.train_batch(batches(job, engine, 2))
        except EngineStoppedError as error:
            return message, unchanged, "NonFiniteLossError" in str(error)
        finally:
            linger(rank)
        return message, unchanged, False

    for message, unchanged, stopped in values(workers(poisoned, 4, timeout_seconds=30)):
        assert "step 1, micro-batch 3" in message
        assert unchanged
        assert stopped


class Failing(Block):
    """Raises in the second step of one worker."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls > JOB.micro_batches and self.training and os.environ["RANK"] == "1":
            raise ZeroDivisionError("a bug of the user's")
        return super().forward(value)


def test_an_exception_in_one_worker_ends_the_others_with_its_cause(workers: Run) -> None:
    def fail(rank: int) -> tuple[str, float]:
        job = replace(JOB, layers=lambda: [*blocks(2), LayerSpec(Failing), *blocks(3)])
        engine = build_engine(job, 3, "off")
        engine.train_batch(batches(job, engine, 0))
        started = time.monotonic()
        try:
            engine.train_batch(batches(job, engine, 1))
        except (ZeroDivisionError, PeerLostError) as error:
            seconds = time.monotonic() - started
            linger(rank)
            return f"{type(error).__name__}: {error}", seconds
        return "trained", 0.0

    told = values(workers(fail, 3, timeout_seconds=30))
    assert told[1][0] == "ZeroDivisionError: a bug of the user's"
    assert all("worker 1 failed: ZeroDivisionError: a bug of the user's" in told[rank][0] for rank in (0, 2))
    assert max(seconds for _, seconds in told) < 8


@pytest.mark.slow
def test_one_time_out_rules_every_wait(workers: Run) -> None:
    """A worker that does nothing is noticed by all others within the time-out, whatever they wait for."""

    def stall(rank: int) -> tuple[str, float]:
        job = replace(JOB, config={"bamboo": {"timeout_seconds": 2.0}})
        engine = build_engine(job, 2)
        engine.train_batch(batches(job, engine, 0))
        if rank == 3:
            time.sleep(7.0)
            return "asleep", 0.0
        started = time.monotonic()
        try:
            engine.train_batch(batches(job, engine, 1))
        except PeerLostError as error:
            seconds = time.monotonic() - started
            linger(rank)
            return str(error), seconds
        return "trained", 0.0

    told = values(workers(stall, 4, timeout_seconds=40))
    assert told[3][0] == "asleep"
    assert all("worker 3" in message for message, _ in told[:3]), told
    assert max(seconds for _, seconds in told[:3]) < 6


def test_training_without_an_optimizer_is_refused(workers: Run) -> None:
    def train_bare(rank: int) -> None:
        import bamboo_ds

        module = bamboo_ds.BambooPipelineModule(JOB.layers(), num_stages=2, loss_fn=JOB.loss_fn)
        engine, *_ = bamboo_ds.initialize(model=module, config=JOB.deepspeed_config("fit"))
        engine.train_batch(batches(JOB, engine, 0))

    results = workers(train_bare, 2, timeout_seconds=30)
    assert all("ConfigError: train_batch() needs an optimizer" in str(result.error) for result in results)


def test_the_reference_itself_trains() -> None:
    one = OneProcess(replace(JOB, steps=1))
    losses = [one.train_batch([vectors(0, m) for m in range(5)]) for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0]

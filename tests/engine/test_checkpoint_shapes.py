"""A checkpoint that was saved in one shape goes on in every other, with the losses of the uninterrupted run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bamboo_ds.cli.bench.workers import WorkerResult, values
from bamboo_ds.engine.sampler import Position
from tests.engine.test_checkpoints import JOBS, TIES, resume, save_then_go_on
from tests.engine.training import Outcome, Training, assert_copies_equal, build_engine, largest, sgd, train_step

Run = Callable[..., list[WorkerResult]]

SAVED = (2, 2)
SHAPES = [(4, 1), (1, 3), (3, 2), (1, 1)]
LOW = {"Adam in bf16", "momentum, tied, in bf16"}


@pytest.fixture(scope="module")
def runs(workers: Run, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, list[Outcome]]]:
    """Give what saves a job in 2x2, once: the folder, and the steps after it."""
    known: dict[str, tuple[str, list[Outcome]]] = {}

    def run(name: str) -> tuple[str, list[Outcome]]:
        if name not in known:
            folder = str(tmp_path_factory.mktemp("saved"))
            count = SAVED[0] * SAVED[1]
            target = workers(save_then_go_on, count, args=(JOBS[name], SAVED[0], folder), timeout_seconds=60)
            known[name] = folder, values(target)
        return known[name]

    return run


@pytest.mark.sample(12)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
@pytest.mark.parametrize("name", JOBS)
def test_it_goes_on_in_any_shape(workers: Run, runs: Any, name: str, shape: tuple[int, int]) -> None:
    folder, undisturbed = runs(name)
    stages, pipelines = shape
    resumed = values(workers(resume, stages * pipelines, args=(JOBS[name], stages, folder), timeout_seconds=60))
    bound = 1e-3 if name in LOW else 1e-6  # a bf16 weight rounds the order of a sum up to 1/256
    for outcome in resumed:
        assert largest(outcome.losses, undisturbed[0].losses) <= bound
        assert outcome.extra[1:4] == ([1, "two"], 3, 30)
    assert_copies_equal(resumed, tied=TIES.get(name, ()))


@pytest.mark.parametrize("name", JOBS)
def test_all_layers_are_what_they_were(workers: Run, runs: Any, name: str) -> None:
    """Bit for bit, in another shape too; so is all that the optimizer knows of them."""
    folder, _ = runs(name)
    before = states(values(workers(loaded_state, 4, args=(JOBS[name], 2, folder), timeout_seconds=60)))
    after = states(values(workers(loaded_state, 3, args=(JOBS[name], 3, folder), timeout_seconds=60)))
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key]), key


def loaded_state(rank: int, job: Training, num_stages: int, folder: str) -> dict[str, torch.Tensor]:
    from bamboo_ds.engine.unit_state import copy_to_host, take

    engine = build_engine(job, num_stages)
    engine.load_checkpoint(folder)
    found = {
        f"{name}/{key}": tensor
        for name, unit in engine._held_units().items()
        for key, tensor in copy_to_host(take(unit, engine.optimizer)).tensors.items()
    }
    engine.close()
    return found


def states(by_worker: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Join what the workers hold; several may hold a layer, alike."""
    joined: dict[str, torch.Tensor] = {}
    for one in by_worker:
        for key, tensor in one.items():
            assert torch.equal(joined.setdefault(key, tensor), tensor), key
    return joined


def test_every_layer_is_written_once_and_shared_out(workers: Run, runs: Any) -> None:
    from bamboo_ds.checkpoint import open_storage, read_manifest

    folder, _ = runs("Adam")
    manifest = read_manifest(open_storage(folder), "global_step3")
    assert manifest is not None
    written = [unit.writer for unit in manifest.units.values()]
    assert sorted(manifest.units) == [str(index) for index in range(6)]
    assert {writer: written.count(writer) for writer in range(4)} == {0: 2, 1: 1, 2: 2, 3: 1} or (
        sorted(written.count(writer) for writer in range(4)) == [1, 1, 2, 2]
    )


def test_training_data_goes_on_where_it_was_in_another_shape(workers: Run, tmp_path: Path) -> None:
    from tests.engine.test_data import Samples, in_order

    block = {"data": {"shuffle": True, "drop_last": True}}
    job = replace(
        JOBS["Adam"],
        batch=in_order(1000, 5),
        arguments=lambda _: {"training_data": Samples(37)},
        config={"bamboo": block},
    )

    def train_some(rank: int, stages: int, load: bool) -> tuple[list[float], Position]:
        engine = build_engine(job, stages)
        if load:
            engine.load_checkpoint(str(tmp_path))
        else:
            for _ in range(5):
                engine.train_batch()
            engine.save_checkpoint(str(tmp_path))
        at = engine.data_position()
        losses = [float(engine.train_batch()) for _ in range(5)]
        engine.close()
        return losses, at

    first = values(workers(train_some, 4, args=(2, False), timeout_seconds=60))[0]
    for stages, count in ((1, 3), (3, 3)):
        again = values(workers(train_some, count, args=(stages, True), timeout_seconds=60))
        assert all(at == first[1] for _, at in again)
        assert all(largest(losses, first[0]) < 1e-6 for losses, _ in again)


def load_with(rank: int, job: Training, num_stages: int, folder: str, how: dict[str, Any]) -> Any:
    from bamboo_ds.engine.unit_state import take

    engine = build_engine(job, num_stages)
    try:
        engine.load_checkpoint(folder, **how)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    weights = {
        name: {key: tensor.clone() for key, tensor in take(unit, engine.optimizer).tensors.items()}
        for name, unit in engine._held_units().items()
    }
    scheduler = engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None
    facts = engine.global_steps, scheduler, weights
    engine.close()
    return facts


def test_parts_of_it_may_be_left_out(workers: Run, runs: Any) -> None:
    folder, _ = runs("Adam")
    whole, weights, counters, module = (
        values(workers(load_with, 1, args=(JOBS["Adam"], 1, folder, how), timeout_seconds=60))[0]
        for how in (
            {},
            {"load_optimizer_states": False},
            {"load_lr_scheduler_states": False},
            {"load_module_only": True},
        )
    )
    assert [one[0] for one in (whole, weights, counters, module)] == [3, 3, 3, 0]
    moments = [sum(key.startswith("state/") for key in one[2]["0"]) for one in (whole, weights, counters, module)]
    assert moments[1] == moments[3] == 0 < moments[0] == moments[2]
    assert whole[1] == weights[1] != counters[1] == module[1]
    for one in (weights, counters, module):
        assert torch.equal(one[2]["0"]["parameter/linear.weight"], whole[2]["0"]["parameter/linear.weight"])


def test_masters_follow_weights_that_are_loaded_alone(workers: Run, runs: Any) -> None:
    folder, _ = runs("Adam in bf16")
    how = {"load_optimizer_states": False}
    for _, _, units in values(workers(load_with, 2, args=(JOBS["Adam in bf16"], 2, folder, how), timeout_seconds=60)):
        for tensors in units.values():
            assert torch.equal(tensors["master/linear.weight"], tensors["parameter/linear.weight"].float())


@pytest.mark.parametrize(
    ("job", "told"),
    [
        (replace(JOBS["Adam"], optimizer=sgd, config={}), "saved with the optimizer Adam, this job has SGD"),
        (replace(JOBS["Adam"], layers=lambda: JOBS["Adam"].layers()[:4]), "is of another model: it has 6 layers"),
        (JOBS["Adam in bf16"], "parameter/linear.weight is torch.bfloat16"),
    ],
    ids=["another optimizer", "another model", "another precision"],
)
def test_what_does_not_fit_is_named(workers: Run, runs: Any, job: Training, told: str) -> None:
    folder, _ = runs("Adam")
    found = values(workers(load_with, 1, args=(job, 1, folder, {}), timeout_seconds=60))
    assert all(isinstance(text, str) and told in text for text in found), found


# ---- damage --------------------------------------------------------------------------------------------------------


def save_twice(rank: int, job: Training, num_stages: int, folder: str) -> list[float]:
    engine, outcome = build_engine(job, num_stages), Outcome()
    for step in range(2):
        train_step(engine, job, step, Outcome())
        engine.save_checkpoint(folder)
    for step in range(2, 4):
        train_step(engine, job, step, outcome)
    engine.close()
    return outcome.losses


def load_and_train(rank: int, job: Training, num_stages: int, folder: str) -> tuple[Any, int, list[float]]:
    engine, outcome = build_engine(job, num_stages), Outcome()
    path, _ = engine.load_checkpoint(folder)
    steps = engine.global_steps
    for step in range(steps, 4):
        train_step(engine, job, step, outcome)
    engine.close()
    return path, steps, outcome.losses


@pytest.mark.parametrize("damage", ["cut", "flip", "manifest"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(workers: Run, damage: str, tmp_path: Path) -> None:
    """Whoever finds the damage: a byte that has changed is seen by those only who need the layer."""
    job, folder = JOBS["Adam"], tmp_path / "place"
    expected = values(workers(save_twice, 2, args=(job, 2, str(folder)), timeout_seconds=60))[0]
    path = folder / "global_step2" / ("bamboo_manifest.json" if damage == "manifest" else "bamboo_unit_5.safetensors")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data if damage == "flip" else data[:-20])
    for stages, count in ((3, 3), (2, 4)):
        for where, steps, losses in values(
            workers(load_and_train, count, args=(job, stages, str(folder)), timeout_seconds=60)
        ):
            assert steps == 1
            assert "global_step1/" in where
            assert largest(losses[1:], expected) < 1e-6


def test_a_checkpoint_may_be_saved_again_under_its_name(workers: Run, tmp_path: Path) -> None:
    def save(rank: int, steps: int) -> int:
        engine = build_engine(JOBS["Adam"], 2)
        for step in range(steps):
            train_step(engine, JOBS["Adam"], step, Outcome())
        assert engine.save_checkpoint(str(tmp_path), tag="mine")
        engine.close()
        return steps

    for steps in (1, 2):
        values(workers(save, 2, args=(steps,), timeout_seconds=60))
        assert (
            values(workers(load_and_train, 1, args=(JOBS["Adam"], 1, str(tmp_path)), timeout_seconds=60))[0][1] == steps
        )


def test_the_scripts_own_state_may_be_anything(workers: Run, tmp_path: Path) -> None:
    """JSON tells numbers and texts; an object goes into DeepSpeed's file, as in DeepSpeed."""

    def save(rank: int, state: dict[str, Any]) -> None:
        engine = build_engine(JOBS["Adam"], 2)
        engine.save_checkpoint(str(tmp_path), client_state=state)
        engine.close()

    def load(rank: int) -> Any:
        engine = build_engine(JOBS["Adam"], 1)
        state = engine.load_checkpoint(str(tmp_path))[1]
        engine.close()
        return state["mine"]

    for mine in ({"a": (1, 2.5, None), 3: "x"}, Position(3, 4)):
        values(workers(save, 2, args=({"mine": mine},), timeout_seconds=60))
        assert values(workers(load, 1, timeout_seconds=60)) == [mine]


def test_stocks_weights_load_with_other_stages(workers: Run, tmp_path: Path) -> None:
    """Its optimizer state does not, and says what to do."""
    from tests.engine.test_checkpoints import STOCK, stock_saves

    job = STOCK
    values(workers(stock_saves, 2, args=(job, str(tmp_path)), timeout_seconds=60))
    refused = workers(load_with, 3, args=(job, 3, str(tmp_path), {}), timeout_seconds=30, exit_naturally=True)
    assert any("load_optimizer_states=False" in str(result.value) for result in refused)
    how = {"load_optimizer_states": False}
    for shape in ((3, 3), (1, 2), (2, 2)):
        for steps, _, units in values(
            workers(load_with, shape[1], args=(job, shape[0], str(tmp_path), how), timeout_seconds=60)
        ):
            assert steps == 3
            for name, tensors in units.items():
                saved = torch.load(tmp_path / "global_step3" / f"layer_{int(name):02d}-model_states.pt")
                assert torch.equal(tensors["parameter/linear.weight"], saved["linear.weight"])


def test_a_copy_of_the_folder_loads(workers: Run, runs: Any, tmp_path: Path) -> None:
    folder, undisturbed = runs("Adam")
    moved = shutil.copytree(folder, tmp_path / "moved")
    resumed = values(workers(resume, 1, args=(JOBS["Adam"], 1, str(moved)), timeout_seconds=60))
    assert largest(resumed[0].losses, undisturbed[0].losses) <= 1e-6

"""Nobody alive has a layer, all go back to the newest checkpoint, and more workers die on the way there.

Whatever they were at: no hang, no wrong number, and no checkpoint is chosen that was not finished.
"""

from __future__ import annotations

import errno
import functools
import importlib
import os
import random
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from deepspeed.pipe import LayerSpec

from bamboo_ds.cli.bench.workers import WorkerResult, values
from bamboo_ds.elastic.membership import Membership
from bamboo_ds.errors import BambooError
from tests.engine.disturbed import Fault, kill
from tests.engine.entering import Death, Program, before_call, died, dying
from tests.engine.reshaped import Reshaped, ReshapedCluster, assert_as, assert_copies_equal
from tests.engine.test_checkpoint_background import periodic, train_all
from tests.engine.test_failover import JOBS
from tests.engine.training import Outcome, Training, build_engine, train_one_process
from tests.engine.zoo import Block

Record = Callable[[str, object], None]
Run = Callable[..., list[WorkerResult]]
STEPS = 8


def job(path: Path, *, asynchronous: bool = False, reconfigure: str = "needed") -> Training:
    """Return a job that writes a checkpoint after every second step, and goes on when it is whole.

    Who comes later waits until it is needed, or until it helps.
    """
    settings = {"path": str(path / "checkpoints"), "interval_steps": 2, "asynchronous": asynchronous}
    return replace(plain(), config={"bamboo": {"checkpoint": settings, "reconfigure": reconfigure}})


def plain() -> Training:
    return replace(JOBS["dropout, clipping and Adam"], steps=STEPS, micro_batches=6)


@functools.cache
def expected() -> Outcome:
    return train_one_process(plain())


@pytest.fixture(scope="module")
def reshaped(tmp_path_factory: pytest.TempPathFactory) -> ReshapedCluster:
    return ReshapedCluster(tmp_path_factory.mktemp("restores"))


def assert_right(results: dict[int, Reshaped]) -> None:
    """Hold everybody who is left against one process that trains the same."""
    assert results, "nobody is left"
    assert_as(expected(), results, bound=0.0)
    assert_copies_equal(results)


def in_turn(engine: Any) -> None:
    """Let one checkpoint be there before the next is due: else none is begun; and each part before the next step."""

    def finish(engine: Any) -> None:
        engine._finish_checkpoints()

    before_call(type(engine), "_votes", finish)
    if not engine._is_first:
        before_call(type(engine), "_begin_step", finish)


# ---- on the way back -----------------------------------------------------------------------------------------------

PHASES = {
    "decided": 0.005,
    "links forming": 0.02,
    "choosing": 0.02,
    "reading": 0.05,
    "reading again": 0.05,
    "settling": 0.02,
}
"""Seconds after the beginning of each phase in which workers die."""


def neighbours(draw: random.Random) -> list[Fault]:
    """Return the deaths of a worker and of its shadow in one step: a stage is lost."""
    stage, moment = draw.randrange(3), {"before": draw.randrange(8), "step": draw.randrange(3, 7)}
    return [kill(0, stage, **moment), kill(0, (stage - 1) % 3, **moment)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(100))
def test_a_death_during_a_restore_leads_to_another(
    reshaped: ReshapedCluster, seed: int, tmp_path: Path, record_property: Record
) -> None:
    draw = random.Random(3000 + seed)
    phase, seconds = list(PHASES.items())[seed % len(PHASES)]
    lost = neighbours(draw)
    deaths = [Death(1, phase.removesuffix(" again"), draw.uniform(0.0, seconds), number=draw.randrange(4))]
    if seed % 4 == 3:
        deaths.append(Death(2, "reading", draw.uniform(0.0, seconds), number=draw.randrange(3)))
    results = reshaped.train(
        job(tmp_path, asynchronous=seed % 5 == 4), (3, 1), lost, spare=3,
        around=lambda program: dying(program, deaths, tmp_path, unit_seconds=0.01), prepare=in_turn,
    )  # fmt: skip
    record_property("died", str(dict(died(tmp_path))))
    assert_right(results)
    told = [event["step"] for event in reshaped.events("restored")]
    record_property("restores", len(told))
    assert told, "nobody went back"
    if seed % 5 != 4:
        assert set(told) == {lost[0]["step"] // 2 * 2}, "that was the newest"


# ---- half a checkpoint ---------------------------------------------------------------------------------------------

MOMENTS = {
    "before its note": ("bamboo_ds.checkpoint.writing", "leave_note", "bamboo_step00000004"),
    "before the marker": ("bamboo_ds.checkpoint.periodic", "close", "bamboo_step00000004"),
    "with the marker beside its place": ("os", "replace", r"bamboo_step00000004[^/]*/bamboo_manifest\.json"),
}
"""Where the worker dies that writes the marker: before which call, with what among the arguments."""


def dying_writer(program: Program, moment: str, *, worker: int = 0) -> Program:
    """Return the program of a worker; one dies in the checkpoint of step 4."""
    module, name, pattern = MOMENTS[moment]

    def strike(*arguments: Any) -> None:
        if re.search(pattern, repr(arguments)):
            os.kill(os.getpid(), signal.SIGKILL)

    def run() -> Any:
        seat = Membership.read()
        if seat is not None and seat.worker == worker:
            before_call(importlib.import_module(module), name, strike)
        return program()

    return run


@pytest.mark.sample(1)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("instruction", [0, 9])
def test_a_checkpoint_without_its_marker_is_not_gone_back_to(
    reshaped: ReshapedCluster, moment: str, asynchronous: bool, instruction: int, tmp_path: Path
) -> None:
    """The other worker that has the first stage dies in the next step."""
    lost = [kill(0, 2, before=instruction, step=4)]
    results = reshaped.train(
        job(tmp_path, asynchronous=asynchronous), (3, 1), lost, spare=2,
        around=lambda program: dying_writer(program, moment), prepare=in_turn,
    )  # fmt: skip
    assert_right(results)
    assert {event["step"] for event in reshaped.events("restored")} == {2}


def test_a_death_in_a_checkpoint_that_training_waits_for_does_not_use_the_time_out_up(
    reshaped: ReshapedCluster, tmp_path: Path
) -> None:
    results = reshaped.train(
        job(tmp_path), (3, 1), around=lambda program: dying_writer(program, "before its note", worker=2)
    )
    assert len(results) == 2
    assert_right(results)
    (lost,), (failed,) = reshaped.events("failover"), reshaped.events("checkpoint_failed")
    assert "nothing was heard of worker(s) 2" in failed["text"]
    assert failed["time"] - lost["time"] < 10.0, "half of the time-out"


def restore_what_vanishes(rank: int, job: Training) -> int:
    """Go back to the newest checkpoint, which is deleted just after it was chosen; return its step."""
    from bamboo_ds.engine import checkpointing

    engine, choose, gone = build_engine(job, 2), checkpointing.newest_but, list[str]()

    def choose_and_delete(storage: Any, *arguments: Any, **how: Any) -> Any:
        tag, reasons = choose(storage, *arguments, **how)
        if not gone:
            gone.append(tag)
            storage.delete_folder(tag)
        return tag, reasons

    checkpointing.newest_but = choose_and_delete  # type: ignore[assignment]
    step = engine._restored(engine._held_units()).step
    engine.close()
    return int(step)


def test_a_checkpoint_that_makes_room_for_a_newer_one_after_it_was_chosen_is_given_up(
    workers: Run, tmp_path: Path
) -> None:
    """A writer of before the loss finishes only now, and deletes what is too old."""
    saving = periodic(JOBS["dropout, clipping and Adam"], tmp_path, interval_steps=2, asynchronous=False, keep=3)
    values(workers(train_all, 2, args=(saving, 2), timeout_seconds=60))
    assert values(workers(restore_what_vanishes, 2, args=(saving,), timeout_seconds=60)) == [4, 4]


def restore_through_trouble(rank: int, job: Training, *, times: int) -> tuple[int, str]:
    """Go back to the newest checkpoint of a place that cannot be read a few times; return its step, or what is said."""
    from bamboo_ds.checkpoint.local import LocalStorage

    engine, read, failures = build_engine(job, 2), LocalStorage.read, [times]

    def failing(self: LocalStorage, name: str) -> bytes:
        failures[0] -= 1
        if failures[0] >= 0:
            raise OSError(errno.EIO, "Input/output error", name)
        return read(self, name)

    LocalStorage.read = failing  # type: ignore[method-assign]
    try:
        return int(engine._restored(engine._held_units()).step), ""
    except BambooError as error:
        return -1, str(error)
    finally:
        engine.close()


@pytest.mark.parametrize("times", [2, 1000])
def test_a_place_that_cannot_be_read_is_asked_again_for_half_of_the_time_out(
    workers: Run, tmp_path: Path, times: int
) -> None:
    saving = periodic(JOBS["dropout, clipping and Adam"], tmp_path, interval_steps=2, asynchronous=False, keep=3)
    values(workers(train_all, 2, args=(saving, 2), timeout_seconds=60))
    brief = {**saving.config, "bamboo": {**saving.config["bamboo"], "timeout_seconds": 4}}
    again = functools.partial(restore_through_trouble, times=times)
    told = workers(again, 2, args=(replace(saving, config=brief),), timeout_seconds=60)
    if times == 2:
        assert values(told) == [(6, ""), (6, "")]
    else:
        assert f"the checkpoints in {tmp_path} cannot be read: [Errno 5]" in told[0].value[1]


# ---- all of a layer ------------------------------------------------------------------------------------------------


class Gained(Block):
    """Keeps a number that is neither a parameter nor a buffer; it is in the `state_dict` as extra state."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, super().forward(value)) * self.gain

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.gain)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.gain = float(state)


def set_gain(engine: Any) -> None:
    """Do what a script does before it trains; those who come later have it from the others, or from the checkpoint."""
    if engine.global_steps == 0:
        for stage in engine.module.held_stages():
            for layer in engine.module.layers_of(stage).values():
                layer.gain = 0.5


@pytest.mark.sample(1)
@pytest.mark.parametrize("lost", [(1,), (1, 2)], ids=["from a worker", "from a checkpoint"])
def test_what_a_module_keeps_besides_tensors_comes_with_it(
    reshaped: ReshapedCluster, lost: tuple[int, ...], tmp_path: Path
) -> None:
    when = "needed" if len(lost) > 1 else "auto"
    gained = replace(job(tmp_path, reconfigure=when), layers=lambda: [LayerSpec(Gained, 1.0) for _ in range(6)])
    faults = [kill(0, stage, before=8, step=5) for stage in lost]
    results = reshaped.train(gained, (3, 1), faults, spare=len(lost), prepare=set_gain)
    assert {outcome.shape for outcome in results.values()} == {(3, 1)}
    assert bool(reshaped.events("restored")) == (len(lost) > 1)
    assert any(outcome.first for outcome in results.values()), "one came later"
    reference = replace(plain(), layers=lambda: [LayerSpec(Gained, 0.5) for _ in range(6)])
    assert_as(train_one_process(reference), results, bound=0.0)

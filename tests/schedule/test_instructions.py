"""Instructions are DeepSpeed's classes with value equality."""

from __future__ import annotations

import subprocess
import sys

import pytest
from deepspeed.runtime.pipe import schedule as stock

from bamboo_ds.schedule import instructions as ours
from bamboo_ds.schedule.operations import Kind, Operation
from bamboo_ds.schedule.words import LETTERS, REDUCE, STEP, Word, computed, expand

SHARED = [
    "LoadMicroBatch",
    "ForwardPass",
    "BackwardPass",
    "SendActivation",
    "RecvActivation",
    "SendGrad",
    "RecvGrad",
]


@pytest.mark.parametrize("name", [*SHARED, "RedundantForward", "PromoteForward"])
def test_an_instruction_is_a_value_of_type_stage_and_micro_batch(name: str) -> None:
    kind = getattr(ours, name)
    same, other_stage, other_batch = (
        kind(stage=2, micro_batch=3),
        kind(stage=1, micro_batch=3),
        kind(stage=2, micro_batch=4),
    )
    assert same == kind(stage=2, micro_batch=3)
    assert len({same, kind(stage=2, micro_batch=3), other_stage, other_batch}) == 3
    assert same != getattr(ours, "SendGrad" if name != "SendGrad" else "RecvGrad")(stage=2, micro_batch=3)
    assert (same.stage, same.micro_batch, same.buffer_id, same.name) == (2, 3, 3, name)
    assert same.kwargs == {"stage": 2, "micro_batch": 3}


@pytest.mark.parametrize("name", SHARED)
def test_an_instruction_is_an_instance_of_deepspeeds_class_of_its_name(name: str) -> None:
    assert isinstance(getattr(ours, name)(stage=0, micro_batch=0), getattr(stock, name))


@pytest.mark.parametrize("name", ["ReduceGrads", "OptimizerStep"])
def test_the_end_of_a_step_takes_no_arguments(name: str) -> None:
    kind = getattr(ours, name)
    assert kind().kwargs == {}
    assert kind() == kind()
    assert hash(kind()) == hash(kind())
    assert isinstance(kind(), getattr(stock, name))
    assert ours.ReduceGrads() != ours.OptimizerStep()


def test_ours_never_equals_an_instruction_of_deepspeed() -> None:
    assert ours.ForwardPass(stage=0, micro_batch=1) != stock.ForwardPass(buffer_id=1)


def test_between_two_owned_stages_nothing_is_sent() -> None:
    forward = Operation(Kind.FORWARD, 1, 0)
    assert expand(forward, stages=4, owned=(1, 2)) == (Word("RA", 1, 0), Word("F", 1, 0))


def test_every_word_is_an_instruction_and_back() -> None:
    words = [*(Word(letters, 2, 7) for letters in LETTERS), REDUCE, STEP]
    assert [ours.to_word(ours.from_word(word)) for word in words] == words
    assert len({type(ours.from_word(word)) for word in words}) == len(words) == len(ours.CLASSES)


@pytest.mark.parametrize(("stage", "expected"), [(0, "0P5 0SA5"), (1, "1P5 1SA5"), (3, "3L5 3P5")])
def test_a_promoted_forward_needs_no_inputs_but_the_labels_for_the_loss(stage: int, expected: str) -> None:
    words = expand(Operation(Kind.PROMOTED, stage, 5), stages=4, owned=(stage,))
    assert " ".join(map(str, words)) == expected
    assert computed(words) == Operation(Kind.PROMOTED, stage, 5)
    assert computed(words[:1]) is None or stage < 3


def test_importing_the_room_and_its_pure_modules_loads_neither_torch_nor_deepspeed() -> None:
    code = (
        "import sys, bamboo_ds.schedule, bamboo_ds.schedule.check, bamboo_ds.schedule.grid\n"
        "costs = bamboo_ds.schedule.StageCosts.uniform(2)\n"
        "bamboo_ds.schedule.disturb(2, micro_batches=1, victim=1, before=2, costs=costs)\n"
        "print({'torch', 'deepspeed'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"

"""The text form of instructions, both ways."""

from __future__ import annotations

import pytest
from deepspeed.runtime.pipe import schedule as stock
from hypothesis import given
from hypothesis import strategies as st

from bamboo_ds.errors import ScheduleError
from bamboo_ds.schedule import BambooTrainSchedule, StageCosts, notation
from bamboo_ds.schedule import instructions as ours

EXAMPLES = [
    ("2L0", ours.LoadMicroBatch(stage=2, micro_batch=0)),
    ("2F10", ours.ForwardPass(stage=2, micro_batch=10)),
    ("12B0", ours.BackwardPass(stage=12, micro_batch=0)),
    ("2R0", ours.RedundantForward(stage=2, micro_batch=0)),
    ("2P0", ours.PromoteForward(stage=2, micro_batch=0)),
    ("2SA0", ours.SendActivation(stage=2, micro_batch=0)),
    ("2RA0", ours.RecvActivation(stage=2, micro_batch=0)),
    ("2SG0", ours.SendGrad(stage=2, micro_batch=0)),
    ("2RG0", ours.RecvGrad(stage=2, micro_batch=0)),
    ("REDUCE", ours.ReduceGrads()),
    ("STEP", ours.OptimizerStep()),
]


@pytest.mark.parametrize(("text", "instruction"), EXAMPLES)
def test_an_instruction_has_one_text_form(text: str, instruction: ours.Instruction) -> None:
    assert notation.format(instruction) == text
    assert notation.parse(text) == instruction


@given(st.sampled_from(["L", "F", "B", "R", "P", "SA", "RA", "SG", "RG"]), st.integers(0, 999), st.integers(0, 9999))
def test_any_stage_and_micro_batch_survive_the_round_trip(letters: str, stage: int, micro_batch: int) -> None:
    text = f"{stage}{letters}{micro_batch}"
    assert notation.format(notation.parse(text)) == text


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2f0", "-1F0", "2F0 ", "REDUCE ", "step", "2F0.5", "\uff12F0"])
def test_what_is_no_instruction_is_refused_by_name(text: str) -> None:
    with pytest.raises(ScheduleError, match="is no instruction: expected <stage>"):
        notation.parse(text)


def test_an_instruction_of_deepspeed_has_no_text_form() -> None:
    with pytest.raises(ScheduleError, match="ForwardPass"):
        notation.format(stock.ForwardPass(buffer_id=0))


@pytest.mark.parametrize("redundancy", ["off", "fit", "eflb"])
def test_a_whole_schedule_survives_the_round_trip(redundancy: str) -> None:
    steps = list(BambooTrainSchedule(8, 4, 3, redundancy=redundancy, costs=StageCosts.uniform(4)).steps())
    assert notation.parse_steps(notation.format_steps(steps)) == steps

"""The evaluation schedule: forwards in clock order."""

from __future__ import annotations

import pytest

from bamboo_ds.errors import ScheduleError
from bamboo_ds.schedule import BambooInferenceSchedule
from bamboo_ds.schedule.notation import format_steps


@pytest.mark.parametrize(
    ("stage_id", "expected"),
    [
        (0, ["0L0 0F0 0SA0", "0L1 0F1 0SA1"]),
        (1, ["1RA0 1F0 1SA0", "1RA1 1F1 1SA1"]),
        (2, ["2L0 2RA0 2F0", "2L1 2RA1 2F1"]),
    ],
)
def test_each_stage_forwards_its_micro_batches_in_order(stage_id: int, expected: list[str]) -> None:
    assert format_steps(BambooInferenceSchedule(2, 3, stage_id).steps()).splitlines() == expected


def test_a_merged_worker_runs_both_stages_of_a_micro_batch_together() -> None:
    merged = BambooInferenceSchedule(2, 3, 0, owned=(0, 1))
    assert format_steps(merged.steps()).splitlines() == ["0L0 0F0", "1F0 1SA0", "0L1 0F1", "1F1 1SA1"]


def test_the_owned_stages_must_contain_the_own_one() -> None:
    with pytest.raises(ScheduleError, match="stage_id=0"):
        BambooInferenceSchedule(2, 3, 0, owned=(1,))

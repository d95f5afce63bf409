"""The training schedule is DeepSpeed's 1F1B in clock order."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
from deepspeed.runtime.pipe.schedule import TrainSchedule

from bamboo_ds.errors import ScheduleError
from bamboo_ds.schedule import BambooTrainSchedule, StageCosts
from bamboo_ds.schedule.notation import format_steps

SHAPES = [(stages, micro_batches) for stages in range(1, 9) for micro_batches in range(1, 17)]


def work(schedule: TrainSchedule) -> list[tuple[str, int]]:
    """Return forwards and backwards with their micro-batch, counted, as DeepSpeed names buffers only."""
    counts: Counter[str] = Counter()
    done = []
    for instruction in flat(schedule):
        if instruction.name in ("ForwardPass", "BackwardPass"):
            done.append((instruction.name, counts[instruction.name]))
            counts[instruction.name] += 1
    return done


def flat(schedule: TrainSchedule) -> list[Any]:
    return [instruction for step in schedule.steps() for instruction in step]


@pytest.mark.parametrize(("stages", "micro_batches"), SHAPES)
def test_the_work_of_each_stage_is_that_of_deepspeed_in_its_order(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        ours = BambooTrainSchedule(micro_batches, stages, stage)
        assert work(ours) == work(TrainSchedule(micro_batches, stages, stage))
        computed = [i for i in flat(ours) if i.name in ("ForwardPass", "BackwardPass")]
        assert [(i.name, i.micro_batch) for i in computed] == work(ours), "micro-batches run in their order"
        assert {i.stage for i in computed} == {stage}


@pytest.mark.parametrize("name", ["LoadMicroBatch", "SendActivation", "RecvActivation", "SendGrad", "RecvGrad"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_loads_and_messages_are_as_many_as_deepspeeds(stage: int, name: str) -> None:
    ours, stock = (flat(kind(6, 4, stage)) for kind in (BambooTrainSchedule, TrainSchedule))
    assert sum(i.name == name for i in ours) == sum(i.name == name for i in stock)


def test_a_middle_stage_sends_right_after_it_computes() -> None:
    assert format_steps(BambooTrainSchedule(3, 3, 1).steps()).splitlines() == [
        "1RA0 1F0 1SA0",
        "1RA1 1F1 1SA1",
        "1RG0 1B0 1SG0",
        "1RA2 1F2 1SA2",
        "1RG1 1B1 1SG1",
        "1RG2 1B2 1SG2",
        "REDUCE STEP",
    ]


def test_a_merged_worker_hands_tensors_over_in_memory() -> None:
    assert format_steps(BambooTrainSchedule(2, 3, 1, owned=(1, 2)).steps()).splitlines() == [
        "1RA0 1F0",
        "2L0 2F0",
        "1RA1 1F1",
        "2B0",
        "1B0 1SG0",
        "2L1 2F1",
        "2B1",
        "1B1 1SG1",
        "REDUCE STEP",
    ]


def test_the_owner_of_the_ends_talks_to_both_neighbours() -> None:
    assert format_steps(BambooTrainSchedule(1, 3, 2, owned=(0, 2)).steps()).splitlines() == [
        "0L0 0F0 0SA0",
        "2L0 2RA0 2F0",
        "2B0 2SG0",
        "0RG0 0B0",
        "REDUCE STEP",
    ]


def test_one_stage_needs_no_messages_and_no_redundancy() -> None:
    costs = StageCosts.uniform(1)
    for redundancy in ("off", "lflb", "fit", "eflb"):
        steps = format_steps(BambooTrainSchedule(1, 1, 0, redundancy=redundancy, costs=costs).steps())
        assert steps.splitlines() == ["0L0 0F0", "0B0", "REDUCE STEP"]


def test_redundant_forwards_stand_alone_between_operations() -> None:
    costs = StageCosts.uniform(2)
    steps = BambooTrainSchedule(2, 2, 0, redundancy="fit", costs=costs).steps()
    assert format_steps(steps).splitlines() == [
        "0L0 0F0 0SA0",
        "0L1 0F1 0SA1",
        "1R0",
        "0RG0 0B0",
        "0RG1 0B1",
        "REDUCE STEP",
    ]


def test_without_costs_fit_runs_none_and_eflb_assumes_uniform_ones() -> None:
    for stage in range(4):
        fit = BambooTrainSchedule(8, 4, stage, redundancy="fit")
        assert list(fit.steps()) == list(BambooTrainSchedule(8, 4, stage).steps())
        eager = BambooTrainSchedule(8, 4, stage, redundancy="eflb")
        known = BambooTrainSchedule(8, 4, stage, redundancy="eflb", costs=StageCosts.uniform(4))
        assert list(eager.steps()) == list(known.steps())
        assert sum(i.name == "RedundantForward" for i in flat(eager)) == 8


def test_a_merged_worker_has_nothing_to_run_redundantly() -> None:
    merged = BambooTrainSchedule(8, 4, 1, owned=(1, 2), redundancy="eflb", costs=StageCosts.uniform(4))
    assert not any(i.name == "RedundantForward" for i in flat(merged))


def test_owners_say_the_same_as_owned_stages() -> None:
    owned = BambooTrainSchedule(8, 4, 1, owned=(1, 2))
    owners = BambooTrainSchedule(8, 4, 1, owners=(0, 1, 1, 3))
    assert owned.owned == owners.owned == (1, 2)
    assert list(owned.steps()) == list(owners.steps())


def test_only_workers_that_could_take_over_run_redundant_forwards() -> None:
    owners, costs = (0, 1, 1, 3, 4), StageCosts.uniform(5)
    counts = [
        sum(i.name == "RedundantForward" for i in flat(schedule))
        for home in (0, 1, 3, 4)
        for schedule in [BambooTrainSchedule(8, 5, home, owners=owners, redundancy="eflb", costs=costs)]
    ]
    # Stage 1 has a merged owner, whose loss nobody could make good; worker 1 is merged.
    assert counts == [0, 0, 8, 8]


def test_buffers_are_the_micro_batches_in_flight() -> None:
    assert [BambooTrainSchedule(8, 4, stage).num_pipe_buffers() for stage in range(4)] == [4, 3, 2, 1]
    assert BambooTrainSchedule(2, 4, 0).num_pipe_buffers() == 2
    assert BambooTrainSchedule(8, 4, 3, owned=(0, 3)).num_pipe_buffers() == 4


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"micro_batches": 0, "stages": 2, "stage_id": 0}, "micro_batches=0"),
        ({"micro_batches": 1, "stages": 0, "stage_id": 0}, "stages=0"),
        ({"micro_batches": 1, "stages": 2, "stage_id": 2}, r"owned=\(2,\)"),
        ({"micro_batches": 1, "stages": 2, "stage_id": 0, "owned": (1,)}, "stage_id=0"),
        ({"micro_batches": 1, "stages": 2, "stage_id": 0, "owners": (1, 1)}, r"owners=\(1, 1\): not those of .*=0"),
        ({"micro_batches": 1, "stages": 2, "stage_id": 0, "owners": (0,)}, r"owners=\(0,\): must name for each of 2"),
        ({"micro_batches": 1, "stages": 2, "stage_id": 0, "owners": (0, -1)}, r"owners=\(0, -1\)"),
        ({"micro_batches": 1, "stages": 2, "stage_id": 0, "owners": (1, 0)}, r"owners=\(1, 0\)"),
        ({"micro_batches": 1, "stages": 2, "stage_id": 0, "owned": (0,), "owners": (0, 0)}, r"owned=\(0,\), owners="),
        ({"micro_batches": 1, "stages": 2, "stage_id": 0, "redundancy": "most"}, "'most'.*off, lflb, fit, eflb"),
        (
            {"micro_batches": 1, "stages": 2, "stage_id": 0, "redundancy": "fit", "costs": StageCosts.uniform(3)},
            "3 stages.*stages=2",
        ),
    ],
)
def test_what_makes_no_schedule_is_refused_with_its_value(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ScheduleError, match=named):
        BambooTrainSchedule(**arguments)


def test_the_lists_of_a_step_are_the_callers_own() -> None:
    schedule = BambooTrainSchedule(2, 2, 0)
    next(iter(schedule.steps())).clear()
    assert next(iter(schedule.steps()))


def test_a_schedule_costs_little_while_costs_stay() -> None:
    costs = StageCosts.uniform(8)

    def build() -> float:
        start = time.perf_counter()
        list(BambooTrainSchedule(16, 8, 3, redundancy="eflb", costs=costs).steps())
        return time.perf_counter() - start

    build()
    assert min(build() for _ in range(20)) < 0.001

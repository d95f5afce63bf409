"""The dry run passes all our schedules and finds every way we know to break one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import pytest
from deepspeed.runtime.pipe.schedule import TrainSchedule

from bamboo_ds.errors import ScheduleError
from bamboo_ds.schedule import MODES, BambooInferenceSchedule, BambooTrainSchedule, StageCosts
from bamboo_ds.schedule.check import check
from bamboo_ds.schedule.instructions import Instruction
from bamboo_ds.schedule.notation import parse, parse_steps


@dataclass
class Written:
    """A schedule from its text form."""

    text: str
    buffers: int = 2

    def steps(self) -> Sequence[Sequence[Instruction]]:
        return parse_steps(self.text)

    def num_pipe_buffers(self) -> int:
        return self.buffers


@pytest.mark.parametrize("redundancy", MODES)
@pytest.mark.parametrize("stages", range(1, 9))
def test_all_our_training_schedules_fit_together(stages: int, redundancy: str) -> None:
    costs = StageCosts.uniform(stages)
    for micro_batches in range(1, 17):
        schedules = {
            stage: BambooTrainSchedule(micro_batches, stages, stage, redundancy=redundancy, costs=costs)
            for stage in range(stages)
        }
        report = check(schedules, stages=stages, micro_batches=micro_batches)
        assert report.messages == 2 * (stages - 1) * micro_batches
        assert report.in_flight == {stage: min(stages - stage, micro_batches) for stage in range(stages)}
        if redundancy == "eflb" and stages > 1:
            assert report.redundant_forwards == stages * micro_batches
        if redundancy in ("off", "lflb"):
            assert report.redundant_forwards == 0


@pytest.mark.parametrize("redundancy", MODES)
def test_schedules_under_unequal_costs_fit_together(redundancy: str) -> None:
    costs = StageCosts((1.0, 0.3, 2.0, 0.9), (1.0, 2.0, 2.5, 0.4), (0.2, 1.4, 0.9, 0.5))
    schedules = {s: BambooTrainSchedule(9, 4, s, redundancy=redundancy, costs=costs) for s in range(4)}
    check(schedules, stages=4, micro_batches=9)


@pytest.mark.parametrize("stages", range(1, 9))
def test_all_our_inference_schedules_fit_together(stages: int) -> None:
    for micro_batches in range(1, 17):
        schedules = {stage: BambooInferenceSchedule(micro_batches, stages, stage) for stage in range(stages)}
        report = check(schedules, stages=stages, micro_batches=micro_batches, forward_only=True)
        assert report.messages == (stages - 1) * micro_batches


def merged(stages: int) -> list[list[int]]:
    """Return the owners after any one or two losses, together or not: each stage goes to the owner of that before."""
    found = []
    for lost in (lost for count in (1, 2) for lost in combinations(range(stages), count) if len(lost) < stages):
        owners = list(range(stages))
        for stage in range(stages):
            while owners[stage] in lost:
                owners[stage] = (owners[stage] - 1) % stages
        found.append(owners)
    return found


@pytest.mark.parametrize("stages", range(2, 7))
@pytest.mark.parametrize("redundancy", MODES)
def test_merged_workers_fit_together_with_the_others(stages: int, redundancy: str) -> None:
    costs = StageCosts.uniform(stages)
    for owners in merged(stages):
        schedules = {
            home: BambooTrainSchedule(5, stages, home, owners=owners, redundancy=redundancy, costs=costs)
            for home in set(owners)
        }
        check(schedules, stages=stages, micro_batches=5)


@pytest.mark.parametrize("stages", range(2, 7))
def test_merged_workers_fit_together_in_evaluation(stages: int) -> None:
    for owners in merged(stages):
        schedules = {
            home: BambooInferenceSchedule(5, stages, home, owned=[s for s in range(stages) if owners[s] == home])
            for home in set(owners)
        }
        check(schedules, stages=stages, micro_batches=5, forward_only=True)


# Two stages, two micro-batches, one redundant forward: small enough to see each fault.
FIRST = "0L0 0F0 0SA0 0L1 0F1 0SA1 1R0 0RG0 0B0 0RG1 0B1 REDUCE STEP"
LAST = "0R0 1L0 1RA0 1F0 1B0 1SG0 1L1 1RA1 1F1 1B1 1SG1 REDUCE STEP"


def test_the_example_is_sound() -> None:
    report = check({0: Written(FIRST), 1: Written(LAST)}, stages=2, micro_batches=2)
    assert (report.messages, report.redundant_forwards, report.instructions) == (4, 2, 26)


def drop(word: str) -> Callable[[list[str]], list[str]]:
    return lambda words: [other for other in words if other != word]


def repeat(word: str) -> Callable[[list[str]], list[str]]:
    return lambda words: [copy for other in words for copy in [other] * (1 + (other == word))]


def replace(word: str, by: str) -> Callable[[list[str]], list[str]]:
    return lambda words: [by if other == word else other for other in words]


def swap(first: str, second: str) -> Callable[[list[str]], list[str]]:
    return lambda words: [{first: second, second: first}.get(word, word) for word in words]


MUTATIONS = [
    (0, drop("0SA0"), r"SendActivation of stage 0: micro-batches sent \[1\], received \[0, 1\]"),
    (1, drop("1SG1"), r"SendGrad of stage 1: micro-batches sent \[0\], received \[0, 1\]"),
    (1, drop("1RA0"), r"worker 1 runs ForwardPass\(stage 1, micro-batch 0\) without RecvActivation"),
    (0, drop("0RG1"), r"worker 0 runs BackwardPass\(stage 0, micro-batch 1\) without RecvGrad"),
    (0, drop("0L1"), r"runs ForwardPass\(stage 0, micro-batch 1\) without LoadMicroBatch"),
    (1, drop("1B1"), r"worker 1 never runs BackwardPass\(stage 1, micro-batch 1\)"),
    (0, drop("0F1"), r"worker 0 never runs ForwardPass\(stage 0, micro-batch 1\)"),
    (0, repeat("0B0"), r"runs BackwardPass\(stage 0, micro-batch 0\) twice"),
    (0, repeat("0F0"), r"runs ForwardPass\(stage 0, micro-batch 0\) twice"),
    (0, repeat("0SA1"), r"runs SendActivation\(stage 0, micro-batch 1\) twice"),
    (1, repeat("0R0"), r"runs RedundantForward\(stage 0, micro-batch 0\) twice"),
    (0, swap("0F0", "0SA0"), r"runs SendActivation\(stage 0, micro-batch 0\) without ForwardPass"),
    (0, swap("0RG0", "1R0"), None),
    (0, swap("0F0", "1R0"), r"runs RedundantForward\(stage 1, micro-batch 0\) without ForwardPass\(stage 0"),
    (0, swap("0SA0", "0SA1"), r"without ForwardPass\(stage 0, micro-batch 1\)"),
    (1, swap("1RA0", "1RA1"), r"sent \[0, 1\], received \[1, 0\]"),
    (0, swap("0B0", "0B1"), "out of micro-batch order"),
    (1, swap("1F0", "1B0"), r"runs BackwardPass\(stage 1, micro-batch 0\) without ForwardPass"),
    (1, replace("0R0", "1R0"), r"owns \[1\] and is no shadow for RedundantForward\(stage 1"),
    (0, replace("1R0", "0R0"), r"owns \[0\] and is no shadow for RedundantForward\(stage 0"),
    (0, replace("0B1", "0B2"), r"BackwardPass\(stage 0, micro-batch 2\) is outside of"),
    (0, replace("0F0", "2F0"), r"ForwardPass\(stage 2, micro-batch 0\) is outside of"),
    (0, replace("0F1", "1F1"), r"stage 1 must have one owner, its forwards are run by workers \[0, 1\]"),
    (0, drop("STEP"), r"worker 0 must end with \['ReduceGrads', 'OptimizerStep'\]"),
    (0, swap("STEP", "REDUCE"), r"worker 0 must end with"),
    (1, swap("STEP", "1SG1"), r"worker 1 must end with"),
]


@pytest.mark.parametrize(("worker", "mutate", "problem"), MUTATIONS)
def test_a_broken_schedule_is_found(worker: int, mutate: Callable[[list[str]], list[str]], problem: str | None) -> None:
    texts = {0: FIRST, 1: LAST}
    words = texts[worker].split()
    broken = mutate(words)
    assert broken != words
    texts[worker] = " ".join(broken)
    schedules = {number: Written(text) for number, text in texts.items()}
    if problem is None:  # moving a redundant forward to another legal place breaks nothing
        assert check(schedules, stages=2, micro_batches=2).redundant_forwards == 2
        return
    with pytest.raises(ScheduleError, match=problem):
        check(schedules, stages=2, micro_batches=2)


def test_every_single_instruction_of_a_real_pipeline_is_missed_when_it_is_dropped() -> None:
    schedules = {s: BambooTrainSchedule(4, 3, s) for s in range(3)}
    lists = {s: [i for step in schedule.steps() for i in step] for s, schedule in schedules.items()}
    for worker, instructions in lists.items():
        for index in range(len(instructions)):
            broken = {s: _Listed(own) for s, own in lists.items()}
            broken[worker] = _Listed(instructions[:index] + instructions[index + 1 :])
            with pytest.raises(ScheduleError):
                check(broken, stages=3, micro_batches=4)


@dataclass
class _Listed:
    instructions: list[Instruction]

    def steps(self) -> list[list[Instruction]]:
        return [self.instructions]

    def num_pipe_buffers(self) -> int:
        return 3


def test_orders_that_are_right_alone_but_wait_for_each_other_are_found() -> None:
    first = "0L0 0F0 0SA0 0RG0 0B0 0L1 0F1 0SA1 0RG1 0B1 REDUCE STEP"
    last = "1L0 1RA0 1F0 1L1 1RA1 1F1 1B0 1SG0 1B1 1SG1 REDUCE STEP"
    with pytest.raises(
        ScheduleError, match=r"deadlock: worker 0 waits in RecvGrad.*; worker 1 waits in RecvActivation"
    ):
        check({0: Written(first), 1: Written(last)}, stages=2, micro_batches=2)


def test_more_micro_batches_in_flight_than_buffers_are_found() -> None:
    with pytest.raises(ScheduleError, match=r"worker 0 holds 2 micro-batches of stage 0, num_pipe_buffers\(\) says 1"):
        check({0: Written(FIRST, buffers=1), 1: Written(LAST)}, stages=2, micro_batches=2)


def test_a_stage_without_owner_is_found() -> None:
    with pytest.raises(ScheduleError, match=r"stage 1 must have one owner, its forwards are run by workers \[\]"):
        check({0: Written(FIRST)}, stages=2, micro_batches=2)


def test_a_schedule_of_stock_deepspeed_is_refused_not_misread() -> None:
    with pytest.raises(ScheduleError, match="do not fit together"):
        check({0: TrainSchedule(2, 1, 0)}, stages=1, micro_batches=2)


def test_only_the_first_problems_are_told() -> None:
    text = " ".join(word for word in FIRST.split() if not word.startswith("0L") and not word.startswith("0RG"))
    with pytest.raises(ScheduleError) as raised:
        check({0: Written(text), 1: Written(LAST.replace("1L0", "").replace("1L1", ""))}, stages=2, micro_batches=2)
    assert str(raised.value).count(";") == 4
    assert "(and 2 more)" in str(raised.value)
    assert parse("2F0").name == "ForwardPass"

"""The rest of the step after a loss: as text, and played through for every loss of small pipelines.

Played through are about 34,000 cases: each worker of 2 to 6 stages lost before each of its instructions with 1 to 8
micro-batches in three modes (up to 4 stages and 6 micro-batches under four kinds of interleaving, beyond under one),
and a seeded choice of two and three losses in one step, and of losses in pipelines that have lost workers before.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import permutations
from typing import Any

import pytest

from bamboo_ds.errors import ScheduleError
from bamboo_ds.schedule import BambooTrainSchedule, FailoverSchedule, Redundancy, StageCosts
from bamboo_ds.schedule.instructions import Instruction, to_word
from bamboo_ds.schedule.notation import format_steps, parse
from bamboo_ds.schedule.operations import shadowed_stage
from bamboo_ds.schedule.words import Word
from tests.schedule.rehearsal import Rehearsal, Worker

MODES: tuple[Redundancy, ...] = ("lflb", "fit", "eflb")


# ---- small ones as text ----------------------------------------------------------------------------------------


def rest(stages: int, micro_batches: int, home: int, *, before: str, held: int, mode: Redundancy) -> list[str]:
    """Return the rest of the step of a shadow that takes over right before one of its own instructions."""
    schedule = BambooTrainSchedule(micro_batches, stages, home, redundancy=mode, costs=StageCosts.uniform(stages))
    done = flat(schedule)
    failover = FailoverSchedule(
        micro_batches,
        stages,
        home,
        victim=(home + 1) % stages,
        done=done[: done.index(parse(before))],
        held_by_successor=held,
    )
    return format_steps(failover.steps()).splitlines()


def flat(schedule: Any) -> list[Instruction]:
    return [instruction for step in schedule.steps() for instruction in step]


def test_the_schedule_that_is_left_begins_like_this() -> None:
    schedule = BambooTrainSchedule(3, 4, 1, redundancy="eflb", costs=StageCosts.uniform(4))
    assert format_steps(schedule.steps()).splitlines() == [
        "1RA0 1F0 1SA0",
        "1RA1 1F1 1SA1",
        "1RA2 1F2 1SA2",
        "2R0",
        "2R1",
        "2R2",
        "1RG0 1B0 1SG0",
        "1RG1 1B1 1SG1",
        "1RG2 1B2 1SG2",
        "REDUCE STEP",
    ]


def test_before_the_first_instruction_both_stages_run_merged() -> None:
    assert rest(4, 2, 1, before="1RA0", held=0, mode="eflb") == [
        "1RA0 1F0",
        "2F0 2SA0",
        "1RA1 1F1",
        "2F1 2SA1",
        "2RG0 2B0",
        "1B0 1SG0",
        "2RG1 2B1",
        "1B1 1SG1",
        "REDUCE STEP",
    ]


def test_an_activation_that_exists_and_that_the_successor_lacks_goes_first() -> None:
    assert rest(4, 3, 1, before="2R2", held=1, mode="eflb") == [
        "2P1 2SA1",
        "2P0",
        "2RG0 2B0",
        "1B0 1SG0",
        "2F2 2SA2",
        "2RG1 2B1",
        "1B1 1SG1",
        "2RG2 2B2",
        "1B2 1SG2",
        "REDUCE STEP",
    ]


def test_lost_backwards_come_again_before_the_shadow_goes_on() -> None:
    # 1B0 is done; its gradient was not yet sent.
    assert rest(4, 3, 1, before="1SG0", held=3, mode="eflb") == [
        "1SG0",
        "2P0",
        "2P1",
        "2RG0 2B0",
        "2P2",
        "2RG1 2B1",
        "1B1 1SG1",
        "2RG2 2B2",
        "1B2 1SG2",
        "REDUCE STEP",
    ]


def test_lazily_the_lost_forwards_come_again_too_and_are_not_sent_twice() -> None:
    assert rest(4, 3, 1, before="1RG1", held=3, mode="lflb") == [
        "2F0",
        "2F1",
        "2RG0 2B0",
        "2F2",
        "2RG1 2B1",
        "1B1 1SG1",
        "2RG2 2B2",
        "1B2 1SG2",
        "REDUCE STEP",
    ]


def test_a_message_that_was_received_is_not_received_again() -> None:
    assert rest(4, 3, 1, before="1F1", held=1, mode="lflb")[:3] == ["2F0", "1F1", "2F1 2SA1"]
    # The received gradient of 1B0 is computed again, by 2B0.
    assert rest(4, 3, 1, before="1B0", held=2, mode="lflb")[:5] == ["2F0", "2F1", "2RG0 2B0", "1B0 1SG0", "2F2 2SA2"]


def test_a_lost_last_stage_needs_labels_and_sends_nothing() -> None:
    assert rest(3, 2, 1, before="1RG1", held=0, mode="eflb") == [
        "2L0 2P0",
        "2B0",
        "2L1 2P1",
        "2B1",
        "1B1 1SG1",
        "REDUCE STEP",
    ]


def test_a_lost_first_stage_is_loaded_where_it_was_not_run_redundantly() -> None:
    assert rest(3, 3, 2, before="2SG1", held=1, mode="eflb") == [
        "2SG1",
        "0P1 0SA1",
        "0P0",
        "0L2 0F2 0SA2",
        "0RG0 0B0",
        "2L2 2RA2 2F2",
        "0RG1 0B1",
        "2B2 2SG2",
        "0RG2 0B2",
        "REDUCE STEP",
    ]


def test_of_two_workers_one_is_left_and_sends_nothing() -> None:
    assert rest(2, 2, 0, before="0RG0", held=0, mode="lflb") == [
        "1L0 1F0",
        "1B0",
        "0B0",
        "1L1 1F1",
        "1B1",
        "0B1",
        "REDUCE STEP",
    ]
    assert rest(2, 2, 1, before="1B0", held=0, mode="lflb") == [
        "0L0 0F0",
        "0L1 0F1",
        "1B0",
        "0B0",
        "1L1 1F1",
        "1B1",
        "0B1",
        "REDUCE STEP",
    ]


def test_in_the_reduction_all_of_the_lost_stage_comes_again() -> None:
    expected = ["2P0", "2P1", "2RG0 2B0", "2P2", "2RG1 2B1", "2RG2 2B2", "REDUCE STEP"]
    assert rest(4, 3, 1, before="REDUCE", held=3, mode="eflb") == expected
    assert rest(4, 3, 1, before="STEP", held=3, mode="eflb") == expected


def test_buffers_are_the_micro_batches_in_flight_from_now_on() -> None:
    done = flat(BambooTrainSchedule(6, 4, 1))

    def buffers(before: str, held: int) -> int:
        rest = done[: done.index(parse(before))]
        return FailoverSchedule(6, 4, 1, victim=2, done=rest, held_by_successor=held).num_pipe_buffers()

    assert buffers("1RA0", 0) == 3
    assert buffers("1RG2", 4) == 3
    assert buffers("REDUCE", 6) == 2  # the lost stage alone


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"victim": 3}, "victim=3: the worker of stage 1 is the shadow of stage 2"),
        ({"stages": 1, "stage_id": 0, "victim": 0}, "stages=1.*no stage to take over"),
        ({"stage_id": 4}, "home=4"),
        ({"micro_batches": 0}, "micro_batches=0"),
        ({"held_by_successor": 4}, r"held_by_successor=4: must be 0..3"),
        ({"held_by_successor": -1}, r"held_by_successor=-1"),
        ({"stage_id": 2, "victim": 3, "held_by_successor": 1}, r"held_by_successor=1: must be 0..0, stage 3 of 4"),
        ({"done": [parse("2F0"), parse("1F0")]}, "done has 2F0: not of a step in progress at the worker of stage 1"),
        ({"done": [parse("3R0")]}, "done has 3R0"),
        ({"done": [parse("REDUCE"), parse("STEP")]}, "done has STEP"),
    ],
)
def test_what_no_shadow_can_be_in_is_refused_with_its_value(changed: dict[str, Any], named: str) -> None:
    arguments = {"micro_batches": 3, "stages": 4, "stage_id": 1, "victim": 2, "done": [], **changed}
    with pytest.raises(ScheduleError, match=named):
        FailoverSchedule(**arguments)


# ---- every loss of small pipelines, played through -------------------------------------------------------------


@cache
def program(micro_batches: int, home: int, owners: tuple[int, ...], mode: Redundancy, unequal: bool) -> list[Word]:
    stages = len(owners)
    costs = StageCosts.uniform(stages)
    if unequal:
        forward = tuple(1.0 + 0.7 * (stage % 3) for stage in range(stages))
        costs = StageCosts(forward, tuple(1.5 * f for f in forward), (0.5,) * stages)
    schedule = BambooTrainSchedule(micro_batches, stages, home, owners=owners, redundancy=mode, costs=costs)
    return [to_word(instruction) for instruction in flat(schedule)]


def rehearsal(micro_batches: int, owners: Sequence[int], mode: Redundancy, rng: random.Random) -> Rehearsal:
    unequal = rng.random() < 0.5
    programs = {home: program(micro_batches, home, tuple(owners), mode, unequal) for home in set(owners)}
    return Rehearsal(programs, list(owners), micro_batches, rng)


Choice = Callable[[list[Worker]], Worker]


def interleavings(victim: int, rng: random.Random) -> dict[str, Choice]:
    """Return ways to choose who goes on: the victim as early or as late as it can, by chance, and in turns."""

    def eager(ready: list[Worker]) -> Worker:
        return next((worker for worker in ready if worker.home == victim), None) or rng.choice(ready)

    def lazy(ready: list[Worker]) -> Worker:
        return rng.choice([worker for worker in ready if worker.home != victim] or ready)

    def fair(ready: list[Worker]) -> Worker:
        return min(ready, key=lambda worker: worker.position)

    return {"eager": eager, "lazy": lazy, "random": rng.choice, "fair": fair}


def cuts(pipeline: Rehearsal, victim: int, choose: Choice, seed: int) -> Iterator[tuple[int, Rehearsal]]:
    """Yield the pipeline at the moments at which the victim is about to run each of its instructions."""
    worker = pipeline.workers[victim]
    for position in range(len(worker.program)):
        pipeline.run(choose, until=lambda at=position: worker.position == at)
        assert worker.position == position
        yield position, pipeline.copy(random.Random(seed + position))


def lose_later(pipeline: Rehearsal, victim: int) -> None:
    """Lose another worker at some later moment of its own."""
    worker = pipeline.workers[victim]
    moment = pipeline.rng.randint(worker.position, len(worker.program) - 1)
    pipeline.run(pipeline.rng.choice, until=lambda: worker.position == moment)
    pipeline.lose(victim, turns=pipeline.rng.choice((0, 3, 30)))


def takeable(owners: Sequence[int]) -> list[int]:
    stages = (shadowed_stage(home, owners=owners) for home in sorted(set(owners)))
    return sorted(stage for stage in stages if stage is not None)


def play(
    micro_batches: int,
    owners: Sequence[int],
    mode: Redundancy,
    victims: Sequence[int],
    ways: Sequence[str],
    *,
    share: float = 1.0,
) -> int:
    """Lose the first victim before each of its instructions and the others later; return how many cases ran."""
    cases = 0
    for way in ways:
        name = f"{micro_batches} {owners} {mode} {victims} {way}"
        seed = zlib.crc32(name.encode())
        rng = random.Random(seed)
        pipeline = rehearsal(micro_batches, owners, mode, rng)
        for position, cut in cuts(pipeline, victims[0], interleavings(victims[0], rng)[way], seed):
            if cut.rng.random() >= share:
                continue
            try:
                cut.lose(victims[0], turns=cut.rng.choice((0, 0, 5, 50)))
                for later in victims[1:]:
                    lose_later(cut, later)
                cut.finish()
            except AssertionError as error:
                raise AssertionError(f"{name}, before instruction {position}: {error}") from error
            cases += 1
    return cases


WAYS = ("eager", "lazy", "random", "fair")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_any_worker_may_be_lost_before_any_instruction(stages: int, mode: Redundancy) -> None:
    cases = [
        play(micro_batches, range(stages), mode, [victim], WAYS)
        for micro_batches in range(1, 7)
        for victim in range(stages)
    ]
    assert sum(cases) >= 4 * stages * sum(4 * micro_batches for micro_batches in range(1, 7)), "every instruction"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stages", range(2, 7))
def test_in_larger_pipelines_as_well(stages: int, mode: Redundancy) -> None:
    sizes = range(1, 9) if stages > 4 else (7, 8)
    cases = [
        play(micro_batches, range(stages), mode, [victim], [WAYS[(micro_batches + victim) % len(WAYS)]])
        for micro_batches in sizes
        for victim in range(stages)
    ]
    assert sum(cases) >= stages * sum(4 * micro_batches for micro_batches in sizes), "every instruction"


def apart(stages: int, count: int) -> list[tuple[int, ...]]:
    """Return the ordered choices of stages no two of which are neighbours on the ring."""
    return [
        lost
        for lost in permutations(range(stages), count)
        if all((one - other) % stages not in (1, stages - 1) for one, other in permutations(lost, 2))
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("stages", "count", "share"), [(4, 2, 1.0), (5, 2, 0.2), (6, 2, 0.1), (6, 3, 0.1)])
def test_several_workers_that_are_no_neighbours_may_be_lost_in_one_step(
    stages: int, count: int, share: float, mode: Redundancy
) -> None:
    cases = [
        play(micro_batches, range(stages), mode, victims, ["random"], share=share)
        for micro_batches in range(1, 7 if share == 1.0 else 9)
        for victims in apart(stages, count)
    ]
    assert sum(cases) > 200


@pytest.mark.parametrize("mode", MODES)
def test_a_pipeline_that_has_lost_workers_before_may_lose_more(mode: Redundancy) -> None:
    cases = [
        play(micro_batches, owners, mode, [victim], ["eager", "random"], share=0.2)
        for stages in (4, 5, 6)
        for lost in apart(stages, 1) + apart(stages, 2)
        for owners in [merged(stages, lost)]
        for victim in takeable(owners)
        for micro_batches in (1, 3, 6)
    ]
    assert sum(cases) > 1000


def merged(stages: int, lost: Sequence[int]) -> list[int]:
    return [(stage - 1) % stages if stage in lost else stage for stage in range(stages)]


# ---- the rehearsal finds what is wrong -------------------------------------------------------------------------


def finish_edited(mode: Redundancy, victim: int, position: int, edit: Callable[[list[Word]], list[Word]]) -> None:
    """Lose a worker of four before an instruction; its shadow runs an edited schedule."""
    programs = {home: program(3, home, (0, 1, 2, 3), mode, False) for home in range(4)}
    pipeline = Rehearsal(programs, [0, 1, 2, 3], 3, random.Random(position))
    worker = pipeline.workers[victim]
    pipeline.run(pipeline.rng.choice, until=lambda: worker.position == position)
    pipeline.edit = edit
    pipeline.lose(victim, turns=0)
    pipeline.finish()


@pytest.mark.parametrize(("victim", "position"), [(0, 3), (1, 12), (1, 18), (2, 8), (3, 10)])
@pytest.mark.parametrize("mode", MODES)
def test_every_instruction_of_a_failover_is_missed_when_it_is_dropped_or_repeated(
    mode: Redundancy, victim: int, position: int
) -> None:
    original: list[Word] = []
    finish_edited(mode, victim, position, lambda program: original.extend(program) or program)
    for index, word in enumerate(original[:-1]):
        for copies in ([], [word, word]):
            with pytest.raises(AssertionError):
                finish_edited(mode, victim, position, lambda p, i=index, c=copies: [*p[:i], *c, *p[i + 1 :]])


def test_a_schedule_that_waits_before_it_sends_is_found_to_deadlock() -> None:
    def send_late(program: list[Word]) -> list[Word]:
        sends = [word for word in program if word.letters == "SA"]
        return [word for word in program[:-2] if word not in sends] + sends + program[-2:]

    with pytest.raises(AssertionError, match=r"deadlock: .*1 waits in 2RG0"):
        finish_edited("lflb", 2, 1, send_late)


def test_what_the_successor_holds_counts() -> None:
    done = flat(BambooTrainSchedule(3, 4, 1))[:9]
    for held in range(4):
        schedule = FailoverSchedule(3, 4, 1, victim=2, done=done, held_by_successor=held)
        assert [i.micro_batch for i in flat(schedule) if i.name == "SendActivation"] == list(range(held, 3))

"""The dry run: proves without tensors that a set of schedules fits together.

What is proved, for the workers of one pipeline:
- every stage has one owner, every forward and backward of every micro-batch happens once, the backward after its
  forward, and the backwards of a stage in micro-batch order (so that sums are the same in every shape);
- each has what it needs from its own worker: batches loaded, messages received, redundant forwards after their source;
- per link and kind, the messages sent are the messages received, in the same order;
- no stage holds more micro-batches than `num_pipe_buffers()` says;
- nothing deadlocks. One greedy run proves it for every interleaving: each worker runs a fixed sequence, sends never
  block, a receive waits for one named link only. This is a Kahn network: running one worker never takes away another's
  ability to run, so all maximal runs execute the same instructions and the greedy one stands for them all.

What is checked are whole steps without a loss, whoever owns the stages; the rest of a step after a loss (`failover`)
fits no fixed set of schedules, as it depends on what the lost worker had sent.

Instructions are read by class name and `kwargs`, so this module needs neither torch nor DeepSpeed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bamboo_ds.errors import ScheduleError
from bamboo_ds.schedule.replay import MICRO_BATCH_INSTRUCTIONS, Replay, Shape, Step

_SHOWN_PROBLEMS = 5
_SENDS = {"SendActivation": 1, "SendGrad": -1}
_RECEIVES = {"RecvActivation": ("SendActivation", -1), "RecvGrad": ("SendGrad", 1)}
_STEP_END = ["ReduceGrads", "OptimizerStep"]


class Schedule(Protocol):
    """What the check reads of a `PipeSchedule`."""

    def steps(self) -> Iterable[Sequence[Any]]:
        """Return the instructions, grouped."""

    def num_pipe_buffers(self) -> int:
        """Return how many micro-batches of one stage may be in flight."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a passed check counted.

    Args:
        instructions: All instructions of all workers.
        messages: Activations and gradients sent.
        redundant_forwards: Redundant forwards of all workers.
        in_flight: By stage, the most micro-batches between forward and backward.
    """

    instructions: int
    messages: int
    redundant_forwards: int
    in_flight: Mapping[int, int]


def check(schedules: Mapping[int, Schedule], *, stages: int, micro_batches: int, forward_only: bool = False) -> Report:
    """Prove that the schedules of all workers of a pipeline fit together, see the module.

    Args:
        schedules: By worker (any number that names it in messages).
        stages: Number of stages of the pipeline.
        micro_batches: Micro-batches of the pipeline in the step.
        forward_only: Whether these are inference schedules: no backwards, no step end.

    Raises:
        ScheduleError: When they do not; names worker and instruction, the first few problems in one message.
    """
    work = {worker: _read(schedule) for worker, schedule in schedules.items()}
    shape = Shape(stages, micro_batches, forward_only)
    problems = _range_problems(work, shape)
    if problems:
        _refuse(problems)
    owner = _owners(work, stages, problems)
    in_flight: dict[int, int] = {}
    for worker, steps in work.items():
        replay = Replay(worker, {stage for stage, own in owner.items() if own == worker}, shape)
        replay.run(steps)
        problems += replay.problems
        in_flight |= replay.peak
        problems += _buffer_problems(worker, replay.peak, schedules[worker].num_pipe_buffers())
    problems += _link_problems(work)
    if problems:
        _refuse(problems)
    _run_greedily(work)
    counts = Counter(step.name for steps in work.values() for step in steps)
    return Report(counts.total(), sum(counts[name] for name in _SENDS), counts["RedundantForward"], in_flight)


def _refuse(problems: Sequence[str]) -> None:
    more = f" (and {len(problems) - _SHOWN_PROBLEMS} more)" if len(problems) > _SHOWN_PROBLEMS else ""
    raise ScheduleError("the schedules do not fit together: " + "; ".join(problems[:_SHOWN_PROBLEMS]) + more)


def _read(schedule: Schedule) -> list[Step]:
    return [
        Step(type(instruction).__name__, instruction.kwargs.get("stage", -1), instruction.kwargs.get("micro_batch", -1))
        for instructions in schedule.steps()
        for instruction in instructions
    ]


def _range_problems(work: Mapping[int, Sequence[Step]], shape: Shape) -> list[str]:
    """Return what is wrong with single instructions: names, stages, micro-batches, the end of the step."""
    problems = []
    for worker, steps in work.items():
        end = [step.name for step in steps if step.name not in MICRO_BATCH_INSTRUCTIONS]
        wanted = [] if shape.forward_only else _STEP_END
        if end != wanted or [step.name for step in steps[len(steps) - len(wanted) :]] != wanted:
            problems.append(f"worker {worker} must end with {wanted} and have no other such instruction, it has {end}")
        for step in steps:
            outside = not (0 <= step.stage < shape.stages and 0 <= step.micro_batch < shape.micro_batches)
            if step.name in MICRO_BATCH_INSTRUCTIONS and outside:
                problems.append(f"worker {worker}: {step} is outside of {shape}")
    return problems


def _owners(work: Mapping[int, Sequence[Step]], stages: int, problems: list[str]) -> dict[int, int]:
    """Return the owner of each stage, the worker that runs its forwards; note stages with none or several."""
    owner: dict[int, int] = {}
    for stage in range(stages):
        runners = [
            worker
            for worker, steps in work.items()
            if any(step.name == "ForwardPass" and step.stage == stage for step in steps)
        ]
        if len(runners) != 1:
            problems.append(f"stage {stage} must have one owner, its forwards are run by workers {runners}")
        if runners:
            owner[stage] = runners[0]
    return owner


def _buffer_problems(worker: int, peak: Mapping[int, int], buffers: int) -> list[str]:
    return [
        f"worker {worker} holds {count} micro-batches of stage {stage}, num_pipe_buffers() says {buffers}"
        for stage, count in peak.items()
        if count > buffers
    ]


def _link_problems(work: Mapping[int, Sequence[Step]]) -> list[str]:
    """Return the links whose messages sent and messages received differ, in number or in order."""
    sent, received = defaultdict(list), defaultdict(list)
    for steps in work.values():
        for step in steps:
            if step.name in _SENDS:
                sent[step.name, step.stage].append(step.micro_batch)
            if step.name in _RECEIVES:
                received[_source(step)].append(step.micro_batch)
    return [
        f"{name} of stage {stage}: micro-batches sent {sent[name, stage]}, received {received[name, stage]}"
        for name, stage in sorted(sent.keys() | received.keys())
        if sent[name, stage] != received[name, stage]
    ]


def _source(step: Step) -> tuple[str, int]:
    """Return kind and stage of the send that a receive waits for."""
    name, distance = _RECEIVES[step.name]
    return name, step.stage + distance


def _run_greedily(work: Mapping[int, Sequence[Step]]) -> None:
    """Run all workers as far as they go, and raise when one never ends."""
    position = dict.fromkeys(work, 0)
    sent: set[tuple[str, int, int]] = set()
    progress = True
    while progress:
        progress = False
        for worker, steps in work.items():
            while position[worker] < len(steps):
                step = steps[position[worker]]
                if step.name in _RECEIVES and (*_source(step), step.micro_batch) not in sent:
                    break
                if step.name in _SENDS:
                    sent.add((step.name, step.stage, step.micro_batch))
                position[worker] += 1
                progress = True
    stuck = [
        f"worker {worker} waits in {steps[position[worker]]}"
        for worker, steps in work.items()
        if position[worker] < len(steps)
    ]
    if stuck:
        raise ScheduleError("deadlock: " + "; ".join(stuck))

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

Instructions are read by class name and `kwargs`, so this module needs neither torch nor DeepSpeed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from bamboo_ds.errors import ScheduleError

_SHOWN_PROBLEMS = 5
_MICRO_BATCH_INSTRUCTIONS = frozenset(
    {
        "LoadMicroBatch",
        "ForwardPass",
        "BackwardPass",
        "SendActivation",
        "RecvActivation",
        "SendGrad",
        "RecvGrad",
        "RedundantForward",
    }
)
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


@dataclass(frozen=True, slots=True)
class _Step:
    """One instruction, reduced to values; `stage` and `micro_batch` are -1 for the step-end instructions."""

    name: str
    stage: int = -1
    micro_batch: int = -1

    def __str__(self) -> str:
        return self.name if self.stage < 0 else f"{self.name}(stage {self.stage}, micro-batch {self.micro_batch})"


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
    shape = _Shape(stages, micro_batches, forward_only)
    problems = _range_problems(work, shape)
    if problems:
        _refuse(problems)
    owner = _owners(work, stages, problems)
    in_flight: dict[int, int] = {}
    for worker, steps in work.items():
        replay = _Replay(worker, {stage for stage, own in owner.items() if own == worker}, shape)
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


@dataclass(frozen=True, slots=True)
class _Shape:
    stages: int
    micro_batches: int
    forward_only: bool


def _refuse(problems: Sequence[str]) -> None:
    more = f" (and {len(problems) - _SHOWN_PROBLEMS} more)" if len(problems) > _SHOWN_PROBLEMS else ""
    raise ScheduleError("the schedules do not fit together: " + "; ".join(problems[:_SHOWN_PROBLEMS]) + more)


def _read(schedule: Schedule) -> list[_Step]:
    return [
        _Step(
            type(instruction).__name__, instruction.kwargs.get("stage", -1), instruction.kwargs.get("micro_batch", -1)
        )
        for instructions in schedule.steps()
        for instruction in instructions
    ]


def _range_problems(work: Mapping[int, Sequence[_Step]], shape: _Shape) -> list[str]:
    """Return what is wrong with single instructions: names, stages, micro-batches, the end of the step."""
    problems = []
    for worker, steps in work.items():
        end = [step.name for step in steps if step.name not in _MICRO_BATCH_INSTRUCTIONS]
        wanted = [] if shape.forward_only else _STEP_END
        if end != wanted or [step.name for step in steps[len(steps) - len(wanted) :]] != wanted:
            problems.append(f"worker {worker} must end with {wanted} and have no other such instruction, it has {end}")
        for step in steps:
            outside = not (0 <= step.stage < shape.stages and 0 <= step.micro_batch < shape.micro_batches)
            if step.name in _MICRO_BATCH_INSTRUCTIONS and outside:
                problems.append(f"worker {worker}: {step} is outside of {shape}")
    return problems


def _owners(work: Mapping[int, Sequence[_Step]], stages: int, problems: list[str]) -> dict[int, int]:
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


@dataclass(slots=True)
class _Replay:
    """Runs one worker's instructions alone and notes what each lacks."""

    worker: int
    owned: set[int]
    shape: _Shape
    problems: list[str] = field(default_factory=list)
    done: set[_Step] = field(default_factory=set)
    peak: dict[int, int] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    next_backward: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def run(self, steps: Sequence[_Step]) -> None:
        for step in steps:
            if step in self.done:
                self.problems.append(f"worker {self.worker} runs {step} twice")
            for needed in self.needs(step):
                if needed not in self.done:
                    self.problems.append(f"worker {self.worker} runs {step} without {needed} before it")
            self.note(step)
            self.done.add(step)
        self.problems += [
            f"worker {self.worker} never runs {step}" for step in self.expected() if step not in self.done
        ]

    def needs(self, step: _Step) -> list[_Step]:
        """Return what the same worker must have run before."""
        stage, batch, last = step.stage, step.micro_batch, self.shape.stages - 1
        forward = _Step("ForwardPass", stage, batch)
        if step.name == "ForwardPass":
            loads = [_Step("LoadMicroBatch", stage, batch)] if stage in (0, last) else []
            return loads + self.inputs("ForwardPass", "RecvActivation", stage, batch, stage - 1)
        if step.name == "BackwardPass":
            return [forward, *self.inputs("BackwardPass", "RecvGrad", stage, batch, stage + 1)]
        if step.name == "RedundantForward":
            return [_Step("ForwardPass", stage - 1, batch)] if stage > 0 else []
        return {"SendActivation": [forward], "SendGrad": [_Step("BackwardPass", stage, batch)]}.get(step.name, [])

    def inputs(self, compute: str, receive: str, stage: int, batch: int, neighbour: int) -> list[_Step]:
        """Return where the tensors from a neighbouring stage come from: memory, a message, or nowhere at the ends."""
        if not 0 <= neighbour < self.shape.stages:
            return []
        return [_Step(compute, neighbour, batch) if neighbour in self.owned else _Step(receive, stage, batch)]

    def note(self, step: _Step) -> None:
        """Count micro-batches in flight; check who may run this, and the order of backwards."""
        stage = step.stage
        if step.name in _MICRO_BATCH_INSTRUCTIONS - {"RedundantForward"} and stage not in self.owned:
            self.problems.append(f"worker {self.worker} runs {step}, but owns {sorted(self.owned)}")
        if step.name == "ForwardPass":
            self.held[stage] += 1
            self.peak[stage] = max(self.peak.get(stage, 0), self.held[stage])
        for released in self.released(step):
            self.held[released] -= 1
        if step.name == "BackwardPass":
            if step.micro_batch != self.next_backward[stage]:
                self.problems.append(f"worker {self.worker} runs {step} out of micro-batch order")
            self.next_backward[stage] = step.micro_batch + 1
        if step.name == "RedundantForward" and (
            stage in self.owned or (stage - 1) % self.shape.stages not in self.owned
        ):
            self.problems.append(f"worker {self.worker} owns {sorted(self.owned)} and is no shadow for {step}")

    def released(self, step: _Step) -> list[int]:
        """Return the stages that a step lets forget a micro-batch: after its backward, or once the next stage has it."""
        stage, released = step.stage, []
        if not self.shape.forward_only:
            return [stage] if step.name == "BackwardPass" else []
        if step.name == "SendActivation" or (step.name == "ForwardPass" and stage == self.shape.stages - 1):
            released.append(stage)
        if step.name == "ForwardPass" and stage - 1 in self.owned:
            released.append(stage - 1)
        return released

    def expected(self) -> list[_Step]:
        computes = ["ForwardPass"] if self.shape.forward_only else ["ForwardPass", "BackwardPass"]
        return [
            _Step(name, stage, batch)
            for name in computes
            for stage in sorted(self.owned)
            for batch in range(self.shape.micro_batches)
        ]


def _link_problems(work: Mapping[int, Sequence[_Step]]) -> list[str]:
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


def _source(step: _Step) -> tuple[str, int]:
    """Return kind and stage of the send that a receive waits for."""
    name, distance = _RECEIVES[step.name]
    return name, step.stage + distance


def _run_greedily(work: Mapping[int, Sequence[_Step]]) -> None:
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

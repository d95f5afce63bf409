"""The dry run of one worker alone: does it have what each of its instructions needs, and who may run what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

MICRO_BATCH_INSTRUCTIONS = frozenset(
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


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction, reduced to values; `stage` and `micro_batch` are -1 for the step-end instructions."""

    name: str
    stage: int = -1
    micro_batch: int = -1

    def __str__(self) -> str:
        return self.name if self.stage < 0 else f"{self.name}(stage {self.stage}, micro-batch {self.micro_batch})"


@dataclass(frozen=True, slots=True)
class Shape:
    """What is checked: a training or an inference step of this size."""

    stages: int
    micro_batches: int
    forward_only: bool


@dataclass(slots=True)
class Replay:
    """Runs one worker's instructions and notes what each lacks.

    Args:
        worker: Its name in messages.
        owned: The stages that it runs.
        shape: Of the step.
    """

    worker: int
    owned: set[int]
    shape: Shape
    problems: list[str] = field(default_factory=list)
    done: set[Step] = field(default_factory=set)
    peak: dict[int, int] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    next_backward: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def run(self, steps: Sequence[Step]) -> None:
        """Run all instructions, then note what of the stages' work is missing."""
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

    def needs(self, step: Step) -> list[Step]:
        """Return what the same worker must have run before."""
        stage, batch, last = step.stage, step.micro_batch, self.shape.stages - 1
        forward = Step("ForwardPass", stage, batch)
        if step.name == "ForwardPass":
            loads = [Step("LoadMicroBatch", stage, batch)] if stage in (0, last) else []
            return loads + self.inputs("ForwardPass", "RecvActivation", stage, batch, stage - 1)
        if step.name == "BackwardPass":
            return [forward, *self.inputs("BackwardPass", "RecvGrad", stage, batch, stage + 1)]
        if step.name == "RedundantForward":
            return [Step("ForwardPass", stage - 1, batch)] if stage > 0 else []
        return {"SendActivation": [forward], "SendGrad": [Step("BackwardPass", stage, batch)]}.get(step.name, [])

    def inputs(self, compute: str, receive: str, stage: int, batch: int, neighbour: int) -> list[Step]:
        """Return where the tensors from a neighbouring stage come from: memory, a message, or nowhere at the ends."""
        if not 0 <= neighbour < self.shape.stages:
            return []
        return [Step(compute, neighbour, batch) if neighbour in self.owned else Step(receive, stage, batch)]

    def note(self, step: Step) -> None:
        """Count micro-batches in flight; check who may run this, and the order of backwards."""
        stage = step.stage
        if step.name in MICRO_BATCH_INSTRUCTIONS - {"RedundantForward"} and stage not in self.owned:
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

    def released(self, step: Step) -> list[int]:
        """Return the stages that may now forget a micro-batch: after its backward, or once the next stage has it."""
        stage, released = step.stage, []
        if not self.shape.forward_only:
            return [stage] if step.name == "BackwardPass" else []
        if step.name == "SendActivation" or (step.name == "ForwardPass" and stage == self.shape.stages - 1):
            released.append(stage)
        if step.name == "ForwardPass" and stage - 1 in self.owned:
            released.append(stage - 1)
        return released

    def expected(self) -> list[Step]:
        """Return the work that the owner of these stages must do."""
        computes = ["ForwardPass"] if self.shape.forward_only else ["ForwardPass", "BackwardPass"]
        return [
            Step(name, stage, batch)
            for name in computes
            for stage in sorted(self.owned)
            for batch in range(self.shape.micro_batches)
        ]

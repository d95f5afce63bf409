"""Trains a job in a cluster that is reshaped: nodes die and join while it runs, and all that was trained must be right.

The data come from `training_data`, which follows the shape; a step's loss says which samples were in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from bamboo_ds.cli.chaos.report import read_events
from bamboo_ds.cli.local import LocalCluster
from bamboo_ds.config.source import CONFIG_VARIABLE, encoded
from bamboo_ds.elastic import keys
from bamboo_ds.elastic.member import Member
from bamboo_ds.elastic.membership import Membership
from bamboo_ds.engine.engine import BambooPipelineEngine
from tests.elastic.clusters import Look, eventually
from tests.engine.disturbed import Fault, logs
from tests.engine.entering import before_call
from tests.engine.training import (
    Outcome,
    Training,
    build_engine,
    held_digests,
    own_weights,
    relative,
    single,
)

LONGEST_SECONDS = 90.0


class Places(Dataset[tuple[int, int]]):
    """Says of each sample which (step, micro-batch) it is of; `collated` makes the micro-batch of it."""

    def __init__(self, job: Training) -> None:
        self._micro_batches, self._steps = job.micro_batches, job.steps

    def __len__(self) -> int:
        return 2 * self._steps * self._micro_batches

    def __getitem__(self, sample: int) -> tuple[int, int]:
        return divmod(sample // 2, self._micro_batches)


def with_data(job: Training) -> Training:
    """Return the job with its batches as training data."""

    def arguments(module: Any) -> dict[str, Any]:
        given = job.arguments(module) if job.arguments else {}
        return {**given, "training_data": Places(job), "collate_fn": lambda places: job.batch(*places[0])}

    return replace(job, arguments=arguments)


@dataclass(slots=True)
class Reshaped:
    """What one worker left.

    Attributes:
        first: step at which it began.
        losses: by step, of those that it took part in.
        away: steps that went by while it stood by, as it had lost its place for a while.
        norms: likewise.
        digests: by step, of every layer that it held.
        weights: of the layers that it owned in the end.
        epochs: numbers of the plans of the epochs that it went through.
        shape: stages and pipelines in the end.
    """

    first: int
    losses: dict[int, float] = field(default_factory=dict)
    away: list[int] = field(default_factory=list)
    norms: dict[int, float] = field(default_factory=dict)
    digests: dict[int, list[tuple[int, str]]] = field(default_factory=dict)
    weights: Mapping[str, Any] = field(default_factory=dict)
    epochs: tuple[tuple[int, int], ...] = ()
    shape: tuple[int, int] = (0, 0)


def training(job: Training, stages: int, redundancy: str, prepare: Callable[[Any], None]) -> Callable[[], Reshaped]:
    """Return the program of a worker."""

    def program() -> Reshaped:
        engine = build_engine(job, stages, redundancy)
        prepare(engine)
        outcome, stood_by = Reshaped(first=engine.global_steps), set[int]()
        before_call(Member, "await_place", lambda *_: stood_by.add(engine.global_steps))
        while (wanted := engine.global_steps) < job.steps:
            loss = float(engine.train_batch())
            step = engine.global_steps - 1
            outcome.away += range(wanted, step) if wanted in stood_by else ()
            outcome.losses[step], outcome.norms[step] = loss, float(engine.get_global_grad_norm())
            outcome.digests[step] = held_digests(engine)
        outcome.weights = own_weights(engine)
        outcome.epochs = tuple(report.number for report in engine.reshapes)
        outcome.shape = engine.plan.num_stages, engine.plan.num_pipelines
        engine.close()
        return outcome

    return program


def after_the_first(program: Callable[[], Reshaped], first: int, *, spare: int) -> Callable[[], Reshaped]:
    """Return the program, such that on a busy machine, too, the first workers begin and the spare ones stand by.

    Args:
        program: of a worker.
        first: number of workers with which the job begins; those with higher ids wait for that.
        spare: number of workers that must stand by before the first ones train.
    """

    def run() -> Reshaped:
        seat = Membership.read()
        assert seat is not None
        board = Look(seat.etcd.endpoints[0], job=seat.job)
        if seat.worker >= first:
            eventually(lambda: board.get(keys.ROSTER), within_seconds=LONGEST_SECONDS, what="the job begins")
        elif spare:
            before_call(BambooPipelineEngine, "train_batch", functools.partial(_await_ready, board, first + spare))
        return program()

    return run


def _await_ready(board: Look, count: int, engine: BambooPipelineEngine, *_: Any) -> None:
    """Wait before the first step until so many workers have a place or stand by."""
    if not engine.global_steps:
        what = f"{count} workers are ready"
        eventually(lambda: len(board.list(keys.READY)) >= count, within_seconds=LONGEST_SECONDS, what=what)


class ReshapedCluster:
    """Runs jobs one after the other, each with an etcd of its own.

    Args:
        folder: for logs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._runs = folder, 0

    def train(
        self,
        job: Training,
        shape: tuple[int, int],
        faults: Sequence[Fault] = (),
        *,
        spare: int = 0,
        redundancy: str = "eflb",
        zones: Sequence[str] = ("local",),
        act: Callable[[LocalCluster], None] = lambda cluster: None,
        around: Callable[[Callable[[], Reshaped]], Callable[[], Reshaped]] = lambda program: program,
        prepare: Callable[[Any], None] = lambda engine: None,
        await_spare: bool = True,
    ) -> dict[int, Reshaped]:
        """Train with one worker a node, and return what the survivors left, by worker id.

        Args:
            job: what to train.
            shape: stages and pipelines with which it begins.
            faults: deaths.
            spare: nodes beyond the first shape.
            redundancy: mode.
            zones: of the nodes, in turn.
            act: is called while it runs.
            around: makes the program of a worker of the usual one.
            prepare: is given the engine of each worker before it trains.
            await_spare: whether to train only when all nodes stand by that are beyond the first shape.
        """
        self._runs += 1
        folder = self._logs()
        block = {**job.config.get("bamboo", {}), "fault_injection": list(faults)}
        job = replace(with_data(job), config={**job.config, "bamboo": block})
        first = shape[0] * shape[1]
        program = around(training(job, shape[0], redundancy, prepare))
        with LocalCluster(
            after_the_first(program, first, spare=spare if await_spare else 0),
            nodes=first + spare,
            start_workers=first,
            job=f"reshaped-{self._runs}",
            ttl_seconds=2.0,
            zones=zones,
            log_folder=folder,
            echo=False,
            environment={CONFIG_VARIABLE: encoded(job.deepspeed_config(redundancy))},
        ) as cluster:
            act(cluster)
            code, results = cluster.wait(LONGEST_SECONDS), cluster.results()
        assert code == 0, f"the job ended with {code}:\n{logs(folder)}"
        return results

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of a kind of the last run."""
        return [event for event in read_events(self._logs()) if event["kind"] == kind]

    def _logs(self) -> Path:
        return self._folder / f"run-{self._runs}"


def undisturbed(results: Mapping[int, Reshaped]) -> Outcome:
    """Return what an undisturbed run left, as one process would have left it."""
    any_one = next(iter(results.values()))
    weights = {name: value for outcome in results.values() for name, value in outcome.weights.items()}
    return Outcome(losses=list(any_one.losses.values()), norms=list(any_one.norms.values()), weights=weights)


def assert_as(expected: Outcome, results: Mapping[int, Reshaped], *, bound: float, losses_only: bool = False) -> None:
    """Hold every loss and norm of every worker, and the last weights, against one process that trains the same.

    Args:
        expected: of one process, or of an undisturbed run.
        results: by worker.
        bound: largest relative difference of losses; 0 demands equal bits. Norms and weights may differ ten times as
            much; norms are a sum in another order than that of one process.
        losses_only: whether to leave norms and weights out.
    """
    losses, weight_bound = single(expected.losses), 10 * bound
    for worker, outcome in results.items():
        steps = [step for step in range(outcome.first, len(losses)) if step not in outcome.away]
        assert list(outcome.losses) == steps, f"worker {worker} trained other steps"
        off = {step: relative(loss, losses[step]) for step, loss in outcome.losses.items()}
        assert max(off.values(), default=0.0) <= bound, f"worker {worker}: {off}"
        if losses_only:
            continue
        off = {step: relative(norm, expected.norms[step]) for step, norm in outcome.norms.items()}
        assert max(off.values(), default=0.0) <= max(weight_bound, 1e-6), f"worker {worker}: {off}"
        wrong = {name: relative(value, expected.weights[name]) for name, value in outcome.weights.items()}
        assert {name: by for name, by in wrong.items() if not by <= weight_bound} == {}
    assert {name for outcome in results.values() for name in outcome.weights} == set(expected.weights)


def assert_copies_equal(results: Mapping[int, Reshaped]) -> None:
    """Check that all copies of a layer had equal bits after every step."""
    seen: dict[tuple[int, int], str] = {}
    for outcome in results.values():
        for step, digests in outcome.digests.items():
            for layer, checksum in digests:
                assert seen.setdefault((step, layer), checksum) == checksum, f"step {step}: layer {layer} differs"

"""`bamboo-ds bench parity`: the same numbers as one process, in every shape and mode, and bit-equal replicas.

Each case trains a small GPT for a few steps in forked workers and is held against the one-process reference: the mean
loss of every step, the final weights, and after every step a digest of each layer that any worker holds.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from bamboo_ds.cli.bench.bamboo import BambooOutcome, train_bamboo
from bamboo_ds.cli.bench.job import Job, OptimizerName, Outcome, Precision, gpt_job
from bamboo_ds.cli.bench.report import JSON_OPTION, QUICK_OPTION, finish, progress, table
from bamboo_ds.cli.bench.workers import WorkerError, run_workers, values, warm_up

if TYPE_CHECKING:
    import torch

SHAPES = ((1, 1), (2, 1), (4, 1), (2, 2), (1, 4), (3, 2))
"""Stages and pipelines."""
MODES = ("off", "lflb", "fit", "eflb")
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
OPTIMIZERS: tuple[OptimizerName, ...] = ("Adam", "SGD")
STEPS = 6
"""Enough for "fit" to have measured its windows and used them."""
LOSS_BOUND = 1e-6
"""fp32: relative, per step. Sums over pipelines are taken in another order than in one process."""
WEIGHT_BOUND = 1e-5
"""fp32: norm of the difference over the norm, per tensor, after the last step."""
BF16_LOSS_BOUND = 1e-2
"""bf16: a sum in another order may round a weight to its neighbour, 2^-8 away."""
CASE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Case:
    """One run to compare."""

    stages: int
    pipelines: int
    redundancy: str
    precision: Precision = "fp32"
    optimizer: OptimizerName = "Adam"
    tied: bool = True
    dropout: float = 0.1
    clipping: float = 0.5
    micro_batches: int = 5
    against_stock: bool = False

    @property
    def exact(self) -> bool:
        """Whether the same sums are taken in the same order as in one process: only P differs, no layer is tied."""
        return self.pipelines == 1 and not self.tied

    @property
    def frc_due(self) -> int:
        """Forward redundant computations of the whole run: eager modes do that of every micro-batch of every stage."""
        eager = self.redundancy == "eflb" and self.stages > 1
        return STEPS * self.micro_batches * self.stages if eager else 0

    @property
    def job_case(self) -> Case:
        """The same case on one worker: equal for all cases that train the same job."""
        return replace(self, stages=1, pipelines=1, redundancy="off", against_stock=False)


@dataclass(slots=True)
class Verdict:
    """How a case compares; relative differences are the largest over steps and tensors."""

    case: Case
    loss_diff: float = 0.0
    weight_diff: float = 0.0
    stock_diff: float | None = None
    replicas_bit_equal: bool = True
    frc_done: int = 0
    seconds: float = 0.0
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether everything demanded of this case holds."""
        if self.error is not None or not self.replicas_bit_equal or (self.stock_diff or 0.0) > LOSS_BOUND:
            return False
        if self.case.redundancy != "fit" and self.frc_done != self.case.frc_due:
            return False
        if self.case.exact:
            return self.loss_diff == 0.0 and self.weight_diff == 0.0
        if self.case.precision == "bf16":
            return self.loss_diff <= BF16_LOSS_BOUND
        return self.loss_diff <= LOSS_BOUND and self.weight_diff <= WEIGHT_BOUND

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        fields = asdict(self)
        return {"shape": f"{self.case.stages}x{self.case.pipelines}", **fields.pop("case"), **fields, "ok": self.ok}


def parity(as_json: bool = JSON_OPTION, quick: bool = QUICK_OPTION) -> None:
    """Compare with one process: losses, weights, replicas, in all shapes and modes."""
    warm_up()
    verdicts = [compare(case) for case in progress(cases(quick=quick), "parity")]
    columns = ["shape", "mode", "precision", "optimizer", "tied", "loss", "weights", "stock", "replicas", "ok"]
    rows = [_row(verdict) for verdict in verdicts]
    caption = "largest relative difference from one process; replicas: bit-equal after every step"
    finish(summarize(verdicts), [table("bench parity", columns, rows, caption=caption)], as_json=as_json)


def cases(*, quick: bool) -> list[Case]:
    """List the runs: everything crossed with everything, or with `quick` each value of everything at least once."""
    stock = [
        Case(*shape, "fit", dropout=0.0, clipping=0.0, micro_batches=4, optimizer=optimizer, against_stock=True)
        for shape, optimizer in itertools.product(SHAPES, OPTIMIZERS)
    ]
    if quick:
        crossed = [Case(*shape, mode) for shape, mode in itertools.product(SHAPES, MODES)]
        crossed += [Case(*shape, "fit", "bf16", "SGD", tied=False) for shape in SHAPES]
        crossed += [Case(*shape, "eflb", "fp32", "SGD", tied=False) for shape in SHAPES]
        return crossed + stock[::2]
    settings = itertools.product(SHAPES, MODES, PRECISIONS, OPTIMIZERS, (True, False))
    return [Case(*shape, mode, *rest) for shape, mode, *rest in settings] + stock  # type: ignore[arg-type]


def compare(case: Case) -> Verdict:
    """Run a case and hold it against the reference (and stock where it says so); a failure is a verdict too."""
    started, verdict = time.monotonic(), Verdict(case)
    try:
        outcomes = _run(train_bamboo, case, case.redundancy)
        _judge(verdict, outcomes, reference_of(case.job_case))
        if case.against_stock:
            from bamboo_ds.cli.bench.stock import train_stock

            stock = _run(train_stock, case)
            verdict.stock_diff = _loss_difference(outcomes[0].losses, stock[0].losses)
    except WorkerError as problem:
        verdict.error = str(problem)
    verdict.seconds = round(time.monotonic() - started, 2)
    return verdict


def job_of(case: Case) -> Job:
    """Return the job that a case trains."""
    return gpt_job(
        dropout=case.dropout,
        tied=case.tied,
        micro_batches=case.micro_batches,
        steps=STEPS,
        optimizer=case.optimizer,
        learning_rate=1e-3 if case.optimizer == "Adam" else 0.1,
        clipping=case.clipping,
        precision=case.precision,
    )


@functools.cache
def reference_of(case: Case) -> Outcome:
    """Train a case's job in this process; once for all shapes and modes."""
    from bamboo_ds.cli.bench.reference import train_one_process

    return train_one_process(job_of(case))


def summarize(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Make the report; `max_rel_diff` is that of fp32 losses, the bf16 one stands beside it."""
    fp32 = [verdict for verdict in verdicts if verdict.case.precision == "fp32"]
    bf16 = [verdict for verdict in verdicts if verdict.case.precision == "bf16"]
    return {
        "ok": all(verdict.ok for verdict in verdicts),
        "max_rel_diff": max((verdict.loss_diff for verdict in fp32), default=0.0),
        "max_weight_diff": max((verdict.weight_diff for verdict in fp32), default=0.0),
        "max_rel_diff_bf16": max((verdict.loss_diff for verdict in bf16), default=0.0),
        "max_stock_diff": max((verdict.stock_diff or 0.0 for verdict in verdicts), default=0.0),
        "exact_cases": sum(verdict.loss_diff == verdict.weight_diff == 0.0 for verdict in verdicts),
        "replicas_bit_equal": all(verdict.replicas_bit_equal and verdict.error is None for verdict in verdicts),
        "failed": sum(not verdict.ok for verdict in verdicts),
        "seconds": round(sum(verdict.seconds for verdict in verdicts), 1),
        "cases": [verdict.as_dict() for verdict in verdicts],
    }


def _run(target: Any, case: Case, *args: Any) -> list[Any]:
    arguments = (job_of(case), case.stages, *args)
    workers = case.stages * case.pipelines
    return values(run_workers(target, workers, args=arguments, timeout_seconds=CASE_SECONDS, grace_seconds=10.0))


def _judge(verdict: Verdict, outcomes: Sequence[BambooOutcome], reference: Outcome) -> None:
    verdict.loss_diff = max(_loss_difference(outcome.losses, reference.losses) for outcome in outcomes)
    verdict.weight_diff = max(_weight_difference(outcome.weights, reference.weights) for outcome in outcomes)
    verdict.replicas_bit_equal = replicas_bit_equal(outcomes, tied=_tied_layers(reference) if verdict.case.tied else ())
    verdict.frc_done = sum(outcome.frc_done for outcome in outcomes)
    missing = reference.weights.keys() - {name for outcome in outcomes for name in outcome.weights}
    if missing:
        verdict.error = f"no worker owns {sorted(missing)}"


def _tied_layers(reference: Outcome) -> tuple[int, ...]:
    layers = sorted({int(name.partition(".")[0]) for name in reference.weights})
    return (layers[0], layers[-1])


def replicas_bit_equal(outcomes: Sequence[BambooOutcome], *, tied: Sequence[int] = ()) -> bool:
    """Tell whether all copies of each layer, own and redundant, of all workers, had the same bits after every step.

    Args:
        outcomes: Of all workers of a job.
        tied: Indices of layers that share their weights, so must be equal to each other too.
    """
    for by_worker in zip(*(outcome.digests for outcome in outcomes), strict=True):
        seen: dict[int, str] = {}
        for layer, digest in itertools.chain.from_iterable(by_worker):
            weights = tied[0] if layer in tied else layer
            if seen.setdefault(weights, digest) != digest:
                return False
    return True


def _loss_difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Largest relative difference, of the losses as fp32 numbers (an engine returns them as such)."""
    import torch

    ours, theirs = (torch.tensor(each, dtype=torch.float32).double() for each in (losses, expected))
    return float(((ours - theirs).abs() / theirs.abs()).max())


def _weight_difference(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    differences = [
        float((value.double() - expected[name].double()).norm() / expected[name].double().norm().clamp_min(1e-30))
        for name, value in weights.items()
    ]
    return max(differences, default=0.0)


def _row(verdict: Verdict) -> list[Any]:
    case = verdict.case
    shape, result = f"{case.stages}x{case.pipelines}", "failed" if verdict.error else verdict.loss_diff
    measured = [result, verdict.weight_diff, verdict.stock_diff, verdict.replicas_bit_equal, verdict.ok]
    return [shape, case.redundancy, case.precision, case.optimizer, "tied" if case.tied else "-", *measured]

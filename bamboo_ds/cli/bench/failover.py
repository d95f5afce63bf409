"""`bamboo-ds bench failover`: kill a worker at every moment of a step, and compare with the undisturbed run bit by bit.

The first table is exhaustive: `kill -9` before every instruction of every stage of one step. The second strikes at
random times, between instructions and inside of them, in three ways. Each case is a job of its own with real processes
and one real etcd for all; the workers are forked from a warm parent. A case passes when all survivors report the losses
of the undisturbed run and hold its final weights, bit by bit.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import typer

from bamboo_ds.cli.bench.bamboo import digest, held_layers
from bamboo_ds.cli.bench.job import Job, gpt_job
from bamboo_ds.cli.bench.report import JSON_OPTION, finish, progress, table, tails
from bamboo_ds.cli.bench.workers import warm_up
from bamboo_ds.cli.local import LocalCluster
from bamboo_ds.config import EtcdConfig
from bamboo_ds.config.source import CONFIG_VARIABLE, encoded
from bamboo_ds.elastic.membership import Membership
from bamboo_ds.store.embedded import EmbeddedEtcd

STAGES, SHARE, STEPS, FAULT_STEP = 4, 6, 4, 1
"""P, micro-batches of each pipeline, steps of a run, and the step in which a worker dies: two more follow."""
CASE_SECONDS = 60.0
TTL_SECONDS = 2.0
RANDOM_KILLS, RANDOM_STOPS, RANDOM_CUTS = 200, 50, 50


@dataclass(frozen=True, slots=True)
class Case:
    """One death: where, when and how.

    Attributes:
        pipelines: D of the job.
        redundancy: mode of the job.
        how: kill, stop or cut.
        pipeline: of the victim.
        stage: of the victim.
        instruction: before which it dies; None for `after_seconds`.
        after_seconds: from the beginning of the step; the fault then comes from outside.
    """

    pipelines: int
    redundancy: str
    how: str
    pipeline: int
    stage: int
    instruction: int | None = None
    after_seconds: float = 0.0


@dataclass(slots=True)
class Survivor:
    """What a worker that lived to the end tells."""

    pipeline: int = 0
    stage: int = 0
    losses: list[float] = field(default_factory=list)
    layers: dict[int, str] = field(default_factory=dict)
    instructions: int = 0
    failovers: int = 0
    step_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a case ended: `equal`, `wrong`, `hung` or `failed`, and what is known of it."""

    kind: str
    detail: str = ""
    failovers: int = 0


def failover(
    as_json: bool = JSON_OPTION,
    quick: bool = typer.Option(False, "--quick", help="A seeded part of it, in about two minutes."),
    seed: int = typer.Option(0, help="Of the random times, and of the part that --quick takes."),
    every: int = typer.Option(1, min=1, help="Run every n-th case of the exhaustive table only."),
) -> None:
    """Kill workers at every moment and compare with the undisturbed run."""
    warm_up()
    started, draw = time.monotonic(), random.Random(seed)
    with EmbeddedEtcd() as etcd, tempfile.TemporaryDirectory(prefix="bamboo-failover-") as folder:
        bench = FailoverBench(EtcdConfig(endpoints=(etcd.endpoint,)), Path(folder))
        exhaustive = [case for shape in ((1, "eflb"), (2, "lflb")) for case in bench.exhaustive_cases(*shape)]
        exhaustive = draw.sample(exhaustive, 24) if quick else exhaustive[::every]
        at_random = bench.random_cases(draw, (6, 2, 2) if quick else (RANDOM_KILLS, RANDOM_STOPS, RANDOM_CUTS))
        tables = {"every_instruction": exhaustive, "random_times": at_random}
        verdicts = {name: bench.run_all(cases, name) for name, cases in tables.items()}
    report = {name: summary(tables[name], found) for name, found in verdicts.items()}
    ok = all(part["cases"] == part["bit_equal"] == part["failovers"] for part in report.values())
    counted = ("cases", "bit_equal", "hung", "wrong", "failed", "failovers")
    totals = {key: sum(part[key] for part in report.values()) for key in counted}
    rows = [[name, *(part[key] for key in totals)] for name, part in report.items()]
    finish(
        {"ok": ok, **totals, **report, "seconds": round(time.monotonic() - started, 1)},
        [table("bench failover", ["moments", *totals], rows, caption="after a death, two more steps; fp32")],
        as_json=as_json,
    )


def summary(cases: Sequence[Case], verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Count the verdicts; name the first cases that are not bit-equal."""
    counts = Counter(verdict.kind for verdict in verdicts)
    bad = [(case, verdict) for case, verdict in zip(cases, verdicts, strict=True) if verdict.kind != "equal"]
    return {
        "cases": len(verdicts),
        "bit_equal": counts["equal"],
        "hung": counts["hung"],
        "wrong": counts["wrong"],
        "failed": counts["failed"],
        "failovers": sum(verdict.failovers for verdict in verdicts),
        "by_how": dict(Counter(case.how for case in cases)),
        "problems": [f"{case}: {verdict.kind}: {verdict.detail}" for case, verdict in bad[:10]],
    }


class FailoverBench:
    """Runs cases against one etcd, and keeps the undisturbed runs they are held against.

    Args:
        etcd: of all jobs.
        folder: for logs; the folder of a case that passes is removed.
    """

    def __init__(self, etcd: EtcdConfig, folder: Path) -> None:
        self._etcd, self._folder, self._jobs = etcd, folder, 0
        self._references: dict[tuple[int, str], dict[int, Survivor]] = {}

    def reference(self, pipelines: int, redundancy: str) -> dict[int, Survivor]:
        """Return what the workers of an undisturbed run tell, by worker id."""
        if (pipelines, redundancy) not in self._references:
            survivors, verdict = self._run(Case(pipelines, redundancy, "none", -1, -1))
            if verdict is not None:
                raise RuntimeError(f"the undisturbed run failed: {verdict.detail}")
            self._references[pipelines, redundancy] = survivors
        return self._references[pipelines, redundancy]

    def exhaustive_cases(self, pipelines: int, redundancy: str) -> list[Case]:
        """Return a death before every instruction of every stage, in the last pipeline."""
        reference = self.reference(pipelines, redundancy)
        lengths = {one.stage: one.instructions for one in reference.values() if one.pipeline == pipelines - 1}
        return [
            Case(pipelines, redundancy, "kill", pipelines - 1, stage, instruction)
            for stage in range(STAGES)
            for instruction in range(lengths[stage])
        ]

    def random_cases(self, draw: random.Random, counts: Sequence[int]) -> list[Case]:
        """Return deaths at random moments of the step, of random stages, so many of each kind."""
        hows = [how for how, count in zip(("kill", "stop", "cut"), counts, strict=True) for _ in range(count)]
        return [self._random_case(draw, how) for how in hows]

    def _random_case(self, draw: random.Random, how: str) -> Case:
        pipelines, redundancy = draw.choice([(1, "fit"), (1, "eflb"), (1, "lflb"), (2, "fit")])
        longest = max(one.step_seconds for one in self.reference(pipelines, redundancy).values())
        return Case(
            pipelines,
            redundancy,
            how,
            draw.randrange(pipelines),
            draw.randrange(STAGES),
            after_seconds=draw.uniform(0.0, 1.2 * longest),
        )

    def run_all(self, cases: Sequence[Case], title: str) -> list[Verdict]:
        """Run cases one after the other."""
        return [self.judge(case) for case in progress(cases, title)]

    def judge(self, case: Case) -> Verdict:
        """Run one case and hold it against the undisturbed run."""
        expected = self.reference(case.pipelines, case.redundancy)
        survivors, verdict = self._run(case)
        return verdict or compare(survivors, expected, case)

    def _run(self, case: Case) -> tuple[dict[int, Survivor], Verdict | None]:
        """Run a job, break it as the case says, and read what the survivors tell."""
        self._jobs += 1
        folder = self._folder / f"case-{self._jobs}"
        folder.mkdir()
        workers, apart = STAGES * case.pipelines, case.how == "cut"
        cluster = LocalCluster(
            lambda: train(case, folder),
            nodes=workers if apart else 1,
            workers=1 if apart else workers,
            job=f"failover-{self._jobs}",
            etcd=None if apart else self._etcd,  # a network of the nodes' own needs a server that is in it
            ttl_seconds=TTL_SECONDS,
            log_folder=folder / "logs",
            echo=False,
            namespaces=apart,
            environment={CONFIG_VARIABLE: encoded(config_of(case))},
        )
        with cluster:
            expected = workers - (case.how != "none")
            verdict = self._watch(cluster, case, folder, expected)
        survivors = read_survivors(folder)
        if verdict is None:
            shutil.rmtree(folder)
        return survivors, verdict

    @staticmethod
    def _watch(cluster: LocalCluster, case: Case, folder: Path, expected: int) -> Verdict | None:
        """Wait for the survivors; strike from outside when it is time to."""
        deadline = time.monotonic() + CASE_SECONDS
        strike = Strike(case, folder) if case.instruction is None and case.how != "none" else None
        while len(list(folder.glob("survivor-*.json"))) < expected:
            if strike is not None:
                strike.look(cluster)
            if time.monotonic() > deadline:
                return Verdict("hung", f"{len(read_survivors(folder))} of {expected} survivors; {tails(folder)}")
            ended = all(code is not None for code in cluster.codes.values())
            if ended and len(list(folder.glob("survivor-*.json"))) < expected:
                return Verdict("failed", f"the agents ended with {cluster.codes}; {tails(folder)}")
            time.sleep(0.001)
        return None


class Strike:
    """Breaks a worker from outside, a given time after it has begun the step.

    Args:
        case: whom, when and how.
        folder: where workers tell that they begin a step.
    """

    def __init__(self, case: Case, folder: Path) -> None:
        self._case, self._folder, self._done = case, folder, False

    def look(self, cluster: LocalCluster) -> None:
        """Strike if it is time."""
        marker = self._folder / f"begun-{self._case.pipeline}-{self._case.stage}.json"
        if self._done or not marker.exists():
            return
        begun = json.loads(marker.read_text())
        if time.monotonic() < begun["at"] + self._case.after_seconds:
            return
        self._done = True
        if self._case.how == "cut":
            cluster.kill(begun["node"], "cut")
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(begun["pid"], signal.SIGKILL if self._case.how == "kill" else signal.SIGSTOP)


# ---- the workers' side ---------------------------------------------------------------------------------------------


def job_of(case: Case) -> Job:
    """Return what is trained: a tiny GPT with dropout, clipping, a tied embedding and Adam."""
    return gpt_job(dropout=0.1, tied=True, micro_batches=SHARE * case.pipelines, steps=STEPS)


def config_of(case: Case) -> dict[str, Any]:
    """Return the DeepSpeed config of a case, with its fault."""
    faults = [] if case.instruction is None else [
        {"how": case.how, "step": FAULT_STEP, "pipeline": case.pipeline, "stage": case.stage,
         "instruction": case.instruction}
    ]  # fmt: skip
    block = {
        "redundancy": case.redundancy, "seed": 7, "timeout_seconds": CASE_SECONDS, "fault_injection": faults,
        "reconfigure": "needed",  # cut anew, a tied layer's sums would come out in another order
    }  # fmt: skip
    return {**job_of(case).deepspeed_config(), "bamboo": block}


def train(case: Case, folder: Path) -> None:
    """Train as one worker, and write down what a survivor knows."""
    import bamboo_ds

    job = job_of(case)
    module = bamboo_ds.BambooPipelineModule(
        layers=job.layers(), num_stages=STAGES, loss_fn=job.loss_fn, seed_layers=True, base_seed=job.base_seed
    )
    engine, *_ = bamboo_ds.initialize(model=module, config=config_of(case))
    told = Survivor(engine.pipeline_id, engine.stage_id)
    for step in range(job.steps):
        if step == FAULT_STEP:
            _mark(engine, folder)
        begun = time.monotonic()
        told.losses.append(float(engine.train_batch(job.batches(step, engine.micro_batch_range))))
        told.step_seconds = time.monotonic() - begun
    told.layers = {layer: digest(module) for layer, module in held_layers(engine)}
    told.instructions, told.failovers = engine.instructions_run, len(engine.failovers)
    _write_whole(folder / f"survivor-{engine.module.worker}.json", asdict(told))


def _mark(engine: Any, folder: Path) -> None:
    """Say that this worker begins the step in which somebody dies."""
    seat = Membership.read()
    marker = {"at": time.monotonic(), "pid": os.getpid(), "node": "" if seat is None else seat.node}
    _write_whole(folder / f"begun-{engine.pipeline_id}-{engine.stage_id}.json", marker)


def _write_whole(path: Path, value: Any) -> None:
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(value))
    partial.rename(path)


# ---- judging -------------------------------------------------------------------------------------------------------


def read_survivors(folder: Path) -> dict[int, Survivor]:
    """Return what the workers that lived to the end have written, by worker id."""
    found = {}
    for path in folder.glob("survivor-*.json"):
        fields = json.loads(path.read_text())
        fields["layers"] = {int(layer): checksum for layer, checksum in fields["layers"].items()}
        found[int(path.stem.removeprefix("survivor-"))] = Survivor(**fields)
    return found


def compare(survivors: dict[int, Survivor], expected: dict[int, Survivor], case: Case) -> Verdict:
    """Hold survivors against the undisturbed run: losses of all steps, and final weights of all layers."""
    losses = next(iter(expected.values())).losses
    weights = {layer: checksum for one in expected.values() for layer, checksum in one.layers.items()}
    held: set[int] = set()
    for worker, one in survivors.items():
        if one.losses != losses:
            return Verdict("wrong", f"worker {worker} has losses {one.losses}, undisturbed {losses}")
        differing = [layer for layer, checksum in one.layers.items() if weights[layer] != checksum]
        if differing:
            return Verdict("wrong", f"worker {worker} holds other weights of layers {differing}")
        held |= one.layers.keys()
    if held != weights.keys():
        return Verdict("wrong", f"nobody holds layers {sorted(weights.keys() - held)}")
    failovers = sum(one.failovers > 0 for one in survivors.values())
    return Verdict("equal", failovers=int(failovers > 0))

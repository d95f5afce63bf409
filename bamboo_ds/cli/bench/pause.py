"""`bamboo-ds bench pause`: how long the death of a worker holds a step up, by mode and phase.

Paced layers (they sleep for an accelerator, so bubbles are real on two cores) as 4 stages, 8 micro-batches, one
pipeline. In each case one worker kills itself (SIGKILL) before a given forward or backward of one step; all others
train on. What is told of a case:

* `detect_ms`: from the kill to the moment at which every survivor holds the next version of the plan;
* `reroute_ms`: from there, at the shadow, until its links are there again;
* `recompute_ms`: from there until it has redone the backwards that the victim had done;
* `extra_steps`: how much longer the disturbed step took than a normal one, in normal steps. Part of it is no pause:
  from the loss on one worker has the work of two, whatever one does;
* `pause_steps`: the rest, after taking off what the event simulation says for a hand-over that costs nothing.

After the disturbed step the merged pipeline is held against the simulation of the same costs (`after_ratio`).
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bamboo_ds.cli.bench.job import Job, paced_job
from bamboo_ds.cli.bench.report import JSON_OPTION, QUICK_OPTION, finish, progress, rounded, table, tails
from bamboo_ds.cli.bench.workers import warm_up
from bamboo_ds.cli.local import LocalCluster
from bamboo_ds.config import EtcdConfig
from bamboo_ds.config.source import CONFIG_VARIABLE, encoded
from bamboo_ds.schedule.costs import StageCosts
from bamboo_ds.schedule.disturbance import disturb, worker_words
from bamboo_ds.schedule.timing import simulate
from bamboo_ds.schedule.windows import worker_orders
from bamboo_ds.store.embedded import EmbeddedEtcd

STAGES, MICRO_BATCHES = 4, 8
FORWARD_SECONDS, BACKWARD_SECONDS = 0.020, 0.040
WARM_STEPS, AFTER_STEPS = 6, 4
FAULT_STEP = WARM_STEPS
MODES, KINDS = ("fit", "eflb", "lflb"), ("forward", "backward")
CASE_SECONDS = 60.0

REROUTE_MS = 100.0
FORWARD_PAUSE = 0.25
EAGER_TO_LAZY = 0.65
AFTER_RATIO = 1.1


@dataclass(frozen=True, slots=True)
class Death:
    """When a worker dies.

    Attributes:
        redundancy: mode of the job.
        stage: of the victim.
        kind: `forward` or `backward`: the phase of the step.
        before: it dies before its pass of this number (from 0): a forward in the forward phase, else a backward.
    """

    redundancy: str
    stage: int
    kind: str
    before: int


@dataclass(slots=True)
class Told:
    """What a survivor tells: moments are of the machine's monotonic clock."""

    stage: int = 0
    step_seconds: list[float] = field(default_factory=list)
    heard: float = 0.0
    noticed: float = 0.0
    rerouted: float = 0.0
    caught_up: float = 0.0
    taken: int | None = None
    costs: list[list[float]] = field(default_factory=list)


def pause(as_json: bool = JSON_OPTION, quick: bool = QUICK_OPTION) -> None:
    """Kill workers in the forward and in the backward phase and see how long their shadows need."""
    warm_up()
    started = time.monotonic()
    deaths = cases(quick=quick)
    with EmbeddedEtcd() as etcd, tempfile.TemporaryDirectory(prefix="bamboo-pause-") as folder:
        bench = PauseBench(EtcdConfig(endpoints=(etcd.endpoint,)), Path(folder))
        figures = {death: bench.run(death) for death in progress(deaths, "pause")}
    report = {
        mode: {kind: medians([figures[death] for death in deaths if (death.redundancy, death.kind) == (mode, kind)])
               for kind in KINDS}
        for mode in MODES
    }  # fmt: skip
    judged = judge(report)
    rows = [[mode, kind, *(report[mode][kind][name] for name in COLUMNS)] for mode in MODES for kind in KINDS]
    pace = f"f = {1000 * FORWARD_SECONDS:g} ms, b = {1000 * BACKWARD_SECONDS:g} ms"
    shape = f"{STAGES} stages, {MICRO_BATCHES} micro-batches, {pace} (paced)"
    finish(
        {"ok": all(judged.values()), **report, "demands": judged, "seconds": round(time.monotonic() - started, 1)},
        [table(f"bench pause: {shape}", ["mode", "phase", *COLUMNS], rows, caption=str(judged))],
        as_json=as_json,
    )


COLUMNS = ("cases", "detect_ms", "reroute_ms", "recompute_ms", "extra_steps", "pause_steps", "after_ratio")


def cases(*, quick: bool) -> list[Death]:
    """Return the deaths: before the last forward of the warm-up, and before early and late backwards."""
    stages = (1,) if quick else range(STAGES)
    late = (4,) if quick else (2, 4, 6)
    forward = [(stage, "forward", STAGES - stage - 1) for stage in stages]
    backward = [(stage, "backward", before) for stage in stages for before in late]
    return [Death(mode, *moment) for mode in MODES for moment in (*forward, *backward)]


def medians(figures: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return the median of each figure over cases."""
    return {
        "cases": len(figures),
        **{name: rounded(statistics.median(figure[name] for figure in figures)) for name in COLUMNS[1:]},
    }


def judge(report: dict[str, Any]) -> dict[str, bool]:
    """Hold the medians against what is demanded of them."""
    every = [report[mode][kind] for mode in MODES for kind in KINDS]
    eager, fit, lazy = (report[mode]["backward"]["extra_steps"] for mode in ("eflb", "fit", "lflb"))
    return {
        "reroute_within_100_ms": all(part["reroute_ms"] <= REROUTE_MS for part in every),
        "forward_pause_within_quarter_step": all(
            report[mode]["forward"]["pause_steps"] <= FORWARD_PAUSE for mode in ("fit", "eflb")
        ),
        "eager_within_0.65_of_lazy": eager <= EAGER_TO_LAZY * lazy,
        "fit_between": eager <= 1.05 * fit and fit <= 1.05 * lazy,
        "after_within_1.1_of_simulation": all(part["after_ratio"] <= AFTER_RATIO for part in every),
    }


class PauseBench:
    """Runs one job per death.

    Args:
        etcd: of all jobs.
        folder: for logs.
    """

    def __init__(self, etcd: EtcdConfig, folder: Path) -> None:
        self._etcd, self._folder, self._jobs = etcd, folder, 0

    def run(self, death: Death) -> dict[str, float]:
        """Run a job with its death and return its figures."""
        self._jobs += 1
        folder = self._folder / f"case-{self._jobs}"
        folder.mkdir()
        cluster = LocalCluster(
            lambda: train(death, folder),
            nodes=1,
            workers=STAGES,
            job=f"pause-{self._jobs}",
            etcd=self._etcd,
            ttl_seconds=3.0,
            log_folder=folder / "logs",
            echo=False,
            environment={CONFIG_VARIABLE: encoded(config_of(death))},
        )
        with cluster:
            code = cluster.wait(CASE_SECONDS)
            told = [Told(**fields) for fields in cluster.results().values()]
        if code != 0 or len(told) != STAGES - 1:
            raise RuntimeError(f"{death}: the job ended with {code} and {len(told)} survivors\n{tails(folder)}")
        return figures(death, told, killed=float((folder / "killed").read_text()))


def figures(death: Death, told: Sequence[Told], *, killed: float) -> dict[str, float]:
    """Work a case out: see the module for what each figure is."""
    shadow = next(one for one in told if one.taken is not None)
    normal = statistics.median(second for one in told for second in one.step_seconds[2:WARM_STEPS])
    disturbed = max(one.step_seconds[FAULT_STEP] for one in told)
    after = statistics.median(second for one in told for second in one.step_seconds[FAULT_STEP + 1 :])
    costs = stage_costs()
    free = disturb(
        STAGES,
        micro_batches=MICRO_BATCHES,
        victim=death.stage,
        before=position(death, costs),
        costs=costs,
        redundancy=death.redundancy,  # type: ignore[arg-type]  # one of MODES
    )
    owners = [(death.stage - 1) % STAGES if stage == death.stage else stage for stage in range(STAGES)]
    merged = worker_orders(
        STAGES, micro_batches=MICRO_BATCHES, redundancy=death.redundancy, costs=costs, owners=owners  # type: ignore[arg-type]
    )  # fmt: skip
    scale = normal / free.plain_seconds
    return {
        "detect_ms": 1000 * (max(one.heard for one in told) - killed),
        "reroute_ms": 1000 * (shadow.rerouted - shadow.heard),
        "recompute_ms": 1000 * (shadow.caught_up - shadow.rerouted),
        "extra_steps": disturbed / normal - 1,
        "pause_steps": (disturbed - scale * free.free_seconds) / normal,
        "after_ratio": after / (scale * simulate(merged, costs).step_seconds),
    }


def position(death: Death, costs: StageCosts) -> int:
    """Return the index of the instruction before which the victim dies."""
    orders = worker_orders(STAGES, micro_batches=MICRO_BATCHES, redundancy=death.redundancy, costs=costs)  # type: ignore[arg-type]
    wanted = f"{death.stage}{'F' if death.kind == 'forward' else 'B'}{death.before}"
    return [str(word) for word in worker_words(orders, death.stage, stages=STAGES)].index(wanted)


def stage_costs() -> StageCosts:
    """Return what the paced layers sleep."""
    forward, backward = (FORWARD_SECONDS,) * STAGES, (BACKWARD_SECONDS,) * STAGES
    return StageCosts(forward=forward, backward=backward, redundant=forward)


# ---- the workers' side ---------------------------------------------------------------------------------------------


def paced() -> Job:
    """Return the job of all cases."""
    return paced_job(
        layers=STAGES,
        forward_seconds=FORWARD_SECONDS,
        backward_seconds=BACKWARD_SECONDS,
        micro_batches=MICRO_BATCHES,
        steps=WARM_STEPS + 1 + AFTER_STEPS,
    )


def config_of(death: Death) -> dict[str, Any]:
    """Return the DeepSpeed config of a case."""
    # The steps after the loss are those of the merged pipeline: it is not to be cut anew.
    block = {"redundancy": death.redundancy, "seed": 7, "timeout_seconds": CASE_SECONDS, "reconfigure": "needed"}
    return {**paced().deepspeed_config(), "bamboo": block}


def train(death: Death, folder: Path) -> dict[str, Any]:
    """Train as one worker; the victim dies in time. Returns what a survivor tells."""
    import bamboo_ds

    job = paced()
    module = bamboo_ds.BambooPipelineModule(
        layers=job.layers(), num_stages=STAGES, loss_fn=job.loss_fn, seed_layers=True, base_seed=job.base_seed
    )
    engine, *_ = bamboo_ds.initialize(model=module, config=config_of(death))
    told = Told(stage=engine.stage_id)
    listen(engine, told)
    if engine.stage_id == death.stage:
        arm(engine, death, folder)
    for step in range(job.steps):
        begun = time.monotonic()
        engine.train_batch(job.batches(step, engine.micro_batch_range))
        told.step_seconds.append(time.monotonic() - begun)
    for report in engine.failovers:
        told.noticed, told.rerouted, told.caught_up = report.noticed, report.rerouted, report.caught_up
        told.taken = report.taken
    return asdict(told)


def listen(engine: Any, told: Told) -> None:
    """Note when this worker first holds a newer plan."""

    def hear() -> None:
        if not told.heard and engine._source.current().version:
            told.heard = time.monotonic()

    engine._source.subscribe(hear)


def arm(engine: Any, death: Death, folder: Path) -> None:
    """Let this worker kill itself before its pass of the given number."""
    wanted = "ForwardPass" if death.kind == "forward" else "BackwardPass"
    execute = engine._execute

    def watched(instruction: Any) -> None:
        due = type(instruction).__name__ == wanted and instruction.kwargs["micro_batch"] == death.before
        if due and engine.global_steps == FAULT_STEP:
            (folder / "killed").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        execute(instruction)

    engine._execute = watched

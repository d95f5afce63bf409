"""`bamboo-ds bench validate`: hold the simulator against a real cluster on the same nodes at the same times.

1. Each layer is timed by itself, as `bamboo-ds profile` does.
2. A *calibration run* tells what all else costs: a cluster that loses a node, then the node that coordinates, and gets
   another one after each.
3. A cluster follows the trace. Its speed and its decisions are measured.
4. The simulator plays the trace as it was played (who came and went when), with the costs of 1 and 2.

So nothing of the run that is judged goes into the simulation but when nodes came and went, and in which order they
registered. The job is that of `bamboo-ds chaos`: real nodes, `kill -9`, layers that sleep for an accelerator.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bamboo_ds.cli.bench.report import finish, rounded, table
from bamboo_ds.cli.bench.workers import run_workers, values, warm_up
from bamboo_ds.errors import BambooError, ConfigError
from bamboo_ds.simulator.constants import Constants
from bamboo_ds.simulator.market import Market, generate
from bamboo_ds.simulator.step_time import StepTimes
from bamboo_ds.simulator.trace import Change, NodeEvent, Trace
from bamboo_ds.simulator.trace_files import read_trace
from bamboo_ds.simulator.validation import Validation, simulated, spaced
from bamboo_ds.simulator.workload import Workload

if TYPE_CHECKING:
    from bamboo_ds.cli.bench.observed import Costs
    from bamboo_ds.cli.chaos.disturbed import Disturbed
    from bamboo_ds.cli.chaos.job import ChaosJob
    from bamboo_ds.simulator.workload import Layer

__all__ = ["ValidateOptions", "calibration_trace", "trace_of", "validate"]

ZONES = ("a", "b", "c")
CHECKPOINT_STEPS = 10
REPEATS = 10
PROFILE_SECONDS, STUCK_SECONDS = 120.0, 60.0
LOCAL = {
    **dict.fromkeys(("bandwidth", "zone_bandwidth", "copy_bandwidth", "storage_bandwidth"), 1e18),
    "commit_seconds_per_pipeline": 0.0,
}
"""The job's 0.9 MB of state take no time to travel beside the latency; what ends a step is measured as a whole."""


@dataclass(frozen=True, kw_only=True)
class ValidateOptions:
    """The options of `bamboo-ds bench validate`."""

    trace: Annotated[
        Path | None,
        typer.Option(help="When the market gives and takes nodes; by default one is drawn.", show_default=False),
    ] = None
    seed: Annotated[int, typer.Option(help="Of the trace that is drawn.")] = 4
    speedup: Annotated[float, typer.Option(help="Seconds of the trace in one second.")] = 24.0
    gap: Annotated[float, typer.Option(help="Least seconds between two changes of the fleet.")] = 9.0
    seconds: Annotated[float, typer.Option(help="Longest time to follow the trace.")] = 180.0
    nodes: Annotated[int, typer.Option(help="Nodes of the whole fleet.")] = 12
    stages: Annotated[int, typer.Option(help="Stages of a pipeline, where there are nodes enough.")] = 4
    pace: Annotated[float, typer.Option(help="Milliseconds of a layer's forward; its backward takes twice that.")] = (
        20.0
    )
    logs: Annotated[
        Path | None, typer.Option(help="New folder for the logs (default: a temporary one).", show_default=False)
    ] = None
    quick: Annotated[bool, typer.Option("--quick", help="A small fleet for a short time.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON object only, without the table.")] = False

    def __post_init__(self) -> None:
        """Refuse values that cannot be right.

        Raises:
            ConfigError: names the option.
        """
        for name in ("speedup", "gap", "seconds", "pace"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"--{name} {getattr(self, name):g}: must be above 0")
        if not 3 <= self.stages <= self.nodes // 2:
            raise ConfigError(
                f"--stages {self.stages}: must be from 3 (with fewer, losses are noticed late) to half of --nodes, "
                f"{self.nodes // 2}: a pipeline that is lost must leave another one"
            )

        if self.nodes % self.stages:
            raise ConfigError(f"--nodes {self.nodes}: must be a multiple of --stages, {self.stages}")

    @property
    def pipelines(self) -> int:
        """D of the whole fleet."""
        return self.nodes // self.stages


QUICK = {"nodes": 6, "stages": 3, "gap": 5.0, "seconds": 30.0, "speedup": 200.0, "pace": 10.0}


def validate(options: ValidateOptions) -> None:
    """Train on nodes that come and go, simulate the same, and compare speed and decisions."""
    if options.quick:
        options = replace(options, quick=False, **QUICK)  # type: ignore[arg-type]  # fields of it
    trace = trace_of(options)
    warm_up()
    from bamboo_ds.cli.chaos.command import log_folder

    with log_folder(options.logs, prefix="bamboo-validate-") as folder:
        report = Bench(options, folder).report(trace)
    columns = ["", "simulated", "real"]
    pairs = [[name, *map(_shown, value)] for name, value in report.items() if isinstance(value, list)]
    title = f"bench validate: {trace.name}, throughput simulated/real {report['throughput_ratio']}"
    finish(report, [table(title, columns, pairs)], as_json=options.as_json)


def _shown(value: Any) -> Any:
    return " ".join(value) if isinstance(value, tuple) else value


def trace_of(options: ValidateOptions) -> Trace:
    """Return the trace that is followed."""
    from bamboo_ds.cli.chaos.drive import fitted

    trace = drawn(options) if options.trace is None else fitted(read_trace(options.trace), nodes=options.nodes)
    zoned = trace if all(trace.zones) else trace.zoned(ZONES)
    return spaced(zoned, speedup=options.speedup, gap_seconds=options.gap, seconds=options.seconds)


def drawn(options: ValidateOptions) -> Trace:
    """Draw a trace in which half of the nodes are taken within an hour, mostly one at a time."""
    market = Market(
        nodes=options.nodes, hours=1.5, rate=0.5, zones=len(ZONES), bulk=1.4, shared=0.0, delay_seconds=400.0, grant=0.7
    )
    return generate(market, seed=options.seed)


def calibration_trace(nodes: int, *, gap_seconds: float) -> Trace:
    """Return the trace that the costs are measured on: the loss of a node, and of the one that coordinates."""
    events = [NodeEvent(0.0, Change.ADD, f"m{number}", ZONES[number % len(ZONES)]) for number in range(nodes)]
    for number, gone in enumerate(("m1", "m0")):  # the first to come coordinates
        lost = (2 * number + 1) * gap_seconds
        events.append(NodeEvent(lost, Change.REMOVE, gone))
        events.append(NodeEvent(lost + gap_seconds, Change.ADD, f"m{nodes + number}", ZONES[0]))
    return Trace("calibration", tuple(events), 5 * gap_seconds)


class Bench:
    """The runs of one command.

    Args:
        options: of the command.
        folder: for logs and checkpoints.
    """

    def __init__(self, options: ValidateOptions, folder: Path) -> None:
        from bamboo_ds.cli.chaos.disturbed import teller
        from bamboo_ds.cli.chaos.job import ChaosJob

        self._options, self._folder, self._tell = options, folder, teller("validate")
        self._job = ChaosJob(
            stages=options.stages,
            pipelines=options.pipelines,
            pace_seconds=options.pace / 1000,
            checkpoint_steps=CHECKPOINT_STEPS,
            timeout_seconds=STUCK_SECONDS,
        )

    def report(self, trace: Trace) -> dict[str, Any]:
        """Make the runs and return the report."""
        from bamboo_ds.cli.bench import observed

        began = time.monotonic()
        self._tell("1 of 3: time each layer")
        layers = self._layers()
        workload = self._workload(layers)
        calibration = calibration_trace(self._options.nodes, gap_seconds=self._options.gap)
        self._tell(f"2 of 3: calibrate, {calibration.seconds:.0f} s")
        calibrated = self._run(calibration, layers, self._folder / "calibration", timed=True)
        costs = observed.costs_of(calibrated.lines, calibrated.timeline.deeds, calibrated.events)
        self._tell(f"3 of 3: {trace.preemptions} losses and the joins between them, {trace.seconds:.0f} s")
        run = self._run(trace, layers, self._folder / "judged")
        return {
            **self._compared(run, workload, costs),
            **run.timeline.removals(),
            "joins": run.timeline.joins(),
            "run_seconds": rounded(run.timeline.seconds),
            "costs": {name: rounded(value) for name, value in costs.fixed.items()},
            "seconds": round(time.monotonic() - began, 1),
        }

    def _compared(self, run: Disturbed, profiled: Workload, costs: Costs) -> dict[str, Any]:
        """Simulate what was played and compare; also an undisturbed step, as the calibration run saw it."""
        from bamboo_ds.cli.bench import observed
        from bamboo_ds.cli.chaos.job import BATCH

        stages, pipelines = profiled.num_stages, profiled.pipelines
        workload = replace(profiled, layers=costs.layers(profiled.layers, parts=profiled.model.parts(stages)))
        constants = Constants().with_values(
            {**LOCAL, **costs.fixed, "zone_latency_seconds": costs.fixed["latency_seconds"]}
        )
        validation = Validation(
            simulated(workload, observed.played(run.timeline, run.events), constants=constants),
            observed.course_of(run.timeline, run.events, batch=BATCH),
        )
        whole = StepTimes(workload, constants, "fit").whole_seconds(stages, pipelines)
        return {
            **validation.as_json(),
            "undisturbed_step_seconds": [rounded(whole), rounded(costs.step)],
            "stage_seconds": {"forward": [*map(rounded, costs.forward)], "backward": [*map(rounded, costs.backward)]},
        }

    # ---- runs --------------------------------------------------------------------------------------------------

    def _layers(self) -> list[Layer]:
        """Time each layer in a process of its own."""
        (layers,) = values(run_workers(_profiled, 1, args=(self._job,), timeout_seconds=PROFILE_SECONDS))
        return list(layers)

    def _workload(self, layers: Sequence[Layer]) -> Workload:
        from bamboo_ds.cli.chaos.job import MICRO_BATCHES, ROWS

        return Workload(
            name="chaos",
            layers=tuple(layers),
            micro_batch_samples=ROWS,
            micro_batches=MICRO_BATCHES,
            num_stages=self._options.stages,
            pipelines=self._options.pipelines,
            cut_by=_whole(layers),
        )

    def _run(self, trace: Trace, layers: Sequence[Layer], folder: Path, *, timed: bool = False) -> Disturbed:
        from bamboo_ds.cli.chaos.disturbed import train_disturbed

        job = replace(self._job, costs=_whole(layers), timed=timed)
        run = train_disturbed(
            job, trace, folder, zones=ZONES, stuck_seconds=STUCK_SECONDS, tell=self._tell, in_turn=True
        )
        if not run.ended or len(run.timeline.steps) < 2:
            raise BambooError(f"the job has not ended in order on the trace {trace.name}; its logs: {folder}")
        return run


def _whole(layers: Sequence[Layer]) -> tuple[float, ...]:
    """Return what each layer takes, by which the job and the simulated one are cut."""
    return tuple(layer.forward_seconds + layer.backward_seconds for layer in layers)


def _profiled(rank: int, job: ChaosJob) -> list[Layer]:
    """Time the layers of a job."""
    from bamboo_ds.cli.chaos.job import ROWS, micro_batch
    from bamboo_ds.cli.profile import Subject, measure
    from bamboo_ds.models.gpt import language_model_loss
    from bamboo_ds.module.layers import build_stage, seed_all

    layers = job.layers()
    built = build_stage(layers, stage=0, bounds=(0, len(layers)), tied={}, seed_layer=seed_all)
    inputs, labels = micro_batch(0, 0)
    subject = Subject(built, language_model_loss, inputs, labels, ROWS, "cpu", lambda: None)
    found = measure(subject, repeats=REPEATS)
    # A tied layer is counted once; but whoever gets its second use receives it, too.
    found[-1] = replace(found[-1], state_bytes=found[0].state_bytes)
    return found

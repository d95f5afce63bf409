"""The command `bamboo-ds chaos` and its options.

The last line of its output is a JSON object; the exit code is 0 when nothing was lost, repeated, restarted or computed
wrongly, and all steps were trained.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from bamboo_ds.cli.bench.report import finish, table
from bamboo_ds.cli.bench.workers import warm_up
from bamboo_ds.cli.chaos.drive import begins_with, fitted
from bamboo_ds.errors import ConfigError
from bamboo_ds.simulator.trace_files import read_trace

__all__ = ["ChaosOptions", "chaos", "log_folder"]


@dataclass(frozen=True, kw_only=True)
class ChaosOptions:
    """The options of `bamboo-ds chaos`."""

    trace: Annotated[Path, typer.Option(help="When the market gives and takes nodes.", show_default=False)]
    speedup: Annotated[float, typer.Option(help="Seconds of the trace in one second.")] = 240.0
    nodes: Annotated[int, typer.Option(help="Nodes of the whole fleet; the trace's mean is scaled to them.")] = 12
    stages: Annotated[int, typer.Option(help="Stages of a pipeline, where there are nodes enough.")] = 4
    pipelines: Annotated[int, typer.Option(help="Most pipelines.")] = 3
    steps: Annotated[
        int | None, typer.Option(help="Steps to train (default: until the trace is over).", show_default=False)
    ] = None
    zones: Annotated[str, typer.Option(help="Of nodes whose zone the trace does not tell, in turn.")] = "a,b,c"
    checkpoint_steps: Annotated[int, typer.Option(help="Steps between two checkpoints.")] = 10
    pace: Annotated[float, typer.Option(help="Milliseconds of a layer's forward; its backward takes twice that.")] = 3.0
    undisturbed_steps: Annotated[int, typer.Option(help="Steps of the undisturbed run, for its speed.")] = 30
    stuck: Annotated[float, typer.Option(help="Seconds without a step after which the run is given up.")] = 60.0
    logs: Annotated[
        Path | None, typer.Option(help="New folder for the logs (default: a temporary one).", show_default=False)
    ] = None
    plot: Annotated[Path | None, typer.Option(help="Draw the run into this PNG.", show_default=False)] = None
    json: Annotated[bool, typer.Option("--json", help="Print the JSON object only, without the table.")] = False

    def __post_init__(self) -> None:
        """Refuse values that cannot be right.

        Raises:
            ConfigError: names the option.
        """
        least = {"nodes": 1, "stages": 1, "pipelines": 1, "checkpoint_steps": 1, "undisturbed_steps": 3, "steps": 2}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least {bound}")
        for name, value in (("speedup", self.speedup), ("stuck", self.stuck)):
            if not value > 0:
                raise ConfigError(f"--{name} {value:g}: must be above 0")
        if self.pace < 0:
            raise ConfigError(f"--pace {self.pace:g}: must be at least 0")
        if not all(self.zone_names):
            raise ConfigError(f"--zones {self.zones}: must be names between commas, such as a,b,c")

    @property
    def zone_names(self) -> tuple[str, ...]:
        """The zones."""
        return tuple(zone.strip() for zone in self.zones.split(","))


def chaos(options: ChaosOptions) -> None:
    """Train through the preemptions of a spot market, and compare with an undisturbed run."""
    trace = fitted(read_trace(options.trace), nodes=options.nodes)
    if not begins_with(trace):
        raise ConfigError(f"--trace {options.trace}: scaled to {options.nodes} nodes it never has any")
    warm_up()
    with log_folder(options.logs, prefix="bamboo-chaos-") as folder:
        from bamboo_ds.cli.chaos.run import Chaos  # loads torch

        report = Chaos(options, trace, folder).report()
    rows = [[name, value] for name, value in report.items() if not isinstance(value, dict)]
    finish(report, [table(f"chaos: {trace.name}, {options.speedup:g} times as fast", ["", ""], rows)],
           as_json=options.json)  # fmt: skip


@contextlib.contextmanager
def log_folder(given: Path | None, *, prefix: str) -> Iterator[Path]:
    """Make the folder for logs and checkpoints; one that nobody asked for goes in the end.

    Raises:
        ConfigError: the folder that was asked for holds something.
    """
    if given is None:
        with tempfile.TemporaryDirectory(prefix=prefix) as folder:
            yield Path(folder)
        return
    if given.exists() and any(given.iterdir()):
        raise ConfigError(f"--logs {given}: is not empty; give a new folder")
    given.mkdir(parents=True, exist_ok=True)
    yield given.resolve()

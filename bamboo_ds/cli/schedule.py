"""`bamboo-ds schedule`: show who does what when in a step, bubbles and redundant work included.

Times are those of an event simulation under the costs given; nothing is run and neither torch nor DeepSpeed is loaded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from bamboo_ds.errors import ScheduleError
from bamboo_ds.schedule import MODES, Redundancy, StageCosts, Timeline, frc_share, simulate, worker_orders
from bamboo_ds.schedule.grid import cell_width, column_seconds, grid, rows
from bamboo_ds.schedule.operations import Kind

_STYLES = {
    Kind.FORWARD: "black on cyan",
    Kind.BACKWARD: "black on green",
    Kind.REDUNDANT: "black on yellow",
    None: "dim",
}
_LEGEND = "F forward   B backward   r redundant forward of the next stage   . idle   (each with its micro-batch)"


@dataclass(frozen=True, slots=True)
class _Picture:
    """All that is shown of one step."""

    stages: int
    micro_batches: int
    redundancy: Redundancy
    costs: StageCosts
    timeline: Timeline
    off_seconds: float
    frc_share: tuple[float, ...]

    @property
    def bubble_share(self) -> float:
        """Share of the workers' time in which they run nothing."""
        idle = sum(window.seconds for worker in self.timeline.events for window in self.timeline.idle(worker))
        return idle / (self.stages * self.timeline.step_seconds)


def schedule(
    stages: Annotated[int | None, typer.Option(help="Number of pipeline stages (P).", show_default=False)] = None,
    micro_batches: Annotated[
        int | None, typer.Option(help="Micro-batches of one pipeline in a step (M).", show_default=False)
    ] = None,
    redundancy: Annotated[str, typer.Option(help=f"Redundant forwards: {', '.join(MODES)}.")] = "fit",
    forward: Annotated[float, typer.Option(help="Cost of a forward of one stage.")] = 1.0,
    backward: Annotated[float, typer.Option(help="Cost of a backward of one stage.")] = 2.0,
    redundant: Annotated[
        float | None, typer.Option(help="Cost of a redundant forward.  [default: as a forward]", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the picture.")] = False,
) -> None:
    """Print the schedule of one training step: who does what when, with bubbles and redundant work."""
    picture = _draw(
        _at_least_one("--stages", stages),
        _at_least_one("--micro-batches", micro_batches),
        redundancy,
        forward,
        backward,
        redundant,
    )
    if as_json:
        typer.echo(json.dumps(_as_json(picture)))
    else:
        _show(picture, Console(highlight=False))


def _refuse(message: str) -> NoReturn:
    typer.echo(f"bamboo-ds schedule: {message}", err=True)
    raise typer.Exit(2)


def _at_least_one(option: str, value: int | None) -> int:
    if value is None:
        _refuse(f"{option} is missing: give a number, such as {option} 4")
    if value < 1:
        _refuse(f"{option} {value}: must be at least 1")
    return value


def _draw(
    stages: int, micro_batches: int, redundancy: str, forward: float, backward: float, redundant: float | None
) -> _Picture:
    mode = next((mode for mode in MODES if mode == redundancy), None)
    if mode is None:
        _refuse(f"--redundancy {redundancy}: must be one of {', '.join(MODES)}")
    try:
        costs = StageCosts.uniform(stages, forward=forward, backward=backward, redundant=redundant)
    except ScheduleError as error:
        _refuse(f"--forward, --backward, --redundant: {error}")
    plain = simulate(worker_orders(stages, micro_batches=micro_batches), costs)
    orders = worker_orders(stages, micro_batches=micro_batches, redundancy=mode, costs=costs)
    share = frc_share(stages, micro_batches=micro_batches, redundancy=mode, costs=costs)
    return _Picture(stages, micro_batches, mode, costs, simulate(orders, costs), plain.step_seconds, share)


def _as_json(picture: _Picture) -> dict[str, Any]:
    events = picture.timeline.events
    return {
        "stages": picture.stages,
        "micro_batches": picture.micro_batches,
        "redundancy": picture.redundancy,
        "step_seconds": picture.timeline.step_seconds,
        "vs_off": picture.timeline.step_seconds / picture.off_seconds,
        "bubble_share": picture.bubble_share,
        "frc_share": list(picture.frc_share),
        "orders": {str(worker): [str(event.operation) for event in events[worker]] for worker in events},
        "timeline": [
            {
                "stage": worker,
                "operation": str(event.operation),
                "start": event.start_seconds,
                "finish": event.finish_seconds,
            }
            for worker in events
            for event in events[worker]
        ],
    }


def _show(picture: _Picture, console: Console) -> None:
    unit = column_seconds(picture.costs)
    if console.is_terminal:
        _show_coloured(picture, console, unit)
    else:
        typer.echo(grid(picture.timeline, unit_seconds=unit))
    typer.echo(f"\n{_LEGEND}\n{_summary(picture)}")


def _summary(picture: _Picture) -> str:
    step = picture.timeline.step_seconds
    share = " ".join(f"{value:.0%}" for value in picture.frc_share)
    return (
        f"step time    {step:g} ({step / picture.off_seconds:.3f} x off)\n"
        f"bubble share {picture.bubble_share:.1%}\n"
        f"FRC share    {share} (by stage of the worker that runs it)"
    )


def _show_coloured(picture: _Picture, console: Console, unit: float) -> None:
    """Print the grid in colours, in panels of as many columns as fit the terminal, so that no line wraps."""
    lines: list[tuple[str, Text]] = []
    for row in rows(picture.timeline, unit_seconds=unit):
        line = Text()
        for cell in row.cells:
            line.append(cell.text.rstrip(), _STYLES[cell.kind]).append(" " * (len(cell.text) - len(cell.text.rstrip())))
        lines.append((f"{row.worker:>2}  ", line))
    total, column = max(len(line) for _, line in lines), cell_width(picture.timeline)
    panel = max((console.width - len(lines[0][0])) // column, 1) * column
    for start in range(0, total, panel):
        for head, line in lines:
            console.print(Text(head) + line[start : start + panel], no_wrap=True, crop=True)
        if start + panel < total:
            console.print()

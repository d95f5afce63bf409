"""`bamboo-ds schedule`: show who does what when in a step, bubbles and redundant work included.

With `--victim` and `--before`, a step in which a worker is lost: the picture, what the failover costs, and the schedule
of the worker that takes over.

Times are those of an event simulation under the costs given; nothing is run and neither torch nor DeepSpeed is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from bamboo_ds.errors import ScheduleError
from bamboo_ds.schedule import (
    MODES,
    Disturbance,
    Redundancy,
    StageCosts,
    Timeline,
    disturb,
    frc_share,
    simulate,
    worker_orders,
)
from bamboo_ds.schedule.disturbance import worker_words
from bamboo_ds.schedule.grid import Row, as_text, cell_width, column_seconds, rows
from bamboo_ds.schedule.operations import Kind
from bamboo_ds.schedule.windows import Orders
from bamboo_ds.schedule.words import REDUCE, STEP, Word, parse_word

_STYLES = {
    Kind.FORWARD: "black on cyan",
    Kind.BACKWARD: "black on green",
    Kind.REDUNDANT: "black on yellow",
    Kind.PROMOTED: "black on yellow",
    None: "dim",
}
_LEGEND = "F forward   B backward   r redundant forward of the next stage   . idle   (each with its micro-batch)"
_LEGEND_OF_LOSS = "x worker lost   f b forward and backward of the lost stage, by the worker that took it over"


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The step that is asked for."""

    stages: int
    micro_batches: int
    redundancy: Redundancy
    costs: StageCosts

    @property
    def orders(self) -> Orders:
        """What every worker runs if none is lost."""
        return worker_orders(
            self.stages, micro_batches=self.micro_batches, redundancy=self.redundancy, costs=self.costs
        )


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
    victim: Annotated[
        int | None, typer.Option(help="Lose the worker of this stage, see --before.", show_default=False)
    ] = None,
    before: Annotated[
        str | None,
        typer.Option(
            help="The instruction that the victim does not reach: its text, such as 2B1 (backward of stage 2 for "
            "micro-batch 1), 2RG1 (its receive) or REDUCE, or its number, from 0.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the picture.")] = False,
) -> None:
    """Print the schedule of one training step: who does what when, with bubbles and redundant work.

    With --victim and --before, the step in which that worker is lost, and what its shadow runs from then on.
    """
    wanted = _wanted(
        _at_least_one("--stages", stages),
        _at_least_one("--micro-batches", micro_batches),
        redundancy,
        forward,
        backward,
        redundant,
    )
    disturbance = _lose(wanted, victim, before)
    if as_json:
        typer.echo(json.dumps(_as_json(wanted) if disturbance is None else _loss_as_json(wanted, disturbance)))
    elif disturbance is None:
        _show(wanted, simulate(wanted.orders, wanted.costs))
        typer.echo(f"\n{_LEGEND}\n{_summary(wanted)}")
    else:
        lost = {disturbance.victim: disturbance.lost_seconds}
        _show(wanted, disturbance.timeline, lost_seconds=lost)
        typer.echo(f"\n{_LEGEND}\n{_LEGEND_OF_LOSS}\n{_summary_of_loss(wanted, disturbance)}")


def _refuse(message: str) -> NoReturn:
    typer.echo(f"bamboo-ds schedule: {message}", err=True)
    raise typer.Exit(2)


def _at_least_one(option: str, value: int | None) -> int:
    if value is None:
        _refuse(f"{option} is missing: give a number, such as {option} 4")
    if value < 1:
        _refuse(f"{option} {value}: must be at least 1")
    return value


def _wanted(
    stages: int, micro_batches: int, redundancy: str, forward: float, backward: float, redundant: float | None
) -> _Wanted:
    mode = next((mode for mode in MODES if mode == redundancy), None)
    if mode is None:
        _refuse(f"--redundancy {redundancy}: must be one of {', '.join(MODES)}")
    try:
        costs = StageCosts.uniform(stages, forward=forward, backward=backward, redundant=redundant)
    except ScheduleError as error:
        _refuse(f"--forward, --backward, --redundant: {error}")
    return _Wanted(stages, micro_batches, mode, costs)


# ---- a step without loss ---------------------------------------------------------------------------------------------


def _off_seconds(wanted: _Wanted) -> float:
    plain = worker_orders(wanted.stages, micro_batches=wanted.micro_batches)
    return simulate(plain, wanted.costs).step_seconds


def _bubble_share(timeline: Timeline) -> float:
    """Return the share of the workers' time in which they run nothing."""
    idle = sum(window.seconds for worker in timeline.events for window in timeline.idle(worker))
    return idle / (len(timeline.events) * timeline.step_seconds)


def _frc_share(wanted: _Wanted) -> tuple[float, ...]:
    return frc_share(
        wanted.stages, micro_batches=wanted.micro_batches, redundancy=wanted.redundancy, costs=wanted.costs
    )


def _as_json(wanted: _Wanted) -> dict[str, Any]:
    timeline = simulate(wanted.orders, wanted.costs)
    return {
        **_head_as_json(wanted, timeline),
        "vs_off": timeline.step_seconds / _off_seconds(wanted),
        "bubble_share": _bubble_share(timeline),
        "frc_share": list(_frc_share(wanted)),
        **_timeline_as_json(timeline),
    }


def _head_as_json(wanted: _Wanted, timeline: Timeline) -> dict[str, Any]:
    return {
        "stages": wanted.stages,
        "micro_batches": wanted.micro_batches,
        "redundancy": wanted.redundancy,
        "step_seconds": timeline.step_seconds,
    }


def _timeline_as_json(timeline: Timeline) -> dict[str, Any]:
    return {
        "orders": {
            str(worker): [str(event.operation) for event in events] for worker, events in timeline.events.items()
        },
        "timeline": [
            {
                "stage": worker,
                "operation": str(event.operation),
                "start": event.start_seconds,
                "finish": event.finish_seconds,
            }
            for worker, events in timeline.events.items()
            for event in events
        ],
    }


def _summary(wanted: _Wanted) -> str:
    timeline = simulate(wanted.orders, wanted.costs)
    share = " ".join(f"{value:.0%}" for value in _frc_share(wanted))
    return (
        f"step time    {timeline.step_seconds:g} ({timeline.step_seconds / _off_seconds(wanted):.3f} x off)\n"
        f"bubble share {_bubble_share(timeline):.1%}\n"
        f"FRC share    {share} (by stage of the worker that runs it)"
    )


# ---- a step with a loss ----------------------------------------------------------------------------------------------


def _lose(wanted: _Wanted, victim: int | None, before: str | None) -> Disturbance | None:
    """Return the step with the loss that is asked for, None when none is."""
    if victim is None and before is None:
        return None
    if victim is None or before is None:
        _refuse("--victim and --before belong together: who is lost, and before which of its instructions")
    if not 0 <= victim < wanted.stages:
        _refuse(f"--victim {victim}: must be a stage, 0 to {wanted.stages - 1}")
    words = worker_words(wanted.orders, victim, stages=wanted.stages)
    try:
        return disturb(
            wanted.stages,
            micro_batches=wanted.micro_batches,
            victim=victim,
            before=_position(before, words),
            costs=wanted.costs,
            redundancy=wanted.redundancy,
        )
    except ScheduleError as error:
        _refuse(f"--victim {victim}: {error}")


def _position(before: str, words: tuple[Word, ...]) -> int:
    """Return the number of an instruction given by its text or number."""
    if before.isdecimal() and int(before) < len(words):
        return int(before)
    try:
        return words.index(parse_word(before))
    except (ScheduleError, ValueError):
        _refuse(f"--before {before}: must be 0 to {len(words) - 1} or one of {' '.join(map(str, words))}")


def _next_step_seconds(wanted: _Wanted, disturbance: Disturbance) -> float:
    """Return the time of the steps that follow, with the stage merged."""
    owners = [disturbance.shadow if stage == disturbance.victim else stage for stage in range(wanted.stages)]
    orders = worker_orders(
        wanted.stages,
        micro_batches=wanted.micro_batches,
        redundancy=wanted.redundancy,
        costs=wanted.costs,
        owners=owners,
    )
    return simulate(orders, wanted.costs).step_seconds


def _loss_as_json(wanted: _Wanted, disturbance: Disturbance) -> dict[str, Any]:
    return {
        **_head_as_json(wanted, disturbance.timeline),
        "failover": {
            "victim": disturbance.victim,
            "before": str(disturbance.before),
            "shadow": disturbance.shadow,
            "lost_seconds": disturbance.lost_seconds,
            "undisturbed_seconds": disturbance.plain_seconds,
            "pause_seconds": disturbance.pause_seconds,
            "merged_seconds": disturbance.free_seconds - disturbance.plain_seconds,
            "next_step_seconds": _next_step_seconds(wanted, disturbance),
            "held_by_successor": disturbance.takeover.held_by_successor,
            "schedule": _shadow_steps(disturbance),
        },
        **_timeline_as_json(disturbance.timeline),
    }


def _shadow_steps(disturbance: Disturbance) -> list[str]:
    return [" ".join(map(str, step)) for step in (*disturbance.takeover.steps, (REDUCE, STEP))]


def _summary_of_loss(wanted: _Wanted, disturbance: Disturbance) -> str:
    merged = disturbance.free_seconds - disturbance.plain_seconds
    return (
        f"lost         the worker of stage {disturbance.victim} at {disturbance.lost_seconds:g}, "
        f"before {disturbance.before}\n"
        f"step time    {disturbance.step_seconds:g} = {disturbance.plain_seconds:g} undisturbed "
        f"{disturbance.pause_seconds:+g} for lost work {merged:+g} as one worker runs two stages\n"
        f"later steps  {_next_step_seconds(wanted, disturbance):g} until the pipeline is reconfigured\n\n"
        f"the worker of stage {disturbance.shadow} goes on with\n" + "\n".join(_shadow_steps(disturbance))
    )


# ---- the picture -----------------------------------------------------------------------------------------------------


def _show(wanted: _Wanted, timeline: Timeline, *, lost_seconds: Mapping[int, float] | None = None) -> None:
    console = Console(highlight=False)
    drawn = rows(timeline, unit_seconds=column_seconds(wanted.costs), lost_seconds=lost_seconds)
    if console.is_terminal:
        _show_coloured(drawn, console, cell_width(timeline))
    else:
        typer.echo(as_text(drawn))


def _show_coloured(drawn: Sequence[Row], console: Console, column: int) -> None:
    """Print the rows in colours, in panels of as many columns as fit the terminal, so that no line wraps."""
    lines: list[tuple[str, Text]] = []
    for row in drawn:
        line = Text()
        for cell in row.cells:
            line.append(cell.text.rstrip(), _STYLES[cell.kind]).append(" " * (len(cell.text) - len(cell.text.rstrip())))
        lines.append((f"{row.worker:>2}  ", line))
    total = max(len(line) for _, line in lines)
    panel = max((console.width - len(lines[0][0])) // column, 1) * column
    for start in range(0, total, panel):
        for head, line in lines:
            console.print(Text(head) + line[start : start + panel], no_wrap=True, crop=True)
        if start + panel < total:
            console.print()

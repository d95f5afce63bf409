"""What `bamboo-ds simulate` says: tables for people, one JSON object for programs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from bamboo_ds.simulator.comparison import POLICIES, Figures
from bamboo_ds.simulator.constants import Constants
from bamboo_ds.simulator.trace import Trace
from bamboo_ds.simulator.workload import Workload

__all__ = ["Answer", "Case", "report", "tables"]

_PIPED_COLUMNS = 150

Found = Mapping[str, tuple[Figures, Mapping[str, float]]]
"""By policy: mean figures, and their standard deviations over seeds."""


@dataclass(frozen=True, slots=True)
class Case:
    """One value of a sweep, or all there is.

    Attributes:
        label: name and value of what is swept; empty without a sweep.
        workload: what is trained.
        found: what came of it.
    """

    label: Mapping[str, float]
    workload: Workload
    found: Found


@dataclass(frozen=True, slots=True)
class Answer:
    """All that was simulated.

    Attributes:
        cases: one, or one for each value of the sweep.
        trace: the (first) trace.
        seeds: how many traces were drawn; None for a given one.
        placement: `policy` or `kept`.
        constants: of the simulation.
        warnings: about the trace.
    """

    cases: Sequence[Case]
    trace: Trace
    seeds: int | None
    placement: str
    constants: Constants
    warnings: Sequence[str]


def report(answer: Answer) -> dict[str, Any]:
    """Return everything for JSON."""
    trace, workload = answer.trace, answer.cases[0].workload
    common: dict[str, Any] = {
        "trace": {
            "name": trace.name,
            "hours": round(trace.seconds / 3600, 3),
            "preemptions": trace.preemptions,
            "mean_nodes": round(trace.mean_live(), 2),
            "zones": len(trace.zones),
        },
        "seeds": answer.seeds,
        "model": {
            "name": workload.name,
            "stages": workload.num_stages,
            "pipelines": workload.pipelines,
            "micro_batches": workload.micro_batches,
            "batch": workload.batch,
            "on_demand_stages": workload.on_demand_stages,
            "source": workload.source,
        },
        "placement": answer.placement,
        "constants": answer.constants.table(),
        "warnings": list(answer.warnings),
    }
    if not answer.cases[0].label:
        return {**_case(answer.cases[0], answer.seeds), **common}
    return {"sweep": [{**case.label, **_case(case, answer.seeds)} for case in answer.cases], **common}


def _case(case: Case, seeds: int | None) -> dict[str, Any]:
    found: dict[str, Any] = {"policies": {policy: figures.as_json() for policy, (figures, _) in case.found.items()}}
    if seeds is not None and seeds > 1:
        names = ("throughput", "value", "goodput", "fatal_losses")
        found["deviations"] = {
            policy: {name: float(f"{spread[name]:.4g}") for name in names} for policy, (_, spread) in case.found.items()
        }
    return found


# ---- tables ----------------------------------------------------------------------------------------------------------

_COLUMNS = (
    "policy", "samples/s", "$/h", "samples/$", "x on demand", "goodput", "failovers", "reconfigured", "fatal",
    "restored",
)  # fmt: skip


def tables(answer: Answer) -> None:
    """Print figures, and where the time went."""
    console = Console() if sys.stdout.isatty() else Console(width=_PIPED_COLUMNS)
    console.print(_figures(answer))
    console.print(_time(answer))
    console.print(f"policies: {'; '.join(f'{name}: {POLICIES[name]}' for name in answer.cases[0].found)}")


def _title(answer: Answer) -> str:
    workload, trace = answer.cases[0].workload, answer.trace
    drawn = "" if answer.seeds is None else f", means of {answer.seeds} drawn trace(s)"
    return (
        f"{workload.name}, P = {workload.num_stages}, D = {workload.pipelines}, M = {workload.micro_batches}, "
        f"on {trace.name}{drawn}"
    )


def _figures(answer: Answer) -> Table:
    swept = tuple(answer.cases[0].label)
    table = Table(*swept, *(("preemptions", "nodes") if swept else ()), *_COLUMNS, title=_title(answer))
    for column in table.columns:
        column.justify, column.no_wrap = "left" if column.header == "policy" else "right", True
    for case in answer.cases:
        stays = case.found.get("on_demand")
        for policy, (figures, _) in case.found.items():
            head = [f"{value:g}" for value in case.label.values()]
            if swept:
                head += [f"{figures.preemptions:.0f}", f"{figures.mean_nodes:.1f}"]
            table.add_row(*head, policy, *_cells(figures, None if stays is None else stays[0]))
        table.add_section()
    return table


def _cells(figures: Figures, stays: Figures | None) -> list[str]:
    relative = f"{figures.value / stays.value:.2f}" if stays is not None and stays.value else ""
    counts = (figures.failovers, figures.reconfigurations, figures.fatal_losses, figures.restores)
    return [
        f"{figures.throughput:.1f}",
        f"{figures.cost_per_hour:.2f}",
        f"{figures.value:,.0f}",
        relative,
        f"{figures.goodput:.3f}",
        *(f"{count:.1f}".removesuffix(".0") for count in counts),
    ]


def _time(answer: Answer) -> Table:
    """Show the share of time by cause; causes that took none in any case are left out."""
    everything = [figures.seconds_by_cause for case in answer.cases for figures, _ in case.found.values()]
    causes = [cause for cause in everything[0] if any(found[cause] > 0 for found in everything)]
    table = Table(*answer.cases[0].label, "policy", *causes, title="share of the time, by cause")
    for column in table.columns[1:]:
        column.justify = "left" if column.header == "policy" else "right"
    for case in answer.cases:
        for policy, (figures, _) in case.found.items():
            total = sum(figures.seconds_by_cause.values()) or 1.0
            shares = (_share(figures.seconds_by_cause[cause] / total) for cause in causes)
            table.add_row(*(f"{value:g}" for value in case.label.values()), policy, *shares)
        table.add_section()
    return table


def _share(value: float) -> str:
    return "" if value == 0 else "< 0.1%" if value < 0.001 else f"{value:.1%}"

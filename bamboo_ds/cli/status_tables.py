"""The picture of a job that `bamboo-ds status` prints: rich tables of a `Report`."""

from __future__ import annotations

import time
from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bamboo_ds.cloud.fleet_report import FleetReport
from bamboo_ds.cloud.meter import Cost
from bamboo_ds.elastic.events import ClusterEvent
from bamboo_ds.elastic.report import Cell, NodeReport, PlanReport, Report, WorkerReport

__all__ = ["picture"]

_PHASE_STYLES = {
    "gathering": "yellow",
    "training": "green",
    "aborted": "bold red",
    "deserted": "bold red",
    "failed": "bold red",
    "finished": "bold green",
}
_STATE_STYLES = {"training": "green", "standby": "cyan", "dead": "red", "ended": "red", "left": "dim"}
_LEGEND = "w3 worker 3 · +w3 it took this stage over · 2x it owns two stages · lost nobody holds it"
_EVENT_STYLES = {
    "node_lost": "red",
    "worker_ended": "red",
    "abort": "bold red",
    "evicted": "red",
    "failure": "bold red",
    "store_outage": "red",
    "failover": "yellow",
    "reconfigure": "yellow",
    "preempt": "yellow",
    "plan": "green",
    "finished": "bold green",
    "notice": "yellow",
    "fleet_trouble": "yellow",
}
_NO_FLEET = FleetReport()


def picture(report: Report, *, trouble: str = "", fleet: FleetReport = _NO_FLEET) -> RenderableType:
    """Return the whole picture.

    Args:
        report: of the job.
        trouble: why the store cannot be heard, if it cannot: what is shown is old.
        fleet: of the job.
    """
    parts: list[RenderableType] = [_head(report)]
    if fleet.cost is not None and fleet.cost.per_hour > 0:
        parts.append(_money(fleet.cost))
    if trouble:
        parts.append(Text(f"etcd cannot be reached, this is old: {trouble}", style="bold red"))
    parts.append(_nodes(report, fleet))
    if report.plan is not None:
        parts += [_grid(report.plan), Text(_LEGEND, style="dim"), *_cause(report.plan)]
    if report.events:
        parts.append(_events(report.events, now=report.time))
    return Group(*parts)


def _head(report: Report) -> Text:
    line = Text.assemble(("job ", "dim"), (report.job, "bold"), "   ")
    line.append(report.phase, _PHASE_STYLES.get(report.phase, ""))
    line.append(f"   {report.phase_text}")
    line.append("\ncoordinator ", "dim").append(report.coordinator or "none")
    for name, value in _figures(report):
        line.append(f"   {name} ", "dim").append(value)
    return line


def _figures(report: Report) -> Iterable[tuple[str, str]]:
    progress = report.progress
    if progress is None:
        return
    if progress.step is not None:
        yield "step", str(progress.step)
    if progress.loss is not None:
        yield "loss", f"{progress.loss:.4f}"
    if progress.samples_per_second is not None:
        yield "samples/s", f"{progress.samples_per_second:.1f}"
    if progress.step_seconds is not None:
        yield "step time", _duration(progress.step_seconds)
    if progress.vote_seconds is not None:
        yield "vote", f"{progress.vote_seconds * 1000:.1f} ms"
    if progress.age_seconds is not None and progress.age_seconds >= 5:
        yield "last commit", f"{_duration(progress.age_seconds)} ago"


def _money(cost: Cost) -> Text:
    line = Text.assemble(("now ", "dim"), f"${cost.per_hour:.2f}/h", ("   spent ", "dim"), f"${cost.spent:.2f}")
    if cost.on_demand is not None:
        line.append("   on demand ", "dim").append(f"${cost.on_demand:.2f}")
    if cost.samples_per_dollar is not None:
        line.append("   samples/$ ", "dim").append(f"{cost.samples_per_dollar:,.0f}")
    return line


def _nodes(report: Report, fleet: FleetReport) -> Table:
    table = _table("node", "zone", "address", "workers", "joined", "")
    workers = {worker.id: worker for worker in report.workers}
    for node in report.nodes:
        table.add_row(
            node.name,
            node.zone,
            node.address,
            _list_workers([workers[worker] for worker in node.workers]),
            "?" if node.joined_seconds is None else f"{_duration(node.joined_seconds)} ago",
            _remarks(node, report, fleet),
        )
    gone = [worker for worker in report.workers if not any(worker.id in node.workers for node in report.nodes)]
    for name in sorted({worker.node for worker in gone}):
        row = _list_workers([worker for worker in gone if worker.node == name])
        table.add_row(Text(name or "(unknown)", style="dim"), "", "", row, "", Text("gone", style="red"))
    return table


def _remarks(node: NodeReport, report: Report, fleet: FleetReport) -> str:
    remarks = ["alive"]
    if node.name in fleet.warned:
        remarks.append("warned")
    if node.name == report.coordinator:
        remarks.append("coordinator")
    if node.name == fleet.keeper:
        remarks.append("keeps the fleet")
    if not node.spot:
        remarks.append("on demand")
    return ", ".join(remarks)


def _list_workers(workers: list[WorkerReport]) -> Text:
    """Return ids with what is not plain training: `w0, w1 standby`."""
    line = Text()
    for worker in workers:
        if line:
            line.append(", ")
        line.append(f"w{worker.id}", _STATE_STYLES.get(worker.state, ""))
        if worker.state != "training":
            line.append(f" {worker.state}", _STATE_STYLES.get(worker.state, ""))
    return line


def _grid(plan: PlanReport) -> Table:
    table = _table(f"plan {plan.epoch}.{plan.version}", *(f"stage {stage}" for stage in range(plan.num_stages)))
    for pipeline, row in enumerate(plan.grid):
        table.add_row(Text(f"pipeline {pipeline}", style="dim"), *map(_cell, row))
    return table


def _cell(cell: Cell) -> Text:
    if cell.owner is None:
        return Text(f"lost (was w{cell.home})", style="bold red")
    text = Text()
    text.append(f"{'+' if cell.taken_over else ''}w{cell.owner}", "yellow" if cell.taken_over else "green")
    if cell.taken_over:
        text.append(f" for w{cell.home}", "yellow")
    elif cell.merged:
        text.append(" 2x", "yellow")
    where = "/".join(part for part in (cell.node, cell.zone) if part)
    return text.append(f" {where}", "dim") if where else text


def _cause(plan: PlanReport) -> list[RenderableType]:
    lines: list[RenderableType] = []
    if plan.cause:
        lines.append(Text.assemble(("because ", "dim"), plan.cause))
    if plan.from_checkpoint:
        lines.append(Text("this epoch began from the last checkpoint", style="yellow"))
    return lines


def _events(events: tuple[ClusterEvent, ...], *, now: float) -> Table:
    table = _table("time", "ago", "node", "event", "")
    for event in events:
        clock = time.strftime("%H:%M:%S", time.localtime(event.time))
        style = _EVENT_STYLES.get(event.kind, "")
        ago = _duration(max(now - event.time, 0.0))
        table.add_row(clock, ago, event.node, Text(event.kind, style=style), Text(event.text))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"

"""`bamboo-ds bench fleet`: a day of a spot market in pretend time, many times, with the real keeper and coordinator.

They run over a memory store by a clock that jumps from event to event; cloud, nodes and agents are pretended. The cloud
refuses, grants late and in part, forgets what it promised and takes nodes away as a trace says. Answers get lost, and
agents are killed at the worst moments: before and after a write of the ledger, before and after an order, or in the
middle of one, which then arrives when a successor has long made it again.

The capacity is that of the trace: of its nodes that are there, by zones. What can be had of it at most, when each node
is taken the moment it is there, is the ceiling.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from bamboo_ds.cli.bench.fleet_day import TARGET, ZONES, Rehearsal, Tally
from bamboo_ds.cli.bench.report import JSON_OPTION, QUICK_OPTION, finish, progress, rounded, table
from bamboo_ds.cloud.pretend import Supply
from bamboo_ds.simulator.market import Market, generate
from bamboo_ds.simulator.trace import Change, Trace
from bamboo_ds.simulator.trace_files import read_trace

__all__ = ["fleet"]

HOURS, SEEDS, QUICK_SEEDS = 24.0, 1000, 10
LEAST_SHARE = 0.98
MOST_UNSPREAD = 0.01
"""Neighbours in one zone above the best that this many nodes allow, as a share of all."""


def fleet(
    as_json: bool = JSON_OPTION,
    quick: bool = QUICK_OPTION,
    seeds: int = typer.Option(SEEDS, min=1, help="How many days."),
    trace: Path | None = typer.Option(None, help="A trace in any form that simulate reads; else one is drawn per day."),
) -> None:
    """Keep a fleet through days of a spot market: never above P x D, no order twice, close to what can be had."""
    count = QUICK_SEEDS if quick else seeds
    total, cores = Tally(), len(os.sched_getaffinity(0))
    with multiprocessing.get_context("spawn").Pool(min(cores, count)) as pool:
        tallies = pool.imap_unordered(_live_through, [(seed, trace) for seed in range(count)])
        for _ in progress(range(count), "days"):
            total.add(next(tallies))
    report = _report(total, count)
    rows = [[name, value] for name, value in report.items() if name != "ok"]
    finish(report, [table(f"bench fleet: {count} days", ["", ""], rows)], as_json=as_json)


def _report(total: Tally, days: int) -> dict[str, Any]:
    share = total.live_seconds / total.ceiling_seconds
    unspread, best = total.same_zone / total.pairs, total.best_same_zone / total.pairs
    ok = not total.over_asked and not total.double_orders and share >= LEAST_SHARE and unspread <= best + MOST_UNSPREAD
    counts = ("orders", "repeated", "refused", "losses", "kills", "epochs")
    return {
        "ok": ok,
        "days": days,
        "nodes": TARGET,
        "over_asked": total.over_asked,
        "double_orders": total.double_orders,
        "mean_share": rounded(share),
        "unspread_neighbours": rounded(unspread),
        "best_unspread_neighbours": rounded(best),
        **{name: getattr(total, name) for name in counts},
    }


def _live_through(job: tuple[int, Path | None]) -> Tally:
    seed, path = job
    return Rehearsal(_supply(seed, path), seed=seed).run(HOURS * 3600.0)


def _supply(seed: int, path: Path | None) -> Supply:
    """Return the capacity of a day: of a drawn trace, or of a file, from a random moment on and round and round."""
    hours = Market(nodes=TARGET + TARGET // 4, hours=HOURS, zones=len(ZONES))
    trace = generate(hours, seed=seed) if path is None else read_trace(path).zoned(ZONES)
    names = trace.zones
    zones = {name: ZONES[index % len(ZONES)] for index, name in enumerate(names)}
    offset = 0.0 if path is None else random.Random(f"offset {seed}").uniform(0.0, trace.seconds)
    return Supply.of(_changes(trace, zones, offset), zones=ZONES)


def _changes(trace: Trace, zones: Mapping[str, str], offset: float) -> Iterator[tuple[float, str, int]]:
    """Yield what changes from an offset on; after its end the trace begins anew, from nothing."""
    there: dict[str, str] = {}
    for lap in itertools.count():
        begin = lap * trace.seconds - offset
        if begin > HOURS * 3600.0:
            return
        for event in trace.events:
            if event.change is Change.ADD:
                there[event.node] = zones[event.zone]
                yield max(begin + event.seconds, 0.0), there[event.node], 1
            else:
                yield max(begin + event.seconds, 0.0), there.pop(event.node), -1
        yield from ((max(begin + trace.seconds, 0.0), zone, -1) for zone in there.values())
        there.clear()

"""Many traces, drawn from markets with many seeds, and shared out to processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from statistics import fmean, pstdev
from typing import Any

from bamboo_ds.schedule.windows import Redundancy
from bamboo_ds.simulator.comparison import Comparison, Figures
from bamboo_ds.simulator.constants import Constants
from bamboo_ds.simulator.market import Market, generate
from bamboo_ds.simulator.workload import Workload

__all__ = ["Scenario", "mean_figures", "run_seeds"]


@dataclass(frozen=True)
class Scenario:
    """What is simulated: everything but the seed.

    Attributes:
        workload: what is trained.
        constants: of everything else.
        policies: names of the ways to train.
        redundancy: of the policy `bamboo`.
        market: from which traces are drawn.
        kept: whether placement is kept; None decides by the number of nodes.
    """

    workload: Workload
    constants: Constants
    policies: tuple[str, ...]
    redundancy: Redundancy
    market: Market
    kept: bool | None = None


def run_seeds(scenarios: Sequence[Scenario], *, seeds: int, processes: int) -> list[dict[str, list[Figures]]]:
    """Return by scenario and policy the figures of each seed, 1 to `seeds`; in so many processes."""
    drawn = range(1, seeds + 1)
    # A process keeps what it has worked out for a scenario, so each gets few large parts.
    tasks = [(index, drawn[part::processes]) for index in range(len(scenarios)) for part in range(processes)]
    tasks = [task for task in tasks if task[1]]
    work = [(scenarios[index], part) for index, part in tasks]
    results: list[dict[str, dict[int, Figures]]] = [{} for _ in scenarios]
    for (index, _), found in zip(tasks, _mapped(work, processes), strict=True):
        for policy, by_seed in found.items():
            results[index].setdefault(policy, {}).update(by_seed)
    return [{policy: [by[seed] for seed in drawn] for policy, by in found.items()} for found in results]


def _mapped(work: Sequence[tuple[Scenario, Sequence[int]]], processes: int) -> list[dict[str, dict[int, Figures]]]:
    if processes == 1 or len(work) == 1:
        return [_play(task) for task in work]
    # Forking keeps what is loaded; where there is no fork, loading anew works too.
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context(method)) as pool:
        return list(pool.map(_play, work))


def _play(task: tuple[Scenario, Sequence[int]]) -> dict[str, dict[int, Figures]]:
    scenario, seeds = task
    comparison = Comparison(
        scenario.workload, constants=scenario.constants, redundancy=scenario.redundancy, kept=scenario.kept
    )
    found: dict[str, dict[int, Figures]] = {policy: {} for policy in scenario.policies}
    for seed in seeds:
        trace = generate(scenario.market, seed=seed)
        for policy in scenario.policies:
            found[policy][seed] = comparison.run(trace, policy).figures
    return found


def mean_figures(figures: Sequence[Figures]) -> tuple[Figures, Mapping[str, float]]:
    """Return the mean of each figure, and the standard deviation of each that is a number."""
    names = [field.name for field in fields(Figures) if field.name != "seconds_by_cause"]
    values = {name: [getattr(each, name) for each in figures] for name in names}
    causes = figures[0].seconds_by_cause
    by_cause = {cause: fmean(each.seconds_by_cause[cause] for each in figures) for cause in causes}
    means: dict[str, Any] = {name: fmean(found) for name, found in values.items()}
    return Figures(**means, seconds_by_cause=by_cause), {name: pstdev(found) for name, found in values.items()}

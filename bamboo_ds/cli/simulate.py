"""`bamboo-ds simulate`: what a training would cost on a spot market, Bamboo against other ways, in pretend time.

Plans and schedules are those of the real job; nothing is run, and neither torch nor DeepSpeed is loaded.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from bamboo_ds.cli.simulate_options import MARKET_KEYS, SimulateOptions
from bamboo_ds.cli.simulate_report import Answer, Case, report, tables
from bamboo_ds.errors import ConfigError
from bamboo_ds.plan.keeping import warm_up
from bamboo_ds.schedule.windows import MODES, Redundancy
from bamboo_ds.simulator.comparison import POLICIES, Comparison, Run
from bamboo_ds.simulator.constants import Constants
from bamboo_ds.simulator.many import Scenario, mean_figures, run_seeds
from bamboo_ds.simulator.market import Market, generate
from bamboo_ds.simulator.models import MODELS, built_in
from bamboo_ds.simulator.trace import Trace
from bamboo_ds.simulator.trace_files import read_trace, write_trace
from bamboo_ds.simulator.workload import Workload, read_workload

__all__ = ["SimulateOptions", "simulate"]

_PLACEMENTS = ("auto", "policy", "kept")
_SHAPES = ("stages", "pipelines")


def simulate(options: SimulateOptions) -> None:
    """Say what a training costs on spot instances: throughput, dollars, value, and where the time goes."""
    asked = _Asked(options)
    asked.load()
    started = time.monotonic()
    answer = asked.answer()
    wall_seconds = round(time.monotonic() - started, 3)
    for warning in answer.warnings:
        typer.echo(f"bamboo-ds simulate: warning: {warning}", err=True)
    if options.plot is not None:
        _draw(asked, answer, options.plot)
    found = {**report(answer), "wall_seconds": wall_seconds}
    if not options.as_json:
        tables(answer)
    typer.echo(json.dumps(found))


def _draw(asked: _Asked, answer: Answer, path: Path) -> None:
    from bamboo_ds.cli.simulate_plot import draw, draw_sweep

    first = answer.cases[0]
    if first.label:
        draw_sweep(answer.cases, path, title=f"{first.workload.name}, by {', '.join(first.label)}: means, deviations")
    else:
        draw(asked.recorded(), path, title=asked.title)


class _Asked:
    """The options, checked and turned into what is simulated."""

    def __init__(self, options: SimulateOptions) -> None:
        if (options.trace is None) == (options.generate is None):
            raise ConfigError("give either --trace FILE or --generate nodes=48,hours=24,rate=0.10,zones=3")
        if options.seeds < 1:
            raise ConfigError(f"--seeds {options.seeds}: must be at least 1")
        self._options = options
        self._policies = _policies(options.policies)
        self._redundancy = _choice("--redundancy", options.redundancy, MODES)
        self._constants = Constants().with_values(_numbers("--set", options.constants or []))
        self._market = _numbers("--generate", options.generate.split(",") if options.generate else [])
        _refuse_unknown("--generate", self._market, MARKET_KEYS)
        self._trace = None if options.trace is None else self._read(options.trace)
        _choice("--placement", options.placement, _PLACEMENTS)

    def load(self) -> None:
        """Load what placements are made with: that is not simulating, and takes half a second once."""
        if not self._kept(self._first_workload()):
            warm_up()

    @property
    def title(self) -> str:
        """Say in one line what is simulated."""
        workload, trace = self._first_workload(), self._first_trace()
        return f"{workload.name}, P = {workload.num_stages}, D = {workload.pipelines}, on {trace.name}"

    def answer(self) -> Answer:
        """Simulate all that is asked for."""
        cases = self._cases()
        if self._options.write_trace is not None:
            write_trace(self._first_trace(), self._options.write_trace)
        figures = self._of_trace(cases) if self._trace is not None else self._of_market(cases)
        return Answer(
            cases=[Case(label, workload, found) for (label, workload, _), found in zip(cases, figures, strict=True)],
            trace=self._first_trace(),
            seeds=None if self._trace is not None else self._options.seeds,
            placement="kept" if self._kept(cases[0][1]) else "policy",
            constants=self._constants,
            warnings=self._first_trace().warnings,
        )

    def recorded(self) -> dict[str, Run]:
        """Play the first trace again in all ways, for a picture."""
        workload, trace = self._first_workload(), self._first_trace()
        comparison = self._comparison(workload)
        return {policy: comparison.run(trace, policy, record=True) for policy in self._policies}

    # ---- what is simulated ----

    def _cases(self) -> list[tuple[dict[str, float], Workload, Market | None]]:
        """Return a label, a workload and a market for each value of the sweep; one without a sweep."""
        name, values = _swept(self._options.sweep)
        if name is None:
            return [({}, self._workload({}), self._market_of({}, self._workload({})))]
        allowed = _SHAPES if self._trace is not None else (*_SHAPES, *MARKET_KEYS)
        _refuse_unknown("--sweep", {name: 0.0}, allowed)
        labels = [{name: value} for value in values]
        return [(label, (workload := self._workload(label)), self._market_of(label, workload)) for label in labels]

    def _workload(self, label: dict[str, float]) -> Workload:
        options = self._options
        known = built_in(options.model) if options.model in MODELS else read_workload(_file(options.model))
        stages = label.get("stages", options.stages)
        pipelines = label.get("pipelines", options.pipelines)
        sized = known.resized(num_stages=None if stages is None else int(stages))
        nodes = {**self._market, **label}.get("nodes")
        if pipelines is None and nodes is not None:
            pipelines = max(int(nodes) // sized.num_stages, 1)
        return sized if pipelines is None else sized.resized(pipelines=int(pipelines))

    def _market_of(self, label: dict[str, float], workload: Workload) -> Market | None:
        if self._trace is not None:
            return None
        values: dict[str, Any] = {"nodes": workload.most_workers, **self._market}
        values.update({name: value for name, value in label.items() if name in MARKET_KEYS})
        for name in ("nodes", "zones"):
            if name in values:
                values[name] = int(values[name])
        return Market(**values)

    def _read(self, path: Path) -> Trace:
        trace = read_trace(path)
        options = self._options
        if options.cut is not None:
            trace = replace(trace.cut(*_hours(options.cut)), warnings=trace.warnings)
        if options.scale != 1:
            trace = trace.scaled(options.scale)
        if options.zones > 1 and trace.zones == ("",):
            trace = trace.zoned([f"zone{number + 1}" for number in range(options.zones)])
        return trace

    def _first_workload(self) -> Workload:
        return self._cases()[0][1]

    def _first_trace(self) -> Trace:
        market = self._cases()[0][2]
        if market is not None:
            return generate(market, seed=1)
        assert self._trace is not None, "there is a trace or a market"
        return self._trace

    def _kept(self, workload: Workload) -> bool:
        """Return whether placement is kept: the policy's takes seconds for a trace with zones and many losses."""
        if self._options.placement != "auto":
            return self._options.placement == "kept"
        return Comparison(workload, constants=self._constants).kept or self._options.seeds > 1

    def _comparison(self, workload: Workload) -> Comparison:
        return Comparison(workload, constants=self._constants, redundancy=self._redundancy, kept=self._kept(workload))

    def _of_trace(self, cases: Sequence[tuple[dict[str, float], Workload, Market | None]]) -> list[Any]:
        assert self._trace is not None, "this is for traces"
        found = []
        for _, workload, _ in cases:
            comparison = self._comparison(workload)
            by_policy = {policy: [comparison.run(self._trace, policy).figures] for policy in self._policies}
            found.append({policy: mean_figures(figures) for policy, figures in by_policy.items()})
        return found

    def _of_market(self, cases: Sequence[tuple[dict[str, float], Workload, Market | None]]) -> list[Any]:
        scenarios = [
            Scenario(workload, self._constants, self._policies, self._redundancy, market, self._kept(workload))
            for _, workload, market in cases
            if market is not None
        ]
        processes = self._options.processes or os.cpu_count() or 1
        by_case = run_seeds(scenarios, seeds=self._options.seeds, processes=processes)
        return [{policy: mean_figures(figures) for policy, figures in found.items()} for found in by_case]


# ---- parsing ---------------------------------------------------------------------------------------------------------


def _policies(text: str) -> tuple[str, ...]:
    chosen = tuple(name.strip().replace("-", "_") for name in text.split(",") if name.strip())
    for name in chosen:
        if name not in POLICIES:
            raise ConfigError(f"--policies {text}: there is no {name}; choose of {', '.join(POLICIES)}")
    return chosen


def _choice(option: str, value: str, allowed: Sequence[Any]) -> Redundancy:
    if value not in allowed:
        raise ConfigError(f"{option} {value}: must be one of {', '.join(allowed)}")
    return value  # type: ignore[return-value]  # one of the allowed


def _numbers(option: str, pairs: Sequence[str]) -> dict[str, float]:
    """Parse name=value pairs."""
    found = {}
    for pair in filter(None, pairs):
        name, equals, value = pair.partition("=")
        found[name.strip()] = _number(option, pair, value if equals else "")
    return found


def _number(option: str, pair: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ConfigError(f"{option} {pair}: must be name=number") from None


def _refuse_unknown(option: str, found: dict[str, float], allowed: Sequence[str]) -> None:
    for name in found:
        if name not in allowed:
            raise ConfigError(f"{option}: there is no {name}; it must be one of {', '.join(allowed)}")


def _swept(text: str | None) -> tuple[str | None, list[float]]:
    if text is None:
        return None, []
    name, _, values = text.partition("=")
    found = [_number("--sweep", text, value) for value in values.split(",")]
    return name.strip(), found


def _hours(text: str) -> tuple[float, float]:
    start, dash, end = text.partition("-")
    if not dash:
        raise ConfigError(f"--cut {text}: must be two hours, such as 2-8")
    parse: Callable[[str], float] = lambda value: _number("--cut", text, value)  # noqa: E731
    return parse(start) * 3600, parse(end) * 3600


def _file(name: str) -> Path:
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"--model {name}: neither a file nor one of {', '.join(MODELS)}")
    return path

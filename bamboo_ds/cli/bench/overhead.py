"""`bamboo-ds bench overhead`: what redundancy costs a step, against Bamboo without it and against stock DeepSpeed.

The first table is of *paced* layers (they sleep to a fixed time, which stands for an accelerator), because many workers
on few cores have no true bubbles otherwise. The second is of real layers, at two stages.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from bamboo_ds.cli.bench.bamboo import build_bamboo_engine
from bamboo_ds.cli.bench.job import Job, gpt_job, paced_job
from bamboo_ds.cli.bench.report import JSON_OPTION, QUICK_OPTION, finish, progress, reported_failure, rounded, table
from bamboo_ds.cli.bench.turns import Contestant, Pace, Stepper, Timed, ratio, take_turns
from bamboo_ds.cli.bench.workers import warm_up

MODES = ("off", "lflb", "fit", "eflb")
COST_NAMES = ("forward", "backward", "redundant")
FORWARD_SECONDS, BACKWARD_SECONDS = 0.010, 0.020
OFF_BOUND = 1.02
"""Largest step time of Bamboo without redundancy, relative to stock."""
FIT_BOUND = 1.02
"""Largest step time of "fit", relative to "off"."""
EFLB_SLACK = 1.05
"""Largest step time of "eflb", relative to "off", over the bound that the free windows give."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A pipeline to time."""

    stages: int
    micro_batches: int
    paced: bool = True

    @property
    def name(self) -> str:
        """Return its key in the report."""
        return f"{'' if self.paced else 'real_'}p{self.stages}_m{self.micro_batches}"


FULL = (Setting(4, 8), Setting(4, 16), Setting(8, 16), Setting(2, 8, paced=False))
QUICK = (Setting(4, 8), Setting(2, 4, paced=False))


def overhead(as_json: bool = JSON_OPTION, quick: bool = QUICK_OPTION) -> None:
    """Time a step without redundancy, with each mode of it, and on stock DeepSpeed."""
    warm_up()
    started = time.monotonic()
    with reported_failure():
        measured = {each: measure(each, quick=quick) for each in progress(QUICK if quick else FULL, "overhead")}
    report = summarize(measured)
    report["seconds"] = round(time.monotonic() - started, 1)
    tables = [
        _table(measured, paced=True, title="bench overhead, paced layers (they sleep: not the time of this CPU)"),
        _table(measured, paced=False, title="bench overhead, real layers on this CPU"),
    ]
    finish(report, tables, as_json=as_json)


def measure(setting: Setting, *, quick: bool) -> dict[str, Any]:
    """Time stock and every mode in turns.

    Returns:
        The ratios, the bound, and what the fit and eflb workers report (`frc_share_fit` by stage).
    """
    job = job_of(setting)
    stock = Contestant("stock", lambda: _StockStepper(job, setting.stages))
    modes = [Contestant(mode, _bamboo_builder(job, setting.stages, mode)) for mode in MODES]
    timed = take_turns([stock, *modes], setting.stages, _pace(setting, quick=quick))
    return {**_ratios(timed), **_facts(timed, setting)}


def job_of(setting: Setting) -> Job:
    """Return what is trained: one layer per stage, or two transformer blocks per stage."""
    micro_batches = setting.micro_batches
    if setting.paced:
        seconds = {"forward_seconds": FORWARD_SECONDS, "backward_seconds": BACKWARD_SECONDS}
        return paced_job(layers=setting.stages, micro_batches=micro_batches, steps=0, **seconds)
    blocks = 2 * setting.stages
    return gpt_job(dropout=0.1, tied=False, blocks=blocks, hidden=128, rows=16, micro_batches=micro_batches, steps=0)


def demands(setting: Setting, figures: dict[str, Any]) -> dict[str, bool]:
    """Say which of the demands hold; real layers on few cores are shown, not judged."""
    if not setting.paced:
        return {}
    return {
        "off_vs_stock": figures["off_vs_stock"] <= OFF_BOUND,
        "fit_vs_off": figures["fit_vs_off"] <= FIT_BOUND,
        "eflb_vs_off": figures["eflb_vs_off"] <= EFLB_SLACK * figures["eflb_bound"],
    }


def summarize(measured: dict[Setting, dict[str, Any]]) -> dict[str, Any]:
    """Make the report; the figures at the top are those of the first setting (shares) and the largest (bytes)."""
    failed = {
        setting.name: [name for name, holds in demands(setting, figures).items() if not holds]
        for setting, figures in measured.items()
    }
    first = next(iter(measured.values()))
    return {
        **{setting.name: figures for setting, figures in measured.items()},
        "frc_share_fit": first["frc_share_fit"],
        "host_peak_bytes": max(figures["host_peak_bytes"] for figures in measured.values()),
        "swap_saved_bytes": max(figures["swap_saved_bytes"] for figures in measured.values()),
        "failed": {name: demands for name, demands in failed.items() if demands},
        "ok": not any(failed.values()),
    }


class _StockStepper:
    """Stock DeepSpeed's engine."""

    def __init__(self, job: Job, stages: int) -> None:
        from bamboo_ds.cli.bench.stock import build_stock_engine, stock_share

        self._job, self._step = job, 0
        self._engine = build_stock_engine(job, num_stages=stages)
        self._share = stock_share(self._engine)

    def step(self) -> None:
        self._engine.train_batch(self._job.batches(self._step, self._share))
        self._step += 1

    def warmed_up(self) -> None:
        """Nothing is counted here."""

    def facts(self) -> dict[str, Any]:
        return {}


class _BambooStepper:
    """Our engine in one mode."""

    def __init__(self, job: Job, stages: int, mode: str) -> None:
        self._job, self._step, self._mode = job, 0, mode
        # It waits for its turn longer than any wait within a step.
        self._engine = build_bamboo_engine(job, num_stages=stages, redundancy=mode, timeout_seconds=600.0)

    def step(self) -> None:
        self._engine.train_batch(self._job.batches(self._step, self._engine.micro_batch_range))
        self._step += 1

    def warmed_up(self) -> None:
        self._engine.statistics.reset()

    def facts(self) -> dict[str, Any]:
        statistics = self._engine.statistics
        return {
            "stage": self._engine.stage_id,
            "frc_share": statistics.frc_done / max(statistics.frc_possible, 1),
            "host_peak_bytes": statistics.host_peak_bytes,
            "swap_saved_bytes": statistics.swap_saved_bytes,
            "costs": self._engine.stage_costs,
        }


def _bamboo_builder(job: Job, stages: int, mode: str) -> Any:
    def build() -> Stepper:
        return _BambooStepper(job, stages, mode)

    return build


def _pace(setting: Setting, *, quick: bool) -> Pace:
    if quick:
        return Pace(rounds=3 if setting.paced else 1, steps=3, warm_up_steps=3, timeout_seconds=60.0)
    return Pace(rounds=10, steps=3, warm_up_steps=8, timeout_seconds=400.0)


def _ratios(timed: dict[str, Timed]) -> dict[str, float]:
    return {
        "off_vs_stock": rounded(ratio(timed["off"], timed["stock"])),
        **{f"{mode}_vs_off": rounded(ratio(timed[mode], timed["off"])) for mode in ("fit", "eflb", "lflb")},
        **{f"{name}_seconds": rounded(sorted(each.seconds)[len(each.seconds) // 2]) for name, each in timed.items()},
    }


def _facts(timed: dict[str, Timed], setting: Setting) -> dict[str, Any]:
    from bamboo_ds.schedule.windows import eager_bound

    eager = [*timed["fit"].facts, *timed["eflb"].facts]
    costs = timed["eflb"].facts[0]["costs"]
    fit = sorted(timed["fit"].facts, key=lambda facts: facts["stage"])
    return {
        "eflb_bound": rounded(eager_bound(setting.stages, setting.micro_batches, costs)),
        "frc_share_fit": [rounded(facts["frc_share"]) for facts in fit],
        "host_peak_bytes": max(facts["host_peak_bytes"] for facts in eager),
        "swap_saved_bytes": max(facts["swap_saved_bytes"] for facts in eager),
        "stage_costs": {name: [rounded(cost) for cost in getattr(costs, name)] for name in COST_NAMES},
    }


def _table(measured: dict[Setting, dict[str, Any]], *, paced: bool, title: str) -> Any:
    ratios = ["off/stock", "lflb/off", "fit/off", "eflb/off", "bound"]
    columns = ["P", "M", "stock s", "off s", *ratios, "FRC in fit"]
    keys = ("stock_seconds", "off_seconds", "off_vs_stock", "lflb_vs_off", "fit_vs_off", "eflb_vs_off", "eflb_bound")
    rows = [
        [
            setting.stages,
            setting.micro_batches,
            *(f"{figures[key]:.3f}" for key in keys),
            " ".join(f"{share:.0%}" for share in figures["frc_share_fit"]),
        ]
        for setting, figures in measured.items()
        if setting.paced == paced
    ]
    caption = (
        "P stages, M micro-batches; medians of step times, in turns; FRC in fit: share of M that is ready, by stage"
    )
    return table(title, columns, rows, caption=caption)

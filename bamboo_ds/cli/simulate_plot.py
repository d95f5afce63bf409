"""The pictures of `bamboo-ds simulate`: a trace over time, and the figures of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bamboo_ds.cli.simulate_report import Case
from bamboo_ds.errors import ConfigError
from bamboo_ds.simulator.comparison import Run
from bamboo_ds.simulator.ledger import Cause

__all__ = ["draw", "draw_sweep"]

BINS = 90
"""Of time, for throughput: enough to see every loss, few enough to tell the lines apart."""

POLICY_COLOURS = {
    "bamboo": "#2a7f3f",
    "bamboo_eflb": "#7fbf3f",
    "bamboo_lflb": "#1f5f5f",
    "checkpoint": "#c0392b",
    "sample_dropping": "#d98c1f",
    "varuna": "#8e5ea2",
    "oobleck": "#2e6fb7",
    "on_demand": "#555555",
}

CAUSE_COLOURS = {
    Cause.TRAINING: "#3f9f5f",
    Cause.REDUNDANCY: "#a8d08d",
    Cause.MERGED: "#d6e27f",
    Cause.CHECKPOINT: "#8fb8de",
    Cause.FAILOVER: "#f2c14e",
    Cause.LOST: "#c0392b",
    Cause.RECONFIGURATION: "#8e5ea2",
    Cause.RESTART: "#e67e22",
    Cause.WAITING: "#bdbdbd",
}


def draw(runs: Mapping[str, Run], path: Path, *, title: str) -> None:
    """Draw runs of one trace.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    pyplot = _pyplot()
    figure, (nodes, throughput, causes) = pyplot.subplots(
        3, 1, figsize=(11, 10.5), height_ratios=[1, 1.6, 1.2], constrained_layout=True
    )
    figure.suptitle(title)
    _draw_nodes(nodes, runs)
    _draw_throughput(throughput, runs)
    _draw_causes(causes, runs)
    throughput.sharex(nodes)
    _save(pyplot, figure, path)


def draw_sweep(cases: Sequence[Case], path: Path, *, title: str) -> None:
    """Draw throughput and value of each way to train against what is swept.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    pyplot = _pyplot()
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 5), constrained_layout=True)
    figure.suptitle(title)
    (name,) = cases[0].label
    at = [case.label[name] for case in cases]
    for axes, what, label in zip(
        panels, ("throughput", "value"), ("samples per second", "samples per dollar"), strict=True
    ):
        for policy in cases[0].found:
            values = [getattr(case.found[policy][0], what) for case in cases]
            spread = [case.found[policy][1][what] for case in cases]
            style = "--" if policy == "on_demand" else "-"
            axes.errorbar(
                at, values, spread, fmt=f"o{style}", color=POLICY_COLOURS[policy], label=policy, capsize=2, ms=4,
                lw=2.0 if policy == "bamboo" else 1.1,
            )  # fmt: skip
        axes.set(xlabel=name, ylabel=label, ylim=(0, None))
        axes.grid(alpha=0.3)
    figure.legend(
        *panels[0].get_legend_handles_labels(), ncols=len(cases[0].found), loc="outside lower center", frameon=False
    )
    _save(pyplot, figure, path)


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'bamboo_ds[plot]'") from None
    return pyplot


def _save(pyplot: Any, figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {error}") from None
    finally:
        pyplot.close(figure)


def _draw_nodes(axes: Any, runs: Mapping[str, Run]) -> None:
    trace = next(iter(runs.values())).trace
    steps = [(0.0, 0), *trace.live(), (trace.seconds, trace.live()[-1][1] if trace.events else 0)]
    axes.step([at / 3600 for at, _ in steps], [count for _, count in steps], where="post", color="#333333", lw=1.2)
    axes.fill_between(
        [at / 3600 for at, _ in steps], [count for _, count in steps], step="post", color="#333333", alpha=0.12
    )
    axes.set(ylabel="nodes", ylim=(0, None), xlim=(0, trace.seconds / 3600), title="nodes the market gives")
    axes.grid(alpha=0.3)


def _draw_throughput(axes: Any, runs: Mapping[str, Run]) -> None:
    for policy, run in runs.items():
        hours, rates = binned(run, bins=BINS)
        mean = run.figures.throughput
        style = "--" if policy == "on_demand" else "-"
        width = 2.0 if policy == "bamboo" else 1.1
        axes.plot(
            hours, rates, style, color=POLICY_COLOURS[policy], lw=width, label=f"{policy} (mean {mean:.0f})",
            zorder=3 if policy == "bamboo" else 2, drawstyle="steps-mid",
        )  # fmt: skip
    axes.set(
        ylabel="samples per second",
        xlabel="hours",
        ylim=(0, None),
        title="throughput; steps that were lost again do not count",
    )
    axes.grid(alpha=0.3)
    axes.legend(ncols=3, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False)


def _draw_causes(axes: Any, runs: Mapping[str, Run]) -> None:
    names = [policy for policy in runs if policy != "on_demand"]
    left = [0.0] * len(names)
    for cause in Cause:
        shares = []
        for policy in names:
            found = runs[policy].figures.seconds_by_cause
            shares.append(100 * found[cause.value] / (sum(found.values()) or 1.0))
        if any(share > 0 for share in shares):
            axes.barh(
                names, shares, left=left, color=CAUSE_COLOURS[cause], label=cause.value, edgecolor="white", lw=0.5
            )
            left = [before + share for before, share in zip(left, shares, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="% of the time", xlim=(0, 100), title="where the time went")
    axes.legend(ncols=5, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.22), frameon=False)


def binned(run: Run, *, bins: int) -> tuple[list[float], list[float]]:
    """Return the middle of each bin of time in hours, and the samples per second in it."""
    width = run.trace.seconds / bins
    samples = [0.0] * bins
    for start, end, rate in run.ledger.segments:
        first, last = int(start / width), min(int(end / width), bins - 1)
        for index in range(first, last + 1):
            overlap = min(end, (index + 1) * width) - max(start, index * width)
            samples[index] += max(overlap, 0.0) * rate
    return [(index + 0.5) * width / 3600 for index in range(bins)], [count / width for count in samples]

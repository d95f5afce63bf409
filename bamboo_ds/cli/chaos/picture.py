"""Draws a run whose nodes came and went: nodes, pipelines, throughput and loss, over the same time.

The demo draws with it, too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bamboo_ds.cli.chaos.report import Timeline, at_once
from bamboo_ds.simulator.trace import Change

__all__ = ["Mark", "Story", "draw"]

_RATE_SECONDS = 4.0
_LOST, _CAME, _CALM, _SHAPE = "firebrick", "seagreen", "lightskyblue", "tab:purple"


@dataclass(frozen=True, slots=True)
class Mark:
    """What happened to the fleet, in words.

    Attributes:
        at: `time.time()`.
        text: a few words.
    """

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Story:
    """What is drawn.

    Attributes:
        title: what is to be seen.
        timeline: of the run.
        capacity: nodes of the whole fleet.
        batch: samples of a step.
        undisturbed_rate: samples per second that nobody disturbs.
        expected: loss of each step of the undisturbed run.
        loss_name: its unit.
        marks: to write beside the nodes.
    """

    title: str
    timeline: Timeline
    capacity: int
    batch: int
    undisturbed_rate: float
    expected: Sequence[float]
    loss_name: str = "loss"
    marks: Sequence[Mark] = ()


def draw(story: Story, path: Path) -> str | None:
    """Draw into a PNG and return its path; None, and a word about it, where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
        return None
    figure = Figure(figsize=(11, 9), layout="constrained")
    FigureCanvasAgg(figure)
    nodes, shape, rate, loss = figure.subplots(4, sharex=True, height_ratios=(3, 2, 3, 4))
    _draw_nodes(nodes, story)
    _draw_shape(shape, story)
    _draw_rate(rate, story)
    _draw_loss(loss, story)
    for mark in story.marks:
        for axes in (nodes, shape, rate, loss):
            axes.axvline(mark.at - story.timeline.steps[0].at, color="grey", linestyle="--", linewidth=0.8)
    figure.suptitle(story.title, wrap=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return str(path)


def _draw_nodes(axes: Any, story: Story) -> None:
    """Draw how many nodes there are, and what was lost and came; a number tells how many at once."""
    from matplotlib.ticker import MaxNLocator

    timeline, zero = story.timeline, story.timeline.steps[0].at
    times = [max(deed.at - zero, 0.0) for deed in timeline.deeds]
    live = [deed.live for deed in timeline.deeds]
    axes.step([*times, timeline.seconds], [*live, live[-1]], where="post", color="black", linewidth=1.2)
    axes.axhline(story.capacity, color=_CALM, linewidth=5, zorder=0, label="whole fleet")
    for change, color, marker, label in ((Change.REMOVE, _LOST, "v", "lost"), (Change.ADD, _CAME, "^", "came")):
        later = [deed for deed in timeline.deeds if deed.at > zero]
        for number, group in enumerate(at_once(later, change)):
            at, left = group[0].at - zero, group[-1].live
            axes.plot(at, left, marker, color=color, markersize=7, label=label if number == 0 else None)
            if len(group) > 1:
                place = {"xy": (at, left), "textcoords": "offset points", "xytext": (7, -4)}
                axes.annotate(len(group), **place, fontsize=8, color=color)
    for number, mark in enumerate(story.marks):
        place = {"xy": (mark.at - zero, 1), "xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        axes.annotate(mark.text, **place, xytext=(0, 3 + 11 * (number % 2)), ha="center", fontsize=8)
    axes.set_ylim(0, 1.2 * story.capacity)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("nodes")
    _legend(axes)


def _legend(axes: Any) -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize="small")


def _draw_shape(axes: Any, story: Story) -> None:
    steps, zero = story.timeline.steps, story.timeline.steps[0].at
    times = [step.at - zero for step in steps]
    axes.step(times, [step.pipelines for step in steps], where="post", color=_SHAPE, linewidth=2, label="pipelines")
    axes.step(times, [step.stages for step in steps], where="post", color="grey", linestyle=":", label="stages of each")
    top = max(max(step.pipelines, step.stages) for step in steps)
    axes.set_ylim(0, top + 0.7)
    axes.set_yticks(range(top + 1))
    axes.set_ylabel("plan")
    _legend(axes)


def _draw_rate(axes: Any, story: Story) -> None:
    """Draw the throughput in a moving window, and where training stood still or went back."""
    steps, zero = story.timeline.steps, story.timeline.steps[0].at
    edges = [step.at - zero for step in steps]
    times = [_RATE_SECONDS / 4 * number for number in range(int(4 * edges[-1] / _RATE_SECONDS) + 1)]
    rates = [story.batch * sum(abs(edge - at) <= _RATE_SECONDS / 2 for edge in edges) / _window(at, edges[-1])
             for at in times]  # fmt: skip
    axes.axhline(story.undisturbed_rate, color=_CALM, linewidth=5, zorder=0, label="whole fleet, undisturbed")
    axes.fill_between(times, rates, step="mid", color="navy", alpha=0.25)
    axes.plot(times, rates, color="navy", linewidth=1.2, label="this run")
    back = [after.at - zero for before, after in pairwise(steps) if after.step < before.step]
    for number, at in enumerate(back):
        label = "back to a checkpoint" if number == 0 else None
        axes.axvline(at, color="darkorange", linestyle="--", label=label)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("samples / s")
    _legend(axes)


def _window(at: float, end: float) -> float:
    """Return how much of the window around a moment lies in the run."""
    return max(min(at + _RATE_SECONDS / 2, end) - max(at - _RATE_SECONDS / 2, 0.0), _RATE_SECONDS / 2)


def _draw_loss(axes: Any, story: Story) -> None:
    """Draw the undisturbed loss broad and pale, and this run's on it: where they are equal, both are seen."""
    steps, zero = story.timeline.steps, story.timeline.steps[0].at
    times = [step.at - zero for step in steps]
    expected = [story.expected[step.step] for step in steps]
    axes.plot(times, expected, color=_CALM, linewidth=6, label="undisturbed run, same step")
    axes.plot(times, [step.loss for step in steps], color="navy", linewidth=1, label="this run")
    axes.set_ylabel(story.loss_name)
    axes.set_xlabel("seconds")
    _legend(axes)

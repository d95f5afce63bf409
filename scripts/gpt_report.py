"""What the main job shows of itself: loss curves, progress, the plot."""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

SUMMARY_STEPS = 5
"""Steps whose mean loss is the first and the last loss of the summary."""

RATE_STEPS = 20
"""Steps over which the rate and the remaining time are estimated."""


@dataclasses.dataclass
class Curves:
    """The losses of a run, and how long its training steps took."""

    first_step: int
    """Number of the first step, from 1; larger after loading a checkpoint."""
    batch_size: int
    """Samples per step, of all pipelines together."""
    training: list[float] = dataclasses.field(default_factory=list)
    """Mean loss of each step's global batch."""
    seconds: list[float] = dataclasses.field(default_factory=list)
    """Duration of each step, validation not counted."""
    validation: dict[int, float] = dataclasses.field(default_factory=dict)
    """Validation loss after the steps that were followed by one."""

    def add(self, loss: float, *, seconds: float) -> None:
        """Note one training step."""
        self.training.append(loss)
        self.seconds.append(seconds)

    def samples_per_second(self, *, steps: int = RATE_STEPS) -> float:
        """Return the rate over the last steps."""
        recent = self.seconds[-steps:]
        return self.batch_size * len(recent) / sum(recent) if recent else 0.0

    def summary(self) -> dict[str, Any]:
        """Return the figures for the JSON; the rate is that of all steps."""
        return {
            "loss_first": _mean(self.training[:SUMMARY_STEPS]),
            "loss_last": _mean(self.training[-SUMMARY_STEPS:]),
            "validation_loss": _mean(list(self.validation.values())[-1:]),
            "steps": len(self.training),
            "samples_per_second": round(self.samples_per_second(steps=len(self.seconds)), 2),
        }


def _mean(values: Sequence[float]) -> float | None:
    return round(statistics.fmean(values), 4) if values else None


class Progress(Protocol):
    """Shows how far the run is."""

    def show(self, step: int, curves: Curves) -> None:
        """Show that a step is done; its figures stand last in the curves."""


class Silence:
    """The progress of the workers that do not report."""

    def show(self, step: int, curves: Curves) -> None:
        """Show nothing."""


class Lines:
    """One plain line every few steps on stderr, for log files."""

    def __init__(self, *, steps: int, interval: int) -> None:
        self._steps = steps
        self._interval = interval

    def show(self, step: int, curves: Curves) -> None:
        """Write a line when one is due: at the interval, with a validation, at the end."""
        if step % self._interval and step != self._steps and step not in curves.validation:
            return
        parts = [f"step {step}/{self._steps}", f"loss {curves.training[-1]:.4f}"]
        if step in curves.validation:
            parts.append(f"validation {curves.validation[step]:.4f}")
        remaining = (self._steps - step) * statistics.fmean(curves.seconds[-RATE_STEPS:])
        parts += [f"{curves.samples_per_second():.1f} samples/s", f"ETA {remaining:.0f} s"]
        print("  ".join(parts), file=sys.stderr, flush=True)


class Bar:
    """A progress bar on the terminal behind stderr."""

    def __init__(self, *, steps: int, first_step: int) -> None:
        from rich import progress
        from rich.console import Console

        columns = (
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("loss {task.fields[loss]}  validation {task.fields[validation]}"),
            progress.TextColumn("{task.fields[rate]} samples/s"),
            progress.TimeRemainingColumn(),
        )
        self._bar = progress.Progress(*columns, console=Console(stderr=True))
        fields: dict[str, Any] = {"loss": "-", "validation": "-", "rate": "-"}
        self._task = self._bar.add_task("training", total=steps, completed=first_step - 1, **fields)

    def __enter__(self) -> Bar:
        """Start drawing."""
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the bar as it stands on the screen."""
        self._bar.stop()

    def show(self, step: int, curves: Curves) -> None:
        """Move the bar."""
        fields: dict[str, Any] = {"loss": f"{curves.training[-1]:.3f}", "rate": f"{curves.samples_per_second():.1f}"}
        if step in curves.validation:
            fields["validation"] = f"{curves.validation[step]:.3f}"
        self._bar.update(self._task, completed=step, **fields)


def progress_for(*, steps: int, first_step: int, interval: int, reports: bool) -> AbstractContextManager[Progress]:
    """Choose a bar on a terminal, lines elsewhere, silence on the workers that do not report."""
    if not reports:
        return nullcontext(Silence())
    if sys.stderr.isatty():
        return Bar(steps=steps, first_step=first_step)
    return nullcontext(Lines(steps=steps, interval=interval))


def plot_losses(curves: Curves, *, title: str, path: Path) -> str | None:
    """Draw the losses into a PNG and return its path, or None (and say so) where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        print("no loss plot: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    _draw(figure.subplots(), curves, title=title)
    figure.savefig(path, dpi=120)
    return str(path)


def _draw(axes: Any, curves: Curves, *, title: str) -> None:
    steps = range(curves.first_step, curves.first_step + len(curves.training))
    axes.plot(steps, curves.training, linewidth=1, color="tab:blue", label="training (each step)")
    axes.plot(list(curves.validation), list(curves.validation.values()), "o-", color="tab:orange", label="validation")
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()

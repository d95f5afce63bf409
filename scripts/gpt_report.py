"""What the main job and the demo show of themselves: loss curves, progress, plots."""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SUMMARY_STEPS = 5
"""Steps whose mean loss is the first and the last loss of the summary."""

RATE_STEPS = 20
"""Steps over which the rate and the remaining time are estimated."""


@dataclasses.dataclass
class Curves:
    """The losses of a run, and how long its training steps took."""

    first_step: int
    """Number of the first step, from 1; larger after loading a checkpoint, or on a worker that came later."""
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

    @property
    def next_step(self) -> int:
        """Number of the step that follows."""
        return self.first_step + len(self.training)

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

    def write(self, path: Path) -> None:
        """Write the losses to a file, whole or not at all. JSON keeps every bit of a float."""
        fields = {
            "first_step": self.first_step,
            "batch_size": self.batch_size,
            "training": self.training,
            "validation": self.validation,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.draft")
        draft.write_text(json.dumps(fields) + "\n", encoding="utf-8")
        draft.replace(path)

    @classmethod
    def read(cls, path: Path) -> Curves:
        """Return the losses that a file holds; how long the steps took does not stand there."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        validation = {int(step): loss for step, loss in fields.pop("validation").items()}
        return cls(**fields, validation=validation)


def _mean(values: Sequence[float]) -> float | None:
    return round(statistics.fmean(values), 4) if values else None


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
    """A progress bar on the terminal behind stderr, drawn from now on."""

    def __init__(self, *, steps: int, done: int) -> None:
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
        self._task = self._bar.add_task("training", total=steps, completed=done, **fields)
        self._bar.start()

    def stop(self) -> None:
        """Leave the bar as it stands on the screen."""
        self._bar.stop()

    def show(self, step: int, curves: Curves) -> None:
        """Move the bar."""
        fields: dict[str, Any] = {"loss": f"{curves.training[-1]:.3f}", "rate": f"{curves.samples_per_second():.1f}"}
        if curves.validation:
            fields["validation"] = f"{list(curves.validation.values())[-1]:.3f}"
        self._bar.update(self._task, completed=step, **fields)


class Progress:
    """Shows how far the run is: a bar on a terminal, lines elsewhere. Nothing appears before the first `show`.

    So a worker that never reports shows nothing, and one that has to go on for another, which died, begins then.
    """

    def __init__(self, *, steps: int, interval: int) -> None:
        self._steps, self._interval = steps, interval
        self._shown: Bar | Lines | None = None

    def __enter__(self) -> Progress:
        """Show nothing yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave what is shown as it stands."""
        if isinstance(self._shown, Bar):
            self._shown.stop()

    def show(self, step: int, curves: Curves) -> None:
        """Show that a step is done; its figures stand last in the curves."""
        if self._shown is None:
            self._shown = self._begin(done=step - 1)
        self._shown.show(step, curves)

    def _begin(self, *, done: int) -> Bar | Lines:
        if sys.stderr.isatty():
            return Bar(steps=self._steps, done=done)
        return Lines(steps=self._steps, interval=self._interval)


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
    axes = figure.subplots()
    steps = range(curves.first_step, curves.next_step)
    axes.plot(steps, curves.training, linewidth=1, color="tab:blue", label="training (each step)")
    validation = [list(values) for values in (curves.validation, curves.validation.values())]
    axes.plot(*validation, "o-", color="tab:orange", label="validation")
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    figure.savefig(path, dpi=120)
    return str(path)

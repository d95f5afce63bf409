"""Who begins a job: when the roster of its first workers is closed, purely from who is there and for how long.

Whoever comes later is a standby. A number of workers closes the roster the moment it is reached; without one, or short
of it, patience does: when nobody has joined for a while, those there begin.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bamboo_ds.errors import ConfigError
from bamboo_ds.plan.job import Roster


@dataclass(frozen=True, slots=True)
class StartRule:
    """When a job begins.

    Attributes:
        start_workers: as soon as so many workers are ready; None leaves it to patience alone.
        patience_seconds: with fewer, but one at least, when for so long nobody has joined.
    """

    start_workers: int | None = None
    patience_seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.start_workers is not None and self.start_workers < 1:
            raise ConfigError(f"start_workers = {self.start_workers}: a job begins with at least 1 worker")
        if not 0 <= self.patience_seconds < float("inf"):
            raise ConfigError(f"patience_seconds = {self.patience_seconds}: must be 0 or more, and finite")


def close_roster(rule: StartRule, *, ready: Iterable[int], waited_seconds: float) -> Roster | None:
    """Return the workers that begin the job; None while it should wait for more.

    Args:
        rule: when a job begins.
        ready: ids of the live workers that can be given a stage.
        waited_seconds: since the last one joined.
    """
    workers = tuple(sorted(set(ready)))
    if not workers:
        return None
    if rule.start_workers is not None and len(workers) >= rule.start_workers:
        return Roster(workers, f"{len(workers)} workers are ready, {rule.start_workers} were asked for")
    if waited_seconds < rule.patience_seconds:
        return None
    wanted = "" if rule.start_workers is None else f" of {rule.start_workers}"
    patience = f"nobody has joined for {rule.patience_seconds:g} s"
    return Roster(workers, f"{len(workers)}{wanted} worker(s) are ready and {patience}")

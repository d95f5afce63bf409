"""Kills workers while they enter an epoch: at a moment of a phase that is asked for, and notes in which they died.

::

    decided          a plan of another epoch is there; what is held is kept, the module is cut anew
    links forming    links and groups of the new place, rows of what all hold and need
    pairs forming    nobody has begun to send
    on the wire      layers travel to or from this worker
    choosing         a layer is held by nobody: which checkpoint is the newest
    reading          its layers are read
    settling         layers are put where they belong; all wait until all have
    training         too late
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Program = Callable[[], Any]
WIRE = "on the wire"


@dataclass(frozen=True, slots=True)
class Death:
    """One worker that dies.

    Attributes:
        epoch: that it enters.
        phase: of it, at least.
        delay_seconds: after the phase has begun, for this worker.
        number: which one dies of those that take part in the phase, in the order of ids; counted round and round.
        late: whether one dies that has come later than the others, whichever is there first.
    """

    epoch: int
    phase: str
    delay_seconds: float
    number: int = 0
    late: bool = False


def dying(
    program: Program,
    deaths: Sequence[Death],
    folder: Path,
    *,
    message_seconds: float = 0.0,
    unit_seconds: float = 0.0,
) -> Program:
    """Return the program of a worker that dies, if it is one of those that do.

    Args:
        program: what it does otherwise.
        deaths: of all workers.
        folder: takes a note of each death; see `died`.
        message_seconds: how long each message of a transfer takes at least, so that deaths meet it.
        unit_seconds: likewise each layer that is read from a checkpoint.
    """

    def run() -> Any:
        _Victim(deaths, folder).watch(message_seconds=message_seconds, unit_seconds=unit_seconds)
        return program()

    return run


def died(folder: Path) -> Counter[str]:
    """Return how many have died in each phase."""
    return Counter(json.loads(path.read_text())["phase"] for path in folder.glob("*.json"))


class _Victim:
    """Watches a worker enter epochs."""

    def __init__(self, deaths: Sequence[Death], folder: Path) -> None:
        self._deaths, self._folder, self._phase, self._worker = deaths, folder, "training", -1
        self._due: tuple[Death, ...] = ()
        self._late = False
        self._lock = threading.Lock()

    def watch(self, *, message_seconds: float, unit_seconds: float) -> None:
        """Follow the phases of this process's engine."""
        from bamboo_ds.comm import transfer
        from bamboo_ds.engine import checkpoint_loading
        from bamboo_ds.engine.checkpointing import Checkpointing
        from bamboo_ds.engine.reshape import Reshaping

        before_call(Reshaping, "_reshape", self._decide)
        before_call(Reshaping, "_stock_row", lambda *_: self._enter("links forming"))
        before_call(Reshaping, "_carry", self._pair)
        before_call(transfer, "_pass", lambda *_: self._pass_one(message_seconds))
        before_call(Checkpointing, "_restored", lambda *_: self._enter("choosing"))
        before_call(Checkpointing, "_read", lambda *_: self._enter("reading"))
        before_call(checkpoint_loading, "read_unit", lambda *_: time.sleep(unit_seconds))
        before_call(Reshaping, "_fill", lambda *_: self._enter("settling"))
        before_call(Reshaping, "_report_epoch", lambda *_: self._enter("training"))

    # ---- phases ------------------------------------------------------------------------------------------------

    def _decide(self, engine: Any, plan: Any, _: Any) -> None:
        self._worker, self._late, self._due = engine._source.worker, engine._came_late, ()
        if not plan.aborted and self._worker in plan.workers:
            for death in (one for one in self._deaths if one.epoch == plan.epoch):
                if (death.phase == WIRE and not death.late) or self._is_mine(death, plan.workers):
                    self._due += (death,)
            self._enter("decided")

    def _pair(self, *arguments: Any) -> None:
        shipping = arguments[-1]
        # Only now it is known who sends and receives.
        ends = sorted({end for one in shipping.shipments for end in (one.source, one.target)})
        self._due = tuple(one for one in self._due if one.phase != WIRE or one.late or self._is_mine(one, ends))
        self._enter("pairs forming")

    def _is_mine(self, death: Death, workers: Sequence[int]) -> bool:
        if not death.late:
            return bool(workers) and workers[death.number % len(workers)] == self._worker
        with contextlib.suppress(FileExistsError):  # then another has taken it upon itself
            if self._late and not self._due:
                (self._folder / f"{death.epoch}-{death.number}").touch(exist_ok=False)
                return True
        return False

    def _enter(self, phase: str) -> None:
        self._phase = phase
        for death in self._due:
            if death.phase == phase:
                timer = threading.Timer(death.delay_seconds, self._die, (death,))
                timer.daemon = True
                timer.start()

    def _pass_one(self, seconds: float) -> None:
        with self._lock:
            if self._phase == "pairs forming":
                self._enter(WIRE)
        time.sleep(seconds)

    def _die(self, death: Death) -> None:
        (self._folder / f"{self._worker}.json").write_text(json.dumps({"asked": death.phase, "phase": self._phase}))
        os.kill(os.getpid(), signal.SIGKILL)


def before_call(owner: Any, name: str, act: Callable[..., None]) -> None:
    """Do something before each call of a function or method, with its arguments."""
    stock = getattr(owner, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        act(*args)
        return stock(*args, **kwargs)

    setattr(owner, name, called)

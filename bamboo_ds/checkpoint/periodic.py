"""Checkpoints that are written by themselves, beside training: when one is due, and what becomes of it.

Whatever goes wrong is told and forgotten: training does not need them as long as nothing else goes wrong.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from bamboo_ds.checkpoint.background import Background, Report
from bamboo_ds.checkpoint.manifest import Written
from bamboo_ds.checkpoint.storage import Storage, open_storage
from bamboo_ds.checkpoint.writing import Closing, Part, await_notes, close, leave_note, write_part
from bamboo_ds.config.checkpoint import CheckpointConfig


@dataclass(frozen=True, slots=True)
class Begun:
    """A checkpoint that is being written.

    Attributes:
        tag: its folder.
        step: optimizer steps committed.
        workers: all who write a part.
        worker: this one.
    """

    tag: str
    step: int
    workers: tuple[int, ...]
    worker: int


class Periodic:
    """One worker's part in checkpoints that are written by themselves.

    Args:
        settings: `bamboo.checkpoint`.
        step: optimizer steps committed so far.
        timeout_seconds: how long to wait for the parts of the others.
        tell: is given each report, from whichever thread.
    """

    def __init__(
        self, settings: CheckpointConfig, *, step: int, timeout_seconds: float, tell: Callable[[Report], None]
    ) -> None:
        self.settings = settings
        self._step, self._at = step, time.monotonic()
        self._timeout_seconds, self._background = timeout_seconds, Background(tell)
        self._begun: Begun | None = None

    @property
    def busy(self) -> bool:
        """Whether the last one is still being written here."""
        return self._background.busy

    def due(self, step: int) -> bool:
        """Return whether this worker wants a checkpoint after so many steps.

        Clocks of workers differ, so with `interval_seconds` they want it at different steps: the first one decides.
        """
        self._step = min(self._step, step - 1)  # training may have gone back to an earlier step
        if self.settings.interval_steps is not None:
            return step // self.settings.interval_steps > self._step // self.settings.interval_steps
        if self.settings.interval_seconds is not None:
            return time.monotonic() - self._at >= self.settings.interval_seconds
        return False

    def begin(self, begun: Begun, part: Callable[[], Part], closing: Callable[[], Closing] | None) -> None:
        """Write this worker's part, and the manifest if `closing` says how.

        Args:
            begun: what is written.
            part: makes it, from copies that training does not change.
            closing: makes what the one worker needs that writes the manifest. Both are called before this returns.
        """
        self._step, self._at, self._begun = begun.step, time.monotonic(), begun
        try:
            made: tuple[Part, Closing | None] | Exception = part(), closing() if closing is not None else None
        except Exception as error:
            made = error
        work = _Work(self.settings.path, begun, made, self._timeout_seconds)
        self._background.start(begun.tag, work.run)

    def lost(self, dead: frozenset[int]) -> None:
        """Learn who is dead: nothing will be heard of their parts."""
        if self._begun is not None and dead.intersection(self._begun.workers):
            self._background.give_up()

    def finish(self, *, timeout_seconds: float) -> bool:
        """Wait for what is being written; return whether it has ended."""
        return self._background.finish(timeout_seconds=timeout_seconds)


@dataclass(frozen=True, slots=True)
class _Work:
    """What runs in the other thread."""

    path: str
    begun: Begun
    made: tuple[Part, Closing | None] | Exception
    timeout_seconds: float

    def run(self, given_up: Callable[[], bool]) -> Report:
        started, storage = time.monotonic(), open_storage(self.path)
        written, closing = self._write(storage)
        if closing is not None:
            notes = await_notes(storage, closing, given_up=given_up, timeout_seconds=self.timeout_seconds)
            close(storage, closing, notes)
        return Report(
            tag=self.begun.tag,
            bytes=sum(record.bytes for record in written.files.values()),
            seconds=time.monotonic() - started,
            finished=closing is not None,
        )

    def _write(self, storage: Storage) -> tuple[Written, Closing | None]:
        """Write the part; let the others know if that cannot be done, so that nobody waits for it."""
        try:
            if isinstance(self.made, Exception):
                raise self.made
            part, closing = self.made
            return write_part(storage, part), closing
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            with contextlib.suppress(OSError):
                leave_note(storage, self.begun.tag, Written(worker=self.begun.worker, error=told))
            raise

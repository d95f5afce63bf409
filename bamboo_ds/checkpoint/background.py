"""Does one piece of work at a time in a thread of its own, beside training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Report:
    """What has come of a worker's part of a checkpoint.

    Attributes:
        tag: of the checkpoint.
        bytes: that this worker has written.
        seconds: that took.
        finished: whether this worker has made the whole checkpoint exist.
        error: what went wrong; empty if nothing has.
    """

    tag: str
    bytes: int = 0
    seconds: float = 0.0
    finished: bool = False
    error: str = ""


class Background:
    """A thread for writing. Errors come back as reports: they never end the job.

    Args:
        tell: is given each report, in the thread that has made it.
    """

    def __init__(self, tell: Callable[[Report], None]) -> None:
        self._tell = tell
        self._thread: threading.Thread | None = None
        self._given_up = threading.Event()

    @property
    def busy(self) -> bool:
        """Whether it is at work."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, tag: str, work: Callable[[Callable[[], bool]], Report]) -> None:
        """Begin a piece of work.

        Args:
            tag: of the checkpoint.
            work: is given what says whether it should give up waiting for others.
        """
        assert not self.busy
        self._given_up = threading.Event()
        given_up = self._given_up.is_set
        self._thread = threading.Thread(
            target=self._run, args=(tag, work, given_up), name=f"checkpoint {tag}", daemon=True
        )
        self._thread.start()

    def _run(self, tag: str, work: Callable[[Callable[[], bool]], Report], given_up: Callable[[], bool]) -> None:
        begun = time.monotonic()
        try:
            report = work(given_up)
        except Exception as error:
            seconds = time.monotonic() - begun
            report = Report(tag, seconds=seconds, error=f"{type(error).__name__}: {error}")
        self._tell(report)

    def give_up(self) -> None:
        """Let it wait for nobody any more: some other worker is lost. What it writes itself, it finishes."""
        self._given_up.set()

    def finish(self, *, timeout_seconds: float) -> bool:
        """Wait for the work to end; return whether it has."""
        if self._thread is not None:
            self._thread.join(timeout_seconds)
        return not self.busy

"""Clocks. Whoever waits or counts time is handed one, so that tests and the simulator can let it pass at will.

`ManualClock` stands still until `advance` is called; a thread that waits on it wakes when its moment has come.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

__all__ = ["Clock", "ManualClock", "SystemClock"]


class Clock(Protocol):
    """Tells the time and waits for it."""

    def now(self) -> float:
        """Return seconds since some fixed moment; they never go back."""
        ...

    def wait(self, condition: threading.Condition, timeout_seconds: float) -> None:
        """Wait, at most so long, until a condition that the caller holds is notified; it may also wake for nothing."""
        ...


class SystemClock:
    """The monotonic clock of this machine."""

    def now(self) -> float:
        """Return `time.monotonic()`."""
        return time.monotonic()

    def wait(self, condition: threading.Condition, timeout_seconds: float) -> None:
        """Wait in real time."""
        condition.wait(max(timeout_seconds, 0.0))


class ManualClock:
    """A clock that moves only when told to.

    Args:
        start_seconds: the first answer of `now`.
        guard_seconds: real seconds after which a wait gives up, as nobody seems to move the clock.
    """

    def __init__(self, start_seconds: float = 0.0, *, guard_seconds: float = 30.0) -> None:
        self._now, self._guard_seconds = start_seconds, guard_seconds
        self._lock = threading.Lock()
        self._waiting: list[threading.Condition] = []

    def now(self) -> float:
        """Return the seconds this clock was told."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move on and wake everyone who waits."""
        if seconds < 0:
            raise ValueError(f"a clock does not go back: advance({seconds})")
        with self._lock:
            self._now += seconds
            waiting = list(self._waiting)
        for condition in waiting:
            with condition:
                condition.notify_all()

    def wait(self, condition: threading.Condition, timeout_seconds: float) -> None:
        """Wait until notified or until the clock was moved.

        Raises:
            TimeoutError: nothing happened for the guard's real time.
        """
        if timeout_seconds <= 0:
            return
        with self._lock:
            # Whoever moves the clock from here on finds us, and cannot notify before we wait: we hold the condition.
            self._waiting.append(condition)
        try:
            if not condition.wait(self._guard_seconds):
                raise TimeoutError(
                    f"waited for {timeout_seconds:g} s of a ManualClock, but nobody moved it for "
                    f"{self._guard_seconds:g} real seconds; call advance() from another thread, or do not wait"
                )
        finally:
            with self._lock:
                self._waiting.remove(condition)

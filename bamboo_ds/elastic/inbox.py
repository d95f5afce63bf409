"""What other threads and signal handlers want done by the agent's main thread, which alone changes its state."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable

__all__ = ["Inbox"]


class Inbox:
    """A queue of calls, with a descriptor to wait on."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        """Return the descriptor that can be read when there are calls."""
        return self._reader

    def put(self, call: Callable[[], None]) -> None:
        """Let a call be made soon. From any thread, and from signal handlers: it takes no lock."""
        self._calls.append(call)
        with contextlib.suppress(BlockingIOError):  # full: there is enough to wake up for
            os.write(self._writer, b"x")

    def run(self) -> None:
        """Make the calls that are there."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 1 << 16)
        while self._calls:
            self._calls.popleft()()

"""A store whose writes go wrong when a test says so: the process dies at one, or its answer is lost, or it is late."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from bamboo_ds.errors import ConflictError, StoreError, StoreUnavailableError
from bamboo_ds.store import Committed, Condition, Fence, MemoryServer, MemoryStore, Write


class Fault(Enum):
    """What becomes of a write."""

    DIE_BEFORE = "the process dies before it"
    DIE_AFTER = "the process dies after it"
    LOSE_REQUEST = "it gets lost"
    LOSE_ANSWER = "it happens, but the answer gets lost"
    DELAY = "no answer comes, and it happens later"
    LEADER_FALLS = "the lease ends before it"


class Killed(BaseException):
    """The process is dead: nothing that it would do afterwards happens."""


class FaultyStore(MemoryStore):
    """A store of which one write, counted from 1, goes wrong.

    Attributes:
        fault: how.
        countdown: writes up to that one; 0 for none.
        delayed: writes on their way.
        fall: ends the leader's lease.
    """

    def __init__(self, server: MemoryServer) -> None:
        super().__init__(server=server)
        self.fault, self.countdown = Fault.DIE_BEFORE, 0
        self.delayed: list[Callable[[], Any]] = []
        self.fall: Callable[[], None] = lambda: None

    def transact(
        self,
        conditions: Sequence[Condition],
        writes: Sequence[Write],
        *,
        fence: Fence | None = None,
        timeout_seconds: float | None = None,
    ) -> Committed:
        def write() -> Committed:
            return MemoryStore.transact(self, conditions, writes, fence=fence)

        self.countdown -= 1
        return self._go_wrong(write) if self.countdown == 0 else write()

    def deliver(self) -> None:
        """Let the writes that were on their way happen now, if they can."""
        while self.delayed:
            try:
                self.delayed.pop(0)()
            except ConflictError:
                continue

    def _go_wrong(self, write: Callable[[], Committed]) -> Committed:
        if self.fault is Fault.DIE_BEFORE:
            raise Killed
        if self.fault is Fault.LEADER_FALLS:
            self.fall()
            return write()
        if self.fault is Fault.DELAY:
            self.delayed.append(write)
        elif self.fault is not Fault.LOSE_REQUEST:
            try:
                write()
            except StoreError:
                if self.fault is Fault.LOSE_ANSWER:
                    raise
        if self.fault is Fault.DIE_AFTER:
            raise Killed
        raise StoreUnavailableError("no answer in time")

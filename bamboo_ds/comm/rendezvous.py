"""The key-value store under our process groups.

Gloo and NCCL bootstrap a group through a `torch.distributed.Store`: each member writes its address and waits for the
others'. Stock stores block in C++ until their time-out. This one polls, so a wait ends when the plan changes or the
deadline passes, and the construction of a group ends with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as torch_distributed

from bamboo_ds.errors import PeerLostError

_POLL_SECONDS = (0.0005, 0.02)  # first and longest pause between two looks


class KeyValue(Protocol):
    """The four calls that a store behind a rendezvous must have."""

    def get(self, key: str) -> bytes:
        """Return the value of a key that exists."""
        ...

    def set(self, key: str, value: Any) -> None:
        """Write a key, as bytes."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        ...


class RendezvousStore(torch_distributed.Store):
    """A torch store over `KeyValue`, whose blocking calls end with the plan or the deadline.

    Args:
        backing: where keys live.
        timeout_seconds: deadline of every wait.
        check: called while waiting; raises when the plan has changed.
    """

    def __init__(self, backing: KeyValue, *, timeout_seconds: float, check: Callable[[], None]) -> None:
        super().__init__()
        self._backing, self._timeout_seconds, self._check = backing, timeout_seconds, check

    def set(self, key: str, value: str | bytes) -> None:
        """Write a key."""
        self._backing.set(key, value if isinstance(value, bytes) else value.encode())

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        self._await([key], self._timeout_seconds)
        return self._backing.get(key)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        return self._backing.add(key, amount)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist.

        Raises:
            PeerLostError: they do not appear in time.
        """
        self._await(keys, self._timeout_seconds if timeout is None else timeout.total_seconds())

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        return self._backing.check(keys)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the deadline of later waits."""
        self._timeout_seconds = timeout.total_seconds()

    def _await(self, keys: list[str], timeout_seconds: float) -> None:
        deadline, pause = time.monotonic() + timeout_seconds, _POLL_SECONDS[0]
        while not self._backing.check(keys):
            self._check()
            if time.monotonic() > deadline:
                raise PeerLostError(
                    f"the other members of a group did not appear within {timeout_seconds:g} s (waited for {keys})"
                )
            time.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS[1])

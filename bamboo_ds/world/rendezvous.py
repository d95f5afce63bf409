"""The key-value store under our process groups.

Gloo and NCCL bootstrap a group through a `torch.distributed.Store`: each member writes its address and waits for the
others'. Stock stores block in C++ until their time-out. This one waits in Python, so a wait ends when the plan changes
or the deadline passes, and the construction of a group ends with it. A construction that ended so may be tried again
in the same process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch.distributed as torch_distributed

from bamboo_ds.errors import PeerLostError, StoreUnavailableError

_POLL_SECONDS = (0.0005, 0.02)  # first and longest pause between two looks
_RETRY_SECONDS = 0.05

Found = TypeVar("Found")


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


@runtime_checkable
class WatchedKeyValue(KeyValue, Protocol):
    """A store that tells when a key appears, so that nobody has to ask it again and again."""

    def below(self, prefix: str) -> WatchedKeyValue:
        """Return the keys below a prefix, watched apart from others."""
        ...

    def await_keys(self, keys: list[str], *, timeout_seconds: float) -> bool:
        """Return whether all keys exist, as soon as they do or when the time is over."""
        ...

    def rest(self) -> None:
        """Let go of what waiting needed, until the next wait."""
        ...


def keys_below(backing: KeyValue, prefix: str) -> KeyValue:
    """Return the keys of a store below a prefix, which ends with a slash."""
    if isinstance(backing, WatchedKeyValue):
        return backing.below(prefix)
    return torch_distributed.PrefixStore(prefix.rstrip("/"), backing)  # type: ignore[arg-type]  # torch's own, then


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
        written = value if isinstance(value, bytes) else value.encode()
        self._insist(lambda: self._backing.set(key, written))

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        self._await([key], self._timeout_seconds)
        return self._insist(lambda: self._backing.get(key))

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
        return self._insist(lambda: self._backing.check(keys))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write a key if it holds what is expected, and return what it holds then."""
        return self._backing.compare_set(key, expected, desired)  # type: ignore[attr-defined]  # all of ours have it

    def delete_key(self, key: str) -> bool:
        """Delete a key, and return whether there was one."""
        return self._backing.delete_key(key)  # type: ignore[attr-defined]

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the deadline of later waits."""
        self._timeout_seconds = timeout.total_seconds()

    def rest(self) -> None:
        """Let go of what waiting needed, until the next wait."""
        if isinstance(self._backing, WatchedKeyValue):
            self._backing.rest()

    def _await(self, keys: list[str], timeout_seconds: float) -> None:
        deadline, pause = time.monotonic() + timeout_seconds, _POLL_SECONDS[0]
        while not self._appear(keys, pause):
            self._check()
            if time.monotonic() > deadline:
                raise PeerLostError(
                    f"the other members of a group did not appear within {timeout_seconds:g} s (waited for {keys})"
                )
            pause = min(2 * pause, _POLL_SECONDS[1])

    def _appear(self, keys: list[str], pause: float) -> bool:
        """Return whether all keys exist; if not, after a pause, which ends when they appear if that can be known."""
        if isinstance(self._backing, WatchedKeyValue):
            try:
                return self._backing.await_keys(keys, timeout_seconds=_POLL_SECONDS[1])
            except StoreUnavailableError:
                time.sleep(_RETRY_SECONDS)
                return False
        found = self._backing.check(keys)
        if not found:
            time.sleep(pause)
        return found

    def _insist(self, call: Callable[[], Found]) -> Found:
        """Make a request that may be repeated, through an outage that `check` bears."""
        deadline = time.monotonic() + self._timeout_seconds
        while True:
            try:
                return call()
            except StoreUnavailableError:
                self._check()
                if time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_SECONDS)

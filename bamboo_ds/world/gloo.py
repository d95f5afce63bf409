"""Process groups made directly: each on its own, none through `torch.distributed.new_group`.

Two things gloo does not do by itself. *Ending at once*: it closes no socket while a reference to the group lives, so a
group is poisoned: a receive with an unused tag that times out closes all its pairs, and threads and peers that wait on
them raise. *Giving up in the middle of being made*: a peer that gave its address and then hangs holds the constructor
up, in C++, until the time-out; so groups can be made in a thread that is left behind when there is news.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_distributed
from deepspeed.accelerator import get_accelerator

_UNUSED_TAG = 987_654
_POISON = timedelta(milliseconds=1)
_LOOK_SECONDS = 0.02
_GRACE_SECONDS = 0.05  # for a construction to end by itself, as it mostly does
_LIBRARY_FILE = re.compile(r"^\[[^\]]*\.(?:cc|cpp|h|cu):\d+\]\s*")
_PAIR_CLOSED = "pair closure"


@functools.cache
def _device(address: str) -> Any:
    """One device, that is one event thread, for all groups of the process on one address."""
    if address:
        return torch_distributed.ProcessGroupGloo.create_device(hostname=address)
    return torch_distributed.ProcessGroupGloo.create_default_device()


def host_group(
    store: torch_distributed.Store, rank: int, size: int, *, timeout: timedelta, address: str = ""
) -> torch_distributed.ProcessGroupGloo:
    """Make a group that moves host memory.

    Args:
        store: by which the members meet.
        rank: of this one.
        size: number of members.
        timeout: of construction and of collectives.
        address: at which the others reach this one; empty for gloo's own choice.
    """
    options = torch_distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._threads, options._timeout = [_device(address)], 1, timeout
    return torch_distributed.ProcessGroupGloo(store, rank, size, options)


def device_group(store: torch_distributed.Store, rank: int, size: int, *, timeout: timedelta, address: str = "") -> Any:
    """Make a group that moves accelerator memory (NCCL on CUDA; untested until a GPU run has shown it)."""
    if get_accelerator().communication_backend_name() != "nccl":
        return host_group(store, rank, size, timeout=timeout, address=address)
    options = torch_distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return torch_distributed.ProcessGroupNCCL(store, rank, size, options)


def poison(handle: Any, *, rank: int, size: int) -> None:
    """End a gloo group: blocked threads and peers raise within milliseconds. May be done again.

    The first receive that times out closes the connections to all members. One from a member that has gone fails at
    once, and closes nothing: a connection to another, whose network is cut, would stay open, and whoever waits on it
    would wait until the time-out. So all members are asked.
    """
    if not isinstance(handle, torch_distributed.ProcessGroupGloo) or size < 2:
        return
    gloo: Any = handle  # torch's stubs lack `recv`
    for distance in range(1, size):
        with contextlib.suppress(RuntimeError):
            gloo.recv([torch.empty(1, dtype=torch.uint8)], (rank + distance) % size, _UNUSED_TAG).wait(_POISON)


def made_while(
    makers: Sequence[Callable[[], Any]], *, check: Callable[[], None], discards: Sequence[Callable[[Any], None]]
) -> list[Any]:
    """Make groups in threads of their own, all at once, and leave them behind when `check` raises.

    Args:
        makers: the constructions.
        check: called while waiting; raises when the groups are not wanted any more.
        discards: end groups that were made too late.
    """
    constructions = [_Construction(make, discard) for make, discard in zip(makers, discards, strict=True)]
    for construction in constructions:
        construction.start()
    try:
        for construction in constructions:
            while not construction.ended.wait(_LOOK_SECONDS):
                check()
        return [construction.result() for construction in constructions]
    except BaseException:
        for construction in constructions:
            construction.abandon()
        raise


class _Construction(threading.Thread):
    def __init__(self, make: Callable[[], Any], discard: Callable[[Any], None]) -> None:
        super().__init__(name="bamboo-group", daemon=True)
        self._make, self._discard = make, discard
        self._lock, self._abandoned = threading.Lock(), False
        self._made: Any = None
        self._error: BaseException | None = None
        self.ended = threading.Event()

    def run(self) -> None:
        try:
            made = self._make()
        except BaseException as error:
            self._error = error
        else:
            with self._lock:
                self._made = made
                if self._abandoned:
                    self._discard(made)
        self.ended.set()

    def abandon(self) -> None:
        with self._lock:
            self._abandoned = True
            if self._made is not None:
                self._discard(self._made)
        self.ended.wait(_GRACE_SECONDS)

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._made


def reason_of(error: Exception) -> str:
    """Return the first sentence of an error of gloo or NCCL, without the file of the library that it came from."""
    text = _LIBRARY_FILE.sub("", str(error).strip())
    return text.splitlines()[0].split(". ")[0] if text else type(error).__name__


def is_broken(error: RuntimeError) -> bool:
    """Return whether an error is a broken connection, rather than a wrong argument."""
    return bool(_LIBRARY_FILE.match(str(error).strip())) or _PAIR_CLOSED in str(error)

"""Process groups of ours.

They are made directly, never through `torch.distributed.new_group`, so that none depends on a world that may lose a
member.

Every wait on a group has the one time-out of the job; a broken or silent peer becomes a `PeerLostError`.
"""

from __future__ import annotations

import contextlib
import functools
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_distributed
from deepspeed.accelerator import get_accelerator

from bamboo_ds.comm.rendezvous import KeyValue, RendezvousStore
from bamboo_ds.errors import PeerLostError

_UNUSED_TAG = 987_654
_LENGTH = struct.Struct("<I")
_LARGEST_ROOM = 1 << 16
_LIBRARY_FILE = re.compile(r"^\[[^\]]*\.(?:cc|cpp|h|cu):\d+\]\s*")


@functools.cache
def _gloo_device() -> object:
    """One device, that is one event thread, for all groups of the process."""
    return torch_distributed.ProcessGroupGloo.create_default_device()


def _gloo(store: torch_distributed.Store, rank: int, size: int, timeout: timedelta) -> Any:
    options = torch_distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._threads, options._timeout = [_gloo_device()], 1, timeout
    return torch_distributed.ProcessGroupGloo(store, rank, size, options)


def _accelerator_group(store: torch_distributed.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Make a group that reduces where the gradients are (NCCL on CUDA; untested until a GPU run has shown it)."""
    if get_accelerator().communication_backend_name() != "nccl":
        return _gloo(store, rank, size, timeout)
    options = torch_distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return torch_distributed.ProcessGroupNCCL(store, rank, size, options)


class GroupFactory:
    """Makes groups of the workers of one plan.

    Args:
        backing: the store through which members meet.
        prefix: names the epoch and version; groups of another plan never meet these.
        worker: id of this worker.
        timeout_seconds: limit of every wait.
        check: called while waiting; raises when the plan has changed.
    """

    def __init__(
        self, backing: KeyValue, *, prefix: str, worker: int, timeout_seconds: float, check: Callable[[], None]
    ) -> None:
        self._store = RendezvousStore(backing, timeout_seconds=timeout_seconds, check=check)
        self._prefix, self.worker = prefix, worker
        self.timeout = timedelta(seconds=timeout_seconds)

    def host(self, name: str, members: Sequence[int]) -> Group:
        """Make a group that moves host memory."""
        return self._make(name, members, _gloo)

    def device(self, name: str, members: Sequence[int]) -> Group:
        """Make a group that moves accelerator memory."""
        return self._make(name, members, _accelerator_group)

    def _make(self, name: str, members: Sequence[int], make: Callable[..., Any]) -> Group:
        store = torch_distributed.PrefixStore(f"{self._prefix}/{name}", self._store)
        with _peer_errors(name, members):
            handle = make(store, members.index(self.worker), len(members), self.timeout)
        return Group(handle, name=name, members=tuple(members), rank=members.index(self.worker), timeout=self.timeout)


@contextlib.contextmanager
def _peer_errors(name: str, members: Sequence[int]) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # what gloo and NCCL raise for every kind of broken peer
        raise PeerLostError(f"group {name} of workers {tuple(members)} broke: {reason_of(error)}") from error


def reason_of(error: Exception) -> str:
    """Return the first sentence of an error of gloo or NCCL, without the file of the library that it came from."""
    text = _LIBRARY_FILE.sub("", str(error).strip())
    return text.splitlines()[0].split(". ")[0] if text else type(error).__name__


class Group:
    """A process group, its members as worker ids."""

    def __init__(
        self,
        handle: Any,
        *,
        name: str,
        members: tuple[int, ...],
        rank: int,
        timeout: timedelta,
    ) -> None:
        self._handle: Any = handle
        self.name, self.members, self.rank, self._timeout = name, members, rank, timeout
        self._room = 1024

    @property
    def handle(self) -> Any:
        """The group of torch.

        Raises:
            PeerLostError: the group was closed.
        """
        if self._handle is None:
            raise PeerLostError(f"group {self.name} of workers {self.members} is closed")
        return self._handle

    def start_sum(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Start an in-place sum over all members; call the result to wait for it."""
        with _peer_errors(self.name, self.members):
            work = self.handle.allreduce([tensor])

        def wait() -> None:
            with _peer_errors(self.name, self.members):
                work.wait(self._timeout)

        return wait

    def broadcast(self, tensor: torch.Tensor, *, source: int) -> None:
        """Overwrite `tensor` with that of the worker `source`."""
        options = torch_distributed.BroadcastOptions()
        options.rootRank, options.timeout = self.members.index(source), self._timeout
        with _peer_errors(self.name, self.members):
            self.handle.broadcast([tensor], options).wait(self._timeout)

    def gather_bytes(self, message: bytes) -> list[bytes]:
        """Return the message of every member, in the order of `members`.

        One collective when all messages fit into the room of the largest seen so far; else a second one with enough
        room. Room beyond `_LARGEST_ROOM` is for one message only: each vote after it would carry it along.
        """
        gathered = self._gather_room(message, self._room)
        longest = max(_LENGTH.unpack_from(row)[0] for row in gathered)
        if longest + _LENGTH.size > self._room:
            gathered = self._gather_room(message, longest + _LENGTH.size)
            self._room = min(2 * (longest + _LENGTH.size), _LARGEST_ROOM)
        return [row[_LENGTH.size : _LENGTH.size + _LENGTH.unpack_from(row)[0]] for row in gathered]

    def _gather_room(self, message: bytes, size: int) -> list[bytes]:
        room = bytearray(size)
        framed = (_LENGTH.pack(len(message)) + message)[:size]
        room[: len(framed)] = framed
        mine = torch.frombuffer(room, dtype=torch.uint8)
        rows = [torch.empty_like(mine) for _ in self.members]
        with _peer_errors(self.name, self.members):
            self.handle.allgather([rows], [mine]).wait(self._timeout)
        return [row.numpy().tobytes() for row in rows]

    def barrier(self) -> None:
        """Wait for all members."""
        self.gather_bytes(b"")

    def close(self) -> None:
        """End the group: blocked threads and peers raise at once.

        Gloo closes no socket while a reference lives, so the group is poisoned: a receive with an unused tag that
        times out closes all its pairs.
        """
        handle, self._handle = self._handle, None
        on_gloo = isinstance(handle, torch_distributed.ProcessGroupGloo)
        if not on_gloo or len(self.members) < 2:
            return
        with contextlib.suppress(RuntimeError):
            handle.recv([torch.empty(1, dtype=torch.uint8)], (self.rank + 1) % len(self.members), _UNUSED_TAG).wait(
                timedelta(milliseconds=1)
            )

"""Process groups of ours, their members as worker ids.

They are made directly (`bamboo_ds.world.gloo`), so that none depends on a world that may lose a member. Every wait on a
group has the one time-out of the job; a broken or silent peer becomes a `PeerLostError`, or in a cluster what is said
of it there.

The members of a gradient group are *seats* (`Plan.seats`), of which a worker may have several: it then is several
members of one group, each with a connection of its own to all others. Its sums keep their size, their order and so
their bits, whoever sits where.
"""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as torch_distributed

from bamboo_ds.comm.rendezvous import KeyValue, RendezvousStore
from bamboo_ds.comm.waits import Waits
from bamboo_ds.errors import PeerLostError
from bamboo_ds.plan import Seat
from bamboo_ds.world.gloo import device_group, host_group, made_while, poison, reason_of

_LENGTH = struct.Struct("<I")
_LARGEST_ROOM = 1 << 16


class GroupFactory:
    """Makes groups of the workers of one plan.

    Args:
        backing: the store through which members meet.
        prefix: in front of the names of groups.
        worker: id of this worker.
        timeout_seconds: limit of every wait.
        check: called while waiting; raises when the plan has changed.
        address: at which the others reach this worker; empty for gloo's own choice.
        waits: how waits on the groups end; as in a fixed job if None.
    """

    def __init__(
        self,
        backing: KeyValue,
        *,
        prefix: str,
        worker: int,
        timeout_seconds: float,
        check: Callable[[], None],
        address: str = "",
        waits: Waits | None = None,
    ) -> None:
        self._store = RendezvousStore(backing, timeout_seconds=timeout_seconds, check=check)
        self._prefix, self.worker, self._address = prefix, worker, address
        self._waits = waits or Waits(check=check, timeout_seconds=timeout_seconds)

    def host(self, name: str, members: Sequence[int], *, greet: Callable[[Any, int], None] | None = None) -> Group:
        """Make a group that moves host memory.

        Args:
            name: of the group, the same on all members.
            members: ids of workers, by rank.
            greet: called with torch's group and this worker's rank as soon as it is made; a part of making it.
        """
        rank = members.index(self.worker)
        (handle,) = self._make(name, members, [rank], host_group, greet)
        return Group(handle, name=name, members=tuple(members), rank=rank, waits=self._waits)

    def seated(self, name: str, seats: Sequence[Seat]) -> SeatGroup:
        """Make a group of seats. It moves accelerator memory, or host memory if a worker has several of the seats.

        Args:
            name: of the group, the same on all members.
            seats: all of them; this worker has one at least.
        """
        workers = [seat.worker for seat in seats]
        own = [rank for rank, worker in enumerate(workers) if worker == self.worker]
        # One accelerator cannot be two members of a group of its own kind.
        kind = device_group if len(set(workers)) == len(workers) else host_group
        handles = self._make(name, workers, own, kind, None) if len(seats) > 1 else []
        return SeatGroup(handles, name=name, seats=tuple(seats), own=tuple(own), waits=self._waits)

    @property
    def store(self) -> RendezvousStore:
        """The store through which members meet."""
        return self._store

    def rest(self) -> None:
        """Let go of what making groups needed, until the next one."""
        self._store.rest()

    def _make(
        self,
        name: str,
        members: Sequence[int],
        ranks: Sequence[int],
        kind: Callable[..., Any],
        greet: Callable[[Any, int], None] | None,
    ) -> list[Any]:
        """Make this worker's members of a group, all at once: each waits for all others."""
        store = torch_distributed.PrefixStore(f"{self._prefix}/{name}", self._store)

        def make(rank: int) -> Any:
            handle = kind(store, rank, len(members), timeout=self._waits.timeout, address=self._address)
            if greet is not None:
                greet(handle, rank)
            return handle

        discards = [functools.partial(poison, rank=rank, size=len(members)) for rank in ranks]
        makers = [functools.partial(make, rank) for rank in ranks]
        with peer_errors(name, members, self._waits):
            if self._waits.elastic or len(makers) > 1:
                return made_while(makers, check=self._waits.check, discards=discards)
            return [make(rank) for rank in ranks]


@contextlib.contextmanager
def peer_errors(name: str, members: Sequence[int], waits: Waits) -> Iterator[None]:
    """Turn a broken connection into a `PeerLostError`, or what the cluster says of it."""
    try:
        yield
    except RuntimeError as error:  # what gloo and NCCL raise for every kind of broken peer
        lost = PeerLostError(f"group {name} of workers {tuple(members)} broke: {reason_of(error)}")
        lost.__cause__ = error
        waits.lose(lost)


class Group:
    """A process group, its members as worker ids."""

    def __init__(self, handle: Any, *, name: str, members: tuple[int, ...], rank: int, waits: Waits) -> None:
        self._handle: Any = handle
        self.name, self.members, self.rank, self._waits = name, members, rank, waits
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
        with peer_errors(self.name, self.members, self._waits):
            self._waits.finish(self.handle.allgather([rows], [mine]))
        return [row.numpy().tobytes() for row in rows]

    def barrier(self) -> None:
        """Wait for all members."""
        self.gather_bytes(b"")

    def close(self) -> None:
        """End the group: blocked threads and peers raise at once."""
        handle, self._handle = self._handle, None
        poison(handle, rank=self.rank, size=len(self.members))


class SeatGroup:
    """A gradient group, seen from one worker.

    Attributes:
        seats: those of this worker, in the order of the group.
    """

    def __init__(
        self, handles: Sequence[Any], *, name: str, seats: tuple[Seat, ...], own: tuple[int, ...], waits: Waits
    ) -> None:
        self._handles, self._name, self._all, self._own, self._waits = list(handles), name, seats, own, waits
        self._members = tuple(seat.worker for seat in seats)
        self.seats = tuple(seats[rank] for rank in own)

    def start_sum(self, rows: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Start an in-place sum over all seats; call the result to wait for it.

        A wait that a newer plan has ended may be called again.

        Args:
            rows: what each of this worker's seats contributes; each becomes the sum.
        """
        return self._start([[row] for row in rows], lambda handle, tensors: handle.allreduce(tensors))

    def start_broadcast(self, tensor: torch.Tensor, *, source: int) -> Callable[[], None]:
        """Start to overwrite `tensor` with that of a seat; call the result to wait for it, also again.

        Args:
            tensor: of this worker; the one to be copied if it has the seat.
            source: home of the seat.
        """
        options = torch_distributed.BroadcastOptions()
        options.rootRank = [seat.home for seat in self._all].index(source)
        options.timeout = self._waits.timeout
        speaking = next((seat for seat in self.seats if seat.home == source), self.seats[0])
        rows = [[tensor if seat is speaking else torch.empty_like(tensor)] for seat in self.seats]
        return self._start(rows, lambda handle, tensors: handle.broadcast(tensors, options))

    def _start(
        self, rows: Sequence[list[torch.Tensor]], start: Callable[[Any, list[torch.Tensor]], Any]
    ) -> Callable[[], None]:
        if len(self._all) == 1:
            return lambda: None
        staged = [[self._staged(tensor) for tensor in row] for row in rows]
        with self._errors():
            works = [start(handle, row) for handle, row in zip(self._open(), staged, strict=True)]

        def wait() -> None:
            with self._errors():
                for work in works:
                    self._waits.finish(work)
            for row, copies in zip(rows, staged, strict=True):
                for tensor, copy in zip(row, copies, strict=True):
                    if copy is not tensor:
                        tensor.copy_(copy)

        return wait

    def _staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy in host memory if the group cannot reach the tensor where it is."""
        on_gloo = isinstance(self._handles[0], torch_distributed.ProcessGroupGloo) if self._handles else False
        return tensor.cpu() if on_gloo else tensor

    def _open(self) -> list[Any]:
        if not self._handles:
            raise PeerLostError(f"group {self._name} of workers {self._members} is closed")
        return self._handles

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        return peer_errors(self._name, self._members, self._waits)

    def close(self) -> None:
        """End the group: blocked threads and peers raise at once."""
        handles, self._handles = self._handles, []
        for handle, rank in zip(handles, self._own, strict=False):
            poison(handle, rank=rank, size=len(self._all))

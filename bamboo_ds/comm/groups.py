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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One member of a group that is to be made."""

    name: str
    members: tuple[int, ...]
    rank: int
    kind: Callable[..., Any]


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

    def host(self, name: str, members: Sequence[int]) -> Group:
        """Make a group that moves host memory.

        Args:
            name: of the group, the same on all members.
            members: ids of workers, by rank.
        """
        (group,) = self.hosts({name: members})
        return group

    def hosts(self, wanted: Mapping[str, Sequence[int]]) -> list[Group]:
        """Make several groups that move host memory, all at once: none waits for the members of another.

        Args:
            wanted: the members by the name of the group.
        """
        asked = [
            _Wanted(name, tuple(members), members.index(self.worker), host_group) for name, members in wanted.items()
        ]
        return [
            Group(handle, name=one.name, members=one.members, rank=one.rank, waits=self._waits)
            for one, handle in zip(asked, self._make_all(asked), strict=True)
        ]

    def seated(self, wanted: Mapping[str, Sequence[Seat]]) -> list[SeatGroup]:
        """Make groups of seats, all at once; this worker has a seat in each.

        They move accelerator memory, or host memory where a worker has several of the seats.

        Args:
            wanted: all seats by the name of the group.
        """
        asked = {name: self._seats_wanted(name, seats) for name, seats in wanted.items()}
        handles = iter(self._make_all([one for ones in asked.values() for one in ones if len(one.members) > 1]))
        return [
            SeatGroup(
                [next(handles) for one in asked[name] if len(seats) > 1],
                name=name,
                seats=tuple(seats),
                own=tuple(one.rank for one in asked[name]),
                waits=self._waits,
            )
            for name, seats in wanted.items()
        ]

    def _seats_wanted(self, name: str, seats: Sequence[Seat]) -> list[_Wanted]:
        workers = tuple(seat.worker for seat in seats)
        # One accelerator cannot be two members of a group of its own kind.
        kind = device_group if len(set(workers)) == len(workers) else host_group
        return [_Wanted(name, workers, rank, kind) for rank, worker in enumerate(workers) if worker == self.worker]

    @property
    def store(self) -> RendezvousStore:
        """The store through which members meet."""
        return self._store

    def rest(self) -> None:
        """Let go of what making groups needed, until the next one."""
        self._store.rest()

    def _make_all(self, wanted: Sequence[_Wanted]) -> list[Any]:
        """Make members of groups, all at once: each waits for all others of its group."""
        makers = [functools.partial(self._make, one) for one in wanted]
        discards = [functools.partial(poison, rank=one.rank, size=len(one.members)) for one in wanted]
        names = ", ".join(dict.fromkeys(one.name for one in wanted))
        members = tuple(sorted({member for one in wanted for member in one.members}))
        with peer_errors(names, members, self._waits):
            if self._waits.elastic or len(makers) > 1:
                return made_while(makers, check=self._waits.check, discards=discards)
            return [make() for make in makers]

    def _make(self, wanted: _Wanted) -> Any:
        store = torch_distributed.PrefixStore(f"{self._prefix}/{wanted.name}", self._store)
        timeout, size = self._waits.timeout, len(wanted.members)
        return wanted.kind(store, wanted.rank, size, timeout=timeout, address=self._address)


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

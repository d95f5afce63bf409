"""Moves state between workers when a new epoch begins: in bulk, between many pairs at once.

Each pair of workers has a group of its own and a thread at either end, so a worker sends to several and receives from
several at the same time. A header says what the receiver must make room for. Large tensors travel as they lie, small
ones of a parcel as one run of bytes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as torch_distributed

from bamboo_ds.comm.groups import Group, GroupFactory, peer_errors
from bamboo_ds.comm.waits import Waits

_LARGE_BYTES = 1 << 18  # from this size on, a message of its own costs less than a copy
_ALIGNMENT = 16  # of a tensor in the run of bytes: every dtype may be viewed there


Rooms = Mapping[str, Mapping[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Parcel:
    """What travels as one.

    Attributes:
        name: for the receiver.
        values: JSON-able.
        tensors: in host memory when received.
    """

    name: str
    values: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class Courier:
    """Carries parcels between the workers of one plan.

    Args:
        factory: makes the groups.
        waits: how waits end.
        name: distinguishes several rounds under one plan.
        rooms: where large tensors are to be received, by name of their parcel and their own, if they fit there. Others
            are received into new memory.
    """

    def __init__(self, factory: GroupFactory, *, waits: Waits, name: str, rooms: Rooms | None = None) -> None:
        self._factory, self._waits, self._name, self._rooms = factory, waits, name, rooms or {}

    def carry(self, outgoing: Mapping[int, Sequence[Parcel]], incoming: Iterable[int]) -> dict[int, list[Parcel]]:
        """Send and receive at once.

        Args:
            outgoing: parcels by receiver.
            incoming: from whom parcels come.

        Returns:
            The received ones by sender.

        Raises:
            PeerLostError: a worker is gone.
            PlanChangedError: the plan was replaced; nobody can know what has arrived.
        """
        received: dict[int, list[Parcel]] = {}
        tasks: list[Callable[[], None]] = [
            lambda peer=peer, parcels=parcels: self._send(peer, parcels)  # type: ignore[misc]
            for peer, parcels in outgoing.items()
        ]
        tasks += [lambda peer=peer: received.update({peer: self._receive(peer)}) for peer in incoming]  # type: ignore[misc]
        all_at_once(tasks)
        return received

    def _send(self, peer: int, parcels: Sequence[Parcel]) -> None:
        group = self._pair(self._factory.worker, peer)
        try:
            header = json.dumps([_described(parcel) for parcel in parcels]).encode()
            self._put(group, torch.tensor([len(header)], dtype=torch.int64))
            self._put(group, torch.frombuffer(bytearray(header), dtype=torch.uint8))
            for parcel in parcels:
                for tensor in (_packed(parcel), *_large(parcel).values()):
                    self._put(group, tensor)
            self._take(group, torch.int64, 1)  # it has all arrived: the group may end
        finally:
            group.close()

    def _receive(self, peer: int) -> list[Parcel]:
        group = self._pair(peer, self._factory.worker)
        try:
            length = int(self._take(group, torch.int64, 1))
            header = json.loads(self._take(group, torch.uint8, length).numpy().tobytes())
            parcels = [self._unpacked(group, description) for description in header]
            self._put(group, torch.tensor([1], dtype=torch.int64))
            return parcels
        finally:
            group.close()

    def _pair(self, sender: int, receiver: int) -> Group:
        return self._factory.host(f"{self._name}-{sender}-{receiver}", (sender, receiver))

    def _unpacked(self, group: Group, description: dict[str, Any]) -> Parcel:
        room, tensors = self._take(group, torch.uint8, description["size"]), {}
        for name, dtype, shape, start, stop in description["small"]:
            tensors[name] = room[start:stop].view(getattr(torch, dtype)).reshape(shape)
        rooms = self._rooms.get(description["name"], {})
        for name, dtype, shape in description["large"]:
            place = _room_for(rooms.get(name), dtype=getattr(torch, dtype), shape=shape)
            self._pass(group, place, root=1 - group.rank)
            tensors[name] = place
        return Parcel(name=description["name"], values=description["values"], tensors=tensors)

    def _put(self, group: Group, tensor: torch.Tensor) -> None:
        self._pass(group, tensor, root=group.rank)

    def _take(self, group: Group, dtype: torch.dtype, count: int) -> torch.Tensor:
        room = torch.empty(count, dtype=dtype)
        self._pass(group, room, root=1 - group.rank)
        return room

    def _pass(self, group: Group, tensor: torch.Tensor, *, root: int) -> None:
        """Pass a tensor from one end to the other: by a broadcast, as gloo lets nobody wait for a send in Python."""
        if not tensor.numel():
            return
        tensor = tensor.reshape(-1).view(torch.uint8)
        options = torch_distributed.BroadcastOptions()
        options.rootRank, options.timeout = root, self._waits.timeout
        with peer_errors(group.name, group.members, self._waits):
            self._waits.finish(group.handle.broadcast([tensor], options))


class Background:
    """A task that runs in a thread of its own.

    Args:
        task: what to run.
    """

    def __init__(self, task: Callable[[], object]) -> None:
        self._task = task
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="bamboo-background", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._task()
        except BaseException as error:
            self._error = error

    def result(self) -> None:
        """Wait for its end.

        Raises:
            BaseException: what it raised.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error


def all_at_once(tasks: Sequence[Callable[[], object]]) -> None:
    """Run all tasks at once, and wait for all; when one fails the others do soon: their peers or the plan are the same.

    Raises:
        BaseException: of the task that failed first.
    """
    errors: list[BaseException] = []

    def run(task: Callable[[], object]) -> None:
        try:
            task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(task,), name="bamboo-state", daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _room_for(given: torch.Tensor | None, *, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return the memory that was given for a tensor, if it fits, or new memory."""
    form = (dtype, list(shape), "cpu")
    if given is not None and (given.dtype, list(given.shape), given.device.type) == form and given.is_contiguous():
        return given
    return torch.empty(shape, dtype=dtype)


def _large(parcel: Parcel) -> dict[str, torch.Tensor]:
    """Return the tensors that travel by themselves, as they lie in host memory."""
    return {
        name: tensor.detach().contiguous() for name, tensor in parcel.tensors.items() if tensor.nbytes >= _LARGE_BYTES
    }


def _layout(parcel: Parcel) -> tuple[list[tuple[str, torch.Tensor, int, int]], int]:
    """Return where the small tensors lie in their run of bytes, and its size."""
    rows, end = [], 0
    for name, tensor in parcel.tensors.items():
        if tensor.nbytes < _LARGE_BYTES:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + tensor.nbytes
            rows.append((name, tensor, start, end))
    return rows, end


def _described(parcel: Parcel) -> dict[str, Any]:
    rows, size = _layout(parcel)
    small = [(name, *_form(tensor), start, stop) for name, tensor, start, stop in rows]
    large = [(name, *_form(tensor)) for name, tensor in _large(parcel).items()]
    return {"name": parcel.name, "values": dict(parcel.values), "small": small, "large": large, "size": size}


def _form(tensor: torch.Tensor) -> tuple[str, list[int]]:
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def _packed(parcel: Parcel) -> torch.Tensor:
    rows, size = _layout(parcel)
    room = torch.empty(size, dtype=torch.uint8)
    for _, tensor, start, stop in rows:
        if stop > start:
            room[start:stop].copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
    return room

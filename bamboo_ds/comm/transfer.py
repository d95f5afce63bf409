"""Moves state between workers when a new epoch begins: in bulk, between many pairs at once.

Each pair of workers has a connection of its own and a thread at either end, so a worker sends to several and receives
from several at the same time. A header says what the receiver must make room for. Large tensors travel as they lie,
small ones of a parcel as one run of bytes.
"""

from __future__ import annotations

import functools
import json
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bamboo_ds.comm.doors import Connection, Door, Sign, call
from bamboo_ds.comm.waits import Waits

_LARGE_BYTES = 1 << 18  # from this size on, a message of its own costs less than a copy
_LENGTH = struct.Struct("<q")
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
        worker: id of this one.
        door: where the others reach it.
        signs: of the doors of all, by worker.
        waits: how waits end.
        rooms: where large tensors are to be received, by name of their parcel and their own, if they fit there. Others
            are received into new memory.
    """

    def __init__(
        self, worker: int, *, door: Door, signs: Mapping[int, Sign], waits: Waits, rooms: Rooms | None = None
    ) -> None:
        self._worker, self._door, self._signs, self._waits, self._rooms = worker, door, signs, waits, rooms or {}

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
        all_at_once([*tasks, lambda: self._receive_all(set(incoming), received)])
        return received

    def _send(self, peer: int, parcels: Sequence[Parcel]) -> None:
        connection = call(self._signs[peer], caller=self._worker, peer=peer, waits=self._waits)
        try:
            header = json.dumps([_described(parcel) for parcel in parcels]).encode()
            connection.put(memoryview(_LENGTH.pack(len(header)) + header))
            for parcel in parcels:
                for tensor in (_packed(parcel), *_large(parcel).values()):
                    _pass(tensor, connection.put)
            connection.take(memoryview(bytearray(1)))  # it has all arrived: the connection may end
        finally:
            connection.close()

    def _receive_all(self, incoming: set[int], received: dict[int, list[Parcel]]) -> None:
        """Receive from each as it comes, from all at the same time."""
        tasks: list[Background] = []
        try:
            while incoming:
                connection = self._door.answer(incoming)
                incoming.discard(connection.peer)
                tasks.append(Background(functools.partial(self._receive, connection, received)))
        finally:
            for task in tasks:
                task.wait()
        for task in tasks:
            task.result()

    def _receive(self, connection: Connection, received: dict[int, list[Parcel]]) -> None:
        try:
            connection.take(memoryview(length := bytearray(_LENGTH.size)))
            connection.take(memoryview(header := bytearray(_LENGTH.unpack(length)[0])))
            received[connection.peer] = [self._unpacked(connection, told) for told in json.loads(header)]
            connection.put(memoryview(b"1"))
        finally:
            connection.close()

    def _unpacked(self, connection: Connection, description: dict[str, Any]) -> Parcel:
        room, tensors = torch.empty(description["size"], dtype=torch.uint8), {}
        _pass(room, connection.take)
        for name, dtype, shape, start, stop in description["small"]:
            tensors[name] = room[start:stop].view(getattr(torch, dtype)).reshape(shape)
        rooms = self._rooms.get(description["name"], {})
        for name, dtype, shape in description["large"]:
            tensors[name] = _room_for(rooms.get(name), dtype=getattr(torch, dtype), shape=shape)
            _pass(tensors[name], connection.take)
        return Parcel(name=description["name"], values=description["values"], tensors=tensors)


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

    def wait(self) -> None:
        """Wait for its end, whatever it was."""
        self._thread.join()

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


def _pass(tensor: torch.Tensor, move: Callable[[memoryview], None]) -> None:
    """Send a tensor, or receive it where it lies."""
    if tensor.numel():
        move(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)


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

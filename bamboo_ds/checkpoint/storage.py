"""Where checkpoints lie, as far as this package cares: names with bytes behind them, whole or not there at all.

A name is `folder/file` or `file`. Failures are `OSError`s, whatever is behind; what is not there is a
`FileNotFoundError`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol


class Sink(Protocol):
    """What a file is written into, from its beginning to its end."""

    def write(self, data: Any, /) -> int:
        """Take the next bytes, of any object that has bytes; return how many."""
        ...

    def flush(self) -> None:
        """Do nothing that anybody relies on; `torch.save` calls it."""
        ...


class Storage(Protocol):
    """A place for checkpoints. Used by one thread at a time."""

    path: str
    """Where it is, for people."""

    def create(self, name: str) -> AbstractContextManager[Sink]:
        """Open a file for writing; it is there, whole and for good, when the block ends, and not if it raises.

        It replaces the file that had the name.
        """
        ...

    def read(self, name: str) -> bytes:
        """Return the bytes of a file.

        Raises:
            FileNotFoundError: there is none.
        """
        ...

    def folders(self) -> list[str]:
        """Return the names of all folders."""
        ...

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the sizes in bytes of the whole files of a folder, by name in the folder; none if there is none."""
        ...

    def delete(self, name: str) -> None:
        """Delete a file, if it is there, for good."""
        ...

    def delete_folder(self, folder: str) -> None:
        """Delete a folder and all that is in it, half-written files too."""
        ...


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a file must be like to be whole.

    Attributes:
        bytes: its size.
        sha256: checksum of its bytes, in hexadecimal.
    """

    bytes: int
    sha256: str


class _Checked:
    """Passes bytes on and sums them up."""

    def __init__(self, sink: Sink) -> None:
        self._sink, self._sum, self.bytes = sink, hashlib.sha256(), 0

    def write(self, data: Any, /) -> int:
        self._sum.update(data)
        count = memoryview(data).nbytes
        self.bytes += count
        self._sink.write(data)
        return count

    def flush(self) -> None:
        self._sink.flush()

    def record(self) -> FileRecord:
        return FileRecord(self.bytes, self._sum.hexdigest())


def write_file(storage: Storage, name: str, write: Callable[[Sink], None]) -> FileRecord:
    """Write a file by a function that is given where to, and return what it is like."""
    with storage.create(name) as sink:
        checked = _Checked(sink)
        write(checked)
    return checked.record()


def write_bytes(storage: Storage, name: str, data: bytes) -> None:
    """Write a small file."""
    with storage.create(name) as sink:
        sink.write(data)


def read_checked(storage: Storage, name: str, expected: FileRecord) -> bytes:
    """Return the bytes of a file that is as it was written.

    Raises:
        DamagedError: it is not.
    """
    try:
        data = storage.read(name)
    except FileNotFoundError:
        raise DamagedError(f"{name} is missing") from None
    if len(data) != expected.bytes:
        raise DamagedError(f"{name} has {len(data)} bytes, it was written with {expected.bytes}")
    if hashlib.sha256(data).hexdigest() != expected.sha256:
        raise DamagedError(f"{name} has other bytes than were written")
    return data


class DamagedError(Exception):
    """Report a checkpoint that is not what was written, or not all of it; the message says what is wrong."""


def open_storage(path: str) -> Storage:
    """Return what is behind a path: a folder, or `s3://bucket/prefix`."""
    if path.startswith("s3://"):
        from bamboo_ds.checkpoint.s3 import S3Storage

        return S3Storage(path)
    from bamboo_ds.checkpoint.local import LocalStorage

    return LocalStorage(path)

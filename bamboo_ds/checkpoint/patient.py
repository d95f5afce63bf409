"""Reads again while a place for checkpoints has trouble that may pass."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

from bamboo_ds.checkpoint.storage import Sink, Storage

_log = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.5
_FINAL = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
"""What asking again will not change."""

_T = TypeVar("_T")


class PatientStorage:
    """A place whose file server may begin anew, or whose network may be cut for a moment, just when it is needed most.

    Args:
        storage: the place.
        seconds: for how long a read is repeated.

    Attributes:
        path: where it is, for people.
    """

    def __init__(self, storage: Storage, *, seconds: float) -> None:
        self._storage, self._seconds, self.path = storage, seconds, storage.path

    def read(self, name: str) -> bytes:
        """Return the bytes of a file."""
        return self._insist(lambda: self._storage.read(name))

    def folders(self) -> list[str]:
        """Return the names of all folders."""
        return self._insist(self._storage.folders)

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the sizes in bytes of the whole files of a folder."""
        return self._insist(lambda: self._storage.sizes(folder))

    def create(self, name: str) -> AbstractContextManager[Sink]:
        """Open a file for writing; not repeated."""
        return self._storage.create(name)

    def delete(self, name: str) -> None:
        """Delete a file; not repeated."""
        self._storage.delete(name)

    def delete_folder(self, folder: str) -> None:
        """Delete a folder; not repeated."""
        self._storage.delete_folder(folder)

    def _insist(self, call: Callable[[], _T]) -> _T:
        deadline = time.monotonic() + self._seconds
        while True:
            try:
                return call()
            except _FINAL:
                raise
            except OSError as error:
                if time.monotonic() + _PAUSE_SECONDS > deadline:
                    raise
                _log.warning("checkpoints in %s cannot be read just now, trying again: %s", self.path, error)
                time.sleep(_PAUSE_SECONDS)

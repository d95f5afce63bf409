"""A folder of the file system as a place for checkpoints.

A file is written under another name beside its own, forced to the disk and renamed; then the folder is forced to the
disk. So whatever dies, and whenever, a name stands for the whole file or for none.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from bamboo_ds.checkpoint.storage import Sink

_PARTIAL = ".partial"
_LONG_SECONDS = 3600.0


class LocalStorage:
    """A folder; it is made when the first file is written.

    Args:
        path: of the folder.
    """

    _numbers = itertools.count()

    def __init__(self, path: str) -> None:
        self.path = str(path)
        self._root = Path(path)

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[Sink]:
        """Write a file; see `Storage`."""
        target = self._root / name
        _make_folders(target.parent)
        partial = target.parent / f".{target.name}.{os.getpid()}-{next(self._numbers)}{_PARTIAL}"
        try:
            with open(partial, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        _sync(target.parent)
        if target.parent == self._root:
            self._sweep()

    def _sweep(self) -> None:
        """Delete what a writer left that died long ago; in folders it goes with the folder."""
        for path in self._root.glob(f".*{_PARTIAL}"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _LONG_SECONDS:
                    path.unlink()

    def read(self, name: str) -> bytes:
        """Return the bytes of a file."""
        return (self._root / name).read_bytes()

    def folders(self) -> list[str]:
        """Return the names of all folders."""
        if not self._root.is_dir():
            return []
        return sorted(entry.name for entry in os.scandir(self._root) if entry.is_dir())

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the sizes of the whole files of a folder."""
        found: dict[str, int] = {}
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(self._root / folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    if entry.is_file() and not entry.name.endswith(_PARTIAL):
                        found[entry.name] = entry.stat().st_size
        return found

    def delete(self, name: str) -> None:
        """Delete a file."""
        with contextlib.suppress(FileNotFoundError):
            (self._root / name).unlink()
            _sync((self._root / name).parent)

    def delete_folder(self, folder: str) -> None:
        """Delete a folder."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._root / folder)
            _sync(self._root)


def _make_folders(folder: Path) -> None:
    """Make a folder and those above it, for good."""
    if folder.is_dir():
        return
    _make_folders(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync(folder.parent)


def _sync(folder: Path) -> None:
    """Force the names of a folder to the disk."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:  # deleted meanwhile, by whoever prunes
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # some network file systems cannot, and need not
    finally:
        os.close(descriptor)

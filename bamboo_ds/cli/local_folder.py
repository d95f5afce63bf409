"""The temporary folder of a local cluster: locked while any process of the cluster lives, swept when none does."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["locked_folder", "sweep_abandoned_folders"]

_PREFIX = "bamboo-local-"
_LOCK = "lock"
_SWEEP_AFTER_SECONDS = 60.0  # a younger folder without a lock may belong to a launcher that is just starting


@contextlib.contextmanager
def locked_folder() -> Iterator[Path]:
    """Give a temporary folder, with a lock that all processes forked from this one hold, too; then remove it."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        with (folder / _LOCK).open("w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep_abandoned_folders() -> None:
    """Remove the folders of launchers that were killed: those that nobody holds locked."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            stat = folder.stat()
            if stat.st_uid == os.getuid() and _is_abandoned(folder, age_seconds=time.time() - stat.st_mtime):
                shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path, *, age_seconds: float) -> bool:
    try:
        with (folder / _LOCK).open("r+", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return age_seconds > _SWEEP_AFTER_SECONDS
    except BlockingIOError:
        return False
    return True

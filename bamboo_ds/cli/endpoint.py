"""Where a job's store is: what `bamboo-ds run` writes to the job's folder, so that other commands need no `--etcd`."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from bamboo_ds.cli.options import PASSWORD, StoreOptions
from bamboo_ds.config.etcd import EtcdConfig
from bamboo_ds.elastic.membership import open_store
from bamboo_ds.errors import ConfigError
from bamboo_ds.store import Store

__all__ = ["DEFAULT_JOB", "Endpoint", "default_logs", "find", "forget", "remember"]

DEFAULT_JOB = "bamboo"
RUNS = Path("runs")
FILE = "endpoint.json"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A job and how to reach its store."""

    etcd: EtcdConfig
    job: str
    source: str
    """What said so, for messages."""

    def open(self) -> Store:
        """Open the store."""
        return open_store(self.etcd, job=self.job)

    def __str__(self) -> str:
        return f"job {self.job} at etcd {','.join(self.etcd.endpoints)} ({self.source})"


def default_logs(job: str) -> Path:
    """Return the folder of a job that names none."""
    return RUNS / job


def remember(folder: Path, etcd: EtcdConfig, *, job: str) -> None:
    """Write down where a job's store is; the password is left out.

    Raises:
        ConfigError: the folder cannot be written.
    """
    fields = {**etcd.model_dump(exclude={"password"}), "job": job}
    path = folder / FILE
    draft = path.with_name(f"{FILE}.{os.getpid()}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(fields) + "\n", encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"--logs {folder}: cannot write there: {error.strerror}; give another folder") from None


def forget(folder: Path) -> None:
    """Remove what `remember` wrote: the store is gone."""
    with contextlib.suppress(OSError):
        (folder / FILE).unlink()


def find(options: StoreOptions) -> Endpoint:
    """Return the job that `--etcd`, `--job` and `--logs` name; without any, the one that was started last here.

    Raises:
        ConfigError: there is none.
    """
    etcd, job = options.etcd_config, options.checked_job()
    if etcd is not None:
        return Endpoint(etcd, job or DEFAULT_JOB, "--etcd")
    path = _file(options.logs, job)
    if not path.is_file():
        raise ConfigError(
            f"{path}: no such file, so no job is known here by it; name the etcd (--etcd host:port) and --job of one, "
            "or the folder of its logs (--logs)"
        )
    endpoint = _read(path)
    if job is not None and job != endpoint.job:
        raise ConfigError(f"--job {job}: the logs in {path.parent} are of job {endpoint.job}; drop --job or --logs")
    return endpoint


def _file(logs: Path | None, job: str | None) -> Path:
    if logs is not None:
        return logs / FILE
    if job is not None:
        return default_logs(job) / FILE
    found = sorted(RUNS.glob(f"*/{FILE}"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else default_logs(DEFAULT_JOB) / FILE


def _read(path: Path) -> Endpoint:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        job = fields.pop("job")
        password = os.environ.get(PASSWORD, "") if fields.get("user") else ""
        etcd = EtcdConfig.model_validate({**fields, "password": password})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); name the etcd with --etcd host:port instead") from None
    return Endpoint(etcd, str(job), str(path))

"""Commands whose options are a dataclass, and the options that all commands share which talk to a store.

typer takes options from a function's signature. A command with forty of them would be a function that nobody can read
or hand on; here the fields of a frozen dataclass are the signature, and the command gets one object.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import socket
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from bamboo_ds.config.etcd import EtcdConfig
from bamboo_ds.errors import BambooError, ConfigError

__all__ = ["CLUSTER", "JOB_NAME", "PASSWORD", "StoreOptions", "command", "host_name"]

Options = TypeVar("Options")

CLUSTER = "Cluster"
PASSWORD = "BAMBOO_ETCD_PASSWORD"
JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_ENDPOINT = re.compile(r"(https?://)?[^\s/:,]+:\d{1,5}|(https?://)?\[[0-9A-Fa-f:]+\]:\d{1,5}")


def command(function: Callable[[Options], int | None], options: type[Options], *, name: str) -> Callable[..., None]:
    """Return a typer command that hands its options to `function` as one object.

    What the function returns is the exit code. An error of ours is one message on stderr and exit code 2, never a
    traceback.
    """

    @functools.wraps(function)
    def run(**given: Any) -> None:
        try:
            code = function(options(**given))
        except BambooError as error:
            typer.echo(f"bamboo-ds {name}: {error}", err=True)
            raise typer.Exit(2) from None
        raise typer.Exit(code or 0)

    hints = get_type_hints(options, include_extras=True)
    parameters = [_parameter(field, hints[field.name]) for field in fields(options)]  # type: ignore[arg-type]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del run.__wrapped__  # `inspect` would look there
    return run


def _parameter(field: Any, annotation: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """How to reach the store of a job."""

    etcd: Annotated[
        str | None,
        typer.Option(help="The etcd servers: host:port[,host:port...].", rich_help_panel=CLUSTER, show_default=False),
    ] = None
    etcd_user: Annotated[
        str,
        typer.Option(help=f"A user of etcd; the password comes from the variable {PASSWORD}.", rich_help_panel=CLUSTER),
    ] = ""
    etcd_ca: Annotated[
        Path | None, typer.Option(help="PEM file of the authorities to trust.", rich_help_panel=CLUSTER)
    ] = None
    etcd_cert: Annotated[Path | None, typer.Option(help="PEM file of our certificate.", rich_help_panel=CLUSTER)] = None
    etcd_key: Annotated[Path | None, typer.Option(help="PEM file of its key.", rich_help_panel=CLUSTER)] = None
    job: Annotated[
        str | None,
        typer.Option(help="Name of the job (default: bamboo).", rich_help_panel=CLUSTER, show_default=False),
    ] = None
    logs: Annotated[Path | None, typer.Option(help="Folder of the logs (default: runs/JOB).", show_default=False)] = (
        None
    )

    @property
    def etcd_config(self) -> EtcdConfig | None:
        """What `--etcd` and its like say; None without `--etcd`.

        Raises:
            ConfigError: names the flag that is wrong.
        """
        self._refuse_halves()
        if self.etcd is None:
            return None
        endpoints = tuple(part.strip() for part in self.etcd.split(","))
        for endpoint in endpoints:
            if not _ENDPOINT.fullmatch(endpoint):
                raise ConfigError(f'--etcd {self.etcd}: "{endpoint}" must be host:port, such as 10.0.0.1:2379')
        return EtcdConfig(
            endpoints=endpoints,
            user=self.etcd_user,
            password=os.environ.get(PASSWORD, "") if self.etcd_user else "",
            ca=_file("--etcd-ca", self.etcd_ca),
            cert=_file("--etcd-cert", self.etcd_cert),
            key=_file("--etcd-key", self.etcd_key),
        )

    def checked_job(self, otherwise: str | None = None) -> str | None:
        """Return `--job`, or what stands for it.

        Raises:
            ConfigError: it cannot be part of a key.
        """
        if self.job is not None and not JOB_NAME.fullmatch(self.job):
            raise ConfigError(
                f"--job {self.job}: must be 1 to 63 letters, digits, '.', '_' or '-', and begin with a letter or digit"
            )
        return self.job if self.job is not None else otherwise

    def _refuse_halves(self) -> None:
        others = {"--etcd-user": self.etcd_user, "--etcd-ca": self.etcd_ca, "--etcd-cert": self.etcd_cert}
        for flag, value in others.items():
            if value and self.etcd is None:
                raise ConfigError(f"{flag} {value}: goes with --etcd host:port, which is missing")
        if (self.etcd_cert is None) != (self.etcd_key is None):
            given, missing = ("--etcd-cert", "--etcd-key") if self.etcd_cert else ("--etcd-key", "--etcd-cert")
            raise ConfigError(f"{given} {self.etcd_cert or self.etcd_key}: goes with {missing}, which is missing")
        if self.etcd_user and not os.environ.get(PASSWORD):
            raise ConfigError(f"--etcd-user {self.etcd_user}: put its password into the variable {PASSWORD}")


def host_name() -> str:
    """Return the name of this machine."""
    return socket.gethostname()


def _file(flag: str, path: Path | None) -> str | None:
    if path is None:
        return None
    if not path.is_file():
        raise ConfigError(f"{flag} {path}: no such file")
    return str(path.resolve())

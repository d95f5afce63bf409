"""Starts the agents of the hosts of a hostfile over ssh, and ends with them.

Each agent's stdin is a leash (`cli.leash`): when this process ends, by an error, Ctrl-C or `kill -9`, the agents end
too. A host that cannot be reached is reported and does not stop the others: the job begins without it once patience is
over.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import typer

from bamboo_ds.cli import endpoint
from bamboo_ds.cli.hostfile import Hosts
from bamboo_ds.cli.options import PASSWORD
from bamboo_ds.cli.run_options import RunOptions
from bamboo_ds.config import EtcdConfig
from bamboo_ds.elastic.membership import VARIABLE
from bamboo_ds.errors import ConfigError
from bamboo_ds.store.embedded import EmbeddedEtcd

__all__ = ["agent_arguments", "exported", "remote_command", "run_over_ssh"]

EXPORTED = ("BAMBOO", "GLOO", "LD_LIBRARY_PATH", "MLFLOW", "MV2", "NCCL", "OMP", "PYTHON", "TORCH", "UCX")
"""Variables that begin so go to all hosts, as do those in `.deepspeed_env` of the home and the current folder."""

_NOT_EXPORTED = {PASSWORD, VARIABLE}  # one goes through the leash, the other is of this process alone
_ENVIRONMENT_FILE = ".deepspeed_env"
_AGENT_CODES = (0, 1, 2, 3)
_END_SECONDS = 20.0
_AFTER_FAILURE_SECONDS = 60.0  # agents end by themselves once the job has failed
_LOOK_SECONDS = 0.1


def run_over_ssh(options: RunOptions, hosts: Hosts, *, etcd: EtcdConfig | None, job: str, logs: Path) -> int:
    """Start an agent on each host, wait for all, and return the exit code of the job.

    Without an etcd to use, one is started here, at the address by which this machine reaches the first host.

    Raises:
        ConfigError: ssh is missing, or a file of variables is wrong.
        StoreError: the etcd does not start.
    """
    variables = exported()
    with contextlib.ExitStack() as stack:
        if etcd is None:
            etcd = stack.enter_context(_own_etcd(options, next(iter(hosts))))
            stack.callback(endpoint.forget, logs)
        endpoint.remember(logs, etcd, job=job)
        agents = stack.enter_context(_Agents(quiet=options.says_nothing))
        slots = sum(len(host.slots) for host in hosts.values())
        for name, host in hosts.items():
            shown = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, host.slots))}
            zone = ("--zone", host.zone) if host.zone else ()
            own = ("--node", name, *zone, "--workers-per-node", str(len(host.slots)))
            arguments = agent_arguments(options, own, etcd=etcd, job=job, logs=logs, workers=slots)
            command = remote_command(arguments, {**variables, **shown}, folder=Path.cwd(), venv=options.venv_script)
            agents.start(name, ssh_command(name, command, options), secrets={PASSWORD: etcd.password})
        return agents.wait()


def agent_arguments(
    options: RunOptions, own: Sequence[str], *, etcd: EtcdConfig, job: str, logs: Path, workers: int
) -> list[str]:
    """Return what `bamboo-ds` is given on a host.

    Args:
        options: of this launcher.
        own: what is of this host alone.
        etcd: the store.
        job: its name.
        logs: folder on the host.
        workers: of all hosts.
    """
    flags: dict[str, object] = {
        "--etcd": ",".join(etcd.endpoints),
        "--etcd-user": etcd.user or None,
        "--etcd-ca": etcd.ca,
        "--etcd-cert": etcd.cert,
        "--etcd-key": etcd.key,
        "--job": job,
        "--logs": logs,
        "--start-workers": options.start_workers or workers,
        "--patience": f"{options.patience:g}",
        "--outage": f"{options.outage:g}",
        "--ttl": None if options.ttl is None else f"{options.ttl:g}",
        "--metrics-port": options.metrics_port,
        "--config": options.config,
    }
    given = [word for flag, value in flags.items() if value is not None for word in (flag, str(value))]
    switches = [flag for flag, on in {"-m": options.module, "--quiet": options.says_nothing}.items() if on]
    script = [str(options.script), *options.script_arguments]
    return ["run", "--leash", *given, *own, *switches, *script]


def remote_command(
    arguments: Sequence[str], variables: Mapping[str, str], *, folder: Path, venv: Path | None = None
) -> str:
    """Return the one line that a host's shell is given: in our folder, with our variables, by our Python."""
    python = sys.executable if venv is None else "python"
    words = [f"{name}={value}" for name, value in variables.items()]
    start = shlex.join(["env", *words, python, "-m", "bamboo_ds.cli.main", *arguments])
    activate = "" if venv is None else f". {shlex.quote(str(venv))} && "
    return f"{activate}cd {shlex.quote(str(folder))} && exec {start}"


def ssh_command(host: str, command: str, options: RunOptions) -> list[str]:
    """Return ssh's own command line; it never asks for a password, as many hosts would ask at once."""
    port = [] if options.ssh_port is None else ["-p", str(options.ssh_port)]
    try:
        more = shlex.split(options.launcher_args)
    except ValueError as error:
        raise ConfigError(f"--launcher_args {options.launcher_args}: {error}") from None
    return ["ssh", *more, *port, "-o", "BatchMode=yes", host, command]


def exported(folders: Sequence[Path] | None = None) -> dict[str, str]:
    """Return the variables that go to all hosts.

    Args:
        folders: where to look for `.deepspeed_env` (or what DS_ENV_FILE names); home and current folder if None.

    Raises:
        ConfigError: a line of such a file is wrong.
    """
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(EXPORTED) and name not in _NOT_EXPORTED and name.isidentifier()
    }
    name = os.environ.get("DS_ENV_FILE", _ENVIRONMENT_FILE)
    for folder in [Path.home(), Path.cwd()] if folders is None else folders:
        if (folder / name).is_file():
            variables.update(_read_variables(folder / name))
    return variables


def _read_variables(path: Path) -> dict[str, str]:
    variables = {}
    for number, line in enumerate(map(str.strip, path.read_text(encoding="utf-8").splitlines()), start=1):
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not name.strip().isidentifier():
            raise ConfigError(f'{path}:{number}: "{line}" must be NAME=VALUE')
        variables[name.strip()] = value.strip()
    return variables


@contextlib.contextmanager
def _own_etcd(options: RunOptions, first_host: str) -> Iterator[EtcdConfig]:
    address = options.master_addr or _address_towards(first_host)
    with EmbeddedEtcd(host=address, client_port=options.master_port or 0) as server:
        if not options.says_nothing:
            typer.echo(f"bamboo-ds run: etcd of this job: {server.endpoint}", err=True)
        yield EtcdConfig(endpoints=(server.endpoint,))


def _address_towards(host: str) -> str:
    """Return our address on the network of a host. Connecting a datagram socket sends nothing."""
    for target in (host.rpartition("@")[2], socket.gethostname()):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 22))
            return str(probe.getsockname()[0])
    return "127.0.0.1"


@dataclass(slots=True)
class _Remote:
    """An agent on a host, as its ssh."""

    host: str
    process: subprocess.Popen[bytes]
    reported: bool = False

    def let_go(self) -> None:
        """End its stdin, which ends it."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()


class _Agents:
    """The agents of all hosts. Leaving the `with` block ends them."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._remotes: list[_Remote] = []
        self._told: int | None = None

    def start(self, host: str, command: Sequence[str], *, secrets: Mapping[str, str]) -> None:
        """Start an agent, and give it what must not stand on a command line."""
        try:
            # In a session of its own: Ctrl-C is for us, and we let the agents end in order.
            process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        except OSError as error:
            raise ConfigError(f"--hostfile: cannot start ssh: {error.strerror}; install an ssh client") from None
        self._remotes.append(_Remote(host, process))
        line = json.dumps({name: value for name, value in secrets.items() if value}) + "\n"
        with contextlib.suppress(OSError):  # it has ended already, which `wait` reports
            if process.stdin is not None:
                process.stdin.write(line.encode())
                process.stdin.flush()

    def wait(self) -> int:
        """Wait for all, and return the job's exit code: 1 if it failed anywhere, else 0 if it finished anywhere."""
        deadline: float | None = None
        while None in (codes := [remote.process.poll() for remote in self._remotes]):
            self._report()
            if self._told is not None:
                return 128 + self._told
            if deadline is None and 1 in codes:
                deadline = time.monotonic() + _AFTER_FAILURE_SECONDS
            if deadline is not None and time.monotonic() > deadline:
                break
            time.sleep(_LOOK_SECONDS)
        self._report()
        return 0 if 0 in codes and 1 not in codes else 1

    def _report(self) -> None:
        """Say which agents ended otherwise than an agent ends: it is ssh that failed."""
        for remote in self._remotes:
            code = remote.process.returncode
            if code is None or remote.reported or code in _AGENT_CODES:
                continue
            remote.reported = True
            typer.echo(
                f"bamboo-ds run: host {remote.host}: ssh ended with {code}; "
                f"try: ssh -o BatchMode=yes {remote.host} true (as {getpass.getuser()})",
                err=True,
            )

    def _be_told(self, number: int, _frame: FrameType | None) -> None:
        self._told = number

    def __enter__(self) -> _Agents:
        self._handlers = {
            number: signal.signal(number, self._be_told) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        return self

    def __exit__(self, *_error: object) -> None:
        for remote in self._remotes:
            remote.let_go()
        deadline = time.monotonic() + _END_SECONDS
        for remote in self._remotes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                remote.process.wait(max(deadline - time.monotonic(), 0.0))
        for remote in self._remotes:
            if remote.process.poll() is None:
                remote.process.kill()
                remote.process.wait()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

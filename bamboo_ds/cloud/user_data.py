"""What an instance does when it boots: installs the package and runs the agent of its node as a systemd unit.

The unit ends the machine with the job. An agent that ends with 0 (finished), 1 (failed) or 2 (wrong input) powers its
machine off, and the launch template makes that its termination. One that ends otherwise, as this node was lost or told
to leave, is started again: if the warning was false, the node joins as a new one. An agent that comes when the job has
ended, as its machine has booted meanwhile, ends with 0 at once (`--started-for-job`).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from bamboo_ds.config.cloud import CloudConfig
from bamboo_ds.errors import ConfigError

__all__ = ["MOST_BYTES", "PACKAGES", "PYTHON", "VENV", "Boot", "user_data"]

PACKAGES = ("bamboo_ds[aws]",)
VENV, PYTHON = "/opt/bamboo/venv", "python3"

MOST_BYTES = 16 * 1024
"""EC2 takes no more."""

_UNIT = """[Unit]
Description=Bamboo agent of job {job}
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
WorkingDirectory={folder}
Environment=PYTHONUNBUFFERED=1
EnvironmentFile=-/etc/bamboo/environment
ExecStart=/bin/bash /etc/bamboo/agent.sh
ExecStopPost=/bin/bash /etc/bamboo/stopped.sh
Restart=always
RestartPreventExitStatus=0 1 2
RestartSec=5
KillMode=mixed
TimeoutStopSec=20

[Install]
WantedBy=multi-user.target
"""

_AGENT = """#!/bin/bash
# shellcheck disable=SC2016  # a dollar in an argument is the script's, not the shell's
exec {command}
"""

_STOPPED = """#!/bin/bash
# The job is over for all nodes, or cannot begin on this one: do not pay for an idle machine.
set -u
if [[ "${EXIT_CODE:-}" == exited && "${EXIT_STATUS:-}" =~ ^[012]$ ]]; then
    systemctl --no-block poweroff
fi
"""

_SCRIPT = """#!/bin/bash
# Made by bamboo-ds cloud launch-template: installs the agent of job {job} and starts it.
set -euo pipefail
exec >> /var/log/bamboo-boot.log 2>&1
# Whatever fails from here on: an instance that never joins must not be paid for.
trap 'echo "bamboo: boot failed in line $LINENO"; shutdown -h +2' ERR
install -d -m 0755 /etc/bamboo {folder} /var/log/bamboo
cd {folder}

{setup}
if [[ ! -x {venv}/bin/bamboo-ds ]]; then
    {python} -m venv {system}{venv}
    {venv}/bin/python -m pip install --quiet {packages}
fi

{files}
systemctl daemon-reload
systemctl enable --now bamboo-agent.service
trap - ERR
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """What a node runs.

    Attributes:
        job: name of the job.
        etcd: the servers, as `--etcd` takes them.
        command: the script and its arguments, as `bamboo-ds run` takes them.
        cloud: the fleet's settings, for every node: any may keep the fleet.
        options: more options of `bamboo-ds run`.
        packages: what pip installs.
        setup: shell commands before that: fetch the script, the data, certificates.
        folder: where the script runs.
        venv: the virtual environment; used as it is when it has bamboo-ds already.
        python: that makes it.
        system_packages: whether it sees the image's own packages, such as its torch.
    """

    job: str
    etcd: str
    command: Sequence[str]
    cloud: CloudConfig
    options: Sequence[str] = ()
    packages: Sequence[str] = PACKAGES
    setup: str = ""
    folder: str = "/opt/bamboo/job"
    venv: str = VENV
    python: str = PYTHON
    system_packages: bool = False


def user_data(boot: Boot) -> str:
    """Return the shell script.

    Raises:
        ConfigError: it is too long for EC2.
    """
    files = {
        "/etc/bamboo/cloud.json": json.dumps(boot.cloud.model_dump(exclude_defaults=True), indent=2) + "\n",
        "/etc/bamboo/agent.sh": _AGENT.format(command=_agent(boot)),
        "/etc/bamboo/stopped.sh": _STOPPED,
        "/etc/systemd/system/bamboo-agent.service": _UNIT.format(job=boot.job, folder=boot.folder),
    }
    text = _SCRIPT.format(
        job=boot.job,
        folder=shlex.quote(boot.folder),
        venv=shlex.quote(boot.venv),
        python=shlex.quote(boot.python),
        system="--system-site-packages " if boot.system_packages else "",
        packages=shlex.join(boot.packages),
        setup=boot.setup.strip() + "\n" if boot.setup.strip() else "",
        files="\n".join(_here(path, content) for path, content in files.items()),
    )
    if len(text.encode()) > MOST_BYTES:
        raise ConfigError(
            f"the user data has {len(text.encode())} bytes and EC2 takes {MOST_BYTES}: let --setup fetch a longer "
            "script and run it"
        )
    return text


def _agent(boot: Boot) -> str:
    command = [
        f"{boot.venv}/bin/bamboo-ds",
        "run",
        *("--etcd", boot.etcd, "--job", boot.job, "--cloud", "/etc/bamboo/cloud.json", "--logs", "/var/log/bamboo"),
        "--started-for-job",
        *boot.options,
        *boot.command,
    ]
    return shlex.join(command)


def _here(path: str, content: str) -> str:
    """Return the commands that write a file whatever is in it: nothing is expanded."""
    mark = "BAMBOO_END"
    while mark in content:
        mark += "_"
    return f"cat > {shlex.quote(path)} <<'{mark}'\n{content}{mark}\n"

"""The options of `bamboo-ds run`: ours, and those of the `deepspeed` launcher under the names they have there.

What cannot mean anything here is refused with one sentence on what to use, never ignored. `check` finds what does not
go together before anything is started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bamboo_ds.cli.options import CLUSTER, StoreOptions
from bamboo_ds.errors import ConfigError

__all__ = ["RunOptions"]

_LOCAL = "Several nodes on this machine"
_DEEPSPEED = "Flags of the deepspeed launcher"


def _option(*names: str, text: str, panel: str = CLUSTER) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False)


def _refused(*names: str, use: str) -> Any:
    """Return an option that is known and refused."""

    def refuse(value: object) -> None:
        if value not in (None, False):
            typer.echo(f"bamboo-ds run: {names[0]}: {use}", err=True)
            raise typer.Exit(2)

    return typer.Option(*names, hidden=True, callback=refuse)


@dataclass(frozen=True, kw_only=True)
class RunOptions(StoreOptions):
    """All options of `bamboo-ds run`, and the script with its arguments."""

    script: Annotated[
        str | None, typer.Argument(metavar="SCRIPT", help="Script to run, or with -m a module.", show_default=False)
    ] = None
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS...", help="Its own, untouched.", show_default=False)
    ] = None
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module, as for python -m.")
    ] = False
    config: Annotated[
        Path | None,
        typer.Option(
            help="The DeepSpeed JSON, where a worker must know it before the script says it; its bamboo block may give "
            "the job's name and etcd.",
            show_default=False,
        ),
    ] = None
    cloud: Annotated[
        Path | None,
        typer.Option(
            help="The fleet's settings: who is asked for nodes, what they cost, who warns (docs/ec2.md).",
            show_default=False,
        ),
    ] = None
    workers_per_node: Annotated[
        int | None,
        typer.Option(help="Workers of this node (default: its accelerators, 1 on CPU).", show_default=False),
    ] = None
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve Prometheus metrics there; 0 for a free port.", show_default=False)
    ] = None

    node: Annotated[str | None, _option("--node", text="Name of this node (default: the host's name).")] = None
    zone: Annotated[str | None, _option("--zone", text="Zone of this node (default: default).")] = None
    address: Annotated[
        str | None, _option("--address", text="At which other nodes reach this one (default: gloo's own choice).")
    ] = None
    on_demand: Annotated[
        bool, typer.Option("--on-demand", help="The cloud does not take this node away.", rich_help_panel=CLUSTER)
    ] = False
    started_for_job: Annotated[
        bool,
        typer.Option(
            "--started-for-job",
            help="This machine was started for the job: leave if it has ended since, instead of beginning it anew.",
            rich_help_panel=CLUSTER,
        ),
    ] = False
    nodes: Annotated[int | None, _option("--nodes", text="Begin at once when so many nodes are there.")] = None
    start_workers: Annotated[
        int | None, _option("--start-workers", text="Begin at once when so many workers are there.")
    ] = None
    patience: Annotated[
        float, typer.Option(help="Begin with fewer when for so long nobody has joined.", rich_help_panel=CLUSTER)
    ] = 30.0
    ttl: Annotated[
        float | None, _option("--ttl", text="Seconds without a word after which a node is lost (default: 10; 3 local).")
    ] = None
    outage: Annotated[float, typer.Option(help="Seconds that etcd may be out of reach.", rich_help_panel=CLUSTER)] = (
        60.0
    )

    local_nodes: Annotated[
        int | None, _option("--local-nodes", text="Emulate so many nodes, with an etcd unless --etcd.", panel=_LOCAL)
    ] = None
    zones: Annotated[str | None, _option("--zones", text="Their zones in turn: a,b,c.", panel=_LOCAL)] = None
    namespaces: Annotated[
        bool,
        typer.Option("--namespaces", help="Each in a network namespace of its own (root).", rich_help_panel=_LOCAL),
    ] = False

    hostfile: Annotated[
        Path | None,
        _option("-H", "--hostfile", text='Start the agents over ssh; lines "host slots=N zone=Z".', panel=_DEEPSPEED),
    ] = None
    include: Annotated[str, _option("-i", "--include", text="Use these only: host1@host2:0,2.", panel=_DEEPSPEED)] = ""
    exclude: Annotated[str, _option("-e", "--exclude", text="Do not use these; as --include.", panel=_DEEPSPEED)] = ""
    num_nodes: Annotated[
        int | None, _option("--num_nodes", text="The hostfile's first N hosts; else as --nodes.", panel=_DEEPSPEED)
    ] = None
    num_gpus: Annotated[
        int | None,
        _option("--num_gpus", "--num_accelerators", text="Workers per node, on slots 0 to N-1.", panel=_DEEPSPEED),
    ] = None
    master_addr: Annotated[
        str | None,
        _option("--master_addr", text="Not needed; of the etcd that --hostfile starts.", panel=_DEEPSPEED),
    ] = None
    master_port: Annotated[int | None, _option("--master_port", text="Likewise, its port.", panel=_DEEPSPEED)] = None
    ssh_port: Annotated[int | None, _option("--ssh_port", text="Port of ssh.", panel=_DEEPSPEED)] = None
    launcher_args: Annotated[
        str, _option("--launcher_args", text="More arguments of ssh, in one quoted word.", panel=_DEEPSPEED)
    ] = ""
    venv_script: Annotated[
        Path | None, _option("--venv_script", text="Activates a virtual environment on each host.", panel=_DEEPSPEED)
    ] = None
    no_ssh: Annotated[
        bool,
        typer.Option(
            "--no_ssh", help="Be the agent of one host of the hostfile (--node_rank).", rich_help_panel=_DEEPSPEED
        ),
    ] = False
    node_rank: Annotated[
        int | None, _option("--node_rank", text="Which host, with --no_ssh: 0 to N-1.", panel=_DEEPSPEED)
    ] = None
    save_pid: Annotated[
        bool,
        typer.Option("--save_pid", help="Write our process id to /tmp/<id>.deepspeed.", rich_help_panel=_DEEPSPEED),
    ] = False
    enable_each_rank_log: Annotated[
        Path | None, _option("--enable_each_rank_log", text="As --logs.", panel=_DEEPSPEED)
    ] = None
    quiet: Annotated[
        bool, typer.Option("-q", "--quiet", help="Say nothing but errors.", rich_help_panel=_DEEPSPEED)
    ] = False
    log_level: Annotated[
        str | None, _option("--log_level", text="Of the launcher; error is as --quiet.", panel=_DEEPSPEED)
    ] = None

    # These say what is so here anyway.
    no_local_rank: Annotated[bool, typer.Option("--no_local_rank", hidden=True)] = False
    no_ssh_check: Annotated[bool, typer.Option("--no_ssh_check", hidden=True)] = False
    force_multi: Annotated[bool, typer.Option("--force_multi", hidden=True)] = False

    launcher: Annotated[
        str | None,
        _refused("--launcher", use="--hostfile starts the agents over ssh; under Slurm use srun bamboo-ds run --etcd"),
    ] = None
    no_python: Annotated[
        bool, _refused("--no_python", use="a worker is a Python program: give a script, or -m and a module")
    ] = False
    autotuning: Annotated[
        str | None, _refused("--autotuning", use="tune with the deepspeed launcher and without a bamboo block")
    ] = None
    bind_cores_to_rank: Annotated[
        bool, _refused("--bind_cores_to_rank", use="run each node's agent under numactl or taskset, workers inherit it")
    ] = False
    bind_core_list: Annotated[
        str | None, _refused("--bind_core_list", use="run each node's agent under taskset -c, workers inherit it")
    ] = None
    nproc_per_node: Annotated[
        str | None, _refused("--nproc-per-node", "--nproc_per_node", use="use --workers-per-node")
    ] = None
    nnodes: Annotated[str | None, _refused("--nnodes", use="use --nodes, or --local-nodes on one machine")] = None
    rdzv_endpoint: Annotated[str | None, _refused("--rdzv-endpoint", "--rdzv_endpoint", use="use --etcd host:port")] = (
        None
    )
    standalone: Annotated[
        bool, _refused("--standalone", use="leave it out: without --etcd a job is of this machine alone")
    ] = False

    leash: Annotated[bool, typer.Option("--leash", hidden=True)] = False
    """The agent ends when its stdin does: with the launcher that started it over ssh."""

    @property
    def script_arguments(self) -> tuple[str, ...]:
        """The script's own arguments."""
        return tuple(self.arguments or ())

    @property
    def says_nothing(self) -> bool:
        """Whether to keep quiet but for errors."""
        return self.quiet or self.log_level in ("error", "critical")

    def check(self) -> None:
        """Check what can be checked without looking at the machine.

        Raises:
            ConfigError: names the flag, its value and what to do.
        """
        self._check_script()
        self._check_numbers()
        self._check_company()
        self._check_pairs()

    def _check_script(self) -> None:
        if not self.script:
            raise ConfigError(
                "SCRIPT is missing: bamboo-ds run [OPTIONS] script.py [ARGUMENTS], or -m and the name of a module"
            )
        if not self.module and self.hostfile is None and not Path(self.script).is_file():
            raise ConfigError(f"SCRIPT {self.script}: no such file; a module needs -m before its name")
        if self.config is not None and not self.config.is_file():
            raise ConfigError(f"--config {self.config}: no such file")
        if self.cloud is not None and not self.cloud.is_file():
            raise ConfigError(f"--cloud {self.cloud}: no such file")

    def _check_numbers(self) -> None:
        for name in ("workers_per_node", "nodes", "start_workers", "local_nodes"):
            self._check_range(f"--{name.replace('_', '-')}", getattr(self, name), lowest=1)
        for name in ("num_nodes", "num_gpus"):
            self._check_range(f"--{name}", getattr(self, name), lowest=1)
        for name in ("ssh_port", "master_port"):
            self._check_range(f"--{name}", getattr(self, name), lowest=1, highest=65535)
        self._check_range("--metrics-port", self.metrics_port, lowest=0, highest=65535)
        self._check_range("--node_rank", self.node_rank, lowest=0)
        self._check_range("--patience", self.patience, lowest=0)
        self._check_range("--ttl", self.ttl, lowest=1)
        self._check_range("--outage", self.outage, lowest=1)

    def _check_range(self, flag: str, value: float | None, *, lowest: int, highest: float = float("inf")) -> None:
        if value is not None and not lowest <= value <= highest:
            limit = f"at least {lowest}" if highest == float("inf") else f"between {lowest} and {highest}"
            raise ConfigError(f"{flag} {value:g}: must be {limit}")

    def _check_company(self) -> None:
        """Refuse flags whose company is missing."""
        for flag, value in {"--zones": self.zones, "--namespaces": self.namespaces}.items():
            self._needs(flag, value, self.local_nodes, "--local-nodes N")
        remote = {"--ssh_port": self.ssh_port, "--launcher_args": self.launcher_args, "--venv_script": self.venv_script}
        for flag, given in {**remote, "--no_ssh": self.no_ssh, "--node_rank": self.node_rank}.items():
            self._needs(flag, given, self.hostfile, "--hostfile FILE")
        self._needs("--no_ssh", self.no_ssh, self.node_rank is not None, "--node_rank N, which of the hosts this is")
        self._needs("--node_rank", self.node_rank, self.no_ssh, "--no_ssh; without it every host is started from here")

    def _needs(self, flag: str, value: object, company: object, named: str) -> None:
        if _given(value) and not company:
            raise ConfigError(f"{_shown(flag, value)}: goes with {named}, which is missing")

    def _check_pairs(self) -> None:
        """Refuse flags that contradict each other."""
        self._excludes("--nodes", self.nodes, {"--start-workers": self.start_workers})
        self._excludes("--logs", self.logs, {"--enable_each_rank_log": self.enable_each_rank_log})
        slots = {"--include": self.include, "--exclude": self.exclude, "--num_gpus": self.num_gpus}
        self._excludes("--workers-per-node", self.workers_per_node, {**slots, "--hostfile": self.hostfile})
        own = {
            "--node": self.node, "--zone": self.zone, "--address": self.address,
            "--on-demand": self.on_demand, "--started-for-job": self.started_for_job,
        }  # fmt: skip
        several = {**own, "--nodes": self.nodes, "--num_nodes": self.num_nodes, "--hostfile": self.hostfile}
        self._excludes("--local-nodes", self.local_nodes, {**several, **slots})
        if not self.no_ssh:
            self._excludes("--hostfile", self.hostfile, {**own, "--nodes": self.nodes, "--cloud": self.cloud})

    def _excludes(self, flag: str, value: object, others: Mapping[str, object]) -> None:
        for other, second in others.items():
            if _given(value) and _given(second):
                raise ConfigError(f"{_shown(flag, value)} and {_shown(other, second)} do not go together; drop one")


def _given(value: object) -> bool:
    return value is not None and value is not False and value != ""  # 0 is given


def _shown(flag: str, value: object) -> str:
    return flag if value is True else f"{flag} {value}"

"""`bamboo-ds run`: take part in a job, as torchrun would be used, or start a whole one.

::

    bamboo-ds run --etcd H:2379 train.py         on each node: this process is the node's agent
    bamboo-ds run train.py                       this machine is the whole cluster, with an etcd of its own
    bamboo-ds run --local-nodes 8 train.py       eight nodes emulated on this machine
    bamboo-ds run --hostfile hosts train.py      start the agents of all hosts over ssh

Exit code: 0 the job has finished, 1 it has failed, 3 this node was lost or told to leave, 2 for wrong input.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import typer

from bamboo_ds.cli import endpoint
from bamboo_ds.cli.hostfile import LOCAL_HOST, Host, Hosts, read_hostfile, select, this_machine
from bamboo_ds.cli.leash import on_leash
from bamboo_ds.cli.local import LocalCluster
from bamboo_ds.cli.options import host_name
from bamboo_ds.cli.run_cloud import LocalFleet, local_fleet, this_place
from bamboo_ds.cli.run_options import RunOptions
from bamboo_ds.cli.ssh import run_over_ssh
from bamboo_ds.config import BambooConfig, EtcdConfig, bamboo_block, load_deepspeed_config
from bamboo_ds.config.cloud import CloudConfig, load_cloud_config
from bamboo_ds.config.source import CONFIG_VARIABLE
from bamboo_ds.elastic.agent import Agent, AgentSettings
from bamboo_ds.elastic.spawner import Script
from bamboo_ds.errors import ConfigError

__all__ = ["Launch", "run", "this_node"]

DEFAULT_ZONE = "default"
_DEVICES = "CUDA_VISIBLE_DEVICES"
_PID_FOLDER = Path("/tmp")  # where DeepSpeed's users look for it


@dataclass(frozen=True, slots=True)
class Launch:
    """What the options come to, whatever way the job is started."""

    options: RunOptions
    job: str
    etcd: EtcdConfig | None
    logs: Path
    script: Script
    environment: dict[str, str]
    cloud: CloudConfig | None = None

    @classmethod
    def of(cls, options: RunOptions) -> Launch:
        """Read the options, and the config they name.

        Raises:
            ConfigError: they cannot be right.
        """
        options.check()
        block = _block(options)
        job = options.checked_job() or (block.job if block else endpoint.DEFAULT_JOB)
        etcd = options.etcd_config
        if etcd is None and block is not None and options.local_nodes is None:
            etcd = block.etcd
        logs = options.logs or options.enable_each_rank_log or endpoint.default_logs(job)
        script = Script((str(options.script), *options.script_arguments), as_module=options.module)
        environment = {CONFIG_VARIABLE: str(options.config.resolve())} if options.config else {}
        cloud = None if options.cloud is None else load_cloud_config(options.cloud)
        return cls(options, job, etcd, logs, script, environment, cloud)


def run(options: RunOptions) -> int:
    """Run a script on preemptible nodes: as the agent of this node, or on several at once.

    Options come before SCRIPT; whatever follows it is the script's own.
    """
    launch = Launch.of(options)
    _explain(options)
    with _pid_file(options.save_pid):
        if options.leash:
            return on_leash(lambda: _start(launch))
        return _start(launch)


def _start(launch: Launch) -> int:
    options = launch.options
    if options.hostfile is not None and not options.no_ssh:
        return run_over_ssh(launch.options, _hosts(options), etcd=launch.etcd, job=launch.job, logs=launch.logs)
    if options.local_nodes is not None:
        return _run_local_nodes(launch, options.local_nodes)
    if launch.etcd is None:
        return _run_alone(launch)
    return Agent(this_node(launch, launch.etcd)).run()


def this_node(launch: Launch, etcd: EtcdConfig) -> AgentSettings:
    """Return what the agent of this machine must know.

    Raises:
        ConfigError: the flags do not fit this machine.
    """
    options = launch.options
    name, host = _this_host(options)
    place = this_place()
    companion = place.companion(launch.cloud, job=launch.job, workers=len(host.slots))
    if options.hostfile is None:
        name = place.identity.instance or name
    endpoint.remember(launch.logs, etcd, job=launch.job)
    return AgentSettings(
        etcd=etcd,
        job=launch.job,
        node=options.node or name,
        zone=options.zone or host.zone or place.identity.zone or DEFAULT_ZONE,
        program=launch.script,
        workers=len(host.slots),
        address=options.address or "",
        spot=not options.on_demand and place.identity.spot is not False,
        ttl_seconds=options.ttl if options.ttl is not None else 10.0,
        start_workers=_start_workers(options, len(host.slots)),
        patience_seconds=options.patience,
        outage_seconds=options.outage,
        log_folder=launch.logs / (options.node or name),
        alone=not options.leash,
        metrics_port=options.metrics_port,
        environment={**launch.environment, **_devices(options, host)},
        started_at=_boot_time() if options.started_for_job else None,
        companions=() if companion is None else (companion,),
    )


def _boot_time() -> float:
    """Return when this machine was started, in Unix seconds."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def _run_alone(launch: Launch) -> int:
    """Be the whole cluster: one node, with an etcd of its own."""
    options = launch.options
    cluster_flags = {
        "--node": options.node,
        "--zone": options.zone,
        "--address": options.address,
        "--on-demand": options.on_demand or None,
        "--nodes": options.nodes,
        "--no_ssh": options.no_ssh or None,
        "--cloud": options.cloud,
        "--started-for-job": options.started_for_job or None,
        "--num_nodes": options.num_nodes if options.num_nodes != 1 else None,
    }
    for flag, value in cluster_flags.items():
        if value is not None:
            shown = flag if value is True else f"{flag} {value}"
            raise ConfigError(
                f"{shown}: goes with --etcd host:port, without which this machine is the whole cluster; "
                "--local-nodes N emulates several nodes"
            )
    _, host = _this_host(options)
    environment = {**launch.environment, **_devices(options, host)}
    return _run_cluster(launch, nodes=1, workers=len(host.slots), zones=(DEFAULT_ZONE,), environment=environment)


def _run_local_nodes(launch: Launch, nodes: int) -> int:
    options = launch.options
    zones = tuple(zone.strip() for zone in (options.zones or DEFAULT_ZONE).split(","))
    if not all(zones):
        raise ConfigError(f"--zones {options.zones}: must be names between commas, such as a,b,c")
    workers = options.workers_per_node or 1
    return _run_cluster(launch, nodes=nodes, workers=workers, zones=zones, environment=launch.environment)


def _run_cluster(
    launch: Launch, *, nodes: int, workers: int, zones: tuple[str, ...], environment: dict[str, str]
) -> int:
    with local_fleet(launch.cloud, job=launch.job, workers=workers, zones=zones) as fleet:
        cluster = _local_cluster(
            launch, nodes=nodes, workers=workers, zones=zones, environment=environment, fleet=fleet
        )
        with cluster:
            endpoint.remember(launch.logs, cluster.etcd, job=launch.job)
            first = {name: zones[index % len(zones)] for index, name in enumerate(cluster.names)}
            try:
                return cluster.wait(meanwhile=fleet.meanwhile(cluster, zones=first))
            finally:
                if launch.etcd is None:
                    endpoint.forget(launch.logs)


def _local_cluster(
    launch: Launch,
    *,
    nodes: int,
    workers: int,
    zones: tuple[str, ...],
    environment: dict[str, str],
    fleet: LocalFleet,
) -> LocalCluster:
    options = launch.options
    return LocalCluster(
        launch.script,
        nodes=nodes,
        zones=zones,
        job=launch.job,
        etcd=launch.etcd,
        workers=workers,
        ttl_seconds=options.ttl if options.ttl is not None else 3.0,
        start_workers=options.start_workers,
        patience_seconds=options.patience,
        outage_seconds=options.outage,
        log_folder=launch.logs,
        metrics_port=options.metrics_port,
        environment=environment,
        namespaces=options.namespaces,
        companions=fleet.companions,
    )


def _hosts(options: RunOptions) -> Hosts:
    if options.hostfile is None:
        local = {LOCAL_HOST: this_machine(accelerators=options.num_gpus or options.workers_per_node)}
        return select(local, include=options.include, exclude=options.exclude, num_gpus=options.num_gpus)
    return select(
        read_hostfile(options.hostfile),
        include=options.include,
        exclude=options.exclude,
        num_nodes=options.num_nodes,
        num_gpus=options.num_gpus,
    )


def _this_host(options: RunOptions) -> tuple[str, Host]:
    """Return the name and the slots of this machine: of the hostfile with `--no_ssh`, else what it has."""
    hosts = _hosts(options)
    if options.hostfile is None:
        return host_name(), hosts[LOCAL_HOST]
    rank = options.node_rank or 0
    if rank >= len(hosts):
        raise ConfigError(f"--node_rank {rank}: there are {len(hosts)} hosts, so it must be 0 to {len(hosts) - 1}")
    return list(hosts.items())[rank]


def _start_workers(options: RunOptions, workers: int) -> int | None:
    if options.start_workers is not None:
        return options.start_workers
    if options.hostfile is not None:
        return sum(len(host.slots) for host in _hosts(options).values())
    nodes = options.nodes or options.num_nodes
    return None if nodes is None else nodes * workers


def _devices(options: RunOptions, host: Host) -> dict[str, str]:
    """Return the variable that shows the workers their accelerators, where flags or a hostfile choose them."""
    if not (options.include or options.exclude or options.num_gpus or options.hostfile):
        return {}
    return {_DEVICES: ",".join(map(str, host.slots))}


def _block(options: RunOptions) -> BambooConfig | None:
    """Return the `bamboo` block of `--config`; a config without one leaves the script to stock DeepSpeed."""
    if options.config is None:
        return None
    try:
        return bamboo_block(load_deepspeed_config(config=str(options.config)))
    except ConfigError as error:
        raise ConfigError(f"--config {options.config}: {error}") from None


def _explain(options: RunOptions) -> None:
    """Say once what a flag of another launcher means here."""
    if options.says_nothing:
        return
    starts_etcd = options.hostfile is not None and not options.no_ssh and options.etcd is None
    if (options.master_addr or options.master_port) and not starts_etcd:
        typer.echo("bamboo-ds run: --master_addr and --master_port are not needed: workers meet through etcd", err=True)


@contextlib.contextmanager
def _pid_file(wanted: bool) -> Iterator[None]:
    """Write our process id where programs that start `deepspeed --save_pid` look for it."""
    if not wanted:
        yield
        return
    path = _PID_FOLDER / f"{os.getpid()}.deepspeed"
    path.write_text(str(os.getpid()), encoding="utf-8")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)

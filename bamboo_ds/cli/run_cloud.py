"""What `bamboo-ds run` does about the cloud: who this machine is, and what attends to its cloud beside the agent."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bamboo_ds.cli.local_cloud import LocalCloud, Nodes
from bamboo_ds.cli.local_folder import locked_folder
from bamboo_ds.cloud.attendant import Attendant, Cloud
from bamboo_ds.cloud.ec2_client import Clients, check_boto3
from bamboo_ds.cloud.ec2_fleet import Ec2Fleet
from bamboo_ds.cloud.ec2_group import Ec2Group
from bamboo_ds.cloud.ec2_prices import Ec2Prices
from bamboo_ds.cloud.fleet import FleetRules
from bamboo_ds.cloud.identity import Identity, identify
from bamboo_ds.cloud.keeper import KeeperSettings
from bamboo_ds.cloud.local import LocalProvider
from bamboo_ds.cloud.metadata import Metadata, find_metadata
from bamboo_ds.cloud.notices import FileNotices, Source, source_of
from bamboo_ds.cloud.port import Provider
from bamboo_ds.cloud.pretend import Manners, PretendMarket, Supply, steady_supply
from bamboo_ds.cloud.prices import PriceBook
from bamboo_ds.config.cloud import CloudConfig
from bamboo_ds.elastic.agent_settings import AgentPort, Companion
from bamboo_ds.errors import ConfigError
from bamboo_ds.simulator.trace import Change, Trace
from bamboo_ds.simulator.trace_files import read_trace

__all__ = ["LocalFleet", "Place", "local_fleet", "local_market", "this_place"]

_NO_LIMIT = 1_000_000
_LOCAL = "local"


@dataclass(frozen=True, slots=True)
class Place:
    """This machine, as its cloud describes it.

    Attributes:
        identity: who it is; empty off a cloud.
        metadata: the cloud's server; None off a cloud.
    """

    identity: Identity
    metadata: Metadata | None

    def companion(self, config: CloudConfig | None, *, job: str, workers: int) -> Companion | None:
        """Return what attends to the cloud of this machine's agent; None if there is nothing to attend to.

        Args:
            config: the fleet's settings; None to hear warnings only.
            job: name of the job.
            workers: of each node.

        Raises:
            ConfigError: the settings are not for such a node.
        """
        sources = [] if self.metadata is None else [source_of(self.metadata)]
        if config is None:
            return _companion(Cloud(identity=self.identity, sources=sources), job=job) if sources else None
        if config.provider == "local":
            raise ConfigError('--cloud: provider = "local" goes with --local-nodes N')
        cloud = _cloud(config, self.identity, sources=sources, workers=workers)
        if config.provider == "ec2":
            check_boto3()
            cloud = _with_ec2(cloud, config, job=job)
        return _companion(cloud, job=job, notice_file=config.notice_file)


def this_place() -> Place:
    """Ask this machine's cloud who it is; takes a second at most, and no time off a cloud."""
    metadata = find_metadata()
    return Place(identify(metadata), metadata)


@dataclass(frozen=True, slots=True)
class LocalFleet:
    """What `--cloud` means to emulated nodes.

    Attributes:
        companions: of each agent.
        cloud: the launcher's part; None if nobody is asked for nodes.
    """

    companions: tuple[Companion, ...] = ()
    cloud: LocalCloud | None = None

    def meanwhile(self, nodes: Nodes, *, zones: Mapping[str, str]) -> Callable[[], bool] | None:
        """Begin, and return what the launcher calls while it waits; None if it plays no cloud.

        Args:
            nodes: the cluster.
            zones: of the nodes that there are, by name.
        """
        if self.cloud is None:
            return None
        self.cloud.begin(zones)
        return functools.partial(self.cloud.go_on, nodes)


@contextlib.contextmanager
def local_fleet(config: CloudConfig | None, *, job: str, workers: int, zones: Sequence[str]) -> Iterator[LocalFleet]:
    """Give what `--cloud` means to emulated nodes.

    Args:
        config: the fleet's settings; None without any.
        job: name of the job.
        workers: of each node.
        zones: of the nodes.

    Raises:
        ConfigError: the settings are for real nodes.
    """
    if config is None:
        yield LocalFleet()
        return
    if config.provider == "ec2":
        raise ConfigError('--cloud: provider = "ec2" does not go with --local-nodes; use "local"')
    names = tuple(sorted(set(zones)))
    settings = _cloud(config, Identity(_LOCAL, type=_LOCAL, spot=True), sources=[], workers=workers)
    if config.provider is None:
        yield LocalFleet((_companion(settings, job=job, notice_file=config.notice_file),))
        return
    with locked_folder() as folder:
        path = folder / "socket"
        settings = replace(settings, provider=lambda: LocalProvider(path, zones=names))
        with LocalCloud(local_market(config, zones=names), path) as cloud:
            yield LocalFleet((_companion(settings, job=job, notice_file=config.notice_file),), cloud)


def local_market(config: CloudConfig, *, zones: Sequence[str]) -> PretendMarket:
    """Return the pretend market of emulated nodes, whose clock begins at 0.

    Raises:
        ConfigError: its trace cannot be read.
    """
    local, names = config.local, tuple(sorted(set(zones)))
    capacity = _NO_LIMIT if local.capacity is None else local.capacity
    supply = steady_supply(names, capacity=capacity)
    if local.trace is not None:
        supply = _supply(read_trace(Path(local.trace)), zones=names, speed=local.speed)
    manners = Manners(refuse=local.refuse, partly=local.partly, delay_seconds=local.delay_seconds)
    return PretendMarket(supply, manners=manners, seed=local.seed)


def _supply(trace: Trace, *, zones: Sequence[str], speed: float) -> Supply:
    """Return a trace as capacity: each of its nodes is room for one."""
    zoned = trace if set(trace.zones) <= set(zones) else trace.zoned(zones)
    there: dict[str, str] = {}
    changes = []
    for event in zoned.events:
        if event.change is Change.ADD:
            there[event.node] = event.zone
        sign = 1 if event.change is Change.ADD else -1
        changes.append((event.seconds / speed, there[event.node], sign))
    return Supply.of(changes, zones=zones)


def _companion(cloud: Cloud, *, job: str, notice_file: str | None = None) -> Companion:
    return functools.partial(_attend, cloud, job, notice_file)


def _attend(cloud: Cloud, job: str, notice_file: str | None, host: AgentPort) -> Attendant:
    if notice_file is not None:
        file = FileNotices(Path(notice_file.replace("{node}", host.node)))
        cloud = replace(cloud, sources=[*cloud.sources, file])
    if not cloud.identity.instance:
        cloud = replace(cloud, identity=replace(cloud.identity, instance=host.node, zone=host.zone))
    if host.registry is not None and cloud.keeper is not None:
        from bamboo_ds.cloud.cost_metrics import CostMetrics  # needs prometheus_client

        cloud = replace(cloud, on_cost=CostMetrics(host.registry, job=job, node=host.node).show)
    return Attendant(host, cloud)


def _cloud(config: CloudConfig, identity: Identity, *, sources: Sequence[Source], workers: int) -> Cloud:
    rules = FleetRules(
        retry_seconds=config.retry_seconds,
        retry_max_seconds=config.retry_max_seconds,
        release_seconds=config.release_seconds,
        boot_seconds=config.boot_seconds,
    )
    settings = KeeperSettings(
        rules=rules, nodes=config.nodes, workers_per_node=workers, look_seconds=config.look_seconds
    )
    return Cloud(
        identity=identity,
        keeper=settings,
        prices=lambda: PriceBook(config.prices),
        sources=sources,
    )


def _with_ec2(cloud: Cloud, config: CloudConfig, *, job: str) -> Cloud:
    """Return what asks EC2, in the keeper's thread: boto3 is not imported before."""
    clients = Clients(config.ec2.region)

    def provider() -> Provider:
        if config.ec2.group is not None:
            return Ec2Group(config.ec2.group, clients=clients)
        return Ec2Fleet(config.ec2, job=job, clients=clients)

    return replace(cloud, provider=provider, prices=lambda: PriceBook(config.prices, spot=Ec2Prices(clients).spot))

"""What an agent must know of its node and its job."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bamboo_ds.config.etcd import EtcdConfig
from bamboo_ds.elastic.spawner import Program
from bamboo_ds.errors import ConfigError
from bamboo_ds.store import Lease, Store

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["AgentPort", "AgentSettings", "Closable", "Companion", "Tell"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Tell(Protocol):
    """Takes an event of the job."""

    def __call__(self, kind: str, text: str, *, about: str = "", **fields: Any) -> object:
        """Write it; it is about the agent's own node unless it says about which."""
        ...


class Closable(Protocol):
    """Something that ends."""

    def close(self) -> None:
        """End it, within seconds."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPort:
    """What a companion of an agent may use of it, from threads of its own.

    Attributes:
        store: of the job.
        node: name of the node, which has joined; likewise `zone`.
        lease: returns the lease that the node lives under now; after an outage it is another one.
        tell: takes an event of the job.
        say: writes to the agent's terminal.
        leave: takes the node out of the job, for the reason given.
        registry: of the agent's metrics; None if it serves none.
    """

    store: Store
    node: str
    zone: str
    lease: Callable[[], Lease]
    tell: Tell
    say: Callable[[str], None]
    leave: Callable[[str], None]
    registry: CollectorRegistry | None


Companion = Callable[[AgentPort], Closable]
"""Something that runs beside an agent from when its node has joined until it leaves: what attends to its cloud."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """What an agent must know.

    Attributes:
        etcd: how to reach the store.
        job: name of the job.
        node: name of this node, unique in the job.
        program: what each worker runs: a `Script` in a new interpreter, or a callable in a fork of this process.
        log_folder: takes `worker-<id>.log` and `events.jsonl`.
        zone: where the node runs.
        workers: how many workers to start.
        address: at which other nodes reach the workers of this one; empty for gloo's own choice.
        spot: whether the cloud may take this node away.
        ttl_seconds: how long the node is believed to live without a word from its agent.
        start_workers: the job starts at once when so many workers are there; None for as many as the job can use.
        patience_seconds: the job starts with fewer when for so long nobody has joined.
        outage_seconds: how long the store may be out of reach before agent and workers give up.
        echo: whether to pass what the workers write on to stdout and stderr.
        alone: whether nobody else writes to this terminal; else only what is about this node is said.
        metrics_port: where to serve Prometheus metrics; None for nowhere.
        pid_file: takes the process ids of spawner and workers, one a line, each the leader of a session: for whoever
            must sweep behind a killed agent.
        environment: more variables for the workers.
        started_at: when this machine was started for the job, in Unix seconds. If the job has ended since then and all
            its nodes are gone, the agent leaves as if it had seen the end. None: it begins the job anew.
        companions: run beside the agent.

    Raises:
        ConfigError: a value cannot be right.
    """

    etcd: EtcdConfig
    job: str
    node: str
    program: Program
    log_folder: Path
    zone: str = ""
    workers: int = 1
    address: str = ""
    spot: bool = True
    ttl_seconds: float = 10.0
    start_workers: int | None = None
    patience_seconds: float = 30.0
    outage_seconds: float = 60.0
    echo: bool = True
    alone: bool = True
    metrics_port: int | None = None
    pid_file: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    started_at: float | None = None
    companions: tuple[Companion, ...] = ()

    def __post_init__(self) -> None:
        for what, name in (("job", self.job), ("node", self.node)):
            if not _NAME.fullmatch(name):
                raise ConfigError(f'{what} = "{name}": must be letters, digits, ".", "_" or "-", as it is part of keys')
        if self.workers < 1:
            raise ConfigError(f"workers = {self.workers}: a node has at least 1")
        for what, seconds in (("ttl", self.ttl_seconds), ("outage", self.outage_seconds)):
            if seconds <= 0:
                raise ConfigError(f"{what}_seconds = {seconds}: must be greater than 0")

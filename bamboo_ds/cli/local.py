"""A cluster on this machine: several nodes, each an agent with its workers, and an etcd.

::

    with LocalCluster(program, nodes=8, zones=("a", "b", "c")) as cluster:
        cluster.kill("n3")
        cluster.add(zone="a")  # it is called n8
        code = cluster.wait()

The agents are forked from this process after it has imported torch and DeepSpeed, and the workers from them, so eight
nodes are up in a second. This process never opens a store itself: none that was forked from it could.

Whatever ends, and however, nothing is left: the agents and etcd die with this process, the workers with their agents.
Only folders of a launcher that was killed stay; the next one sweeps them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from typing_extensions import Self

from bamboo_ds.cli.local_agent import RESULTS, Gate, be_agent, run_and_keep, run_script
from bamboo_ds.cli.local_folder import locked_folder, sweep_abandoned_folders
from bamboo_ds.cli.local_node import POLL_SECONDS, LocalNode, await_agents, kill_nodes, sweep_nodes
from bamboo_ds.config.etcd import EtcdConfig
from bamboo_ds.elastic import forking
from bamboo_ds.elastic.agent import FAILED, FINISHED
from bamboo_ds.elastic.agent_settings import AgentSettings, Companion
from bamboo_ds.elastic.namespaces import Network
from bamboo_ds.elastic.preemption import How, break_node
from bamboo_ds.elastic.processes import NodeProcesses, node_processes, send
from bamboo_ds.elastic.spawner import Program, Script
from bamboo_ds.errors import ConfigError
from bamboo_ds.plan.keeping import warm_up as load_solver
from bamboo_ds.store.embedded import EmbeddedEtcd

__all__ = ["LocalCluster"]

_LATE_SECONDS = 20.0  # in which the other agents end once the first has seen the end of the job
_LEAVE_SECONDS = 5.0  # in which agents that were told to leave end
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class LocalCluster:
    """Several nodes on this machine. Use it in a `with` block, in the main thread of a process that opens no store.

    Args:
        program: a `Script`, run in a fork of this warmed-up process, or a callable, whose value is kept (`results`).
        nodes: their number at the beginning; they are called n0, n1, ..., as are those that are added.
        zones: given to the nodes in turn.
        job: name of the job.
        etcd: servers to use; None for an embedded one.
        workers: per node.
        ttl_seconds: how long a node is believed to live without a word from its agent.
        start_workers: the job starts at once with so many; by default all.
        patience_seconds: the job starts with fewer when for so long nobody has joined.
        outage_seconds: how long the store may be out of reach.
        log_folder: takes a folder per node with `worker-<id>.log` and `events.jsonl`; None for a temporary one.
        echo: whether to pass on what the workers write.
        metrics_port: of the first node, the next ones follow; None for no metrics.
        environment: more variables for the workers.
        namespaces: give each node its own network namespace (needs root) instead of a loopback address.
        warm: import torch and DeepSpeed before the nodes are forked.
        companions: run beside each agent.

    Raises:
        ConfigError: an argument cannot be right, or this machine cannot do it.
    """

    def __init__(
        self,
        program: Script | Callable[[], Any],
        *,
        nodes: int,
        zones: Sequence[str] = ("local",),
        job: str = "local",
        etcd: EtcdConfig | None = None,
        workers: int = 1,
        ttl_seconds: float = 3.0,
        start_workers: int | None = None,
        patience_seconds: float = 30.0,
        outage_seconds: float = 60.0,
        log_folder: Path | None = None,
        echo: bool = True,
        metrics_port: int | None = None,
        environment: Mapping[str, str] | None = None,
        namespaces: bool = False,
        warm: bool = True,
        companions: Sequence[Companion] = (),
    ) -> None:
        if nodes < 1:
            raise ConfigError(f"local nodes = {nodes}: a cluster has at least 1")
        if not zones:
            raise ConfigError("zones: give at least 1")
        _check_thread()
        self._program, self._etcd, self._zones, self._warm = program, etcd, tuple(zones), warm
        self._namespaces, self._log_folder, self._metrics_port = namespaces, log_folder, metrics_port
        self._common = {
            "job": job,
            "workers": workers,
            "ttl_seconds": ttl_seconds,
            "start_workers": nodes * workers if start_workers is None else start_workers,
            "patience_seconds": patience_seconds,
            "outage_seconds": outage_seconds,
            "echo": echo,
            "alone": False,
            "environment": {**_few_threads(nodes * workers), **(environment or {})},
            "companions": tuple(companions),
        }
        self._begin_with = nodes
        self._nodes: dict[str, LocalNode] = {}
        self._network: Network | None = None
        self._server: EmbeddedEtcd | None = None
        self._folder: Path | None = None
        self._results: dict[int, Any] = {}
        self._ending = contextlib.ExitStack()

    # ---- life --------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Start it; returns when all agents run, which take part in the job from now on."""
        try:
            self._start()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """End it."""
        self.end()

    def _start(self) -> None:
        sweep_abandoned_folders()
        folder = self._folder = self._ending.enter_context(locked_folder())
        self._ending.enter_context(_signals_raise())
        if self._namespaces:
            self._network = Network()
            self._ending.callback(self._network.close)
        with ThreadPoolExecutor(1) as other:
            starting = other.submit(self._start_etcd)
            _import_heavy(warm=self._warm)
            starting.result()
        self._fork_all([self._new_node(folder) for _ in range(self._begin_with)], folder)

    def _start_etcd(self) -> None:
        if self._etcd is not None:
            return
        self._server = EmbeddedEtcd(host=self._network.address if self._network else "127.0.0.1")
        self._ending.callback(self._server.stop)
        self._server.start()
        self._etcd = EtcdConfig(endpoints=(self._server.endpoint,))

    def add(self, *, zone: str | None = None) -> str:
        """Start one more node and return its name, which no other has had; it joins the job by itself.

        Args:
            zone: of the node; None for the next in turn.

        Raises:
            ConfigError: the cluster has not begun or has ended, or this machine cannot do it.
        """
        if self._folder is None or not self._folder.exists():
            raise ConfigError("add: the cluster does not run: use it in a `with` block")
        _check_thread()
        node = self._new_node(self._folder, zone=zone)
        self._fork_all([node], self._folder)
        return node.name

    def _new_node(self, folder: Path, *, zone: str | None = None) -> LocalNode:
        index = len(self._nodes)
        name = f"n{index}"
        zone = self._zones[index % len(self._zones)] if zone is None else zone
        node = self._nodes[name] = LocalNode(name, index, self._settings(name, index, zone, folder))
        return node

    def _settings(self, name: str, index: int, zone: str, folder: Path) -> AgentSettings:
        home = folder / name
        (home / "tmp").mkdir(parents=True)
        address = self._network.node_address(index) if self._network else _loopback(index)
        return AgentSettings(
            etcd=self.etcd,
            node=name,
            zone=zone,
            program=self._prepared(folder),
            address=address,
            log_folder=(self._log_folder or folder / "logs") / name,
            metrics_port=self._metrics_port + index if self._metrics_port else self._metrics_port,
            pid_file=home / "pids",
            **self._common,  # type: ignore[arg-type]
        )

    def _prepared(self, folder: Path) -> Program:
        if isinstance(self._program, Script):
            return functools.partial(run_script, self._program) if self._warm else self._program
        return functools.partial(run_and_keep, self._program, folder)

    def _fork_all(self, nodes: Sequence[LocalNode], folder: Path) -> None:
        """Fork agents; those with a network of their own wait until all have a link."""
        gates = {node.name: Gate() for node in nodes} if self._network else {}
        for node in nodes:
            child = functools.partial(
                be_agent,
                node.settings,
                launcher=os.getpid(),
                temporary_folder=folder / node.name / "tmp",
                gate=gates.get(node.name),
            )
            node.pid = forking.fork(child)
        linked = False
        try:
            for gate in gates.values():
                gate.await_child()
            if self._network is not None:
                self._network.attach({node.index: node.pid for node in nodes})
            linked = True
        finally:
            for gate in gates.values():
                gate.open(linked=linked)

    def end(self) -> None:
        """End everything; may be called again."""
        nodes = list(self._nodes.values())
        running = [node for node in nodes if not node.reap()]
        idle = [node for node in running if node.idle]
        send([node.pid for node in running if node not in idle], signal.SIGTERM)
        kill_nodes(idle)
        await_agents(running, timeout_seconds=_LEAVE_SECONDS)
        kill_nodes([node for node in running if not node.reap()])
        sweep_nodes(nodes)
        self._results = self.results()
        self._ending.close()

    # ---- what it can tell --------------------------------------------------------------------------------------

    @property
    def etcd(self) -> EtcdConfig:
        """How to reach its store, once it has begun.

        Raises:
            ConfigError: it has not begun.
        """
        if self._etcd is None:
            raise ConfigError("the cluster has not begun: use it in a `with` block")
        return self._etcd

    @property
    def server(self) -> EmbeddedEtcd | None:
        """The embedded etcd; None if others were given, or before the start."""
        return self._server

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all nodes that there have been."""
        return tuple(self._nodes)

    @property
    def live(self) -> tuple[str, ...]:
        """Names of the nodes that run: their agent has not ended, and nobody has broken them from outside."""
        return tuple(
            name for name, node in self._nodes.items() if not node.reap() and node.fault is None and not node.idle
        )

    @property
    def codes(self) -> dict[str, int | None]:
        """The exit code of each agent, by node: negative for a signal, None while it runs."""
        for node in self._nodes.values():
            node.reap()
        return {name: node.code for name, node in self._nodes.items()}

    def log_folder(self, node: str) -> Path:
        """Return the folder of a node's logs."""
        return self._node(node).settings.log_folder

    def log(self, worker: int) -> str:
        """Return what a worker has written; empty if there is no such worker."""
        found = (self.log_folder(node) / f"worker-{worker}.log" for node in self.names)
        return "".join(path.read_text(encoding="utf-8", errors="replace") for path in found if path.exists())

    def processes(self, node: str) -> NodeProcesses:
        """Return the process ids of a node whose agent runs."""
        return node_processes(self._node(node).pid)

    def results(self) -> dict[int, Any]:
        """Return what the callable program returned, by worker id, for the workers that have returned."""
        found = dict(self._results)
        for path in self._folder.glob(RESULTS) if self._folder is not None else ():
            found[int(path.stem.removeprefix("result-"))] = pickle.loads(path.read_bytes())
        return found

    # ---- faults ------------------------------------------------------------------------------------------------

    def kill(self, node: str, how: How = "kill") -> float:
        """Break a node from outside, and return `time.monotonic()` of the fault.

        Raises:
            ConfigError: there is no such node, it has ended, or `cut` without namespaces.
        """
        found = self._node(node)
        if found.reap():
            raise ConfigError(f"node {node} has ended with code {found.code}")
        if how == "cut":
            if self._network is None:
                raise ConfigError("cut: the nodes of this cluster have no link to cut; make it with namespaces=True")
            found.fault = how
            at = time.monotonic()
            self._network.cut(found.index)
            return at
        processes = node_processes(found.pid)
        found.fault = how
        at = time.monotonic()
        break_node(processes, how)
        return at

    def kill_worker(self, node: str, index: int = 0) -> float:
        """Kill a worker of a node, and return `time.monotonic()` of the fault.

        Raises:
            ConfigError: there is no such node, or it has no such worker.
        """
        workers = self.processes(node).workers
        if index >= len(workers):
            raise ConfigError(f"node {node} has {len(workers)} running worker(s), none with index {index}")
        at = time.monotonic()
        send([workers[index]], signal.SIGKILL)
        return at

    def _node(self, name: str) -> LocalNode:
        if name not in self._nodes:
            raise ConfigError(f"no node {name} runs here; there are {', '.join(self._nodes) or 'none'}")
        return self._nodes[name]

    # ---- its end -----------------------------------------------------------------------------------------------

    def wait(self, timeout_seconds: float | None = None, *, meanwhile: Callable[[], bool] | None = None) -> int:
        """Wait for the end of the job, and return the exit code: 0 it has finished, 1 it has failed or no node is left.

        Nodes that are stopped or cut off are not waited for.

        Args:
            timeout_seconds: longest time; None for no limit.
            meanwhile: called again and again; it may add and kill nodes. While it returns True, more nodes may come, so
                that there are none is not the end.

        Raises:
            TimeoutError: it is not over in time.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        over_at: float | None = None
        while True:
            more_may_come = meanwhile is not None and meanwhile()
            waiting = [node for node in self._nodes.values() if not node.reap()]
            now = time.monotonic()
            if over_at is None and self.over:
                over_at = now
            nobody_left = len(waiting) < len(self._nodes) and all(node.idle for node in waiting)
            if (over_at is not None and now > over_at + _LATE_SECONDS) or (nobody_left and not more_may_come):
                kill_nodes(waiting)
                return self._code()
            if deadline is not None and now > deadline:
                raise TimeoutError(f"the job is not over after {timeout_seconds:g} s; {len(waiting)} nodes run")
            time.sleep(POLL_SECONDS)

    @property
    def over(self) -> bool:
        """Whether an agent whose word counts has said how the job ended."""
        return any(
            node.fault is None and node.reap() and node.code in (FINISHED, FAILED) for node in self._nodes.values()
        )

    def _code(self) -> int:
        said = {node.code for node in self._nodes.values() if node.fault is None}
        return FINISHED if FINISHED in said and FAILED not in said else FAILED


def _check_thread() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("the nodes of a LocalCluster must be made in the main thread: they die with the thread")


def _import_heavy(*, warm: bool) -> None:
    """Import once what all forks need: etcd's client (not a connection), what plans take, and perhaps what trains."""
    from bamboo_ds.store.etcd_protobuf import etcd_messages

    etcd_messages()
    load_solver()
    if warm:
        from bamboo_ds.cli.bench.workers import warm_up  # its package, the benches, imports this module

        warm_up()


def _few_threads(workers: int) -> dict[str, str]:
    """Return what keeps many workers of one machine out of each other's way; torchrun does so too."""
    return {"OMP_NUM_THREADS": "1"} if workers > 1 and "OMP_NUM_THREADS" not in os.environ else {}


def _loopback(index: int) -> str:
    """Return an address of this machine that no other node has: all of 127/8 is its."""
    return f"127.0.{index // 250}.{index % 250 + 1}"


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind this process, as Ctrl-C does, so that it ends in order."""

    def unwind(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, unwind)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

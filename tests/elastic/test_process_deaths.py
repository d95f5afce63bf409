"""`kill -9` of each process in turn, and of some stopped ones: nothing of what depends on it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bamboo_ds.elastic.processes import node_processes, process, running
from tests.elastic.clusters import alive, eventually

LAUNCHER = """
import os, subprocess, sys, time
from pathlib import Path
from bamboo_ds.cli.local import LocalCluster
from tests.elastic.clusters import Train, await_plan

folder = Path(sys.argv[1])

class WithFamily(Train):
    def __call__(self):
        code = "import subprocess, sys, time; subprocess.Popen(['sleep', '300']); time.sleep(300)"
        subprocess.Popen([sys.executable, "-c", code])
        return super().__call__()

with LocalCluster(
    WithFamily(folder / "enough", stages=2), nodes=3, warm=False, ttl_seconds=2, outage_seconds=2,
    log_folder=folder / "logs",
) as cluster:
    await_plan(cluster)
    agents = [cluster.processes(name).agent for name in cluster.names]
    (folder / "draft").write_text(" ".join(map(str, [cluster.server.pid, *agents])))
    (folder / "draft").rename(folder / "pids")
    code = cluster.wait()
    (folder / "code").write_text(str(code))
    sys.exit(code)
"""


@dataclass
class Job:
    """A launcher in a process of its own, with three nodes whose workers have a child and a grandchild."""

    launcher: subprocess.Popen[bytes]
    folder: Path
    etcd: int
    agents: list[int]

    def node(self, index: int) -> list[int]:
        """Return the ids of a node: agent, spawner, worker, child, grandchild."""
        found = node_processes(self.agents[index])
        assert found.spawner is not None
        (worker,) = found.workers
        family = [pid for pid in found.everything if pid not in (found.agent, found.spawner, worker)]
        family.sort(key=lambda pid: process(pid).parent != worker)  # type: ignore[union-attr]  # the child, then its
        return [found.agent, found.spawner, worker, *family]

    @property
    def everything(self) -> list[int]:
        return [self.launcher.pid, self.etcd, *(pid for index in range(3) for pid in self.node(index))]

    def finish(self) -> int:
        """Let the training end, and return the launcher's code."""
        (self.folder / "enough").touch()
        return self.launcher.wait(20)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    (tmp_path / "tmp").mkdir()
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=(tmp_path / "err").open("wb"),
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
    )
    try:
        pids = tmp_path / "pids"
        eventually(lambda: pids.exists() or launcher.poll() is not None, within_seconds=30, what="the nodes train")
        etcd, *agents = map(int, pids.read_text().split())
        made = Job(launcher, tmp_path, etcd, agents)
        eventually(lambda: all(len(made.node(n)) == 5 for n in range(3)), within_seconds=10, what="all have a family")
        yield made
    finally:
        launcher.kill()
        launcher.wait()


def kill(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def gone(pids: list[int], *, within_seconds: float = 10.0) -> None:
    eventually(lambda: not alive(pids), within_seconds=within_seconds, what=f"they end: {alive(pids)} of {pids}")


VICTIMS: dict[str, tuple[int, Any]] = {
    # which process of node n1 is killed, and which of its processes may live on
    "agent": (0, ()),
    "spawner": (1, ()),
    "worker": (2, ()),
    "a child of the worker": (3, (0, 1, 2, 4)),
}


@pytest.mark.parametrize(("victim", "survivors"), VICTIMS.values(), ids=VICTIMS)
def test_a_killed_process_of_a_node(job: Job, victim: int, survivors: tuple[int, ...]) -> None:
    pids, others = job.node(1), [*job.node(0), *job.node(2), job.etcd, job.launcher.pid]
    kill([pids[victim]])
    lost = [pid for index, pid in enumerate(pids) if index not in survivors]
    gone(lost)
    assert alive(others) == others
    assert alive([pids[index] for index in survivors]) == [pids[index] for index in survivors]
    everything = [*others, *pids]
    assert job.finish() == 0
    gone(everything)
    assert list((job.folder / "tmp").iterdir()) == []


def test_a_killed_launcher(job: Job) -> None:
    everything = job.everything
    kill([job.launcher.pid])
    job.launcher.wait()
    gone(everything)


def test_a_killed_launcher_of_stopped_nodes(job: Job) -> None:
    everything = job.everything
    for pid in [*job.node(0), *job.node(1)]:
        os.kill(pid, signal.SIGSTOP)
    kill([job.launcher.pid])
    job.launcher.wait()
    gone(everything)


def test_a_killed_etcd(job: Job) -> None:
    everything = job.everything
    kill([job.etcd])
    gone(everything, within_seconds=25)  # 2 s of outage, and what each takes to end
    assert job.launcher.wait() == 1
    assert b"the store has been out of reach" in (job.folder / "err").read_bytes()
    assert list((job.folder / "tmp").iterdir()) == []


COUPLES: dict[str, Callable[[Job], list[int]]] = {
    "agent and spawner": lambda job: job.node(1)[:2],
    "spawner and worker": lambda job: job.node(1)[1:3],
    "two agents": lambda job: job.agents[:2],
    "launcher and agents": lambda job: [job.launcher.pid, *job.agents],
    "launcher and etcd": lambda job: [job.launcher.pid, job.etcd],
}


@pytest.mark.parametrize("couple", COUPLES.values(), ids=COUPLES)
def test_killed_together(job: Job, couple: Callable[[Job], list[int]]) -> None:
    everything, victims = job.everything, couple(job)
    kill(victims)
    if job.launcher.pid in victims:
        job.launcher.wait()
    else:
        assert job.finish() in (0, 1)
    gone(everything)


def test_no_process_of_the_tests_above_is_left() -> None:
    """Look at the whole machine: one may have left the tree in which the other tests look."""
    assert [each.pid for each in running() if b"WithFamily" in _command(each.pid)] == []


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""

"""The agent that a worker hosts in threads: how a launch claims its job and leaves it. In forks, with a real etcd."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from bamboo_ds.cli.bench.workers import run_workers, values
from bamboo_ds.config import EtcdConfig
from bamboo_ds.elastic import keys
from bamboo_ds.elastic.hosted import HostedAgent, HostedSettings
from bamboo_ds.errors import BambooError, ConfigError, ConflictError, InfeasiblePlanError
from bamboo_ds.plan.job import JobSpec
from bamboo_ds.plan.plan import Plan
from bamboo_ds.store.embedded import EmbeddedEtcd
from tests.elastic.clusters import Look, eventually

TTL_SECONDS = 2.0
PLAN = Plan(owners=((0, 1),))


@pytest.fixture(scope="module")
def etcd() -> Iterator[EmbeddedEtcd]:
    with EmbeddedEtcd() as server:
        yield server


class Flags:
    """What forked workers tell one another."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def show(self, name: str, text: str = "") -> None:
        (self._folder / f"{name}.part").write_text(text)
        (self._folder / f"{name}.part").rename(self._folder / name)

    def wait(self, name: str) -> str:
        eventually((self._folder / name).exists, within_seconds=20, what=name)
        return (self._folder / name).read_text()


@pytest.fixture
def flags(tmp_path: Path) -> Flags:
    return Flags(tmp_path)


@pytest.fixture
def agents(etcd: EmbeddedEtcd, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Return what makes an agent of this test's job, and closes it."""

    @contextlib.contextmanager
    def make(worker: int = 0, workers: int = 2) -> Iterator[HostedAgent]:
        agent = HostedAgent(
            HostedSettings(
                etcd=EtcdConfig(endpoints=(etcd.endpoint,), timeout_seconds=2), job=request.node.name, worker=worker,
                workers=workers, ttl_seconds=TTL_SECONDS, timeout_seconds=15,
            )
        )  # fmt: skip
        try:
            yield agent
        finally:
            agent.close()

    return make


@pytest.fixture
def look(etcd: EmbeddedEtcd, request: pytest.FixtureRequest) -> Look:
    return Look(etcd.endpoint, job=request.node.name)


def fork(target: Callable[[int], Any], count: int = 2, seconds: float = 40) -> list[Any]:
    return values(run_workers(target, count, timeout_seconds=seconds))


def raised(call: Callable[[], Any]) -> str:
    """Return the error that a call raises."""
    try:
        call()
    except BambooError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def spec(worker: int, launched: Plan = PLAN) -> JobSpec:
    return JobSpec(publisher=worker, num_stages=2, num_layers=2, pipelines=1, launched=launched)


def test_of_two_launches_of_one_job_one_is_refused(agents: Any, flags: Flags, look: Look) -> None:
    def launch(rank: int) -> str:
        with agents() as agent:
            flags.show(f"reached-{rank}")
            flags.wait(f"reached-{1 - rank}")
            error = raised(agent.claim)
            flags.show(f"claimed-{rank}")
            flags.wait(f"claimed-{1 - rank}")
            return error

    found = sorted(fork(launch))
    assert found[0] == ""
    assert found[1].startswith(f'ConfigError: bamboo.job = "{look._prefix.split("/")[2]}": a job of this name runs')
    assert not look.list(keys.NODES)


def test_the_plan_is_that_of_the_launchers_ranks_and_the_end_is_handed_over(
    agents: Any, flags: Flags, look: Look
) -> None:
    """The first worker coordinates; when it goes, the other does at once, and writes the end of the job."""

    def work(rank: int) -> tuple[Plan, float]:
        with agents(rank) as agent:
            if rank == 0:
                flags.show("claim", str(agent.claim()))
            else:
                agent.enter(int(flags.wait("claim")))
            plan = agent.join(spec(rank))
            if rank == 1:
                flags.wait("gone")
            begin = time.monotonic()
            agent.member.leave()
            ended = agent.member.await_end(timeout_seconds=TTL_SECONDS - 0.5) if rank == 1 else False
            assert ended == (rank == 1)
        flags.show("gone")
        return plan, time.monotonic() - begin

    plans = [plan for plan, _ in fork(work)]
    assert [plan.owners for plan in plans] == [PLAN.owners] * 2
    assert look.get(keys.FINISHED) is not None
    assert look.get(keys.WORKER_COUNTER) == b"2"


def test_another_plan_than_that_of_the_ranks_is_no_place_to_begin(agents: Any, flags: Flags, look: Look) -> None:
    """One worker is gone between roster and plan: the modules do not fit what the others could make a plan of."""

    def work(rank: int) -> str:
        with agents(rank) as agent:
            if rank == 1:
                agent.enter(int(flags.wait("claim")))
                agent.member.join()
                agent.member.await_roster(timeout_seconds=10)
                flags.show("there")
                return ""
            flags.show("claim", str(agent.claim()))
            agent.member.join()
            flags.wait("there")
            eventually(lambda: len(look.list(keys.NODES)) == 1, within_seconds=5, what="worker 1 is gone")
            return raised(lambda: agent.join(spec(0)))

    found = fork(work)
    assert found[0].startswith(f"{InfeasiblePlanError.__name__}: the job begins with the plan ((0,),)")


def test_a_worker_of_a_former_run_that_wakes_up_writes_nothing(agents: Any, flags: Flags, look: Look) -> None:
    """Its rank, and so its id and the name of its node, are those of a worker of the new run."""

    def former() -> str:
        with agents() as agent:
            agent.claim()
            flags.show("pid", str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
            found = raised(lambda: eventually(lambda: agent.member.check(None), within_seconds=10, what="an error"))
            agent.member.leave()
            agent.member.fail("job", b"{}")
            flags.show("awake")
            return found

    def newer() -> str:
        process = psutil.Process(int(flags.wait("pid")))
        eventually(lambda: process.status() == psutil.STATUS_STOPPED, within_seconds=5, what="it stops")
        with agents() as agent:
            agent.claim()
            process.send_signal(signal.SIGCONT)
            flags.wait("awake")
            found = raised(lambda: agent.member.check(None))
            assert look.get(keys.left(0)) is None
            assert look.get(keys.failure("job")) is None
            assert len(look.list(keys.NODES)) == 1
        return found

    found = fork(lambda rank: former() if rank == 0 else newer())
    assert found[0].startswith(f"{ConflictError.__name__}: bamboo.etcd.endpoints = ")
    assert ": another agent has taken the name of node " in found[0]
    assert found[1] == ""


@pytest.mark.parametrize(("how", "number"), [("kill", signal.SIGKILL), ("term", signal.SIGTERM)])
def test_a_worker_breaks_when_its_node_is_told_to(
    agents: Any, flags: Flags, look: Look, how: str, number: signal.Signals
) -> None:
    def work(rank: int) -> None:
        with agents() as agent:
            agent.claim()
            if how == "term":
                agent.member.join()
            look.put(keys.preempt(f"{socket.gethostname().partition('.')[0]}-0"), how.encode())
            time.sleep(10)

    (result,) = run_workers(work, 1, timeout_seconds=20)
    assert result.exit_code == -number
    assert (look.get(keys.ended(0)) is not None) == (how == "term")
    assert not look.list(keys.PREEMPTIONS)


def test_the_name_of_a_node_can_be_part_of_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = HostedSettings(etcd=EtcdConfig(endpoints=("a:1",)), job="job", worker=12, workers=16)
    for host, name in (("gpu07.cluster.lan", "gpu07-12"), ("my node/1", "my-node-1-12"), ("", "host-12")):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        assert settings.node == name


def test_endpoints_that_cannot_be_are_named() -> None:
    settings = HostedSettings(etcd=EtcdConfig(endpoints=("nowhere",)), job="job", worker=0, workers=1)

    def work(rank: int) -> str:
        return raised(lambda: HostedAgent(settings))

    (found,) = fork(work, 1)
    assert found.startswith(f'{ConfigError.__name__}: bamboo.etcd.endpoints = nowhere: store endpoint "nowhere"')

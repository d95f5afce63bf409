"""Whole jobs on this machine: real agents, real workers, a real etcd."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from bamboo_ds.cli import local_folder
from bamboo_ds.cli.local import LocalCluster
from bamboo_ds.elastic import keys
from bamboo_ds.elastic.member import Member
from bamboo_ds.elastic.membership import Membership
from bamboo_ds.elastic.spawner import Script
from bamboo_ds.errors import ConfigError
from bamboo_ds.plan.job import JobSpec
from tests.elastic.clusters import TTL_SECONDS, Look, Train, alive, await_plan, ended, eventually, everything


def cluster(program: Any, *, nodes: int = 2, **options: Any) -> LocalCluster:
    settings = {"ttl_seconds": TTL_SECONDS, "warm": False, **options}
    return LocalCluster(program, nodes=nodes, **settings)


def node_of(running: LocalCluster, worker: int) -> str:
    """Return the node that a worker runs on."""
    nodes = Look.at(running).list(keys.NODES)
    return next(key.removeprefix(keys.NODES) for key, value in nodes.items() if worker in json.loads(value)["workers"])


@pytest.fixture
def flag(tmp_path: Path) -> Path:
    return tmp_path / "enough"


# ---- a job that goes well ----------------------------------------------------------------------------------------


def test_a_job_finishes_and_nothing_is_left(flag: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with cluster(Train(flag, stages=2), nodes=4, zones=("a", "b")) as running:
        plan = await_plan(running)
        processes = everything(running)
        assert len(alive(processes)) == 4 * 3 + 1  # agent, spawner and worker of each node, and etcd
        flag.touch()
        assert running.wait(20) == 0
        assert running.codes == {"n0": 0, "n1": 0, "n2": 0, "n3": 0}
        assert sorted(running.results()) == list(plan.workers) == [0, 1, 2, 3]
        assert sorted(node for node, _ in running.results().values()) == list(running.names)
        for worker in plan.workers:
            assert re.fullmatch(r"worker \d of node n\d trains\n", running.log(worker))
        kinds = [
            json.loads(line)["kind"]
            for line in (running.log_folder("n0") / "events.jsonl").read_text().split("\n")
            if line
        ]
        assert {"node_joined", "roster", "plan"} <= set(kinds)
    assert not alive(processes)
    assert [path.name for path in tmp_path.iterdir() if path != flag] == []
    assert sorted(running.results()) == [0, 1, 2, 3]


def test_each_node_has_an_address_a_zone_a_folder_and_its_place() -> None:
    def program() -> Any:
        membership = Membership.read()
        assert membership is not None
        names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GREETING", "TMPDIR")
        return membership.node, membership.address, tempfile.gettempdir(), [os.environ.get(name) for name in names]

    with cluster(program, nodes=3, workers=2, environment={"GREETING": "hello"}) as running:
        assert running.wait(20) == 0
        found = sorted(running.results().values())
    assert [(node, address) for node, address, _, _ in found] == [
        (f"n{index // 2}", f"127.0.0.{index // 2 + 1}") for index in range(6)
    ]
    folders = [folder for _, _, folder, _ in found]
    assert len(set(folders)) == 3
    assert [values for *_, values in found] == [
        [str(index % 2), "2", "hello", folder] for index, folder in enumerate(folders)
    ]


def test_zones_are_given_in_turn(flag: Path) -> None:
    with cluster(Train(flag, stages=1), nodes=3, zones=("a", "b")) as running:
        await_plan(running)
        nodes = [json.loads(value) for value in Look.at(running).list(keys.NODES).values()]
    assert sorted((node["name"], node["zone"]) for node in nodes) == [("n0", "a"), ("n1", "b"), ("n2", "a")]


def test_a_program_that_does_not_use_bamboo_is_run_like_any_other(capfd: pytest.CaptureFixture[str]) -> None:
    with cluster(lambda: print("hello"), nodes=2) as running:
        assert running.wait(20) == 0
    assert capfd.readouterr().out == "hello\nhello\n"


SCRIPT = """
import atexit, os, sys
atexit.register(print, "exit handler")
print(__name__, sys.argv, sys.path[0], os.environ["LOCAL_RANK"])
import neighbour
sys.exit(neighbour.CODE)
"""


@pytest.mark.parametrize("as_module", [False, True])
def test_a_warm_script_runs_as_main(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, as_module: bool
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text("CODE = 0\n")
    monkeypatch.chdir(tmp_path)
    program = Script(("script" if as_module else "script.py", "--steps", "3"), as_module=as_module)
    with LocalCluster(program, nodes=1, ttl_seconds=TTL_SECONDS) as running:
        assert running.wait(30) == 0
    path = str(tmp_path / "script.py") if as_module else "script.py"
    folder = str(tmp_path)
    assert capfd.readouterr().out.splitlines() == [f"__main__ {[path, '--steps', '3']} {folder} 0", "exit handler"]


@pytest.mark.slow
def test_a_cold_script_gets_an_interpreter_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text("CODE = 0\n")
    with cluster(Script((str(tmp_path / "script.py"),)), nodes=1) as running:
        assert running.wait(60) == 0
    assert "__main__" in capfd.readouterr().out


def test_eight_nodes_are_up_soon(flag: Path) -> None:
    flag.touch()
    begin = time.monotonic()
    with cluster(Train(flag, stages=4), nodes=8, zones=("a", "b", "c")) as running:
        await_plan(running)
        up_seconds = time.monotonic() - begin
        assert running.wait(20) == 0
    assert up_seconds < 5  # 0.8 s on an idle machine of two cores


# ---- failures ----------------------------------------------------------------------------------------------------


def fail_on(worker: int, how: Callable[[], Any]) -> Callable[[Member], None]:
    """Return a step that fails on one worker."""

    def step(member: Member) -> None:
        if member.worker == worker:
            how()

    return step


def raise_error() -> None:
    raise ValueError("boo")


@pytest.mark.parametrize("log", [True, False], ids=["", "without echo"])
def test_an_exception_ends_the_job_and_its_traceback_is_shown_once(
    flag: Path, capfd: pytest.CaptureFixture[str], log: bool
) -> None:
    with cluster(Train(flag, stages=2, step=fail_on(1, raise_error)), nodes=4, echo=log) as running:
        assert running.wait(20) == 1
        assert running.codes == {f"n{index}": 1 for index in range(4)}
        assert "ValueError: boo" in running.log(1)
        failure = json.loads(Look.at(running).get(keys.failure("job")) or b"{}")
        assert Look.at(running).plan().dead == frozenset()  # type: ignore[union-attr]
        assert len(Look.at(running).events("failure")) == 1
    assert (failure["kind"], failure["message"]) == ("ValueError", "boo")
    shown = capfd.readouterr().err
    assert shown.count('raise ValueError("boo")') == int(log)
    assert shown.count("bamboo: the job has failed: worker 1: ValueError: boo\n") == 1


FAILURES: dict[str, tuple[Callable[[], Any], str]] = {
    "an exit code": (lambda: sys.exit(5), "exited with code 5: no traceback; its log ends:"),
    "an exit at once": (lambda: os._exit(7), "exited with code 7: no traceback; its log ends:"),
    "a crash": (lambda: ctypes.string_at(0), "was ended by SIGSEGV: no traceback; its log ends:"),
    "an abort": (os.abort, "was ended by SIGABRT: no traceback; its log ends:"),
}


@pytest.mark.parametrize(("how", "text"), FAILURES.values(), ids=FAILURES)
def test_a_worker_that_ends_badly_without_a_word_ends_the_job(
    flag: Path, capfd: pytest.CaptureFixture[str], how: Callable[[], Any], text: str
) -> None:
    with cluster(Train(flag, stages=2, step=fail_on(0, how)), nodes=2) as running:
        assert running.wait(20) == 1
        failure = json.loads(Look.at(running).get(keys.failure("job")) or b"{}")
    assert f"{failure['kind']}: {failure['message']}".startswith(text)
    assert len(failure["message"].splitlines()) > 1  # what its log ends with
    assert f"the job has failed: worker 0: {text}" in capfd.readouterr().err


def test_a_script_that_ignores_sigterm_is_killed_when_another_fails(flag: Path) -> None:
    hangs = flag.with_name("hangs")

    def step(member: Member) -> None:
        if member.worker == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            hangs.touch()
            while True:
                time.sleep(1)
        if hangs.exists():
            raise ValueError("boo")

    with cluster(Train(flag, stages=2, step=step), nodes=2) as running:
        await_plan(running)
        processes = everything(running)
        eventually(hangs.exists, within_seconds=5, what="worker 0 hangs")
        begin = time.monotonic()
        assert running.wait(30) == 1
        assert 4 < time.monotonic() - begin < 12  # it had its time to end by itself, and SIGTERM
        assert running.codes == {"n0": 1, "n1": 1}
        eventually(lambda: len(alive(processes)) == 1, within_seconds=3, what="only etcd is left")
    assert not alive(processes)


def test_a_refused_worker_leaves_and_the_others_go_on(flag: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Stages(Train):
        def spec(self, membership: Membership) -> JobSpec:
            if membership.node == "n1":
                self._stages = 3
                board = Look(membership.etcd.endpoints[0])
                eventually(lambda: board.get(keys.SPEC), within_seconds=20, what="the other's specification counts")
            return super().spec(membership)

    with cluster(Stages(flag, stages=1), nodes=2) as running:
        eventually(lambda: running.codes["n1"] is not None, within_seconds=15, what="n1 ends")
        assert running.codes == {"n0": None, "n1": 3}
        assert Look.at(running).get(keys.failure("job")) is None
        flag.touch()
        assert running.wait(20) == 0
    assert "num_stages = 3 here, but 1 in the job" in capfd.readouterr().err


# ---- losses ------------------------------------------------------------------------------------------------------


def test_a_killed_node_is_no_failure(flag: Path) -> None:
    with cluster(Train(flag, stages=2), nodes=4) as running:
        plan = await_plan(running)
        victim = node_of(running, plan.owners[0][1])
        before = running.processes(victim)
        at = running.kill(victim)
        eventually(lambda: not alive(before.everything), within_seconds=3, what="all of it ends")
        after = await_plan(running, version=1)
        assert time.monotonic() - at < TTL_SECONDS + 2
        assert after.dead == {plan.owners[0][1]}
        flag.touch()
        assert running.wait(20) == 0
        assert running.codes == {**dict.fromkeys(running.names, 0), victim: -signal.SIGKILL}
        assert len(running.results()) == 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_killed_worker_is_a_loss(flag: Path, number: signal.Signals) -> None:
    with cluster(Train(flag, stages=2), nodes=4) as running:
        plan = await_plan(running)
        victim = node_of(running, plan.owners[1][0])
        if number == signal.SIGKILL:
            running.kill_worker(victim)
        else:
            os.kill(running.processes(victim).workers[0], number)
        after = await_plan(running, version=1)
        assert after.dead == {plan.owners[1][0]}
        assert f"worker {plan.owners[1][0]} of node {victim} was ended by {number.name}" in after.cause
        record = json.loads(Look.at(running).get(keys.ended(plan.owners[1][0])) or b"{}")
        assert record["signal"] == number.name
        node = Look.at(running).get(keys.node(victim))
        assert node is None or json.loads(node)["workers"] == []
        flag.touch()
        assert running.wait(20) == 0
        assert running.codes[victim] == 3


def test_a_node_that_is_told_to_leave_tells_the_others_at_once(flag: Path) -> None:
    with cluster(Train(flag, stages=2), nodes=4, ttl_seconds=30) as running:
        plan = await_plan(running)
        victim = node_of(running, plan.owners[0][0])
        at = running.kill(victim, "term")
        after = await_plan(running, version=1, within_seconds=5)
        assert time.monotonic() - at < 2
        assert after.dead == {plan.owners[0][0]}
        eventually(lambda: running.codes[victim] is not None, within_seconds=5, what="its agent ends")
        assert running.codes[victim] == 3
        assert Look.at(running).get(keys.node(victim)) is None
        flag.touch()
        assert running.wait(20) == 0


def test_a_stopped_node_is_lost_and_stops_at_once_when_it_wakes_up(flag: Path) -> None:
    with cluster(Train(flag, stages=2), nodes=4) as running:
        plan = await_plan(running)
        victim = node_of(running, plan.owners[0][1])
        processes = running.processes(victim).everything
        at = running.kill(victim, "stop")
        after = await_plan(running, version=1)
        assert TTL_SECONDS * 0.5 < time.monotonic() - at < TTL_SECONDS + 2
        assert after.dead == {plan.owners[0][1]}
        assert alive(processes) == list(processes)
        for pid in processes:
            os.kill(pid, signal.SIGCONT)
        eventually(lambda: running.codes[victim] is not None, within_seconds=8, what="its agent ends")
        assert running.codes[victim] == 3
        assert not alive(processes)
        flag.touch()
        assert running.wait(20) == 0


def test_a_job_does_not_wait_for_nodes_that_are_stopped(flag: Path) -> None:
    with cluster(Train(flag, stages=2), nodes=4) as running:
        plan = await_plan(running)
        victim = node_of(running, plan.owners[0][1])
        processes = running.processes(victim).everything
        running.kill(victim, "stop")
        await_plan(running, version=1)
        flag.touch()
        assert running.wait(20) == 0
        assert running.codes[victim] == -signal.SIGKILL
        eventually(lambda: not alive(processes), within_seconds=3, what="all of it ends")


def test_a_worker_that_is_stopped_alone_is_killed_and_lost(flag: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with cluster(Train(flag, stages=2), nodes=4) as running:
        plan = await_plan(running)
        victim = plan.owners[0][1]
        pid = running.processes(node_of(running, victim)).workers[0]
        os.kill(pid, signal.SIGSTOP)
        at = time.monotonic()
        after = await_plan(running, version=1)
        assert TTL_SECONDS * 0.9 < time.monotonic() - at < TTL_SECONDS + 2
        assert after.dead == {victim}
        assert ended(pid)
        flag.touch()
        assert running.wait(20) == 0
    assert f"worker {victim} was ended by SIGKILL: it had been stopped for 2 s" in capfd.readouterr().err


def test_a_pause_of_a_worker_that_is_short_enough_is_no_loss(flag: Path) -> None:
    with cluster(Train(flag, stages=2), nodes=2) as running:
        await_plan(running)
        pid = running.processes("n0").workers[0]
        for _ in range(2):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(TTL_SECONDS * 0.6)
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.3)
        flag.touch()
        assert running.wait(20) == 0
        plan = Look.at(running).plan()
        assert plan is not None
        assert plan.version == 0


def test_an_evicted_worker_that_hangs_is_killed(flag: Path) -> None:
    def step(member: Member) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)

    with cluster(Train(flag, stages=2, step=step), nodes=4, ttl_seconds=30) as running:
        plan = await_plan(running)
        victim = plan.owners[0][1]
        node = node_of(running, victim)
        pid = running.processes(node).workers[0]
        Look.at(running).put(keys.ended(victim), b'{"signal": "SIGKILL", "reason": "a test says so"}')
        eventually(lambda: ended(pid), within_seconds=6, what="it is killed")
        eventually(lambda: running.codes[node] is not None, within_seconds=5, what="its agent ends")
        assert running.codes[node] == 3


def test_a_spawner_that_is_stopped_does_not_hold_up_the_end(flag: Path) -> None:
    with cluster(Train(flag, stages=2), nodes=4) as running:
        plan = await_plan(running)
        victim = node_of(running, plan.owners[0][1])
        processes = running.processes(victim)
        assert processes.spawner is not None
        os.kill(processes.spawner, signal.SIGSTOP)
        running.kill(victim, "term")
        eventually(lambda: not alive(processes.everything), within_seconds=15, what="the node ends")
        eventually(lambda: running.codes[victim] == 3, within_seconds=2, what="its agent has ended")
        flag.touch()
        assert running.wait(20) == 0


def test_when_no_node_is_left_the_job_has_failed(flag: Path) -> None:
    with cluster(Train(flag, stages=2), nodes=2) as running:
        await_plan(running)
        for name in running.names:
            running.kill(name)
        assert running.wait(10) == 1


# ---- more nodes --------------------------------------------------------------------------------------------------


def test_nodes_are_added_while_it_runs_and_no_name_comes_again(
    flag: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with cluster(Train(flag, stages=1), nodes=2, zones=("a", "b")) as running:
        await_plan(running)
        running.kill("n1")
        assert [running.add(), running.add(zone="c")] == ["n2", "n3"]
        eventually(lambda: worker_nodes(running) == {"n0", "n2", "n3"}, within_seconds=8, what="they have joined")
        nodes = {name: json.loads(Look.at(running).get(keys.node(name)) or b"{}") for name in ("n0", "n2", "n3")}
        assert [node["zone"] for node in nodes.values()] == ["a", "a", "c"]
        assert running.names == ("n0", "n1", "n2", "n3")
        assert running.live == ("n0", "n2", "n3")
        running.kill("n3")
        assert running.add() == "n4"
        processes = [pid for name in ("n0", "n2", "n4") for pid in running.processes(name).everything]
        flag.touch()
        assert running.wait(20) == 0
        assert running.codes == {"n0": 0, "n1": -signal.SIGKILL, "n2": 0, "n3": -signal.SIGKILL, "n4": 0}
    assert not alive(processes)
    assert [path.name for path in tmp_path.iterdir() if path != flag] == []
    with pytest.raises(ConfigError, match="the cluster does not run"):
        running.add()


def worker_nodes(running: LocalCluster) -> set[str]:
    """Return the nodes that have joined, and are there."""
    nodes = Look.at(running).list(keys.NODES)
    return {key.removeprefix(keys.NODES) for key, value in nodes.items() if json.loads(value)["workers"]}


def test_an_added_node_has_an_address_that_no_other_has() -> None:
    def program() -> Any:
        membership = Membership.read()
        assert membership is not None
        return membership.address

    with cluster(program, nodes=1) as running:
        running.add()
        assert running.wait(20) == 0
        assert sorted(running.results().values()) == ["127.0.0.1", "127.0.0.2"]


def test_a_job_is_not_over_without_nodes_as_long_as_more_may_come(flag: Path) -> None:
    begun = time.monotonic()
    with cluster(Train(flag, stages=1), nodes=1) as running:
        await_plan(running)
        running.kill("n0")

        def more_may_come() -> bool:
            return time.monotonic() < begun + 4

        assert running.wait(20, meanwhile=more_may_come) == 1
        assert time.monotonic() > begun + 4


def test_what_is_done_meanwhile_may_add_nodes(flag: Path) -> None:
    with cluster(Train(flag, stages=1), nodes=1) as running:
        await_plan(running)

        def one_more() -> bool:
            if len(running.names) == 1:
                running.add()
            elif "n1" in worker_nodes(running):
                flag.touch()
            return False

        assert running.wait(20, meanwhile=one_more) == 0
        assert running.codes == {"n0": 0, "n1": 0}


def test_a_node_that_has_ended_cannot_be_broken(flag: Path) -> None:
    flag.touch()
    with cluster(Train(flag, stages=1), nodes=1) as running:
        assert running.wait(20) == 0
        with pytest.raises(ConfigError, match="node n0 has ended with code 0"):
            running.kill("n0")


# ---- breaking on request -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "code"), [("kill", -signal.SIGKILL), ("term", 3)])
def test_a_node_breaks_when_the_board_says_so(flag: Path, how: str, code: int) -> None:
    with cluster(Train(flag, stages=2), nodes=4) as running:
        plan = await_plan(running)
        victim = node_of(running, plan.owners[0][1])
        processes = running.processes(victim).everything
        Look.at(running).put(keys.preempt(victim), how.encode())
        eventually(lambda: not alive(processes), within_seconds=8, what="all of it ends")
        eventually(lambda: running.codes[victim] == code, within_seconds=3, what="its agent has ended")
        assert Look.at(running).get(keys.preempt(victim)) is None
        assert [event["how"] for event in Look.at(running).events("preempt")] == [how]
        await_plan(running, version=1)
        flag.touch()
        assert running.wait(20) == 0


def test_a_node_stops_when_the_board_says_so(flag: Path) -> None:
    with cluster(Train(flag, stages=2), nodes=2) as running:
        await_plan(running)
        processes = running.processes("n1").everything
        Look.at(running).put(keys.preempt("n1"), b"stop")
        stopped = psutil.STATUS_STOPPED
        eventually(
            lambda: all(psutil.Process(pid).status() == stopped for pid in processes), within_seconds=5, what="it stops"
        )
        await_plan(running, version=1)
        flag.touch()
        assert running.wait(20) == 0  # though nobody told the launcher


@pytest.mark.parametrize(
    ("how", "why"), [("cut", "this node has no link bamboo0"), ("burn", "allowed are kill, term, stop, cut")]
)
def test_what_cannot_be_done_is_refused_and_the_node_goes_on(
    flag: Path, capfd: pytest.CaptureFixture[str], how: str, why: str
) -> None:
    with cluster(Train(flag, stages=2), nodes=2) as running:
        await_plan(running)
        Look.at(running).put(keys.preempt("n1"), how.encode())
        event = eventually(lambda: Look.at(running).events("preempt"), within_seconds=5, what="it is refused")[0]
        assert why in event["text"]
        assert "how" not in event
        flag.touch()
        assert running.wait(20) == 0
    assert why in capfd.readouterr().err


def test_an_old_request_does_not_break_a_new_node(flag: Path) -> None:
    with cluster(Train(flag, stages=1), nodes=1) as running:
        await_plan(running)
        etcd = running.etcd
        look = Look.at(running)
        look.put(keys.preempt("n1"), b"kill")
        with cluster(Train(flag, stages=1), nodes=2, etcd=etcd, job="local2") as other:
            Look(etcd.endpoints[0], job="local2").put(keys.preempt("n9"), b"kill")
            await_plan_of(other, "local2")
            flag.touch()
            assert other.wait(20) == 0
        assert running.wait(20) == 0


def await_plan_of(running: LocalCluster, job: str) -> None:
    look = Look(running.etcd.endpoints[0], job=job)
    eventually(lambda: look.plan() is not None, within_seconds=10, what="a plan")


# ---- the store goes ----------------------------------------------------------------------------------------------


def test_a_restart_of_etcd_evicts_nobody(flag: Path) -> None:
    with cluster(Train(flag, stages=2), nodes=4) as running:
        plan = await_plan(running)
        server = running.server
        assert server is not None
        for pause in (0.2, TTL_SECONDS + 1):
            server.kill()
            time.sleep(pause)
            server.start()
            time.sleep(TTL_SECONDS + 1)
        after = Look.at(running).plan()
        assert after is not None
        assert after.number == plan.number
        assert len(Look.at(running).list(keys.NODES)) == 4
        flag.touch()
        assert running.wait(20) == 0


def test_etcd_gone_for_good_ends_the_job_with_a_clear_error(flag: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with cluster(Train(flag, stages=2), nodes=2, outage_seconds=2) as running:
        await_plan(running)
        assert running.server is not None
        processes = everything(running)
        running.server.kill()
        begin = time.monotonic()
        assert running.wait(30) == 1
        assert time.monotonic() - begin < 15
        assert running.codes == {"n0": 1, "n1": 1}
        assert not alive(processes)
    shown = capfd.readouterr().err
    assert len(re.findall(r"node n\d gives up: the store has been out of reach for \d+ s", shown)) == 2


# ---- two runs of one job -----------------------------------------------------------------------------------------


def test_a_job_can_be_run_again_under_its_name(flag: Path) -> None:
    flag.touch()
    with cluster(Train(flag, stages=1), nodes=1, job="keeper") as keeper:
        keeper.wait(20)
        assert keeper.server is not None
        for run in range(2):
            with cluster(Train(flag, stages=2), nodes=2, etcd=keeper.etcd) as running:
                assert running.wait(20) == 0
                assert sorted(running.results()) == [2 * run, 2 * run + 1]


def test_a_second_node_of_one_name_is_refused(flag: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with cluster(Train(flag, stages=1), nodes=1) as running:
        await_plan(running)
        with cluster(Train(flag, stages=1), nodes=1, etcd=running.etcd) as second:
            assert second.wait(20) == 1
            assert second.codes == {"n0": 2}
        assert running.codes == {"n0": None}
    assert "there is a node n0 in this job already" in capfd.readouterr().err


# ---- the launcher ------------------------------------------------------------------------------------------------

LAUNCHER = """
import sys, time
from pathlib import Path
from bamboo_ds.cli.local import LocalCluster
from tests.elastic.clusters import Train, await_plan, everything
with LocalCluster(Train(Path(sys.argv[1]), stages=2), nodes=2, warm=False, ttl_seconds=2) as cluster:
    await_plan(cluster)
    Path(sys.argv[2]).write_text(" ".join(map(str, everything(cluster))) + "\\n")
    sys.exit(cluster.wait())
"""


@contextlib.contextmanager
def launcher(flag: Path) -> Any:
    """Start a launcher in a terminal's process group of its own, and wait until its nodes train."""
    pids = flag.with_name("pids")
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(flag), str(pids)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(flag.parent)},
    )
    try:
        text = eventually(lambda: pids.exists() and pids.read_text(), within_seconds=20, what="the nodes train")
        pids.unlink()
        yield process, [int(pid) for pid in text.split()]
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, -2), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_launcher_that_is_told_to_end_ends_everything(flag: Path, number: signal.Signals, code: int) -> None:
    with launcher(flag) as (process, pids):
        os.killpg(process.pid, number)  # as a terminal does
        assert process.wait(10) == code
        assert not alive(pids)
    assert list(flag.parent.iterdir()) == []


def test_what_a_killed_launcher_leaves_is_swept_by_the_next(flag: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(flag.parent))
    with launcher(flag) as (process, pids):
        (used,) = flag.parent.glob("bamboo-local-*")
        local_folder.sweep_abandoned_folders()
        assert used.exists()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        eventually(lambda: not alive(pids), within_seconds=10, what="everything ends")
    young = flag.parent / "bamboo-local-young"
    young.mkdir()
    local_folder.sweep_abandoned_folders()
    assert list(flag.parent.glob("bamboo-local-*")) == [young]


def test_an_error_of_the_launcher_ends_everything(flag: Path) -> None:
    processes: list[int] = []

    def bench() -> None:
        with cluster(Train(flag, stages=2)) as running:
            await_plan(running)
            processes.extend(everything(running))
            raise RuntimeError("the bench has a bug")

    with pytest.raises(RuntimeError, match="the bench has a bug"):
        bench()
    assert processes
    assert not alive(processes)


def test_a_wait_has_a_deadline(flag: Path) -> None:
    with cluster(Train(flag, stages=2)) as running:
        await_plan(running)
        with pytest.raises(TimeoutError, match=r"not over after 0\.2 s; 2 nodes run"):
            running.wait(0.2)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ConfigError, match="local nodes = 0"):
        cluster(print, nodes=0)
    with pytest.raises(ConfigError, match="zones: give at least 1"):
        cluster(print, zones=())
    with pytest.raises(ConfigError, match="use it in a `with` block"):
        _ = cluster(print).etcd
    with pytest.raises(ConfigError, match="no node n7 runs here; there are none"):
        cluster(print).kill("n7")


def test_a_value_that_does_not_pickle_is_a_failure(capfd: pytest.CaptureFixture[str]) -> None:
    with cluster(lambda: lambda: 1, nodes=1) as running:
        assert running.wait(20) == 1
        assert running.results() == {}
    assert "pickle" in capfd.readouterr().err


def test_metrics_are_served(flag: Path) -> None:
    pytest.importorskip("prometheus_client")
    port = free_port()
    with cluster(Train(flag, stages=2), nodes=2, metrics_port=port) as running:
        await_plan(running)

        def shown() -> str:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/metrics")
            return connection.getresponse().read().decode()

        eventually(lambda: 'bamboo_nodes{job_name="local",node="n0"} 2.0' in shown(), within_seconds=5, what="2 nodes")
        eventually(lambda: re.search(r"bamboo_workers\{.*\} 2\.0", shown()), within_seconds=5, what="2 workers")
        assert re.search(r"bamboo_local_workers\{.*\} 1\.0", shown())
        assert re.search(r'bamboo_events_total\{.*kind="plan".*\} 1\.0', shown())


def free_port() -> int:
    """Return a port of two that are free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

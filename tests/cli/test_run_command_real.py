"""`bamboo-ds run`, with real processes and a real etcd: alone, on local nodes, as an agent, and over ssh.

The ssh here is a program that runs the command on this machine, in a shell, as the far side of a real one would.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from bamboo_ds.cli.leash import on_leash
from bamboo_ds.store.embedded import EmbeddedEtcd

SCRIPT = """\
import json, os, sys, time
names = ("NCCL_DEBUG", "FROM_FILE", "CUDA_VISIBLE_DEVICES", "BAMBOO_CONFIG", "BAMBOO_ETCD_PASSWORD", "OMP_NUM_THREADS")
told = {name: os.environ.get(name) for name in names}
membership = json.loads(os.environ["BAMBOO_MEMBERSHIP"])
told |= {"arguments": sys.argv[1:], "folder": os.getcwd(), "node": membership["node"], "id": os.getpid()}
path = os.path.join(os.environ["TELL"], "worker-%d.json" % membership["worker"])
with open(path + ".draft", "w") as file:
    json.dump(told, file)
os.rename(path + ".draft", path)
while os.path.exists(os.path.join(os.environ["TELL"], "wait")):
    time.sleep(0.05)
if "fail" in sys.argv:
    raise ZeroDivisionError("the script's own error")
"""

FAKE_SSH = """\
#!/bin/sh
while :; do case "$1" in -o|-p) shift 2;; -*) shift;; *) break;; esac; done
host=$1; shift
case "$host" in down*) echo "ssh: connect to host $host: No route to host" >&2; exit 255;; esac
exec sh -c "$*"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a script, a hostfile and an ssh; its scripts wait while there is a file `told/wait`."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "hosts").write_text("w0 slots=2\nw1 slots=1 zone=b\n")
    (tmp_path / "told").mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/ssh").write_text(FAKE_SSH)
    (tmp_path / "bin/ssh").chmod(0o755)
    return tmp_path


class Job:
    """A running `bamboo-ds`, in a folder."""

    def __init__(self, folder: Path, *arguments: str, environment: Mapping[str, str]) -> None:
        self.folder = folder
        package = str(Path(__file__).resolve().parents[2])
        own = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("CUDA", "BAMBOO", "OMP"))},
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": package,
            "DS_ACCELERATOR": "cpu",
            "TELL": str(folder / "told"),
            # What a test's processes are known by, wherever they go.
            "BAMBOO_TEST_FOLDER": str(folder),
        }
        with (folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bamboo_ds.cli.main", *arguments],
                cwd=folder,
                env={**own, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    def wait(self, seconds: float = 60) -> int:
        return self.process.wait(seconds)

    def told(self, workers: int) -> list[dict[str, object]]:
        """Wait until so many workers have told what they see, and return that."""
        eventually(lambda: len(self._tellers()) >= workers or self.process.poll() is not None, what="workers begin")
        assert len(self._tellers()) == workers, self.output
        return [json.loads(path.read_text()) for path in self._tellers()]

    def _tellers(self) -> list[Path]:
        return sorted((self.folder / "told").glob("*.json"))

    def others(self) -> list[psutil.Process]:
        """Return all processes that belong to it but itself."""
        mine = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                theirs = process.environ().get("BAMBOO_TEST_FOLDER") == str(self.folder)
                if theirs and process.pid != self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    mine.append(process)
        return mine


def eventually(condition: Callable[[], object], *, what: str, within_seconds: float = 60) -> None:
    deadline = time.monotonic() + within_seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_seconds} s: {what}"
        time.sleep(0.05)


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Job]]:
    """Start `bamboo-ds` in the folder; what is left of it after the test is a failure, and killed."""
    jobs: list[Job] = []

    def start(*arguments: str, **environment: str) -> Job:
        jobs.append(Job(folder, *arguments, environment=environment))
        return jobs[-1]

    yield start
    for job in jobs:
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(0 if job.process.poll() is not None else 20)
        left = job.others() if job.process.poll() is not None else [psutil.Process(job.process.pid), *job.others()]
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        assert not left, f"left running: {left}; output: {job.output}"


def test_alone_this_machine_is_the_whole_cluster(folder: Path, start: Callable[..., Job]) -> None:
    (folder / "c.json").write_text('{"bamboo": {"job": "solo"}}')
    (folder / "told/wait").touch()
    job = start("run", "--config", "c.json", "--num_gpus", "2", "--save_pid", "train.py", "--lr", "3", "--job", "x y")
    told = job.told(2)
    assert [worker["arguments"] for worker in told] == [["--lr", "3", "--job", "x y"]] * 2
    assert [worker["BAMBOO_CONFIG"] for worker in told] == [str(folder / "c.json")] * 2
    assert [worker["CUDA_VISIBLE_DEVICES"] for worker in told] == ["0,1"] * 2
    pid_file = Path(f"/tmp/{job.process.pid}.deepspeed")
    assert pid_file.read_text() == str(job.process.pid)
    (folder / "told/wait").unlink()
    assert job.wait() == 0, job.output
    assert not pid_file.exists()
    assert sorted(path.name for path in (folder / "runs/solo").rglob("worker-*.log")) == [
        "worker-0.log",
        "worker-1.log",
    ]
    assert not (folder / "runs/solo/endpoint.json").exists()


def test_a_script_that_fails_ends_the_job_with_its_traceback_and_code_1(start: Callable[..., Job]) -> None:
    job = start("run", "train.py", "fail")
    assert job.wait() == 1
    assert "ZeroDivisionError: the script's own error" in job.output


def test_local_nodes_are_seen_by_status_and_broken_by_preempt(folder: Path, start: Callable[..., Job]) -> None:
    (folder / "told/wait").touch()
    job = start("run", "--local-nodes", "3", "--zones", "a,b", "--job", "j", "--metrics-port", "0", "train.py")
    told = job.told(3)
    assert {worker["node"] for worker in told} == {"n0", "n1", "n2"}
    assert {worker["OMP_NUM_THREADS"] for worker in told} == {"1"}, "they share the cores of one machine"
    ask = [sys.executable, "-m", "bamboo_ds.cli.main"]
    seen = json.loads(subprocess.check_output([*ask, "status", "--json"], cwd=folder, timeout=30))
    assert [(node["name"], node["zone"]) for node in seen["nodes"]] == [("n0", "a"), ("n1", "b"), ("n2", "a")]
    assert seen["job"] == "j"
    said = subprocess.check_output([*ask, "preempt", "n1", "--how", "term"], cwd=folder, timeout=30, text=True)
    assert said.startswith("node n1 (zone b, workers ")
    assert "was told: term; its lease ended after" in said
    (folder / "told/wait").unlink()
    assert job.wait() == 0, job.output


def test_an_agent_takes_part_through_the_etcd_it_is_given(folder: Path, start: Callable[..., Job]) -> None:
    with EmbeddedEtcd() as server:
        job = start("run", "--etcd", server.endpoint, "--node", "me", "--job", "j", "train.py", "a")
        assert [worker["node"] for worker in job.told(1)] == ["me"]
        assert job.wait() == 0, job.output
        assert json.loads((folder / "runs/j/endpoint.json").read_text())["endpoints"] == [server.endpoint]
    assert (folder / "runs/j/me/worker-0.log").exists()


def test_a_hostfile_starts_the_agents_of_all_hosts_that_can_be_reached(folder: Path, start: Callable[..., Job]) -> None:
    (folder / "hosts").write_text("w0 slots=2\ndown slots=1\nw1 slots=1 zone=b\n")
    (folder / ".deepspeed_env").write_text("FROM_FILE=a b\n")
    job = start(
        "run", "-H", "hosts", "--job", "far", "--patience", "1", "train.py", "$HOME", "a 'b'", NCCL_DEBUG="INFO"
    )
    told = job.told(3)
    assert job.wait() == 0, job.output
    assert [worker["arguments"] for worker in told] == [["$HOME", "a 'b'"]] * 3
    assert {(worker["NCCL_DEBUG"], worker["FROM_FILE"], worker["folder"]) for worker in told} == {
        ("INFO", "a b", str(folder))
    }
    assert sorted((str(worker["node"]), str(worker["CUDA_VISIBLE_DEVICES"])) for worker in told) == [
        ("w0", "0,1"),
        ("w0", "0,1"),
        ("w1", "0"),
    ]
    assert "host down: ssh ended with 255; try: ssh -o BatchMode=yes down true" in job.output
    assert sorted(path.parent.name for path in (folder / "runs/far").rglob("worker-*.log")) == ["w0", "w0", "w1"]
    assert not (folder / "runs/far/endpoint.json").exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_agents_of_all_hosts_end_with_the_launcher(
    number: signal.Signals, folder: Path, start: Callable[..., Job]
) -> None:
    (folder / "told/wait").touch()
    job = start("run", "-H", "hosts", "--num_gpus", "1", "train.py")
    job.told(2)
    job.process.send_signal(number)
    code = job.wait(20)
    assert code == (-number if number == signal.SIGKILL else 128 + number)
    eventually(lambda: not job.others(), what="all processes end", within_seconds=15)


def test_a_failure_on_a_host_is_the_launchers_exit_code(start: Callable[..., Job]) -> None:
    job = start("run", "-H", "hosts", "-i", "w1", "train.py", "fail")
    assert job.wait() == 1
    assert "ZeroDivisionError: the script's own error" in job.output


def test_a_password_goes_to_the_hosts_and_stands_on_no_command_line(folder: Path, start: Callable[..., Job]) -> None:
    (folder / "told/wait").touch()
    (folder / "bin/ssh").write_text(f"#!/bin/sh\nhead -n 1 > {folder}/first\nps -ef > {folder}/seen\necho $* >> seen\n")
    job = start(
        "run",
        "-H",
        "hosts",
        "-i",
        "w1",
        "--etcd",
        "127.0.0.1:1",
        "--etcd-user",
        "u",
        "train.py",
        BAMBOO_ETCD_PASSWORD="hush-hush",
    )
    job.wait()
    assert json.loads((folder / "first").read_text()) == {"BAMBOO_ETCD_PASSWORD": "hush-hush"}
    assert "--etcd-user u" in (folder / "seen").read_text()
    assert "hush-hush" not in (folder / "seen").read_text()


# ---- the leash alone ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def leashed(run: Callable[[], int], line: bytes = b"{}\n", *, grace_seconds: float = 10.0) -> Iterator[tuple[int, int]]:
    """Fork a process that holds a function on a leash; give its id and the end of the leash."""
    reader, writer = os.pipe()
    holder = os.fork()
    if holder == 0:
        os.close(writer)
        os._exit(on_leash(run, stdin=reader, grace_seconds=grace_seconds))
    os.close(reader)
    os.write(writer, line)
    try:
        yield holder, writer
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(holder, signal.SIGKILL)
            os.waitpid(holder, 0)


def exit_code(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


class Agent:
    """An agent that leaves with code 3 when it gets SIGTERM, or never; and a word when it is prepared for that."""

    def __init__(self, *, stubborn: bool = False) -> None:
        self.stubborn = stubborn
        self.reader, self.writer = os.pipe()

    def __call__(self) -> int:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        os.write(self.writer, b"x")
        told = signal.sigtimedwait([signal.SIGTERM], 20)
        if self.stubborn:
            time.sleep(20)
        return 99 if told is None else 3

    def await_readiness(self) -> None:
        assert os.read(self.reader, 1) == b"x"
        os.close(self.reader)
        os.close(self.writer)


def test_an_agent_that_ends_by_itself_gives_its_exit_code() -> None:
    with leashed(lambda: 7) as (holder, _):
        assert exit_code(holder) == 7


def test_the_first_line_goes_to_the_environment() -> None:
    with leashed(lambda: int(os.environ["ODD"]), b'{"ODD": "5"}\n') as (holder, _):
        assert exit_code(holder) == 5


def test_an_agent_leaves_when_the_leash_ends() -> None:
    agent = Agent()
    with leashed(agent) as (holder, writer):
        agent.await_readiness()
        os.close(writer)
        assert exit_code(holder) == 3


def test_an_agent_leaves_when_its_holder_is_told_to() -> None:
    agent = Agent()
    with leashed(agent) as (holder, writer):
        agent.await_readiness()
        os.kill(holder, signal.SIGTERM)
        assert exit_code(holder) == 3
        os.close(writer)


def test_an_agent_that_does_not_leave_is_killed() -> None:
    agent = Agent(stubborn=True)
    with leashed(agent, grace_seconds=0.3) as (holder, writer):
        agent.await_readiness()
        os.close(writer)
        assert exit_code(holder) == 128 + signal.SIGKILL


def test_an_agent_dies_with_its_holder() -> None:
    agent = Agent()
    watched, told = os.pipe()  # ends when all processes that hold it have ended
    with leashed(agent) as (holder, writer):
        agent.await_readiness()
        os.close(told)
        os.kill(holder, signal.SIGKILL)
        assert exit_code(holder) == -signal.SIGKILL
        ready, _, _ = select.select([watched], [], [], 5)
        assert ready
        os.close(writer)
    os.close(watched)

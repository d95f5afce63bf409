"""The spawner: workers in processes that end like those of scripts, and that leave nothing behind."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import multiprocessing.shared_memory
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from bamboo_ds.elastic.spawner import Change, Program, Script, Spawner, SpawnerLostError, sweep
from tests.dropin.launching import MEMORY_OF_TESTS
from tests.elastic.clusters import alive, ended, eventually
from tests.elastic.conftest import Nursery

Make = Callable[[Program], Nursery]


def fail() -> None:
    raise ValueError("boo")


def leave(code: Any) -> Callable[[], None]:
    return lambda: sys.exit(code)


ENDS: dict[str, tuple[Callable[[], Any], int]] = {
    "returns": (lambda: "a value", 0),
    "raises": (fail, 1),
    "exits with 0": (leave(None), 0),
    "exits with 5": (leave(5), 5),
    "exits with 256": (leave(256), 0),
    "exits with a text": (leave("a text"), 1),
    "exits at once": (lambda: os._exit(7), 7),
    "is interrupted": (lambda: os.kill(os.getpid(), signal.SIGINT), -signal.SIGINT),
    "is told to end": (lambda: os.kill(os.getpid(), signal.SIGTERM), -signal.SIGTERM),
    "hangs up": (lambda: os.kill(os.getpid(), signal.SIGHUP), -signal.SIGHUP),
    "is killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL),
    "aborts": (os.abort, -signal.SIGABRT),
    "reads address 0": (lambda: ctypes.string_at(0), -signal.SIGSEGV),
}


@pytest.mark.parametrize(("program", "code"), ENDS.values(), ids=ENDS)
def test_a_callable_ends_as_the_same_script_would(program: Callable[[], Any], code: int, nursery: Make) -> None:
    assert nursery(program).run() == code


def test_a_traceback_is_that_of_the_program_and_is_shown_once(nursery: Make) -> None:
    made = nursery(fail)
    assert made.run() == 1
    assert made.err().count("ValueError: boo") == 1
    assert made.err().count("Traceback") == 1
    assert "forking.py" not in made.err()


def test_a_text_to_exit_with_is_shown(nursery: Make) -> None:
    made = nursery(leave("no data"))
    made.run()
    assert made.err() == "no data\n"


def test_exit_hooks_threads_and_finalizers_of_the_program_run_and_those_of_the_parent_do_not(
    nursery: Make, tmp_path: Path
) -> None:
    inherited = tempfile.TemporaryDirectory(dir=tmp_path)
    atexit.register(print, "an exit handler of the parent", file=sys.stderr)

    def program() -> None:
        atexit.register(print, "exit handler")
        own = tempfile.TemporaryDirectory(dir=tmp_path)
        threading.Thread(target=lambda: (time.sleep(0.1), print("thread", os.path.exists(own.name)))).start()
        sys.excepthook = lambda kind, error, trace: print("hook", error)
        raise ValueError("boo")

    made = nursery(program)
    assert made.run() == 1
    assert made.out().splitlines() == ["hook boo", "thread True", "exit handler"]
    assert made.err() == ""
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [os.path.basename(inherited.name)]
    atexit.unregister(print)
    inherited.cleanup()


def test_a_hook_that_fails_does_not_hide_the_error(nursery: Make) -> None:
    def program() -> None:
        sys.excepthook = lambda *error: 1 / 0
        raise ValueError("boo")

    made = nursery(program)
    assert made.run() == 1
    assert "ValueError: boo" in made.err()
    assert "ZeroDivisionError" in made.err()


def test_a_worker_leads_a_session_with_nothing_to_read_and_its_own_variables(nursery: Make) -> None:
    def program() -> None:
        print(os.getsid(0) == os.getpid(), repr(sys.stdin.read()), sorted(os.environ))
        print([signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == [signal.SIG_DFL] * 2)
        print(signal.pthread_sigmask(signal.SIG_BLOCK, []))

    made = nursery(program)
    assert made.run(environment={"A": "1", "B": "2"}) == 0
    assert made.out().splitlines() == ["True '' ['A', 'B']", "True", "set()"]


def test_workers_draw_different_random_numbers(nursery: Make) -> None:
    numpy = pytest.importorskip("numpy")
    made = nursery(lambda: print(numpy.random.rand(), os.urandom(4)))
    for worker in range(2):
        made.run(worker)
    assert made.out(0) != made.out(1)


def test_a_signal_right_after_the_start_is_not_lost(nursery: Make) -> None:
    made = nursery(lambda: time.sleep(60))
    for worker in range(10):
        out = os.open(os.devnull, os.O_WRONLY)
        made.spawner.spawn(worker, stdout=out, stderr=os.dup(out), environment={})
        made.spawner.signal(worker, signal.SIGTERM)
    assert [made.end(worker) for worker in range(10)] == [-signal.SIGTERM] * 10


def test_many_workers_at_once(nursery: Make) -> None:
    made = nursery(lambda: sys.exit(int(os.environ["CODE"])))
    for worker in range(20):
        made.spawn(worker, {"CODE": str(worker)})
    assert [made.end(worker) for worker in range(20)] == list(range(20))


def test_stops_are_reported(nursery: Make) -> None:
    made = nursery(lambda: time.sleep(60))
    pid = made.spawn()
    for _ in range(2):
        os.kill(pid, signal.SIGSTOP)
        made.await_report(0, Change.STOPPED)
        os.kill(pid, signal.SIGCONT)
        made.await_report(0, Change.CONTINUED)
    os.kill(pid, signal.SIGSTOP)
    made.spawner.signal(0, signal.SIGKILL)
    assert made.end() == -signal.SIGKILL


def family(*, stubborn: bool = False) -> Callable[[], None]:
    """Return a program with a child, a grandchild and an orphan; it prints their ids."""

    def sleeper() -> None:
        if stubborn:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)

    def child() -> None:
        grandchild = multiprocessing.get_context("fork").Process(target=sleeper)
        grandchild.start()
        print(grandchild.pid, flush=True)
        sleeper()

    def program() -> None:
        started = multiprocessing.get_context("fork").Process(target=child)
        started.start()
        orphan = subprocess.run(["sh", "-c", "sleep 60 >&- & echo $!"], stdout=subprocess.PIPE, text=True, check=True)
        print(started.pid, orphan.stdout.strip(), flush=True)
        time.sleep(60)

    return program


def family_of(folder: Path) -> list[int]:
    """Wait until all relatives of worker 0 are there, and return their ids."""
    out = folder / "0.out"
    pids = eventually(lambda: len(out.read_text().split()) == 3 and out.read_text(), within_seconds=10, what="a family")
    return [int(pid) for pid in pids.split()]


@pytest.mark.parametrize("stubborn", [False, True])
def test_what_a_worker_started_ends_with_it(nursery: Make, tmp_path: Path, stubborn: bool) -> None:
    made = nursery(family(stubborn=stubborn))
    pid = made.spawn()
    relatives = family_of(tmp_path)
    assert alive(relatives) == relatives
    os.kill(pid, signal.SIGKILL)
    made.end()
    eventually(lambda: not alive(relatives), within_seconds=3, what="the family ends")
    eventually(lambda: not psutil.pid_exists(pid), within_seconds=3, what="the worker is reaped")


def test_shared_memory_of_a_killed_worker_is_removed(nursery: Make) -> None:
    def program() -> None:
        memory = multiprocessing.shared_memory.SharedMemory(f"{MEMORY_OF_TESTS}{os.getpid()}", create=True, size=4096)
        print(memory.name, flush=True)
        time.sleep(60)

    made = nursery(program)
    pid = made.spawn()
    name = eventually(lambda: made.out().strip(), within_seconds=10, what="shared memory")
    assert Path("/dev/shm", name).exists()
    os.kill(pid, signal.SIGKILL)
    made.end()
    eventually(lambda: not Path("/dev/shm", name).exists(), within_seconds=3, what="it is removed")


def test_workers_die_with_a_killed_spawner_and_their_sessions_can_be_swept(nursery: Make, tmp_path: Path) -> None:
    made = nursery(family())
    pid = made.spawn()
    relatives = family_of(tmp_path)
    os.kill(made.spawner.pid, signal.SIGKILL)
    eventually(lambda: ended(pid), within_seconds=3, what="the worker dies")
    with pytest.raises(SpawnerLostError, match="is gone"):
        eventually(made.spawner.read, within_seconds=3, what="the end is noticed")
    with pytest.raises(SpawnerLostError, match="is gone"):
        made.spawn(1)
    sweep([pid])
    assert not alive(relatives)


@pytest.mark.parametrize("case", ["running", "stopped", "behind with its reading"])
def test_everything_ends_with_a_killed_agent(tmp_path: Path, case: str) -> None:
    agent = os.fork()
    if agent == 0:
        made = Nursery(Spawner(family(stubborn=True)), tmp_path)
        worker = made.spawn()
        Path(tmp_path, "agent").write_text(f"{made.spawner.pid} {worker}\n")
        time.sleep(60)
        os._exit(1)
    said = eventually(
        lambda: (tmp_path / "agent").exists() and (tmp_path / "agent").read_text().split(),
        within_seconds=10,
        what="the agent has a worker",
    )
    spawner, worker = map(int, said)
    everybody = [spawner, worker, *family_of(tmp_path)]
    assert alive(everybody) == everybody
    if case == "stopped":
        for pid in everybody:
            os.kill(pid, signal.SIGSTOP)
    elif case == "behind with its reading":  # the spawner's end of the channel is then not closed, but reset
        os.kill(worker, signal.SIGSTOP)
        time.sleep(0.2)
    os.kill(agent, signal.SIGKILL)
    os.waitpid(agent, 0)
    eventually(lambda: not alive(everybody), within_seconds=5, what="everybody ends")


def test_a_script_gets_an_interpreter_of_its_own() -> None:
    assert Script(("train.py", "--steps", "3")).command == (
        sys.executable,
        "-m",
        "bamboo_ds",
        "train.py",
        "--steps",
        "3",
    )
    assert Script(("train", "-v"), as_module=True).command == (sys.executable, "-m", "bamboo_ds", "-m", "train", "-v")


def test_a_command_that_cannot_run_says_so(nursery: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    made = nursery(Script(("train.py",)))
    assert made.run() == 127
    assert made.err() == "bamboo: cannot run /nowhere/python: No such file or directory\n"

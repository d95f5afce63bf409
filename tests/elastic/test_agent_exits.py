"""What the end of a worker's process means."""

from __future__ import annotations

import json
import signal

import pytest

from bamboo_ds.elastic import keys
from bamboo_ds.elastic.node_workers import worker_environment
from bamboo_ds.elastic.worker_exits import JOB, Verdict, WorkerExit, judge, last_error, publish_failure, read_failure
from bamboo_ds.plan import codec
from bamboo_ds.plan.plan import NOBODY, Plan
from bamboo_ds.store import MemoryStore

DEAD = codec.encode(Plan(((0, 1),), version=1, dead=frozenset({3})))
FAILURE = json.dumps({"worker": 1, "kind": "ValueError", "message": "boo"}).encode()

EXITS = {
    "in order": (0, {}, Verdict.LEFT),
    "in order, though declared dead": (0, {keys.PLAN: DEAD}, Verdict.LEFT),
    "killed": (-signal.SIGKILL, {}, Verdict.LOST),
    "told to end": (-signal.SIGTERM, {}, Verdict.LOST),
    "interrupted": (-signal.SIGINT, {}, Verdict.LOST),
    "hung up": (-signal.SIGHUP, {}, Verdict.LOST),
    "killed after another failed": (-signal.SIGKILL, {keys.failure(JOB): FAILURE}, Verdict.LOST),
    "crashed": (-signal.SIGSEGV, {}, Verdict.FAILED),
    "aborted": (-signal.SIGABRT, {}, Verdict.FAILED),
    "broken pipe": (-signal.SIGPIPE, {}, Verdict.FAILED),
    "an unknown signal": (-40, {}, Verdict.FAILED),
    "an error": (1, {}, Verdict.FAILED),
    "any code": (77, {}, Verdict.FAILED),
    "an error after that of another": (1, {keys.failure(JOB): FAILURE}, Verdict.FOLLOWED),
    "refused": (1, {keys.ended(3): b"{}"}, Verdict.REFUSED),
    "evicted": (1, {keys.PLAN: DEAD}, Verdict.EVICTED),
    "an error under a plan": (1, {keys.PLAN: codec.encode(Plan(((3, 1),)))}, Verdict.FAILED),
    "aborted after eviction": (-signal.SIGABRT, {keys.PLAN: DEAD}, Verdict.EVICTED),
}


@pytest.mark.parametrize(("code", "known", "verdict"), EXITS.values(), ids=EXITS)
def test_verdicts(code: int, known: dict[str, bytes], verdict: Verdict) -> None:
    store = MemoryStore()
    for key, value in known.items():
        store.put(key, value)
    assert judge(store, WorkerExit(3, code)) is verdict


def test_a_failure_without_words_quotes_the_log() -> None:
    store = MemoryStore()
    publish_failure(store, WorkerExit(3, 5), log="the last line")
    entry = store.get(keys.failure(JOB))
    assert entry is not None
    worker, text = read_failure(entry.value)
    assert worker == 3
    assert text == "exited with code 5: no traceback; its log ends:\nthe last line"


LOGS = {
    "nothing": ("", None),
    "no traceback": ("loss 3.2\nkilled", None),
    "an exception": (
        'loss 3.2\nTraceback (most recent call last):\n  File "a.py"\n    f()\nValueError: boo',
        ("ValueError", "boo"),
    ),
    "no message": ('Traceback (most recent call last):\n  File "a.py"\nKeyboardInterrupt', ("KeyboardInterrupt", "")),
    "a class in a module": (
        "Traceback (most recent call last):\n  x\ntorch.cuda.OutOfMemory: 3 GB",
        ("OutOfMemory", "3 GB"),
    ),
    "two lines": ("Traceback (most recent call last):\n  x\nA: one\ntwo", ("A", "one\ntwo")),
    "the last of several": (
        "Traceback (most recent call last):\n  x\nA: one\n\nThen\n\nTraceback (most recent call last):\n  x\nB: two",
        ("B", "two"),
    ),
    "cut off": ('Traceback (most recent call last):\n  File "a.py"', None),
}


@pytest.mark.parametrize(("log", "error"), LOGS.values(), ids=LOGS)
def test_the_error_with_which_a_log_ends(log: str, error: tuple[str, str] | None) -> None:
    assert last_error(log) == error


def test_the_first_failure_stands() -> None:
    store = MemoryStore()
    store.put(keys.failure(JOB), FAILURE)
    publish_failure(store, WorkerExit(3, 5), log="")
    entry = store.get(keys.failure(JOB))
    assert entry is not None
    assert read_failure(entry.value) == (1, "ValueError: boo")


def test_a_failure_that_cannot_be_read_is_shown_as_it_is() -> None:
    assert read_failure(b"who knows") == (NOBODY, "who knows")


HOW = {
    0: "exited with code 0",
    5: "exited with code 5",
    -9: "was ended by SIGKILL: it hung",
    -40: "was ended by signal 40: it hung",
}


@pytest.mark.parametrize(("code", "how"), HOW.items())
def test_ends_in_words(code: int, how: str) -> None:
    assert WorkerExit(3, code, "it hung").how == how


def test_the_record_of_a_lost_worker() -> None:
    record = json.loads(WorkerExit(3, -9, "it hung").record("n1"))
    assert record == {"signal": "SIGKILL", "reason": "worker 3 of node n1 was ended by SIGKILL: it hung"}


def test_the_variables_of_another_launcher_do_not_reach_a_worker() -> None:
    own = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "1", "PATH": "/bin", "LOCAL_RANK": "9"}
    found = worker_environment(own, index=1, workers=2)
    assert found == {
        "PATH": "/bin",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }


def test_what_the_user_has_set_stands() -> None:
    own = {"OMP_NUM_THREADS": "4", "PYTHONUNBUFFERED": ""}
    found = worker_environment(own, index=0, workers=2)
    assert (found["OMP_NUM_THREADS"], found["PYTHONUNBUFFERED"]) == ("4", "")
    assert "OMP_NUM_THREADS" not in worker_environment({}, index=0, workers=1)

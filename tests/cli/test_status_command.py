"""`bamboo-ds status`, as a user runs it: tables and JSON of memory stores, and all of it on a real etcd."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from bamboo_ds.cli.bench.workers import run_workers, values
from bamboo_ds.cli.endpoint import Endpoint, forget, remember
from bamboo_ds.cli.main import app
from bamboo_ds.cli.status import as_json
from bamboo_ds.cli.status_tables import picture
from bamboo_ds.config import EtcdConfig
from bamboo_ds.elastic import keys
from bamboo_ds.elastic.events import EventLog
from bamboo_ds.elastic.membership import open_store
from bamboo_ds.elastic.mirror import Mirror
from bamboo_ds.elastic.report import Report, report
from bamboo_ds.plan.cluster import Node
from bamboo_ds.plan.codec import encode
from bamboo_ds.plan.failover import fail_over
from bamboo_ds.plan.plan import Plan
from bamboo_ds.store import MemoryStore, Store
from bamboo_ds.store.embedded import EmbeddedEtcd

START = Plan(owners=((0, 2, 4), (1, 3, 5)), cause="6 workers are there")


@pytest.fixture(scope="module")
def etcd() -> Iterator[EmbeddedEtcd]:
    with EmbeddedEtcd() as server:
        yield server


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["status", *arguments], env={"COLUMNS": "160"})


def fill(store: Store) -> None:
    """Write the keys of a job of three nodes that has lost one of them."""
    for number in range(3):
        node, workers = f"n{number}", (2 * number, 2 * number + 1)
        store.put(keys.node(node), encode(Node(node, "abc"[number], workers, address=f"127.0.0.{number + 2}")))
        for worker in workers:
            store.put(keys.ready(worker), node.encode())
    store.put(keys.ready(9), b"n2")
    store.put(keys.node("n2"), encode(Node("n2", "c", (4, 5, 9), spot=False)))
    store.delete(keys.node("n1"))
    store.put(keys.PLAN, encode(fail_over(START, [2, 3], redundancy=True, cause="the lease of n1 is gone")))
    store.put(f"{keys.COORDINATOR}/{1:016x}", b"n0")
    progress = {"step": 7, "loss": 1.25, "samples_per_second": 90.1, "step_seconds": 0.7, "vote_seconds": 0.002}
    store.put(keys.PROGRESS, json.dumps({**progress, "time": time.time()}).encode())
    events = EventLog(store, node="n0")
    events.tell("node_joined", "node n1 has joined", about="n1", zone="b", workers=(2, 3))
    events.tell("failover", "worker 0 takes over stage 1", about="n1")


def look(store: Store) -> Report:
    with Mirror(store) as mirror:
        return report(mirror.entries, job="bamboo", now=time.time())


def shown(found: Report, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=160, color_system=None)
    console.print(picture(found, **options))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def words_of(text: str, begin: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.startswith(begin))


def test_the_tables_show_nodes_grid_progress_and_causes() -> None:
    with MemoryStore() as store:
        fill(store)
        text = shown(look(store))
    assert "plan 0.1" in text.splitlines()[0]
    assert "step 7   loss 1.2500   samples/s 90.1   step time 0.7 s   vote 2.0 ms" in text
    assert words_of(text, "n0") == ["n0", "a", "127.0.0.2", "w0,", "w1", "?", "alive,", "coordinator"]
    assert words_of(text, "n2")[-4:] == ["?", "alive,", "on", "demand"]
    assert "w9 standby" in text
    assert words_of(text, "n1") == ["n1", "w2", "dead,", "w3", "dead", "gone"]
    assert words_of(text, "pipeline 0") == [
        "pipeline",
        "0",
        "w0",
        "2x",
        "n0/a",
        "+w0",
        "for",
        "w2",
        "n0/a",
        "w4",
        "n2/c",
    ]
    assert "because the lease of n1 is gone" in text
    assert "failover" in text
    assert "worker 0 takes over stage 1" in text


def test_a_lost_stage_is_named_with_the_worker_that_had_it() -> None:
    with MemoryStore() as store:
        fill(store)
        store.put(keys.PLAN, encode(fail_over(START, [0, 2], redundancy=True, cause="two are gone")))
        text = shown(look(store))
    assert "lost (was w2)" in text
    assert "aborted" in text.splitlines()[0]


def test_brackets_in_a_cause_are_text_and_no_markup() -> None:
    with MemoryStore() as store:
        fill(store)
        store.put(keys.FINISHED, b"[red]really[/nothing]")
        assert "[red]really[/nothing]" in shown(look(store))


def test_trouble_with_the_store_shows_above_what_is_old() -> None:
    with MemoryStore() as store:
        fill(store)
        assert "etcd cannot be reached, this is old: no answer" in shown(look(store), trouble="no answer")


def test_the_json_document_has_what_its_docstring_says() -> None:
    with MemoryStore() as store:
        fill(store)
        endpoint = Endpoint(EtcdConfig(endpoints=("h:1",), user="u", password="secret"), "bamboo", "--etcd")
        text = as_json(look(store), endpoint)
    assert "secret" not in text
    found = json.loads(text)
    assert list(found) == (
        [
            "job",
            "time",
            "etcd",
            "phase",
            "phase_text",
            "coordinator",
            "nodes",
            "workers",
            "roster",
            "plan",
            "progress",
            "events",
            "fleet",
        ]
    )
    assert found["etcd"] == ["h:1"]
    assert found["roster"] is None
    assert found["workers"][0] == {"id": 0, "node": "n0", "zone": "a", "state": "training"}
    assert found["nodes"][0] == {
        "name": "n0",
        "zone": "a",
        "address": "127.0.0.2",
        "workers": [0, 1],
        "spot": True,
        "joined_seconds": None,
    }
    assert list(found["plan"]) == (
        ["epoch", "version", "cause", "aborted", "from_checkpoint", "num_stages", "num_pipelines", "dead", "grid"]
    )
    assert found["plan"]["grid"][0][1] == {
        "owner": 0,
        "home": 2,
        "node": "n0",
        "zone": "a",
        "taken_over": True,
        "merged": True,
    }
    assert sorted(found["progress"]) == sorted(
        ["step", "loss", "samples_per_second", "step_seconds", "vote_seconds", "age_seconds"]
    )
    assert list(found["events"][0]) == ["time", "node", "kind", "text", "fields"]


def test_a_real_etcd_is_read_by_endpoint_by_folder_and_by_default(
    etcd: EmbeddedEtcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def target(rank: int) -> list[tuple[int, str]]:
        config = EtcdConfig(endpoints=(etcd.endpoint,))
        with open_store(config, job="seen") as store:
            fill(store)
        remember(Path("runs/other"), config, job="other")
        os.utime("runs/other/endpoint.json", (1, 1))
        remember(Path("runs/seen"), config, job="seen")
        ways = [
            ("--etcd", etcd.endpoint, "--job", "seen"),
            ("--logs", "runs/seen"),
            ("--job", "seen"),
            (),
        ]
        results = [invoke(*way, "--json") for way in ways]
        results.append(invoke())
        return [(result.exit_code, result.output) for result in results]

    *documents, table = values(run_workers(target, 1, timeout_seconds=60))[0]
    assert [code for code, _ in documents] == [0] * 4
    found = [json.loads(text) for _, text in documents]
    assert [(document["job"], document["plan"]["version"]) for document in found] == [("seen", 1)] * 4
    assert table[0] == 0
    assert "pipeline 1" in table[1]


def test_a_job_is_followed_to_its_end(etcd: EmbeddedEtcd) -> None:
    def target(rank: int) -> tuple[int, list[str]]:
        with open_store(EtcdConfig(endpoints=(etcd.endpoint,)), job="followed") as store:
            fill(store)

            def go_on() -> None:
                time.sleep(0.8)
                store.put(keys.PLAN, encode(START))
                time.sleep(0.8)
                store.put(keys.FINISHED, b"all have left")

            thread = threading.Thread(target=go_on)
            thread.start()
            result = invoke("--etcd", etcd.endpoint, "--job", "followed", "--watch", "--json")
            thread.join()
        return result.exit_code, result.output.splitlines()

    code, lines = values(run_workers(target, 1, timeout_seconds=60))[0]
    assert code == 0
    documents = [json.loads(line) for line in lines]
    assert [document["phase"] for document in documents[-1:]] == ["finished"]
    assert sorted({document["plan"]["version"] for document in documents}) == [0, 1]
    assert documents[0]["phase"] == "training"


def test_watching_on_a_terminal_ends_with_ctrl_c_and_the_last_picture(etcd: EmbeddedEtcd) -> None:
    def target(rank: int) -> tuple[int, str]:
        with open_store(EtcdConfig(endpoints=(etcd.endpoint,)), job="interrupted") as store:
            fill(store)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            result = invoke("--etcd", etcd.endpoint, "--job", "interrupted", "--watch")
        return result.exit_code, result.output

    code, text = values(run_workers(target, 1, timeout_seconds=60))[0]
    assert code == 0
    assert "pipeline 1" in text
    assert "Traceback" not in text


def test_no_such_job_and_an_etcd_that_is_gone_are_one_clear_line(tmp_path: Path) -> None:
    def target(rank: int) -> list[tuple[int, str]]:
        with EmbeddedEtcd() as server:
            config = EtcdConfig(endpoints=(server.endpoint,), timeout_seconds=1.0)
            results = [invoke("--etcd", server.endpoint, "--job", "nobody")]
            remember(tmp_path, config, job="gone")
        results.append(invoke("--logs", str(tmp_path)))
        return [(result.exit_code, result.output) for result in results]

    unknown, gone = values(run_workers(target, 1, timeout_seconds=60))[0]
    assert unknown[0] == gone[0] == 2
    assert unknown[1].startswith("bamboo-ds status: there is no job nobody at etcd 127.0.0.1:")
    assert gone[1].startswith("bamboo-ds status: job gone at etcd 127.0.0.1:")
    assert "cannot be reached" in gone[1]
    assert "Traceback" not in unknown[1] + gone[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "runs/bamboo/endpoint.json: no such file"),
        (("--job", "x"), "runs/x/endpoint.json: no such file"),
        (("--etcd", "here"), '--etcd here: "here" must be host:port'),
        (("--etcd", "a:1,"), '--etcd a:1,: "" must be host:port'),
        (("--etcd", "a:1", "--job", "a/b"), "--job a/b: must be 1 to 63 letters"),
        (("--etcd", "a:1", "--etcd-cert", "c"), "--etcd-cert c: goes with --etcd-key, which is missing"),
        (("--etcd", "a:1", "--etcd-ca", "none.pem"), "--etcd-ca none.pem: no such file"),
        (("--etcd", "a:1", "--etcd-user", "u"), "put its password into the variable BAMBOO_ETCD_PASSWORD"),
        (("--etcd-user", "u"), "--etcd-user u: goes with --etcd host:port, which is missing"),
        (("--etcd", "a:1", "--events", "-1"), "--events -1: must be at least 0"),
    ],
)
def test_wrong_options_are_one_clear_line(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BAMBOO_ETCD_PASSWORD", raising=False)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.output.startswith("bamboo-ds status: ")
    assert message in result.output
    assert len(result.output.splitlines()) == 1


def test_the_folder_of_another_job_is_refused_and_what_is_no_endpoint_too(tmp_path: Path) -> None:
    remember(tmp_path, EtcdConfig(endpoints=("a:1",), user="u", password="secret"), job="one")
    assert "secret" not in (tmp_path / "endpoint.json").read_text()
    result = invoke("--logs", str(tmp_path), "--job", "two")
    assert (result.exit_code, "are of job one" in result.output) == (2, True)
    (tmp_path / "endpoint.json").write_text("[]")
    result = invoke("--logs", str(tmp_path))
    assert (result.exit_code, "name the etcd with --etcd" in result.output) == (2, True)
    forget(tmp_path)
    assert list(tmp_path.iterdir()) == []

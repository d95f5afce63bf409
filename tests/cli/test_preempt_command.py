"""`bamboo-ds preempt`, as a user runs it, on a real etcd; the node's agent is played by a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from typer.testing import CliRunner, Result

from bamboo_ds.cli.bench.workers import run_workers, values
from bamboo_ds.cli.main import app
from bamboo_ds.config import EtcdConfig
from bamboo_ds.elastic import keys
from bamboo_ds.elastic.events import EventLog
from bamboo_ds.elastic.membership import open_store
from bamboo_ds.plan.cluster import Node
from bamboo_ds.plan.codec import encode
from bamboo_ds.plan.failover import fail_over
from bamboo_ds.plan.plan import Plan
from bamboo_ds.store import Entry, EventKind, Store
from bamboo_ds.store.embedded import EmbeddedEtcd

START = Plan(owners=((0, 1),))
DONE = tuple[int, str, str | None, Entry | None]
"""Exit code and output, how the agent was told, and what is left of that."""


@pytest.fixture(scope="module")
def etcd() -> Iterator[EmbeddedEtcd]:
    with EmbeddedEtcd() as server:
        yield server


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["preempt", *arguments])


def preempt(etcd: EmbeddedEtcd, *arguments: str, job: str, effect: Callable[[Store], object]) -> DONE:
    """Preempt node n1 of a job whose agent has some effect on the store when it hears of it."""

    def target(rank: int) -> DONE:
        with open_store(EtcdConfig(endpoints=(etcd.endpoint,)), job=job) as store:
            for worker in (0, 1):
                store.put(keys.node(f"n{worker}"), encode(Node(f"n{worker}", "ab"[worker], (worker,))))
            store.put(keys.node("n2"), encode(Node("n2", "c", (2,))))
            began = store.put(keys.PLAN, encode(START))
            told: list[str] = []

            def agent() -> None:
                with store.watch(keys.PREEMPTIONS, from_revision=began) as watch:
                    events = watch.next(20) or watch.next(20)
                    told.extend(event.value.decode() for event in events if event.kind is EventKind.PUT)
                effect(store)

            thread = threading.Thread(target=agent)
            thread.start()
            result = invoke(*arguments, "--etcd", etcd.endpoint, "--job", job)
            thread.join()
            return result.exit_code, result.output, next(iter(told), None), store.get(keys.preempt(arguments[0]))

    done: DONE = values(run_workers(target, 1, timeout_seconds=60))[0]
    return done


@pytest.mark.parametrize("how", ["kill", "term", "stop", "cut"])
def test_it_tells_the_agent_and_says_what_the_coordinator_decided(etcd: EmbeddedEtcd, how: str) -> None:
    after = fail_over(START, [1], redundancy=True, cause="its agent saw worker 1 end")
    code, output, told, left = preempt(
        etcd, "n1", "--how", how, job=f"how-{how}", effect=lambda store: store.put(keys.PLAN, encode(after))
    )
    assert (code, told, left) == (0, how, None)
    assert output.startswith(f"node n1 (zone b, workers 1) was told: {how}; plan 0.1 after 0.")
    assert output.endswith(" s: its agent saw worker 1 end\n")


def test_the_end_of_a_lease_is_the_effect_on_a_standby(etcd: EmbeddedEtcd) -> None:
    code, output, told, _ = preempt(etcd, "n2", job="standby", effect=lambda store: store.delete(keys.node("n2")))
    assert (code, told) == (0, "kill")
    assert "its lease ended after 0." in output


def test_without_an_effect_it_says_so_in_time_and_takes_its_word_back(etcd: EmbeddedEtcd) -> None:
    code, output, told, left = preempt(
        etcd, "n1", "--how", "stop", "--wait", "0.5", job="nothing", effect=lambda store: None
    )
    assert (code, told, left) == (0, "stop", None)
    assert "no effect seen within 0.5 s" in output


def test_an_agent_that_cannot_says_why(etcd: EmbeddedEtcd) -> None:
    def refuse(store: Store) -> None:
        EventLog(store, node="n1").tell("preempt", "node n1 was told to break and cannot: it has no link of its own")

    code, output, told, _ = preempt(etcd, "n1", "--how", "cut", job="refused", effect=refuse)
    assert (code, told) == (0, "cut")
    assert output.endswith("was told: cut; but node n1 was told to break and cannot: it has no link of its own\n")


def test_a_plan_from_before_is_no_effect(etcd: EmbeddedEtcd) -> None:
    def target(rank: int) -> str:
        with open_store(EtcdConfig(endpoints=(etcd.endpoint,)), job="before") as store:
            store.put(keys.node("n1"), encode(Node("n1", "b", (1,))))
            store.put(keys.PLAN, encode(fail_over(START, [1], redundancy=True, cause="earlier")))
            return invoke("n1", "--wait", "0.3", "--etcd", etcd.endpoint, "--job", "before").output

    assert "no effect seen" in values(run_workers(target, 1, timeout_seconds=60))[0]


def test_an_unknown_node_is_refused_with_those_there_are(etcd: EmbeddedEtcd) -> None:
    def target(rank: int) -> tuple[int, str]:
        with open_store(EtcdConfig(endpoints=(etcd.endpoint,)), job="unknown") as store:
            store.put(keys.node("n1"), encode(Node("n1", "b", (1,))))
            result = invoke("n9", "--etcd", etcd.endpoint, "--job", "unknown")
            assert store.get(keys.preempt("n9")) is None
        return result.exit_code, result.output

    code, output = values(run_workers(target, 1, timeout_seconds=60))[0]
    assert code == 2
    assert output.startswith("bamboo-ds preempt: NODE n9: job unknown at etcd ")
    assert output.endswith("has no such node alive; there are: n1\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("n1", "--etcd", "a:1", "--how", "shoot"), "--how shoot: must be one of kill, term, stop, cut"),
        (("n1", "--etcd", "a:1", "--wait", "-1"), "--wait -1: must be at least 0"),
        (("n1", "--job", "none"), "runs/none/endpoint.json: no such file"),
    ],
)
def test_wrong_options_are_one_clear_line(
    arguments: tuple[str, ...], message: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(str(tmp_path))
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.output.startswith(f"bamboo-ds preempt: {message}")
    assert len(result.output.splitlines()) == 1


def test_without_a_node_there_is_a_usage(tmp_path: object) -> None:
    result = invoke()
    assert result.exit_code == 2
    assert "NODE" in result.output.upper()

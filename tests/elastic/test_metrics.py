"""What an agent tells Prometheus, read as Prometheus reads it."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bamboo_ds.elastic.metrics import WINDOW, Metrics
from bamboo_ds.errors import ConfigError
from bamboo_ds.plan.commit import Decision, Outcome
from bamboo_ds.plan.failover import fail_over
from bamboo_ds.plan.job import JobSettings
from bamboo_ds.plan.plan import Plan

START = Plan(owners=((0, 2), (1, 3)))


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    metrics = Metrics(job="j", node="n0")
    yield metrics
    metrics.close()


def value(metrics: Metrics, name: str, **labels: str) -> float:
    found = metrics.registry.get_sample_value(name, {"job_name": "j", "node": "n0", **labels})
    assert found is not None, f"no such sample: {name} {labels}"
    return found


def committed(step: int, loss: float = 1.0) -> Outcome:
    return Outcome(Decision(step, loss, (loss,), {}, 1.0, False, ()))


def scrape(port: int) -> dict[tuple[str, str], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {(sample.name, sample.labels["node"]): sample.value for family in families for sample in family.samples}


def test_prometheus_reads_every_metric_of_two_agents_in_one_process() -> None:
    agents = [Metrics(job="j", node=name) for name in ("n0", "n1")]
    try:
        ports = [agent.serve(0) for agent in agents]
        agents[0].nodes(3)
        agents[1].nodes(4)
        first, second = map(scrape, ports)
    finally:
        for agent in agents:
            agent.close()
    assert (first["bamboo_nodes", "n0"], second["bamboo_nodes", "n1"]) == (3, 4)
    assert ("bamboo_nodes", "n1") not in first
    wanted = (
        "nodes workers local_workers dead_workers plan_epoch plan_version step loss samples_per_second is_coordinator "
        "commits_total refused_commits_total failovers_total aborts_total reconfigurations_total store_outages_total "
        "step_seconds_count pause_seconds_count vote_seconds_count"
    )
    assert {f"bamboo_{name}" for name in wanted.split()} <= {name for name, _ in first}


def test_nothing_goes_to_the_registry_of_the_process(metrics: Metrics) -> None:
    names = {family.name for family in prometheus_client.REGISTRY.collect()}
    assert not any(name.startswith("bamboo") for name in names)


def test_a_taken_port_is_a_clear_error(metrics: Metrics) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"--metrics-port {port}: cannot listen there \(Address already in use\)"
        ):
            metrics.serve(port)


def test_a_closed_port_is_free_again(metrics: Metrics) -> None:
    port = metrics.serve(0)
    metrics.close()
    metrics.close()
    with pytest.raises(OSError, match="refused"):
        scrape(port)
    assert metrics.serve(port) == port


def test_it_can_serve_at_the_nodes_own_address(metrics: Metrics) -> None:
    port = metrics.serve(0, address="127.0.0.7")
    with pytest.raises(OSError, match="refused"):
        scrape(port)
    with urllib.request.urlopen(f"http://127.0.0.7:{port}/metrics", timeout=5) as answer:
        assert b"bamboo_nodes" in answer.read()


def test_plans_count_failovers_aborts_and_reconfigurations_each_once(metrics: Metrics) -> None:
    taken_over = fail_over(START, [2], redundancy=True)
    aborted = fail_over(taken_over, [0], redundancy=True)
    fresh = Plan(owners=((1, 3),), epoch=1, dead=aborted.dead)
    seen = []
    for plan in (START, START, taken_over, taken_over, aborted, fresh, taken_over):
        metrics.plan(plan)
        counts = [value(metrics, f"bamboo_{name}_total") for name in ("failovers", "aborts", "reconfigurations")]
        seen.append((*counts, value(metrics, "bamboo_workers")))
    assert seen == [(0, 0, 0, 4), (0, 0, 0, 4), (1, 0, 0, 3), (1, 0, 0, 3), (1, 1, 0, 0), (1, 1, 1, 2), (1, 1, 1, 2)]
    assert (value(metrics, "bamboo_plan_epoch"), value(metrics, "bamboo_plan_version")) == (1, 0)
    assert value(metrics, "bamboo_dead_workers") == 2


def test_an_agent_that_joins_late_counts_from_there_and_misses_no_version_in_between(metrics: Metrics) -> None:
    metrics.plan(Plan(owners=((4, 5),), epoch=3, version=2))
    assert value(metrics, "bamboo_failovers_total") == value(metrics, "bamboo_reconfigurations_total") == 0
    metrics.plan(Plan(owners=((4, 5),), epoch=5, version=1))
    assert value(metrics, "bamboo_reconfigurations_total") == 2
    assert value(metrics, "bamboo_failovers_total") == 1


def test_commits_give_step_loss_and_throughput(metrics: Metrics) -> None:
    metrics.settings(JobSettings(0, {"train_batch_size": "32"}))
    metrics.outcome(committed(0, 4.0), 0.0)
    for step, seconds in enumerate((0.5, 0.25, 0.5), start=1):
        metrics.outcome(committed(step, 4.0 - step), seconds)
    assert value(metrics, "bamboo_step") == 4
    assert value(metrics, "bamboo_loss") == 1.0
    assert value(metrics, "bamboo_commits_total") == 4
    assert value(metrics, "bamboo_samples_per_second") == 32 / 0.5
    assert value(metrics, "bamboo_step_seconds_count") == 3


@pytest.mark.parametrize("settings", [{}, {"train_batch_size": "null"}, {"train_batch_size": "{"}])
def test_without_a_batch_size_there_is_no_throughput(metrics: Metrics, settings: dict[str, str]) -> None:
    metrics.settings(JobSettings(0, settings))
    metrics.outcome(committed(1), 0.5)
    assert value(metrics, "bamboo_samples_per_second") == 0


def test_a_refused_step_is_no_commit(metrics: Metrics) -> None:
    metrics.outcome(committed(3), 0.0)
    metrics.outcome(Outcome(refusal="loss is nan"), 0.5)
    metrics.outcome(Outcome(rows=("an evaluation",)), 0.5)
    assert value(metrics, "bamboo_refused_commits_total") == 1
    assert value(metrics, "bamboo_step") == 4


def test_a_pause_is_more_than_twice_the_median_interval(metrics: Metrics) -> None:
    for seconds in (1.0, 9.0, 1.0, 1.0, 1.0):  # too few to know what is usual: the 9 counts as none
        metrics.outcome(committed(0), seconds)
    for seconds in (2.0, 2.5, 1.0, 30.0, 1.0):
        metrics.outcome(committed(0), seconds)
    assert value(metrics, "bamboo_pause_seconds_count") == 2
    assert value(metrics, "bamboo_pause_seconds_sum") == 32.5


def test_a_job_that_got_slower_for_good_pauses_no_more_once_that_is_usual(metrics: Metrics) -> None:
    for _ in range(WINDOW):
        metrics.outcome(committed(0), 1.0)
    for _ in range(2 * WINDOW):
        metrics.outcome(committed(0), 3.0)
    assert value(metrics, "bamboo_pause_seconds_count") == WINDOW // 2


def test_events_are_counted_by_kind_and_outages_on_their_own(metrics: Metrics) -> None:
    for kind in ("node_lost", "store_outage", "store_outage"):
        metrics.event(kind)
    assert value(metrics, "bamboo_events_total", kind="store_outage") == 2
    assert value(metrics, "bamboo_events_total", kind="node_lost") == 1
    assert value(metrics, "bamboo_store_outages_total") == 2


def test_votes_leadership_and_workers_are_told_as_they_are(metrics: Metrics) -> None:
    metrics.vote(0.003)
    metrics.leading(True)
    metrics.local_workers(2)
    assert value(metrics, "bamboo_vote_seconds_bucket", le="0.005") == 1
    assert value(metrics, "bamboo_vote_seconds_bucket", le="0.0025") == 0
    assert value(metrics, "bamboo_is_coordinator") == 1
    assert value(metrics, "bamboo_local_workers") == 2
    metrics.leading(False)
    assert value(metrics, "bamboo_is_coordinator") == 0

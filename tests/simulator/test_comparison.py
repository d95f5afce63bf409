"""Ways to train side by side, on one trace and on many."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bamboo_ds.errors import ConfigError
from bamboo_ds.simulator.comparison import KEPT_ABOVE, POLICIES, Comparison
from bamboo_ds.simulator.constants import Constants
from bamboo_ds.simulator.many import Scenario, mean_figures, run_seeds
from bamboo_ds.simulator.market import Market, generate
from bamboo_ds.simulator.models import built_in
from tests.simulator.markets import SIMPLE, even, story

QUIET = story("0 +8", seconds=36000)


def comparison(**options: object) -> Comparison:
    return Comparison(even(), constants=SIMPLE, redundancy="lflb", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", POLICIES)
def test_undisturbed_everyone_trains_nearly_all_the_time(policy: str) -> None:
    figures = comparison().run(QUIET, policy).figures
    assert figures.goodput == pytest.approx(1.0, abs=0.03 if policy != "varuna" else 0.1)
    assert sum(figures.seconds_by_cause.values()) == pytest.approx(36000)
    assert figures.fatal_losses == figures.failovers == figures.restores == figures.preemptions == 0


def test_value_is_samples_per_dollar_and_spot_is_paid_while_it_is_there() -> None:
    figures = comparison().run(QUIET, "bamboo").figures
    assert figures.cost_per_hour == pytest.approx(8 * 0.918)
    assert figures.value == pytest.approx(figures.samples / (10 * 8 * 0.918))
    assert figures.throughput == pytest.approx(24 / 21, rel=0.01)


def test_machines_that_stay_are_as_many_as_training_without_redundancy_needs() -> None:
    figures = comparison().run(story("0 +8", "10 -0,1,2,3", seconds=36000), "on_demand").figures
    assert (figures.mean_nodes, figures.cost_per_hour) == (4, pytest.approx(4 * 3.06))
    assert figures.throughput == pytest.approx(24 / ((4 + 1) * 6))
    assert figures.value == pytest.approx(figures.throughput * 3600 / (4 * 3.06))


def test_a_fleet_is_never_above_p_times_d() -> None:
    figures = comparison().run(story("0 +20", seconds=36000), "bamboo").figures
    assert figures.mean_nodes == 8
    assert figures.cost_per_hour == pytest.approx(8 * 0.918)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="no policy nothing: choose of bamboo"):
        comparison().run(QUIET, "nothing")


def test_what_one_trace_has_taught_changes_no_other() -> None:
    traces = [generate(Market(nodes=8, hours=4, rate=0.5, zones=2), seed=seed) for seed in range(4)]
    for kept in (False, True):
        shared = comparison(kept=kept)
        for policy in ("bamboo", "bamboo_eflb", "checkpoint", "oobleck"):
            fresh = [comparison(kept=kept).run(trace, policy).figures for trace in traces]
            assert [shared.run(trace, policy).figures for trace in traces] == fresh


def test_large_clusters_keep_their_placement() -> None:
    large = even(4, pipelines=KEPT_ABOVE // 4 + 1, micro_batches=100)
    assert Comparison(large, constants=SIMPLE).kept
    assert not comparison().kept


def test_zones_keep_bulks_from_taking_neighbours() -> None:
    market = Market(nodes=48, hours=24, rate=0.10, zones=3)
    one = replace(market, zones=1)
    known_at_once = replace(Constants(), lease_seconds=0.0)  # no epoch counts on standbys that went with others
    both = Comparison(built_in("bert-large"), constants=known_at_once, kept=True)
    fatal = [
        sum(both.run(generate(each, seed=seed), "bamboo").figures.fatal_losses for seed in range(6))
        for each in (market, one)
    ]
    assert fatal[0] < fatal[1] / 2


def test_the_papers_model_on_the_papers_rate_costs_less_than_half_of_machines_that_stay() -> None:
    both = Comparison(built_in("bert-large"), constants=Constants(), kept=True)
    trace = generate(Market(nodes=48, hours=24, rate=0.10), seed=1)
    ours, stays = (both.run(trace, policy).figures for policy in ("bamboo", "on_demand"))
    assert ours.value > 2 * stays.value
    assert ours.goodput > 0.95


# ---- many traces -----------------------------------------------------------------------------------------------------


def scenario(rate: float) -> Scenario:
    market = Market(nodes=8, hours=3, rate=rate, zones=2)
    return Scenario(even(), SIMPLE, ("bamboo", "checkpoint"), "lflb", market, kept=True)


def test_processes_change_no_figure() -> None:
    scenarios = [scenario(0.2), scenario(0.6)]
    alone = run_seeds(scenarios, seeds=5, processes=1)
    assert alone == run_seeds(scenarios, seeds=5, processes=2)
    assert [len(found["bamboo"]) for found in alone] == [5, 5]
    lost = [sum(figures.preemptions for figures in found["bamboo"]) for found in alone]
    assert lost[0] < lost[1]


def test_means_and_deviations_are_over_seeds() -> None:
    (found,) = run_seeds([scenario(0.4)], seeds=4, processes=1)
    mean, spread = mean_figures(found["bamboo"])
    values = [figures.throughput for figures in found["bamboo"]]
    assert mean.throughput == pytest.approx(sum(values) / 4)
    assert min(values) < mean.throughput < max(values)
    assert 0 < spread["throughput"] <= max(values) - min(values)
    assert sum(mean.seconds_by_cause.values()) == pytest.approx(3 * 3600)
    told = json.loads(json.dumps(mean.as_json()))
    assert told["throughput"] == pytest.approx(mean.throughput, rel=1e-4)
    assert set(told) >= {"cost_per_hour", "value", "goodput", "failovers", "reconfigurations", "fatal_losses"}

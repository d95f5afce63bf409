"""The keeper against a pretend cloud and a memory store: never above the target, no order twice, whatever fails."""

from __future__ import annotations

import random

import pytest

from bamboo_ds.cloud.fleet import FleetRules
from bamboo_ds.cloud.keeper import KeeperSettings
from bamboo_ds.cloud.pretend import Manners, PretendMarket, Supply, steady_supply
from bamboo_ds.cloud.trouble import CloudError, Trouble
from bamboo_ds.elastic import keys
from bamboo_ds.errors import ConflictError, StoreUnavailableError
from bamboo_ds.plan import Plan
from bamboo_ds.plan.codec import encode
from tests.cloud.pretending import FleetJob, lost_answer

RULES = FleetRules(retry_seconds=10.0, retry_max_seconds=60.0, release_seconds=100.0, boot_seconds=300.0)
SETTINGS = KeeperSettings(rules=RULES, nodes=6)
ZONES = ("a", "b", "c")


def job_on(supply: Supply, settings: KeeperSettings = SETTINGS, **manners: object) -> FleetJob:
    return FleetJob(PretendMarket(supply, manners=Manners(**manners), seed=3), settings=settings)  # type: ignore[arg-type]


def test_it_fills_the_fleet_evenly_and_no_further() -> None:
    job = job_on(steady_supply(ZONES, capacity=100), delay_seconds=(5.0, 60.0))
    keeper, _ = job.elect()
    job.run(keeper, 300.0)
    assert job.counts == {"a": 2, "b": 2, "c": 2}
    assert sum(order.nodes for order in job.provider.calls) == 6


def test_it_takes_p_x_d_from_the_job() -> None:
    job = job_on(steady_supply(ZONES, capacity=100), KeeperSettings(rules=RULES, workers_per_node=2))
    keeper, _ = job.elect()
    job.run(keeper, 60.0)
    assert job.counts == {}
    job.publish(stages=3, pipelines=3)
    job.run(keeper, 60.0)
    assert sum(job.counts.values()) == 5  # nine workers, two on a node


def test_without_an_upper_bound_of_pipelines_it_asks_for_nothing() -> None:
    job = job_on(steady_supply(ZONES, capacity=100), KeeperSettings(rules=RULES))
    keeper, _ = job.elect()
    job.publish(stages=3, pipelines=None)
    job.run(keeper, 60.0)
    assert job.provider.calls == []


def test_a_lost_node_is_replaced_where_it_is_missing() -> None:
    job = job_on(steady_supply(ZONES, capacity=100))
    keeper, _ = job.elect()
    job.run(keeper, 60.0)
    job.lose(next(name for name, zone in job.market.running.items() if zone == "b"))
    job.run(keeper, 60.0)
    assert job.counts == {"a": 2, "b": 2, "c": 2}


def test_a_full_zone_is_asked_again_later_and_told_once() -> None:
    supply = Supply.of([(0.0, "a", 9), (2000.0, "b", 9)], zones=("a", "b"))
    job = job_on(supply, KeeperSettings(rules=RULES, nodes=4))
    job.market.add("n0", "a")
    job.join("n0", "a")
    keeper, _ = job.elect()
    job.run(keeper, 500.0)
    assert job.counts == {"a": 4}
    assert [text for kind, text in job.told if kind == "fleet_trouble"] == [
        "NoCapacity in zone b: no capacity; none is needed"
    ]
    job.lose("n0")
    job.run(keeper, 1000.0)
    assert job.counts["b"] <= 1


@pytest.mark.parametrize("heard", [True, False])
def test_an_order_without_an_answer_is_made_again_under_its_token(heard: bool) -> None:
    job = job_on(steady_supply(("a",), capacity=100), KeeperSettings(rules=RULES, nodes=3))
    keeper, _ = job.elect()
    (job.provider.fail_after if heard else job.provider.fail_before).append(lost_answer())
    job.run(keeper, 100.0)
    assert job.counts == {"a": 3}
    assert len(job.provider.calls) == 2
    assert len({order.token for order in job.provider.calls}) == 1


def test_a_successor_makes_the_open_order_again_and_no_other() -> None:
    job = job_on(steady_supply(("a",), capacity=100), KeeperSettings(rules=RULES, nodes=3))
    keeper, lease = job.elect()
    job.provider.fail_after.append(lost_answer())
    keeper.step()
    job.server.expire(lease.id)
    successor, _ = job.elect("c1")
    job.run(successor, 100.0)
    assert job.counts == {"a": 3}
    assert len({order.token for order in job.provider.calls}) == 1


def test_a_successor_does_not_take_a_lost_instance_for_a_node_that_was_started_by_hand() -> None:
    job = job_on(steady_supply(("a",), capacity=100), KeeperSettings(rules=RULES, nodes=3))
    keeper, lease = job.elect()
    job.run(keeper, 60.0)
    lost = next(iter(job.market.running))
    job.market.end([lost])  # it is registered for a TTL yet
    job.server.expire(lease.id)
    successor, _ = job.elect("c1")
    successor.step()
    assert job.market.promised == {"a": 1}


def test_a_keeper_that_was_replaced_orders_nothing() -> None:
    job = job_on(steady_supply(("a",), capacity=100))
    keeper, lease = job.elect()
    job.server.expire(lease.id)
    with pytest.raises(ConflictError):
        keeper.step()
    assert job.provider.calls == []


def test_instances_that_the_cloud_does_not_list_yet_are_not_ordered_again() -> None:
    job = job_on(steady_supply(("a",), capacity=100), KeeperSettings(rules=RULES, nodes=3))
    keeper, _ = job.elect()
    job.run(keeper, 30.0)
    before = len(job.provider.calls)
    job.provider.unlisted = 1
    keeper.step()
    # They were listed and are not now: the cloud says that they are gone, so they are replaced.
    assert len(job.provider.calls) == before + 1


def test_a_cloud_out_of_reach_is_left_alone_and_told_once() -> None:
    job = job_on(steady_supply(("a",), capacity=100), KeeperSettings(rules=RULES, nodes=3))
    keeper, _ = job.elect()
    job.provider.fail_look += [
        CloudError(Trouble("ConnectTimeout", "no answer", "look at the route")) for _ in range(3)
    ]
    assert keeper.step() == 10.0
    assert keeper.step() == 10.0  # it is not asked before that
    assert len(job.provider.fail_look) == 2
    job.clock.advance(10.0)
    assert keeper.step() == 20.0
    job.run(keeper, 400.0)
    assert job.counts == {"a": 3}
    assert job.kinds()["fleet_trouble"] == 1


def test_a_surplus_without_a_stage_is_given_back() -> None:
    job = job_on(steady_supply(ZONES, capacity=100), KeeperSettings(rules=RULES, nodes=2))
    for number, zone in enumerate("abc"):
        job.market.add(f"m{number}", zone)
        job.join(f"m{number}", zone)
    job.store.put(keys.PLAN, encode(Plan(owners=((0, 1),))))
    keeper, _ = job.elect()
    job.run(keeper, 90.0)
    assert set(job.market.running) == {"m0", "m1", "m2"}
    job.run(keeper, 60.0)
    assert set(job.market.running) == {"m0", "m1"}
    assert job.kinds()["fleet_release"] == 1


def test_an_instance_whose_agent_never_joins_is_given_back_and_replaced() -> None:
    job = job_on(steady_supply(("a",), capacity=100), KeeperSettings(rules=RULES, nodes=1))
    keeper, _ = job.elect()
    keeper.step()
    (dud,) = job.start(joining=False)
    job.run(keeper, 200.0)
    assert set(job.market.running) == {dud}
    job.run(keeper, 200.0)
    assert dud not in job.market.running
    assert job.counts == {"a": 1}


def test_at_the_end_of_the_job_nothing_more_is_ordered() -> None:
    job = job_on(steady_supply(("a",), capacity=100))
    keeper, _ = job.elect()
    job.store.put(keys.FINISHED, b"done")
    job.run(keeper, 60.0)
    assert (job.provider.calls, job.provider.finished) == ([], 1)


def test_what_boots_when_the_job_is_over_is_given_back() -> None:
    job = job_on(steady_supply(("a",), capacity=100), KeeperSettings(rules=RULES, nodes=2))
    keeper, _ = job.elect()
    keeper.step()
    first, second = job.start(joining=False)
    job.join(first, "a")
    keeper.step()
    job.server.expire(job.leases[first].id)  # its agent has seen the end already
    job.store.put(keys.FINISHED, b"done")
    keeper.step()
    assert set(job.market.running) == {first}
    assert [text for kind, text in job.told if kind == "fleet_release"] == [
        f"instance {second} is given back: the job is over, and its agent has not joined"
    ]


def test_a_refusal_of_everything_stops_orders_and_not_the_looks() -> None:
    job = job_on(steady_supply(("a",), capacity=100), KeeperSettings(rules=RULES, nodes=2))
    keeper, _ = job.elect()
    quota = Trouble("MaxSpotInstanceCountExceeded", "no more", "ask for more", patience=4.0)
    job.provider.fail_before.append(CloudError(quota))
    keeper.step()
    job.market.add("m0", "a")
    job.clock.advance(15.0)
    keeper.step()
    assert keeper.holdings is not None
    assert [one.id for one in keeper.holdings.instances] == ["m0"]
    assert len(job.provider.calls) == 1
    job.run(keeper, 60.0)
    assert job.counts == {"a": 2}


def test_a_store_out_of_reach_stops_it_until_the_ledger_was_read_again() -> None:
    job = job_on(steady_supply(("a",), capacity=100), KeeperSettings(rules=RULES, nodes=3))
    keeper, _ = job.elect()
    job.server.reachable = False
    with pytest.raises(StoreUnavailableError):
        keeper.step()
    job.server.reachable = True
    job.run(keeper, 30.0)
    assert job.counts == {"a": 3}


@pytest.mark.parametrize("seed", range(12))
def test_whatever_fails_it_never_asks_above_the_target_nor_twice(seed: int) -> None:
    draw = random.Random(seed)
    changes = [(draw.uniform(0, 20_000), draw.choice(ZONES), draw.choice([-1, 1])) for _ in range(120)]
    start = [(0.0, zone, draw.randint(3, 6)) for zone in ZONES]
    supply = Supply.of(sorted([*start, *changes]), zones=ZONES)
    manners = Manners(refuse=0.2, partly=0.3, delay_seconds=(0.0, 90.0), forget=0.1)
    job = FleetJob(PretendMarket(supply, manners=manners, seed=seed), settings=SETTINGS)
    keeper, lease = job.elect()
    for turn in range(400):
        _stumble(job, draw)
        try:
            pause = keeper.step()
        except (ConflictError, StoreUnavailableError):
            pause = 1.0
        if draw.random() < 0.1:
            job.server.reachable = True
            job.server.expire(lease.id)
            keeper, lease = job.elect(f"c{turn + 1}")
        there = len(job.market.running) + sum(job.market.promised.values())
        assert there <= 6
        job.clock.advance(min(pause, draw.uniform(1.0, 40.0)))
        job.server.reachable = True
        job.start()
        chosen = [name for name in sorted(job.market.running) if draw.random() < 0.05]
        for name in (*job.market.reclaim(job.clock.now()), *chosen):
            job.lose(name)
    tokens = [order.token for order in job.provider.calls]
    assert len(tokens) > len(set(tokens)) > 10  # there were repetitions, and the market knew them


def _stumble(job: FleetJob, draw: random.Random) -> None:
    """Perhaps let the next order or look fail, or the store."""
    for waiting in (job.provider.fail_before, job.provider.fail_after, job.provider.fail_look):
        waiting.clear()
    chance = draw.random()
    if chance < 0.1:
        job.provider.fail_before.append(lost_answer())
    elif chance < 0.2:
        job.provider.fail_after.append(lost_answer())
    elif chance < 0.25:
        job.provider.fail_look.append(lost_answer())
    elif chance < 0.3:
        job.server.reachable = False

"""The thread that coordinates: elected, deposed, cut off, stopped; in memory, and in processes on a real etcd."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest

from bamboo_ds.cli.bench.workers import run_workers, values
from bamboo_ds.clock import SystemClock
from bamboo_ds.elastic import keys
from bamboo_ds.elastic.coordinator import Coordinator, CoordinatorSettings
from bamboo_ds.elastic.events import read_events
from bamboo_ds.elastic.hearing import Hearing
from bamboo_ds.elastic.leadership import Leadership
from bamboo_ds.elastic.view import View
from bamboo_ds.errors import ConflictError, LeaseLostError, StoreUnavailableError
from bamboo_ds.plan import Plan
from bamboo_ds.plan.cluster import Node
from bamboo_ds.plan.codec import decode, encode
from bamboo_ds.plan.roster import StartRule
from bamboo_ds.store import Lease, MemoryServer, MemoryStore, Store, Watch
from bamboo_ds.store.embedded import EmbeddedEtcd
from tests.elastic.coordinating import SPEC, ballot

SETTINGS = CoordinatorSettings(ttl_seconds=2.0, start=StartRule(1, 0.0))


def eventually(condition: Callable[[], Any], *, within_seconds: float = 10.0, what: str = "") -> Any:
    deadline = time.monotonic() + within_seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {within_seconds} s: {what}"
        time.sleep(0.005)
    return result


@contextlib.contextmanager
def leading(
    store: Store, node: str, *, lease: Callable[[], Lease] | None = None, settings: CoordinatorSettings = SETTINGS
) -> Iterator[Leadership]:
    """Run a leadership in a thread."""
    own = store.lease(settings.ttl_seconds) if lease is None else None
    leadership = Leadership(store, node=node, lease=lease or (lambda: own), settings=settings)  # type: ignore[arg-type]
    thread = threading.Thread(target=leadership.run)
    thread.start()
    try:
        yield leadership
    finally:
        leadership.stop()
        thread.join(10)
        assert not thread.is_alive(), "a leadership that was stopped ends"


def register(store: Store, node: str, *workers: int, lease: Lease | None = None) -> Lease:
    """Do what an agent and its workers do to join."""
    lease = lease or store.lease(2.0)
    store.put(keys.node(node), encode(Node(node, "z", workers)), lease=lease)
    for worker in workers:
        store.put(keys.ready(worker), node.encode())
    return lease


def plan_of(store: Store) -> Plan | None:
    entry = store.get(keys.PLAN)
    return None if entry is None else decode(Plan, entry.value)


def leader(store: Store) -> str:
    entries = store.list(f"{keys.COORDINATOR}/").entries
    return min(entries, key=lambda entry: entry.create_revision).value.decode() if entries else ""


# ---- in memory -------------------------------------------------------------------------------------------------------


def test_one_of_two_leads_and_hands_over_when_it_is_stopped() -> None:
    server = MemoryServer()
    first, second = MemoryStore(server=server), MemoryStore(server=server)
    with leading(second, "n2") as other, contextlib.ExitStack() as later:
        eventually(lambda: other.leading)
        candidate = later.enter_context(leading(first, "n1"))
        register(first, "n1", 0)
        eventually(lambda: first.get(keys.ROSTER), what="the leader works")
        assert not candidate.leading
        other.stop()
        eventually(lambda: candidate.leading)
        eventually(lambda: not other.leading)
        first.put(keys.SPEC, encode(replace(SPEC, num_stages=1, min_stages=1)))
        eventually(lambda: first.get(keys.PLAN), what="its successor works")
    assert first.list(f"{keys.COORDINATOR}/").entries == ()


def test_every_wait_ends_on_stop() -> None:
    server = MemoryServer()
    with leading(MemoryStore(server=server), "n1") as one:
        eventually(lambda: one.leading)
        with leading(MemoryStore(server=server), "n2"):
            time.sleep(0.1)  # it waits for its turn now
            start = time.monotonic()
        assert time.monotonic() - start < 10
        start = time.monotonic()
    assert time.monotonic() - start < 10


def test_a_lost_lease_ends_the_leadership_and_a_fresh_one_begins_another() -> None:
    store = MemoryStore()
    given: list[Lease] = []

    def lease() -> Lease:
        if not given or not given[-1].alive:
            given.append(store.lease(2.0))
        return given[-1]

    with leading(store, "n1", lease=lease) as leadership:
        for number in range(1, 4):
            eventually(lambda number=number: leadership.leading and len(read_events(store)) == number)
            store.server.expire(given[-1].id)
            eventually(lambda number=number: len(given) > number)
        eventually(lambda: leadership.leading and len(read_events(store)) == 4)
    assert {event.text for event in read_events(store)} == {"node n1 coordinates"}


@pytest.mark.parametrize("error", [LeaseLostError, StoreUnavailableError])
def test_an_agent_without_a_lease_stands_for_election_as_soon_as_it_has_one(error: type[Exception]) -> None:
    store, failures = MemoryStore(), [error("not now")] * 3

    def lease() -> Lease:
        if failures:
            raise failures.pop()
        return own

    own = store.lease(2.0)
    with leading(store, "n1", lease=lease) as leadership:
        eventually(lambda: leadership.leading)
    assert not failures


def test_an_outage_leaves_the_leader_in_place_and_what_happened_meanwhile_is_decided() -> None:
    store = MemoryStore()
    with leading(store, "n1") as leadership:
        register(store, "n1", 0, 1)
        store.put(keys.SPEC, encode(replace(SPEC, num_stages=2, min_stages=1)))
        eventually(lambda: plan_of(store))
        store.server.reachable = False
        time.sleep(0.3)
        assert leadership.leading
        store.server.reachable = True
        store.put(keys.ended(1), b"{}")
        eventually(lambda: (plan_of(store) or Plan(((0,),))).number > (0, 0))


def test_a_coordinator_that_fails_ends_the_job_with_the_reason() -> None:
    store = MemoryStore()
    with leading(store, "n1") as leadership:
        eventually(lambda: leadership.leading)
        store.put(keys.SPEC, b"from the future")
        entry = eventually(lambda: store.get(keys.failure("job")))
        eventually(lambda: not leadership.leading)
    assert b'"kind": "ConfigError"' in entry.value
    assert b"the coordinator, on node n1, cannot go on: a job spec in the store is no JSON" in entry.value


def test_a_closed_store_ends_it() -> None:
    store = MemoryStore()
    leadership = Leadership(store, node="n1", lease=lambda: own, settings=SETTINGS)
    own = store.lease(2.0)
    thread = threading.Thread(target=leadership.run)
    thread.start()
    eventually(lambda: leadership.leading)
    store.close()
    thread.join(5)
    assert not thread.is_alive()


# ---- on a real etcd, in processes of their own -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def etcd() -> Iterator[EmbeddedEtcd]:
    with EmbeddedEtcd() as server:
        yield server


def open_etcd(endpoint: str, job: str) -> Store:
    from bamboo_ds.store.etcd import EtcdStore

    return EtcdStore([endpoint], prefix=keys.prefix(job))


def milliseconds(seconds: list[float]) -> str:
    return f"median {statistics.median(seconds) * 1e3:.1f} ms, worst {max(seconds) * 1e3:.1f} ms of {len(seconds)}"


def measure(rank: int, endpoint: str) -> dict[str, list[float]]:
    """Lead a job of 4 x 8 workers; time losses from the key on the desk to the plan on the board, and commits."""
    found: dict[str, list[float]] = {"loss": [], "commit": []}
    settings = replace(SETTINGS, start=StartRule(32, 60.0))
    with (
        open_etcd(endpoint, "latency") as store,
        open_etcd(endpoint, "latency") as agent,
        leading(store, "n0", settings=settings),
    ):
        for number in range(32):
            register(agent, f"n{number}", number)
        agent.put(keys.SPEC, encode(replace(SPEC, pipelines=8)))
        plan = eventually(lambda: plan_of(agent))
        watch = agent.watch(keys.BOARD, from_revision=agent.list("").revision + 1)
        for commit in range(20):
            for pipeline in range(7):
                text = encode(ballot(commit, pipeline))
                agent.put(keys.vote(0, commit, plan.number, pipeline), text)
            last = keys.vote(0, commit, plan.number, 7), encode(ballot(commit, 7))
            found["commit"].append(timed(watch, keys.decision(0, commit), agent, *last))
        for pipeline in range(8):
            victim = plan.owners[pipeline][1]
            found["loss"].append(timed(watch, keys.PLAN, agent, keys.ended(victim), b"{}"))
        watch.close()
    return found


def timed(watch: Watch, key: str, agent: Store, written: str, value: bytes) -> float:
    """Return the seconds from before a key is written until another is heard."""
    start = time.perf_counter()
    agent.put(written, value)
    while True:
        if any(event.key == key and event.value for event in watch.next(10.0)):
            return time.perf_counter() - start


def test_a_loss_and_a_commit_are_answered_within_milliseconds(etcd: EmbeddedEtcd) -> None:
    (found,) = values(run_workers(measure, 1, args=(etcd.endpoint,), timeout_seconds=60))
    for what, seconds in found.items():
        print(f"\n{what}: {milliseconds(seconds)}", end="")
        assert statistics.median(seconds) < 0.1


def sleep_in_mid_decision(rank: int, endpoint: str) -> list[str]:
    """Process 0 has seen a loss and all votes, and is stopped before it writes; process 1 leads meanwhile."""
    with open_etcd(endpoint, "sleep") as store:
        return sleeper(store) if rank == 0 else successor(store)


def sleeper(store: Store) -> list[str]:
    lease = register(store, "n0", 0, 1, 2, 3)
    election = store.elect(keys.COORDINATOR, b"n0", lease)
    assert election.campaign(10)
    hearing = Hearing(SystemClock(), ttl_seconds=0.0)
    settings = replace(SETTINGS, start=StartRule(4, 60.0))
    with View(store) as view:
        coordinator = Coordinator(store, view=view, fence=election.fence, node="n0", settings=settings, hearing=hearing)
        store.put(keys.SPEC, encode(replace(SPEC, num_stages=2)))
        while plan_of(store) is None:
            coordinator.step()
            view.wait(0.1)
        for pipeline in (0, 1):
            store.put(keys.vote(0, 0, (0, 0), pipeline), encode(ballot(0, pipeline, stages=2)))
        store.put(keys.ended(2), b"{}")
        while not (view.boxes.get((0, 0)) and len(view.boxes[0, 0].ballots["0.0"]) == 2 and 2 in view.ended):
            view.wait(0.1)
        store.put("sleeper", str(os.getpid()).encode())
        os.kill(os.getpid(), signal.SIGSTOP)
        before = store.list("").revision
        woke = []
        try:
            coordinator.step()
        except ConflictError as error:
            woke = [str(error)]
        assert not lease.alive
        assert not coordinator.seconds_to_next > 1
        assert store.list("").revision == before, "who woke up has written"
        store.put("woke", b"")
        return woke


def successor(store: Store) -> list[str]:
    pid = int(eventually(lambda: store.get("sleeper"), within_seconds=20).value)
    process = psutil.Process(pid)
    eventually(lambda: process.status() == psutil.STATUS_STOPPED)
    lease = store.lease(10.0)
    election = store.elect(keys.COORDINATOR, b"n1", lease)
    assert election.campaign(20)
    hearing = Hearing(SystemClock(), ttl_seconds=0.0)
    with View(store) as view:
        coordinator = Coordinator(store, view=view, fence=election.fence, node="n1", settings=SETTINGS, hearing=hearing)
        deeds = [deed.kind for _ in range(4) for deed in coordinator.step()]
    os.kill(pid, signal.SIGCONT)
    eventually(lambda: store.get("woke"), within_seconds=20)
    return deeds


def test_a_coordinator_that_is_stopped_in_mid_decision_writes_nothing_when_it_wakes_up(etcd: EmbeddedEtcd) -> None:
    woke, deeds = values(run_workers(sleep_in_mid_decision, 2, args=(etcd.endpoint,), timeout_seconds=60))
    assert len(woke) == 1
    assert "fenced off" in woke[0]
    assert deeds[:2] == ["coordinator", "decision"]
    assert {"failover", "abort"} & set(deeds), "the node of the sleeper has gone with its lease"


def lead_until_killed(rank: int, endpoint: str) -> float:
    """Process 0 leads and dies with its node; the others stand for election. Time until its stages are taken over."""
    settings = replace(SETTINGS, ttl_seconds=2.0, start=StartRule(4, 60.0))
    with open_etcd(endpoint, "killed") as store:
        if rank == 0:
            own = register(store, "n0", 0)
        else:
            eventually(lambda: leader(store), within_seconds=20)
            own = register(store, f"n{rank}", rank)
        with leading(store, f"n{rank}", lease=lambda: own, settings=settings) as leadership:
            if rank == 0:
                eventually(lambda: leadership.leading)
                store.put(keys.SPEC, encode(replace(SPEC, num_stages=4)))
                eventually(lambda: plan_of(store), within_seconds=20)
                time.sleep(2.5)  # until the others have heard the store for longer than a lease lives
                store.put("killed", b"")
                os.kill(os.getpid(), signal.SIGKILL)
            eventually(lambda: store.get("killed"), within_seconds=20)
            start = time.monotonic()
            eventually(lambda: (plan_of(store) or Plan(((0,),))).number > (0, 0), within_seconds=20)
            return time.monotonic() - start


def test_a_coordinator_killed_with_its_node_is_replaced_and_its_node_lost_when_its_lease_ends(
    etcd: EmbeddedEtcd,
) -> None:
    results = run_workers(lead_until_killed, 4, args=(etcd.endpoint,), timeout_seconds=60)
    assert results[0].exit_code == -signal.SIGKILL
    seconds = [result.value for result in results[1:]]
    assert None not in seconds, "\n".join(f"{result.error}\n{result.log}" for result in results[1:])
    print(f"\ntaken over {max(seconds):.2f} s after the kill, TTL 2 s")
    assert max(seconds) < 2.0 + 1.5 + 1.0


def live_through_an_outage(rank: int, endpoint: str, server: int, stall_seconds: float) -> dict[str, Any]:
    """Four agents, one of them the coordinator and one slow, while the etcd is stopped; then a node ends for good."""
    from bamboo_ds.elastic.registration import Registration

    settings = replace(SETTINGS, start=StartRule(4, 60.0))
    with contextlib.ExitStack() as stack:
        stores = [stack.enter_context(open_etcd(endpoint, "outage")) for _ in range(3)]
        agents = []
        for number, store in enumerate(stores):
            agent = Registration(
                store, Node(f"n{number}", "z", ()), ttl_seconds=2.0, outage_seconds=30.0, on_end=lambda error: None
            )
            register_workers(store, agent.join(1))
            agents.append(agent)
            stack.callback(agent.leave, timeout_seconds=2.0)
        slow = SlowAgent(stack.enter_context(open_etcd(endpoint, "outage")), "n3", 3)
        stack.callback(slow.stop)
        for number, (store, agent) in enumerate(zip(stores, agents, strict=True)):
            stack.enter_context(leading(store, f"n{number}", lease=agent.lease, settings=settings))
        stores[0].put(keys.SPEC, encode(replace(SPEC, num_stages=4)))
        eventually(lambda: plan_of(stores[0]))
        time.sleep(2.5)
        before = {entry.key: entry.create_revision for entry in stores[0].list(keys.NODES).entries}
        os.kill(server, signal.SIGSTOP)
        time.sleep(stall_seconds)
        os.kill(server, signal.SIGCONT)
        time.sleep(4.0)
        after = {entry.key: entry.create_revision for entry in stores[0].list(keys.NODES).entries}
        plan = plan_of(stores[0])
        assert plan is not None
        agents[2].leave(timeout_seconds=5.0)
        eventually(lambda: (plan_of(stores[0]) or plan).number > (0, 0), within_seconds=15)
        return {
            "version": plan.version,
            "nodes": sorted(after),
            "vanished": sum(before[key] != created for key, created in after.items()),
            "events": [event.kind for event in read_events(stores[0])],
        }


class SlowAgent:
    """Comes back a second later than it could."""

    def __init__(self, store: Store, node: str, worker: int) -> None:
        self._store, self._node, self._worker = store, node, worker
        self._lease = register(store, node, worker)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._stopped.wait(0.05):
            if self._lease.alive:
                continue
            with contextlib.suppress(StoreUnavailableError):
                self._lease = self._store.lease(2.0)
                if self._lease.alive:  # not asked for so long ago that it is over by our clock
                    self._stopped.wait(1.0)
                    register(self._store, self._node, self._worker, lease=self._lease)


def register_workers(store: Store, ids: tuple[int, ...]) -> None:
    for worker in ids:
        store.put(keys.ready(worker), b"n")


@pytest.mark.slow
@pytest.mark.parametrize("stall_seconds", [1.5, 4.0])
def test_nobody_is_evicted_as_the_etcd_was_stopped(stall_seconds: float) -> None:
    with EmbeddedEtcd() as server:
        assert server.pid is not None
        arguments = (server.endpoint, server.pid, stall_seconds)
        (found,) = values(run_workers(live_through_an_outage, 1, args=arguments, timeout_seconds=60))
    print(f"\nstopped for {stall_seconds} s: {found}")
    assert found["version"] == 0
    assert found["nodes"] == [keys.node(f"n{number}") for number in range(4)]

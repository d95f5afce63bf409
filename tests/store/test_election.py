"""One leads, others wait, and whoever led before writes nothing more."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bamboo_ds.errors import ConflictError, LeaseLostError
from bamboo_ds.store import Election, Fence, Store
from bamboo_ds.store.embedded import EmbeddedEtcd
from bamboo_ds.store.etcd import EtcdStore
from tests.store.servers import World, eventually

ROOT = Path(__file__).resolve().parents[2]


def candidate(store: Store, name: bytes, ttl_seconds: float = 30) -> Election:
    return store.elect("coordinator", name, store.lease(ttl_seconds))


def test_the_first_candidate_leads_and_the_others_know_who(world: World) -> None:
    store = world.store()
    one, two = candidate(store, b"one"), candidate(world.store(), b"two")
    assert one.leader() is None
    assert one.campaign()
    assert not two.campaign()
    assert not two.campaign(world.brief_seconds)
    assert one.campaign()
    assert one.leading
    assert not two.leading
    leader = two.leader()
    assert leader is not None
    assert (leader.key, leader.value) == (one.key, b"one")
    with pytest.raises(ConflictError, match="does not lead 'coordinator': campaign first"):
        _ = two.fence


def test_candidates_follow_in_the_order_in_which_they_stood(world: World) -> None:
    store = world.store()
    elections = [candidate(world.store(), str(number).encode()) for number in range(4)]
    leads = [election.campaign() for election in elections]
    assert leads == [True, False, False, False]
    elections[1].resign()
    elections[0].resign()
    elections[0].resign()
    assert [election.campaign() for election in elections[2:]] == [True, False]
    with pytest.raises(ConflictError, match="fenced off"):
        store.put("plan", b"", fence=Fence(elections[0].key, 2))
    store.put("plan", b"", fence=elections[2].fence)


def test_a_candidate_that_waits_leads_when_the_leader_resigns(world: World) -> None:
    one, two = candidate(world.store(), b"one"), candidate(world.store(), b"two")
    assert one.campaign()
    timer = threading.Timer(0.3, one.resign)
    timer.start()
    assert two.campaign(20)
    timer.join()
    assert two.leading


def test_a_leader_whose_lease_is_over_is_fenced_off(world: World) -> None:
    store = world.store()
    lease = store.lease(30)
    one = store.elect("coordinator", b"one", lease)
    assert one.campaign()
    fence = one.fence
    store.put("plan", b"1", fence=fence)
    lease.revoke()
    assert not one.leading
    two = candidate(store, b"two")
    assert two.campaign()
    with pytest.raises(ConflictError, match="fenced off"):
        store.put("plan", b"2", fence=fence)
    store.put("plan", b"3", fence=two.fence)
    with pytest.raises(LeaseLostError, match="take a new lease and stand again"):
        one.campaign()


def test_a_candidate_whose_lease_ends_while_it_waits_hears_of_it(world: World) -> None:
    store = world.store()
    assert candidate(store, b"one").campaign()
    lease = store.lease(30)
    two = store.elect("coordinator", b"two", lease)
    timer = threading.Timer(0.3, lambda: (lease.revoke(), world.pass_time(1)))
    timer.start()
    with pytest.raises(LeaseLostError):
        two.campaign(20)
    timer.join()


LEADER = """
import sys, time
from bamboo_ds.errors import ConflictError, StoreUnavailableError
from bamboo_ds.store.etcd import EtcdStore

with EtcdStore([sys.argv[1]], prefix=sys.argv[2]) as store:
    election = store.elect("coordinator", b"child", store.lease(1))
    assert election.campaign(10)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            store.put("wrote", b"child", fence=election.fence)
        except StoreUnavailableError:
            pass
        except ConflictError:
            sys.exit(7)
        time.sleep(0.01)
"""


def test_a_stopped_leader_that_wakes_up_writes_nothing(etcd: EmbeddedEtcd, prefix: str) -> None:
    """A real process leads, is stopped for longer than its lease, wakes up and writes at once, as fast as it can."""
    leader = subprocess.Popen([sys.executable, "-c", LEADER, etcd.endpoint, prefix], cwd=ROOT)
    try:
        with EtcdStore([etcd.endpoint], prefix=prefix) as store:
            eventually(lambda: store.get("wrote"), within_seconds=20, what="the child leads and writes")
            leader.send_signal(signal.SIGSTOP)
            successor = candidate(store, b"successor")
            assert successor.campaign(20)
            revision = store.put("wrote", b"successor", fence=successor.fence)
            leader.send_signal(signal.SIGCONT)
            assert leader.wait(20) == 7
            found = store.get("wrote")
            assert found is not None
            assert (found.value, found.revision) == (b"successor", revision)
    finally:
        leader.kill()
        leader.wait(10)

"""One leads, others wait, and whoever led before writes nothing more."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from bamboo_ds.errors import ConflictError, LeaseLostError, StoreError
from bamboo_ds.store import Election, Fence, Store
from bamboo_ds.store.embedded import EmbeddedEtcd
from bamboo_ds.store.etcd import EtcdStore
from tests.store.servers import World, eventually, insist


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


def test_a_stopped_leader_that_wakes_up_writes_nothing(etcd: EmbeddedEtcd, prefix: str) -> None:
    """A real process leads, is stopped for longer than its lease, wakes up and writes at once, as fast as it can."""
    pid = os.fork()
    if pid == 0:
        _lead_until_refused(etcd.endpoint, prefix)
    with EtcdStore([etcd.endpoint], prefix=prefix) as store:
        eventually(lambda: store.get("wrote"), within_seconds=20, what="the child leads and writes")
        os.kill(pid, signal.SIGSTOP)
        successor = candidate(store, b"successor")
        assert successor.campaign(20)
        revision = store.put("wrote", b"successor", fence=successor.fence)
        os.kill(pid, signal.SIGCONT)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        found = store.get("wrote")
        assert found is not None
        assert (found.value, found.revision) == (b"successor", revision)


def _lead_until_refused(endpoint: str, prefix: str) -> None:
    """Write as the leader, again and again; exit with 7 when a fence stops it."""
    code = 1
    try:
        with EtcdStore([endpoint], prefix=prefix) as store:
            election = candidate(store, b"child", ttl_seconds=1)
            assert election.campaign(10)
            fence = election.fence
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                insist(lambda: store.put("wrote", b"child", fence=fence))
                time.sleep(0.01)
    except ConflictError:
        code = 7
    except StoreError as error:
        print(repr(error), flush=True)
    finally:
        os._exit(code)

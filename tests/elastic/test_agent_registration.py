"""A node's entry in the cluster: kept through outages, changed in one piece, and never another's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from bamboo_ds.elastic import keys
from bamboo_ds.elastic.events import ClusterEvent
from bamboo_ds.elastic.follower import Follower
from bamboo_ds.elastic.registration import Registration, clear_former_run, ended_since
from bamboo_ds.errors import ConfigError, ConflictError, LeaseLostError, StoreError, StoreUnavailableError
from bamboo_ds.plan import codec
from bamboo_ds.plan.cluster import Node
from bamboo_ds.plan.job import JobSettings, JobSpec
from bamboo_ds.plan.plan import Plan
from bamboo_ds.store import Event, EventKind, MemoryServer, MemoryStore
from tests.elastic.clusters import eventually

TTL_SECONDS = 1.0


class Agent:
    """A registration with a store of its own, and how it ended."""

    def __init__(self, server: MemoryServer, name: str, outage_seconds: float) -> None:
        self.store = MemoryStore(server=server)
        self.ends: list[StoreError] = []
        self.registration = Registration(
            self.store,
            Node(name, "a", (), address="10.0.0.1"),
            ttl_seconds=TTL_SECONDS,
            outage_seconds=outage_seconds,
            on_end=self.ends.append,
        )

    def close(self) -> None:
        self.registration.leave(timeout_seconds=1)
        self.store.close()


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer()


@pytest.fixture
def store(server: MemoryServer) -> MemoryStore:
    return MemoryStore(server=server)


@pytest.fixture
def agent(server: MemoryServer) -> Iterator[Callable[..., Agent]]:
    with ExitStack() as stack:

        def make(name: str = "n0", *, outage_seconds: float = 60.0) -> Agent:
            made = Agent(server, name, outage_seconds)
            stack.callback(made.close)
            return made

        yield make


def registered(store: MemoryStore, name: str = "n0") -> Node | None:
    entry = store.get(keys.node(name))
    return None if entry is None else codec.decode(Node, entry.value)


def test_each_node_gets_workers_of_its_own_under_its_lease(agent: Callable[..., Agent], store: MemoryStore) -> None:
    first, second = agent("n0"), agent("n1")
    assert first.registration.join(2) == (0, 1)
    assert second.registration.join(3) == (2, 3, 4)
    assert registered(store, "n0") == Node("n0", "a", (0, 1), address="10.0.0.1")
    entry = store.get(keys.node("n1"))
    assert entry is not None
    assert entry.lease_id == second.registration.lease().id
    second.registration.leave(timeout_seconds=1)
    assert registered(store, "n1") is None
    assert registered(store, "n0") is not None


def test_there_is_no_lease_before_the_node_has_joined(agent: Callable[..., Agent]) -> None:
    with pytest.raises(LeaseLostError, match="not registered yet"):
        agent().registration.lease()


def test_a_name_that_is_taken_is_refused(agent: Callable[..., Agent]) -> None:
    agent().registration.join(1)
    with pytest.raises(ConfigError, match="there is a node n0 in this job already"):
        agent().registration.join(1)


def test_a_former_agent_of_the_name_is_waited_for(agent: Callable[..., Agent], store: MemoryStore) -> None:
    dead = agent()
    dead.registration.join(1)
    dead.store.close()  # its lease runs out
    assert agent().registration.join(1) == (1,)
    node = registered(store)
    assert node is not None
    assert node.workers == (1,)


def test_a_struck_worker_and_its_record_are_written_together(agent: Callable[..., Agent], store: MemoryStore) -> None:
    made = agent()
    made.registration.join(3)
    made.registration.strike({1: b"killed", 2: None})
    assert made.registration.flush(timeout_seconds=5)
    node, record = store.get(keys.node("n0")), store.get(keys.ended(1))
    assert node is not None
    assert record is not None
    assert node.revision == record.revision
    assert codec.decode(Node, node.value).workers == made.registration.node.workers == (0,)
    assert store.get(keys.ended(2)) is None


def test_what_is_struck_in_an_outage_is_written_after_it(
    agent: Callable[..., Agent], server: MemoryServer, store: MemoryStore
) -> None:
    made = agent()
    made.registration.join(2)
    server.reachable = False
    made.registration.strike({0: b"killed"})
    assert not made.registration.flush(timeout_seconds=0.3)
    server.reachable = True
    assert made.registration.flush(timeout_seconds=5)
    assert store.get(keys.ended(0)) is not None
    assert not made.ends


def test_a_lost_lease_is_replaced_and_the_node_put_under_the_new_one(
    agent: Callable[..., Agent], server: MemoryServer, store: MemoryStore
) -> None:
    made = agent()
    made.registration.join(1)
    before = made.registration.lease()
    server.reachable = False
    server.expire(before.id)
    server.reachable = True
    eventually(lambda: registered(store) is not None, within_seconds=5, what="the node is back")
    after = made.registration.lease()
    entry = store.get(keys.node("n0"))
    assert entry is not None
    assert entry.lease_id == after.id != before.id
    assert after.alive
    assert not made.ends


def test_a_node_that_another_agent_has_taken_over_is_lost(
    agent: Callable[..., Agent], server: MemoryServer, store: MemoryStore
) -> None:
    old = agent()
    old.registration.join(1)
    server.reachable = False
    server.expire(old.registration.lease().id)
    with server._changed:  # nobody moves in between
        server.reachable = True
        new = MemoryStore(server=server)
        new.put(keys.node("n0"), codec.encode(Node("n0", "b", (7,))))
    error = eventually(lambda: old.ends, within_seconds=5, what="the old agent hears of it")[0]
    assert isinstance(error, ConflictError)
    assert "another agent has taken the name of node n0" in str(error)
    node = registered(store)
    assert node is not None
    assert node.workers == (7,)


def test_an_outage_that_lasts_too_long_is_the_end(agent: Callable[..., Agent], server: MemoryServer) -> None:
    made = agent(outage_seconds=0.5)
    made.registration.join(1)
    server.reachable = False
    server.expire(made.registration.lease().id)
    error = eventually(lambda: made.ends, within_seconds=5, what="it gives up")[0]
    assert isinstance(error, StoreUnavailableError)
    assert "out of reach for" in str(error)
    assert "outage_seconds is 0.5" in str(error)


@pytest.mark.parametrize("mark", [keys.PLAN, keys.ROSTER, keys.SPEC, keys.FINISHED, keys.failure("job")])
def test_a_run_without_nodes_is_forgotten(store: MemoryStore, mark: str) -> None:
    store.put(mark, b"old")
    for key in (keys.ready(1), "rdzv/0.0/user/x", keys.PROGRESS, f"{keys.EVENTS}1-n0", keys.WORKER_COUNTER):
        store.put(key, b"8")
    clear_former_run(store)
    assert [entry.key for entry in store.list().entries] == [f"{keys.EVENTS}1-n0", keys.WORKER_COUNTER]


CHECKPOINTS = {"bamboo.checkpoint.path": '"there"'}


@pytest.mark.parametrize(
    ("settings", "launched", "over", "goes_on"),
    [
        (CHECKPOINTS, None, None, True),
        ({}, None, None, False),
        (CHECKPOINTS, Plan(owners=((0, 1),)), None, False),
        (CHECKPOINTS, None, keys.FINISHED, False),
        (CHECKPOINTS, None, keys.failure("job"), False),
    ],
    ids=["", "without checkpoints", "with the ranks of a launcher", "finished", "failed"],
)
def test_a_run_without_nodes_that_has_checkpoints_goes_on(
    store: MemoryStore, settings: dict[str, str], launched: Plan | None, over: str | None, goes_on: bool
) -> None:
    store.put(keys.PLAN, b"old")
    store.put(keys.SPEC, codec.encode(JobSpec(publisher=0, num_stages=2, num_layers=4, launched=launched)))
    store.put(keys.settings(0), codec.encode(JobSettings(publisher=0, settings=settings)))
    if over is not None:
        store.put(over, b"over")
    clear_former_run(store)
    assert (store.get(keys.PLAN) is not None) == goes_on


def event(kind: str, at: float) -> bytes:
    return ClusterEvent(at, "n0", kind, f"the job has {kind}").encode()


@pytest.mark.parametrize(
    ("mark", "kind", "node", "ended"),
    [
        (keys.FINISHED, "finished", False, "the job has finished"),
        (keys.failure("job"), "failure", False, "the job has failure"),
        (keys.FINISHED, "finished", True, ""),
        (keys.PLAN, "finished", False, ""),
        (keys.FINISHED, "plan", False, ""),
    ],
    ids=["finished", "failed", "its nodes are still there", "another run goes on", "nobody knows when"],
)
def test_a_run_that_has_ended_since_a_machine_was_started_is_not_begun_by_it(
    store: MemoryStore, mark: str, kind: str, node: bool, ended: str
) -> None:
    store.put(mark, b"over")
    store.put(f"{keys.EVENTS}1-n0", event(kind, 100.0))
    if node:
        store.put(keys.node("n1"), b"there")
    assert ended_since(store, 99.0) == ended
    assert ended_since(store, 101.0) == ""


def test_a_run_with_a_node_is_joined(store: MemoryStore) -> None:
    for key in (keys.PLAN, keys.node("n1")):
        store.put(key, b"there")
    clear_former_run(store)
    assert store.get(keys.PLAN) is not None


def test_a_job_that_is_only_beginning_is_left_as_it_is(store: MemoryStore) -> None:
    store.put(keys.preempt("n1"), b"kill")
    clear_former_run(store)
    assert store.get(keys.preempt("n1")) is not None


def test_two_agents_that_forget_a_run_at_once_do_not_forget_the_new_one(
    server: MemoryServer, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = MemoryStore(server=server)
    store.put(keys.PLAN, b"old")
    original = late.transact

    def transact(*arguments: object, **options: object) -> object:
        monkeypatch.setattr(late, "transact", original)
        clear_former_run(store)  # the other agent is faster, and goes on
        store.put(keys.node("n1"), b"new")
        store.put(keys.ROSTER, b"new")
        return original(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(late, "transact", transact)
    clear_former_run(late)
    assert {entry.key for entry in store.list().entries} == {keys.node("n1"), keys.ROSTER}


def test_a_follower_hears_what_is_there_and_what_changes_each_once(server: MemoryServer, store: MemoryStore) -> None:
    heard: list[Event] = []
    store.put("board/b", b"1")
    store.put("board/a", b"2")
    follower = Follower(MemoryStore(server=server), "board/", heard.append, on_end=lambda error: None)
    eventually(lambda: len(heard) == 2, within_seconds=5, what="the list")
    store.put("board/b", b"3")
    store.delete("board/a")
    store.put("desk/c", b"4")
    eventually(lambda: len(heard) == 4, within_seconds=5, what="the changes")
    shown = [(event.kind, event.key, event.value) for event in heard]
    assert shown == [
        (EventKind.PUT, "board/b", b"1"),
        (EventKind.PUT, "board/a", b"2"),
        (EventKind.PUT, "board/b", b"3"),
        (EventKind.DELETE, "board/a", b""),
    ]
    follower.close()


def test_a_follower_that_was_cut_off_lists_again_and_tells_what_is_gone(
    server: MemoryServer, store: MemoryStore
) -> None:
    heard: list[Event] = []
    store.put("board/a", b"1")
    store.put("board/b", b"1")
    follower = Follower(MemoryStore(server=server), "board/", heard.append, on_end=lambda error: None)
    eventually(lambda: len(heard) == 2, within_seconds=5, what="the list")
    with server._changed:  # all of it before the follower looks again
        store.delete("board/a")
        revision = store.put("board/c", b"2")
        store.put("board/d", b"3")
        store.compact(revision)
    eventually(lambda: len(heard) == 5, within_seconds=5, what="the second list")
    shown = [(event.kind, event.key) for event in heard[2:]]
    assert shown == [(EventKind.DELETE, "board/a"), (EventKind.PUT, "board/c"), (EventKind.PUT, "board/d")]
    follower.close()


def test_a_follower_can_begin_later(server: MemoryServer, store: MemoryStore) -> None:
    heard: list[Event] = []
    store.put("board/a", b"1")
    revision = store.put("board/b", b"2")
    follower = Follower(
        MemoryStore(server=server), "board/", heard.append, from_revision=revision, on_end=lambda error: None
    )
    eventually(lambda: heard, within_seconds=5, what="the list")
    store.put("board/c", b"3")
    eventually(lambda: len(heard) == 2, within_seconds=5, what="the change")
    assert [event.key for event in heard] == ["board/b", "board/c"]
    follower.close()


def test_a_follower_says_when_its_store_is_closed_by_another(server: MemoryServer) -> None:
    own, ends = MemoryStore(server=server), list[StoreError]()
    follower = Follower(own, "board/", lambda event: None, on_end=ends.append)
    eventually(lambda: follower._watch is not None, within_seconds=5, what="it watches")
    own.close()
    eventually(lambda: ends, within_seconds=5, what="it ends")

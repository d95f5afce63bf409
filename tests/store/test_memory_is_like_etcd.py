"""Random operations have the same results in memory and in a real etcd, up to the numbering of revisions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bamboo_ds.errors import ConflictError, LeaseLostError
from bamboo_ds.store import Delete, DeletePrefix, Fence, Lease, MemoryStore, Put, Store, Unchanged
from bamboo_ds.store.embedded import EmbeddedEtcd
from bamboo_ds.store.etcd import EtcdStore
from tests.store.servers import collect

KEYS = st.sampled_from(["a", "a/x", "a/y", "b"])
VALUES = st.sampled_from([b"", b"1", b"2"])
PAST = st.integers(0, 5)  # which of the revisions seen so far; 0 stands for "absent"
LEASES = st.sampled_from([None, 0, 1])

WRITES = st.one_of(
    st.tuples(st.just("put"), KEYS, VALUES, LEASES),
    st.tuples(st.just("delete"), KEYS),
    st.tuples(st.just("delete_prefix"), st.sampled_from(["", "a/", "b"])),
)
OPERATIONS = st.one_of(
    st.tuples(st.just("get"), KEYS),
    st.tuples(st.just("list"), st.sampled_from(["", "a", "a/"])),
    st.tuples(st.just("add"), st.just("counter"), st.integers(-2, 2)),
    st.tuples(st.just("revoke"), st.sampled_from([0, 1])),
    st.tuples(
        st.just("transact"),
        st.lists(st.tuples(st.sampled_from(["unchanged", "fence"]), KEYS, PAST), max_size=2),
        st.lists(WRITES, max_size=3),
    ),
)


class Side:
    """One of the two stores, with revisions told by the order in which they were first seen."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.leases: list[Lease] = [store.lease(60), store.lease(60)]
        self.seen: list[int] = [0]

    def rank(self, revision: int) -> int:
        if revision not in self.seen:
            self.seen.append(revision)
        return self.seen.index(revision)

    def do(self, operation: tuple[Any, ...]) -> Any:
        """Do it and return a result that is comparable with the other side's."""
        kind, *arguments = operation
        try:
            return getattr(self, kind)(*arguments)
        except (ConflictError, LeaseLostError, ValueError) as error:
            return type(error).__name__

    def entry(self, entry: Any) -> Any:
        if entry is None:
            return None
        lease = next((index for index, lease in enumerate(self.leases) if lease.id == entry.lease_id), None)
        return entry.key, entry.value, self.rank(entry.revision), self.rank(entry.create_revision), lease

    def get(self, key: str) -> Any:
        return self.entry(self.store.get(key))

    def list(self, prefix: str) -> Any:
        return [self.entry(entry) for entry in self.store.list(prefix).entries]

    def add(self, key: str, amount: int) -> int:
        return self.store.add(key, amount)

    def revoke(self, index: int) -> None:
        self.leases[index].revoke()

    def transact(self, conditions: Any, writes: Any) -> Any:
        done = self.store.transact(
            [self.condition(*each) for each in conditions], [self.write(*each) for each in writes]
        )
        return done.deleted, self.rank(done.revision) if writes else None

    def condition(self, kind: str, key: str, past: int) -> Unchanged | Fence:
        revision = self.seen[-min(past, len(self.seen) - 1)] if past else 0
        return Unchanged(key, revision) if kind == "unchanged" else Fence(key, revision)

    def write(self, kind: str, key: str, value: bytes = b"", lease: int | None = None) -> Put | Delete | DeletePrefix:
        if kind == "put":
            return Put(key, value, None if lease is None else self.leases[lease])
        return Delete(key) if kind == "delete" else DeletePrefix(key)


@pytest.fixture(scope="module")
def new_etcd_store(etcd: EmbeddedEtcd) -> Callable[[], EtcdStore]:
    numbers = itertools.count()
    return lambda: EtcdStore([etcd.endpoint], prefix=f"/bamboo/random-{next(numbers)}/")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(operations=st.lists(OPERATIONS, min_size=1, max_size=15))
def test_random_operations_have_the_same_results(
    operations: list[tuple[Any, ...]], new_etcd_store: Callable[[], EtcdStore]
) -> None:
    with new_etcd_store() as etcd, MemoryStore(prefix="/bamboo/random/") as memory:
        real, model = Side(etcd), Side(memory)
        starts = [side.store.list().revision + 1 for side in (real, model)]
        for operation in operations:
            assert real.do(operation) == model.do(operation), operation
        model_watch = memory.watch(from_revision=starts[1])
        expected = model_watch.next(0)
        events = collect(etcd.watch(from_revision=starts[0]), len(expected))
        shown = [[(event.kind, event.key, event.value) for event in side] for side in (events, expected)]
        # Keys that one change deletes together have no order of their own.
        assert sorted(shown[0], key=str) == sorted(shown[1], key=str)
        for lease in real.leases:
            lease.revoke()

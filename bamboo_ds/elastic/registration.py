"""Keeps a node registered while its agent lives, and tells the coordinator of workers that have ended.

The node's key lives under a lease. When the store was out of reach for longer than the lease lives, the lease counts as
lost here, though a server that was down itself gives all leases their full time again once it is back. So there is no
harm in it: a new lease is taken and the key put under it, and nobody notices. Only if the store lived on without us the
key is gone, and the node's workers with it from the plan; that the agent then reads on the board.

What has to be written is kept and written by a thread, again and again until the store takes it: the agent's main
thread never waits for the store.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

from bamboo_ds.elastic import keys
from bamboo_ds.elastic.events import read_events
from bamboo_ds.errors import ConfigError, ConflictError, LeaseLostError, StoreError, StoreUnavailableError
from bamboo_ds.plan import codec
from bamboo_ds.plan.cluster import Node
from bamboo_ds.plan.job import JobSettings, JobSpec
from bamboo_ds.store import ABSENT, DeletePrefix, Lease, Put, Store, Unchanged

__all__ = ["Registration", "clear_former_run", "ended_since"]

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1
_RETRY_SECONDS = 0.2
_SHORTEST_TRY_SECONDS = 0.5
_CHECKPOINTS = "bamboo.checkpoint.path"
_WATERMARKS = (keys.PLAN, keys.ROSTER, keys.SPEC, keys.FINISHED, keys.failure("job"))


def clear_former_run(store: Store) -> None:
    """Forget a run of this job of which no node is left: what it knew was in the memory of its workers.

    Not one that writes checkpoints and has not ended: its next nodes go on from the newest. Its events stay in any
    case, and the counter of worker ids: an id is never given again.
    """
    while True:
        entries = {entry.key: entry for entry in store.list(keys.BOARD).entries}
        marks = [entries[key] for key in _WATERMARKS if key in entries]
        if (
            not marks
            or store.list(keys.NODES).entries
            or _goes_on({key: entry.value for key, entry in entries.items()})
        ):
            return
        prefixes = (keys.BOARD, keys.DESK, keys.RENDEZVOUS, keys.PROGRESS)
        # Another agent may do the same now, and go on: what it wrote since then must stay.
        with contextlib.suppress(ConflictError):
            store.transact(
                [Unchanged(mark.key, mark.revision) for mark in marks], [DeletePrefix(prefix) for prefix in prefixes]
            )


def ended_since(store: Store, moment: float) -> str:
    """Return how a run has ended of which no node is left, if it was after a moment in Unix seconds; else nothing.

    When it was, its events tell: without one nobody knows.
    """
    over = store.get(keys.FINISHED) is not None or store.get(keys.failure("job")) is not None
    if not over or store.list(keys.NODES).entries:
        return ""
    ends = [event for event in read_events(store) if event.kind in ("finished", "failure") and event.time > moment]
    return ends[-1].text if ends else ""


def _goes_on(board: Mapping[str, bytes]) -> bool:
    """Return whether nodes to come can take up a run of which none is left.

    A stock launcher's ranks cannot: they come again with the ids that they had, which are dead.
    """
    over = keys.FINISHED in board or keys.failure("job") in board
    if over or not {keys.PLAN, keys.SPEC, keys.settings(0)} <= board.keys():
        return False
    if codec.decode(JobSpec, board[keys.SPEC]).launched is not None:
        return False
    return _CHECKPOINTS in codec.decode(JobSettings, board[keys.settings(0)]).settings


class Registration:
    """The entry of a node in the cluster.

    Args:
        store: of the job.
        node: what to write; without workers, which `join` adds.
        ttl_seconds: how long the entry outlives a silent agent.
        outage_seconds: how long the store may be out of reach.
        on_end: called once, from another thread, when the registration is over against our will: with a
            ConflictError if another agent has taken the name, else with the StoreError that does not pass.
    """

    def __init__(
        self,
        store: Store,
        node: Node,
        *,
        ttl_seconds: float,
        outage_seconds: float,
        on_end: Callable[[StoreError], None],
    ) -> None:
        self._store, self._node, self._on_end = store, node, on_end
        self._ttl_seconds, self._outage_seconds = ttl_seconds, outage_seconds
        self._lease: Lease | None = None
        self._lease_ids: set[int] = set()
        self._revision = ABSENT
        self._ended: dict[int, bytes | None] = {}
        self._dirty = False
        self._stopping = False
        self._change = threading.Condition()
        self._heard = store.clock.now()
        self._thread = threading.Thread(target=self._keep, name="registration", daemon=True)

    @property
    def node(self) -> Node:
        """What is registered, or will be in a moment."""
        return self._node

    def lease(self) -> Lease:
        """Return the lease that the node lives under now; after an outage it is another one.

        Raises:
            LeaseLostError: `join` was not called.
        """
        if self._lease is None:
            raise LeaseLostError(f"node {self._node.name} is not registered yet")
        return self._lease

    def join(self, workers: int) -> tuple[int, ...]:
        """Register the node with new workers and return their ids.

        Raises:
            ConfigError: another agent has this name.
            StoreUnavailableError: the store does not answer.
        """
        last = self._store.add(keys.WORKER_COUNTER, workers)
        ids = tuple(range(last - workers, last))
        self.enter(ids)
        return ids

    def enter(self, ids: tuple[int, ...]) -> None:
        """Register the node with workers that have their ids already, as a launcher's ranks have.

        Raises:
            ConfigError: another agent has this name.
            StoreUnavailableError: the store does not answer.
        """
        self._node = replace(self._node, workers=ids)
        self._take_lease()
        self._register()
        self._thread.start()

    def strike(self, records: Mapping[int, bytes | None]) -> None:
        """Strike workers off the node and, in the same transaction, write how each ended (None: that is written).

        Returns at once; the writing is insisted on until it is done, `leave` was called or the store is gone for good.
        """
        with self._change:
            self._ended.update(records)
            rest = tuple(worker for worker in self._node.workers if worker not in records)
            self._node = replace(self._node, workers=rest)
            self._dirty = True
            self._change.notify_all()

    def flush(self, *, timeout_seconds: float) -> bool:
        """Wait until everything is written; return whether it is."""
        clock = self._store.clock
        deadline = clock.now() + timeout_seconds
        with self._change:
            while self._dirty and (remaining := deadline - clock.now()) > 0 and self._thread.is_alive():
                clock.wait(self._change, remaining)
            return not self._dirty

    def leave(self, *, timeout_seconds: float) -> None:
        """End the registration: the node is gone for all others at once. May be called again."""
        with self._change:
            self._stopping = True
            self._change.notify_all()
        if self._thread.ident:
            self._thread.join(timeout_seconds)
        if self._lease is not None:
            with contextlib.suppress(StoreError):  # then it runs out
                self._lease.revoke(timeout_seconds=timeout_seconds)

    def _take_lease(self, *, timeout_seconds: float | None = None) -> None:
        if self._lease is not None:
            _log.warning("the lease of node %s was lost; it gets a new one", self._node.name)
        self._lease = self._store.lease(self._ttl_seconds, timeout_seconds=timeout_seconds)
        self._lease_ids.add(self._lease.id)
        self._dirty = True

    def _register(self) -> None:
        """Write the node's key for the first time; one of a former agent of this name is waited for."""
        clock, wait = self._store.clock, threading.Condition()
        deadline = clock.now() + 2 * self._ttl_seconds + 1.0
        while not self._write():
            if clock.now() > deadline:
                raise ConfigError(
                    f"there is a node {self._node.name} in this job already, and it lives: give each node its own name"
                )
            with wait:
                clock.wait(wait, _RETRY_SECONDS)

    def _keep(self) -> None:
        while True:
            with self._change:
                if not self._stopping and not self._dirty:
                    self._store.clock.wait(self._change, _LOOK_SECONDS)
                if self._stopping:
                    return
            try:
                self._step()
            except StoreError as error:
                self._on_end(error)
                return

    def _step(self) -> None:
        """Replace the lease if it is lost, and write what is to be written.

        Raises:
            StoreError: all is over.
        """
        clock, lease = self._store.clock, self.lease()
        if lease.alive:
            self._heard = clock.now() - (lease.ttl_seconds - lease.remaining_seconds)
            if not self._dirty:
                return
        try:
            if not lease.alive:
                rest = max(self._heard + self._outage_seconds - clock.now(), _SHORTEST_TRY_SECONDS)
                self._take_lease(timeout_seconds=min(rest, self._store.timeout_seconds))
            if not self._write():
                raise ConflictError(f"another agent has taken the name of node {self._node.name}")
        except LeaseLostError:
            return  # once more, with a new one
        except StoreUnavailableError as error:
            silence = clock.now() - self._heard
            if silence > self._outage_seconds:
                raise StoreUnavailableError(
                    f"the store has been out of reach for {silence:.0f} s, and outage_seconds is "
                    f"{self._outage_seconds:g}: {error}"
                ) from None

    def _write(self) -> bool:
        """Write node and ended workers; return whether the node's key is ours.

        After an indefinite error the same is written again, which does no harm.
        """
        with self._change:
            node, ended = self._node, dict(self._ended)
        records = [Put(keys.ended(worker), record) for worker, record in sorted(ended.items()) if record is not None]
        key = keys.node(node.name)
        try:
            written = self._store.transact(
                [Unchanged(key, self._revision)], [*records, Put(key, codec.encode(node), self._lease)]
            )
        except ConflictError:
            found = self._store.get(key)
            if found is not None and found.lease_id not in self._lease_ids:
                return False
            self._revision = ABSENT if found is None else found.revision
            return self._write()
        self._revision = written.revision
        self._settle(node, ended)
        return True

    def _settle(self, node: Node, ended: Mapping[int, bytes | None]) -> None:
        with self._change:
            for worker in ended:
                self._ended.pop(worker, None)
            self._dirty = self._node != node or bool(self._ended)
            self._change.notify_all()

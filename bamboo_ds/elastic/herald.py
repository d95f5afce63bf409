"""Tells, as events, who has come and gone: what a coordinator saw, without what it decided on it."""

from __future__ import annotations

from bamboo_ds.elastic.hearing import Hearing
from bamboo_ds.elastic.pen import Pen
from bamboo_ds.elastic.view import View
from bamboo_ds.plan.cluster import Cluster
from bamboo_ds.plan.policy import Joined, decide

__all__ = ["Herald", "listed"]


class Herald:
    """Tells each change once. What a former coordinator found is no news, unless there was none.

    Args:
        view: what there is.
        pen: of the coordinator.
        hearing: how well this process hears the store.
        ttl_seconds: how long nodes have to come back after an outage.

    Attributes:
        unsure: whether a node is gone that may come back, as the store was out of reach.
    """

    def __init__(self, view: View, *, pen: Pen, hearing: Hearing, ttl_seconds: float) -> None:
        self._view, self._pen, self._hearing, self._ttl_seconds = view, pen, hearing, ttl_seconds
        self.unsure = False
        self._breaks = hearing.breaks if hearing.certain else 0  # one that led to this election is to be told
        began = view.plan is None and view.roster is None
        self._nodes = set[str]() if began else set(view.nodes)
        self._ready = set[int]() if began else set(view.ready)

    def tell(self) -> bool:
        """Tell what has changed since the last call; return whether anybody has joined."""
        view = self._view
        self._tell_outage()
        came, ready = view.nodes.keys() - self._nodes, view.ready.keys() - self._ready
        for name in sorted(came):
            node = view.nodes[name]
            text = f"node {name} has joined, in zone {node.zone or 'unknown'}, with worker(s) {listed(node.workers)}"
            self._pen.tell("node_joined", text, about=name, zone=node.zone, workers=node.workers)
        if ready:
            self._tell_ready(sorted(ready))
        self._nodes |= came
        self._ready = set(view.ready)
        self._tell_lost(sorted(self._nodes - view.nodes.keys()))
        return bool(came or ready)

    def _tell_outage(self) -> None:
        if self._breaks != self._hearing.breaks:
            self._breaks = self._hearing.breaks
            text = f"the store was out of reach; nodes have {self._ttl_seconds:g} s to come back"
            self._pen.tell("store_outage", text)

    def _tell_ready(self, workers: list[int]) -> None:
        view, text = self._view, f"worker(s) {listed(workers)} are ready"
        if view.plan is not None and view.spec is not None:
            text = decide(Cluster(view.spec.bounds), view.plan, Joined(tuple(workers))).reason
        self._pen.tell("worker_ready", text, workers=workers)

    def _tell_lost(self, nodes: list[str]) -> None:
        self.unsure = bool(nodes) and not self._hearing.certain
        for name in [] if self.unsure else nodes:
            self._pen.tell("node_lost", f"node {name} is gone", about=name)
            self._nodes.discard(name)


def listed(workers: tuple[int, ...] | list[int]) -> str:
    """Return ids as people read them."""
    return ", ".join(map(str, workers)) or "none"

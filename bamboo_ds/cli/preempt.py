"""`bamboo-ds preempt NODE`: break a node on purpose, to see what the job does about it.

It tells the node's agent through the store, so it works from any machine. What the agent does is what the cloud would:
`kill` ends all processes of the node at once, `term` asks its agent to leave, `stop` freezes the processes, `cut` takes
the node off the network.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Annotated, get_args

import typer

from bamboo_ds.cli.endpoint import Endpoint, find
from bamboo_ds.cli.options import StoreOptions
from bamboo_ds.elastic import keys
from bamboo_ds.elastic.events import read_event
from bamboo_ds.elastic.preemption import How
from bamboo_ds.errors import ConfigError, ConflictError, StoreUnavailableError
from bamboo_ds.plan.cluster import Node
from bamboo_ds.plan.codec import decode
from bamboo_ds.plan.plan import Plan
from bamboo_ds.store import Delete, Store, Unchanged, Watch

__all__ = ["PreemptOptions", "preempt"]

_WAYS = get_args(How)
_LOOK_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class PreemptOptions(StoreOptions):
    """The options of `bamboo-ds preempt`."""

    node: Annotated[str, typer.Argument(metavar="NODE", help="Name of the node.", show_default=False)]
    how: Annotated[str, typer.Option(help=f"One of {', '.join(_WAYS)}.")] = "kill"
    wait: Annotated[float, typer.Option(help="Seconds to wait for the effect.")] = 5.0


def preempt(options: PreemptOptions) -> int:
    """Break a node on purpose: kill it, ask it to leave, stop it, or cut it off the network."""
    if options.how not in _WAYS:
        raise ConfigError(f"--how {options.how}: must be one of {', '.join(_WAYS)}")
    if options.wait < 0:
        raise ConfigError(f"--wait {options.wait:g}: must be at least 0")
    endpoint = find(options)
    try:
        with endpoint.open() as store:
            typer.echo(_preempt(store, endpoint, options))
    except StoreUnavailableError as error:
        raise StoreUnavailableError(f"{endpoint} cannot be reached: {error}") from None
    return 0


def _preempt(store: Store, endpoint: Endpoint, options: PreemptOptions) -> str:
    """Tell the node, wait for the effect, and say what it was."""
    node = _node(store, endpoint, options.node)
    known = store.get(keys.PLAN)
    revision = store.put(keys.preempt(node.name), options.how.encode())
    since = 0 if known is None else known.revision
    effect = _effect(store, node, since=since, told=revision, within_seconds=options.wait)
    # A node of the same name that joins later is not meant.
    with contextlib.suppress(ConflictError):
        store.transact([Unchanged(keys.preempt(node.name), revision)], [Delete(keys.preempt(node.name))])
    workers = ", ".join(map(str, node.workers)) or "none"
    return f"node {node.name} (zone {node.zone}, workers {workers}) was told: {options.how}; {effect}"


def _node(store: Store, endpoint: Endpoint, name: str) -> Node:
    nodes = [decode(Node, entry.value) for entry in store.list(keys.NODES).entries]
    for node in nodes:
        if node.name == name:
            return node
    there = ", ".join(node.name for node in nodes) or "none"
    raise ConfigError(f"NODE {name}: {endpoint} has no such node alive; there are: {there}")


def _effect(store: Store, node: Node, *, since: int, told: int, within_seconds: float) -> str:
    """Wait until the plan calls the node's workers dead, or its lease ends, or its agent refuses, and say which.

    Args:
        store: of the job.
        node: that was told.
        since: revision of the plan before.
        told: revision of the request.
        within_seconds: how long to wait.
    """
    begun = time.monotonic()
    with store.watch(keys.EVENTS, from_revision=told) as events:
        while True:
            seconds = time.monotonic() - begun
            entry = store.get(keys.PLAN)
            plan = None if entry is None else decode(Plan, entry.value)
            if plan is not None and entry is not None and entry.revision > since and plan.dead & {*node.workers}:
                return f"plan {keys.dotted(plan.number)} after {seconds:.2f} s: {plan.cause}"
            had_stages = plan is not None and not {*plan.workers, *plan.dead}.isdisjoint(node.workers)
            if not had_stages and store.get(keys.node(node.name)) is None:
                return f"its lease ended after {seconds:.2f} s; it had no stage"
            if refusal := _refusal(events, node):
                return refusal
            if seconds >= within_seconds:
                return f"no effect seen within {within_seconds:g} s (its lease may still run); see bamboo-ds status"


def _refusal(events: Watch, node: Node) -> str:
    """Wait a moment, and return what the node's agent says if it cannot do it."""
    with contextlib.suppress(StoreUnavailableError):
        for event in events.next(_LOOK_SECONDS):
            found = read_event(event.value)
            if found is not None and (found.kind, found.node) == ("preempt", node.name) and "how" not in found.fields:
                return f"but {found.text}"
    return ""

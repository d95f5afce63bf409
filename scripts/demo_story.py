"""What happens to the nodes of the demo, and when: after some part of the steps, once the fleet is whole again.

The launcher lets the `Teller` go on while it waits. It never waits for a time: it looks at what the workers have
written, and at what their agents have told.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bamboo_ds.cli.chaos.drive import Deed
from bamboo_ds.cli.chaos.journal import Journal
from bamboo_ds.cli.chaos.picture import Mark
from bamboo_ds.cli.chaos.report import read_events
from bamboo_ds.cli.local import LocalCluster
from bamboo_ds.cli.run_cloud import LocalFleet
from bamboo_ds.simulator.trace import Change

if TYPE_CHECKING:
    from demo import Run

LOOK_SECONDS = 0.1
EVENTS_SECONDS = 0.5
SETTLED_SECONDS = 15.0
"""After so long a node counts as ready: a coordinator that dies may take with it that it has said so."""
PATIENCE_SECONDS = 90.0
"""For what the story waits for; it takes some ten seconds on a quiet machine with two cores."""
NOTICE_SECONDS = 120
"""So long before EC2 takes a node away it says so."""

STORY = (
    (0.05, "kill the node that reports"),
    (0.20, "warn a node"),
    (0.20, "take the warned node"),
    (0.42, "kill a zone"),
    (0.75, "kill the newest node"),
)
"""What happens, and after which part of the steps at the earliest: it waits until the fleet is whole again."""


class DemoError(Exception):
    """The demo cannot go on."""


def say(text: str) -> None:
    """Tell the user what goes on; a progress bar that stands in this line gives way to it."""
    clear = "\r\x1b[2K" if sys.stderr.isatty() else ""
    sys.stderr.write(f"{clear}demo: {text}\n")  # in one piece, with its end: workers write at the same time
    sys.stderr.flush()


class Teller:
    """Lets happen what the story says, when training is so far and the fleet is whole.

    Args:
        run: that it happens to.
        cluster: of the run.
        story: after which part of the steps what happens.
        fleet: that keeps itself while nodes go.
    """

    def __init__(
        self, run: Run, cluster: LocalCluster, story: Sequence[tuple[float, str]], *, fleet: LocalFleet
    ) -> None:
        self._run, self._cluster, self._story = run, cluster, list(story)
        self._journal, self._looked, self._looked_at_events = Journal(run.folder), 0.0, 0.0
        self._zone, self._since = run.zones, dict.fromkeys(cluster.names, time.monotonic())
        self._keep = fleet.meanwhile(cluster, zones=run.zones)
        self._market = None if fleet.cloud is None else fleet.cloud.market
        self._due_since: float | None = None
        self._ready = False
        run.deeds = [Deed(time.time(), Change.ADD, name, len(cluster.names)) for name in cluster.names]

    def go_on(self) -> bool:
        """Do what is due; return whether more nodes will come."""
        more = self._keep is not None and self._keep()
        self._note_changes()
        if time.monotonic() > self._looked + LOOK_SECONDS:
            self._looked = time.monotonic()
            self.look()
            if self._story and not self._cluster.over:
                self._tell()
        return more

    def look(self) -> None:
        """See how far the workers are."""
        self._run.lines += self._journal.read()

    def _tell(self) -> None:
        """Let the next part of the story happen, if it is time.

        Raises:
            DemoError: what it waits for does not come.
        """
        (part, what), now = self._story[0], time.monotonic()
        if self._trained < max(part * self._run.steps, 2):
            return
        self._due_since = now if self._due_since is None else self._due_since
        if self._handed_over() if what == "take the warned node" else self._is_whole():
            self._story.pop(0)
            self._due_since = None
            self._do(what)
        elif now > self._due_since + PATIENCE_SECONDS:
            raise DemoError(f"{what}: within {PATIENCE_SECONDS:g} s the fleet was not ready for it")

    # ---- how it is ---------------------------------------------------------------------------------------------

    @property
    def _trained(self) -> int:
        return max((line.step + 1 for line in self._run.lines), default=0)

    def _workers(self, step: int) -> set[int]:
        return {line.worker for line in self._run.lines if line.step == step}

    def _last_workers(self) -> set[int]:
        """Return who took part in the last step that all have written down: the one before the last."""
        return self._workers(self._trained - 2)

    def _is_whole(self) -> bool:
        """Return whether all nodes are there and ready, and as many workers train as did in the beginning."""
        full = len(self._last_workers()) >= len(self._workers(0))
        return full and len(self._since) == self._run.fleet_nodes and self._all_are_ready()

    def _all_are_ready(self) -> bool:
        """Return whether the worker of each node has said that it can take a stage, as far as that is told."""
        now = time.monotonic()
        if now > self._looked_at_events + EVENTS_SECONDS:
            self._looked_at_events = now
            ready = ready_nodes(read_events(self._run.folder))
            self._ready = all(name in ready or now > at + SETTLED_SECONDS for name, at in self._since.items())
        return self._ready

    def _handed_over(self) -> bool:
        """Return whether the warned node trains no longer."""
        return all(self._run.node_of(worker) != self._run.warned for worker in self._last_workers())

    # ---- what happens ------------------------------------------------------------------------------------------

    def _do(self, what: str) -> None:
        last = sorted(self._last_workers())
        if what == "kill a zone":
            zones = Counter(self._zone[name] for name in self._since)
            zone, _ = zones.most_common(1)[0]
            self._take(sorted(name for name in self._since if self._zone[name] == zone), f"zone {zone} lost")
        elif what == "warn a node":
            self._warn(self._run.node_of(last[len(last) // 2]))
        elif what == "take the warned node":
            self._take([self._run.warned], f"{self._run.warned} warned, taken")
        else:
            node = self._run.node_of(last[0] if what == "kill the node that reports" else last[-1])
            self._take([node], f"{node} killed")

    def _warn(self, node: str) -> None:
        say(f"step {self._trained}: {node} is warned: it will be taken away in {NOTICE_SECONDS} s")
        self._run.warned = node
        draft = self._run.notice_file(node).with_suffix(".draft")
        draft.write_text(json.dumps({"seconds": NOTICE_SECONDS, "text": "the market wants it back"}), encoding="utf-8")
        draft.replace(self._run.notice_file(node))

    def _take(self, nodes: Sequence[str], text: str) -> None:
        self._mark(f"kill -9 of {', '.join(nodes)}", text)
        for node in nodes:
            self._cluster.kill(node)
        self._note_changes()

    def _note_changes(self) -> None:
        """Note who has gone and who has come; not at the end, when all go."""
        live = set(self._cluster.live)
        for node in sorted(self._since.keys() - live):
            if not self._cluster.over:
                del self._since[node]
                self._note(Change.REMOVE, node)
        for node in sorted(live - self._since.keys()):
            self._since[node] = time.monotonic()
            self._zone[node] = self._market.running[node] if self._market is not None else ""
            self._note(Change.ADD, node)
            say(f"step {self._trained}: {node} comes, in zone {self._zone[node]}: the job has ordered it")

    def _note(self, change: Change, node: str) -> None:
        self._run.deeds.append(Deed(time.time(), change, node, len(self._since)))

    def _mark(self, text: str, short: str) -> None:
        say(f"step {self._trained}: {text}")
        self._run.marks.append(Mark(time.time(), short))


def ready_nodes(events: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the nodes whose workers have said that they can take a stage."""
    workers: dict[str, set[int]] = {}
    ready: set[int] = set()
    for event in events:
        if event["kind"] == "node_joined":
            workers[event["node"]] = set(event["workers"])
        elif event["kind"] == "worker_ready":
            ready |= set(event["workers"])
    return {node for node, theirs in workers.items() if theirs and theirs <= ready}

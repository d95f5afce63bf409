"""What the coordinator sees of the store: a mirror of desk and board, and how well it hears.

`View` lists both prefixes once and then follows their changes, each of which costs what it changes and no more: a vote
among a thousand nodes touches one box of ballots, and what a worker or a plan is was read when it was written.

Why two watches do. Each tells its prefix in order, but one may be ahead of the other, so the mirror is no moment of
the store. It need not be:

* The board's plan, roster, roll, decisions and end are written by this coordinator alone. It notes its own writes at
  once (`note`), so of these the mirror is never behind. Every write names the revision of the plan it rests on.
* What others write on the board (specification, settings, a failure) they write once. To hear of it late is to act
  late; that no plan is made after a failure is a condition of the write itself.
* The desk holds evidence, which only grows while a plan's number lasts. To hear of it late is to judge late. Who writes
  two things about one worker (it left; its node no longer lists it) writes both on the desk, so their order is kept.
* What former coordinators wrote, they wrote before this one was elected, and it lists after its election.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from typing_extensions import Self

from bamboo_ds.elastic import keys
from bamboo_ds.elastic.ears import Ears
from bamboo_ds.errors import CompactedError, ConfigError
from bamboo_ds.plan.cluster import Node
from bamboo_ds.plan.codec import decode
from bamboo_ds.plan.job import JobSettings, JobSpec, Roster
from bamboo_ds.plan.membership import LinkReport
from bamboo_ds.plan.plan import Plan
from bamboo_ds.store import ABSENT, Entry, Event, EventKind, Store

__all__ = ["Box", "Report", "View"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Box:
    """The ballots of one commit, and when the first of them was heard.

    Attributes:
        heard_at: of our clock.
        ballots: texts by plan number and pipeline.
    """

    heard_at: float
    ballots: dict[str, dict[int, bytes]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """A report of a broken link, and the revision at which it was first made."""

    report: LinkReport
    revision: int


class View:
    """A mirror of desk and board.

    Args:
        store: of the job.

    Attributes:
        version: grows when anything changes but votes and decisions.
        nodes: the registered nodes, by name.
        registered: node of each worker that runs, by its id.
        ready: by worker, that it can be given a stage; those that `ended` or `left` may still be among them.
        ended: by worker, what its agent wrote when it saw it end.
        left: by worker, that its script has ended in order.
        answers: by worker, the number of the roll it answered last.
        suspects: reports of broken links, by plan number and by pair of workers.
        boxes: ballots, by engine and number of the commit.
        decisions: numbers of the commits whose outcome is on the board, by engine.

    Raises:
        StoreUnavailableError: the store does not answer.
    """

    def __init__(self, store: Store) -> None:
        self._clock, self._ears = store.clock, Ears(store, (keys.BOARD, keys.DESK))
        self.version = 0
        self._clear()
        self.reload()

    # What is heard

    def reload(self) -> None:
        """List everything anew and follow it from there.

        Raises:
            StoreUnavailableError: the store does not answer; the mirror is as it was.
        """
        entries = self._ears.begin()
        self._clear()
        self._apply(tuple(_as_event(entry) for entry in entries))
        self.version += 1

    def refresh(self) -> None:
        """Take in what has come, without waiting.

        Raises:
            StoreUnavailableError: the store cannot be heard.
        """
        self._hear(self._ears.take)

    def wait(self, timeout_seconds: float) -> None:
        """Wait for news of any kind, or `wake`, and take in all that has come.

        Raises:
            StoreUnavailableError: the store cannot be heard: there may be news. Wait again.
            StoreError: the store was closed.
        """
        self._hear(lambda: self._ears.wait(timeout_seconds))

    def wake(self) -> None:
        """End a `wait` of another thread."""
        self._ears.wake()

    def close(self) -> None:
        """Hear no more. May be called again."""
        self._ears.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _hear(self, hear: Callable[[], tuple[Event, ...]]) -> None:
        try:
            events = hear()
        except CompactedError:
            self.reload()
        else:
            self._apply(events)

    # What is kept

    def note(self, key: str, value: bytes, revision: int) -> None:
        """Note a key of the board that this coordinator has written itself."""
        self._take_board(key, value, revision)

    def forget_votes(self, engine: int, number: int) -> None:
        """Note that this coordinator has deleted the ballots of a commit."""
        self.boxes.pop((engine, number), None)

    def revision(self, key: str) -> int:
        """Return the revision of a key of the board; `ABSENT` if there is none."""
        return self._board[key][1] if key in self._board else ABSENT

    @property
    def plan(self) -> Plan | None:
        """The current plan."""
        return self._plan

    @property
    def roster(self) -> Roster | None:
        """The workers that begin."""
        return self._roster

    @property
    def spec(self) -> JobSpec | None:
        """What the first worker says of the job."""
        return self._spec

    @property
    def roll(self) -> int:
        """The number of the last roll that was called; 0 if none was."""
        return int(self._board[keys.ROLL][0]) if keys.ROLL in self._board else 0

    @property
    def settled(self) -> int:
        """The newest epoch in which a round was decided, so all of its workers have their layers; -1 if none was."""
        return int(self._board[keys.SETTLED][0]) if keys.SETTLED in self._board else -1

    @property
    def over(self) -> bool:
        """Whether the job has failed or finished."""
        return keys.FINISHED in self._board or keys.failure("job") in self._board

    @property
    def present(self) -> frozenset[int]:
        """The workers that can be given a stage: ready, on a registered node, neither ended nor left."""
        return frozenset(
            worker
            for worker in self.ready
            if worker in self.registered and worker not in self.ended and worker not in self.left
        )

    def settings(self, engine: int) -> JobSettings | None:
        """Return the config of an engine."""
        kept = self._board.get(keys.settings(engine))
        return None if kept is None else decode(JobSettings, kept[0])

    def reports(self, number: tuple[int, int]) -> tuple[Report, ...]:
        """Return the broken links that were reported under a plan."""
        return tuple(self.suspects.get(keys.dotted(number), {}).values())

    def newest_decision(self, engine: int) -> int:
        """Return the number of the last commit of an engine whose outcome is on the board; -1 if there is none."""
        return max(self.decisions.get(engine, ()), default=-1)

    def _clear(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.registered: dict[int, str] = {}
        self.ready: dict[int, bytes] = {}
        self.ended: dict[int, bytes] = {}
        self.left: dict[int, bytes] = {}
        self.answers: dict[int, bytes] = {}
        self.leaving: set[str] = set()
        """Names of nodes that have been told that they will be taken away (`desk/leaving/<node>`)."""
        self.suspects: dict[str, dict[str, Report]] = {}
        self.boxes: dict[tuple[int, int], Box] = {}
        self._board: dict[str, tuple[bytes, int]] = {}
        self._plan: Plan | None = None
        self._roster: Roster | None = None
        self._spec: JobSpec | None = None
        self.decisions: dict[int, set[int]] = {}

    def _apply(self, events: tuple[Event, ...]) -> None:
        for event in events:
            try:
                self._apply_one(event)
            except ValueError as error:  # a key with a name that nobody of us gives, or a record that nobody can read
                if event.key in (keys.PLAN, keys.ROSTER, keys.SPEC):
                    raise
                _log.warning("%r in the store is left out: %s", event.key, error)

    def _apply_one(self, event: Event) -> None:
        topic, _, name = event.key.partition("/")[2].partition("/")
        value = event.value if event.kind is EventKind.PUT else None
        if event.key.startswith(keys.VOTES):
            self._take_vote(name, value)
        elif event.key.startswith(keys.DESK):
            self._take_desk(topic, name, value, event.revision)
            self.version += 1
        else:
            self._take_board(event.key, value, event.revision)

    def _take_vote(self, name: str, value: bytes | None) -> None:
        engine, commit, number, pipeline = name.split("/")
        where = int(engine), int(commit)
        if value is not None:
            box = self.boxes.setdefault(where, Box(self._clock.now()))
            box.ballots.setdefault(number, {})[int(pipeline)] = value
        elif where in self.boxes:
            ballots = self.boxes[where].ballots
            ballots.get(number, {}).pop(int(pipeline), None)
            if not any(ballots.values()):
                del self.boxes[where]

    def _take_desk(self, topic: str, name: str, value: bytes | None, revision: int) -> None:
        if topic == "nodes":
            self._take_node(name, value)
        elif topic == "suspects":
            self._take_report(name, value, revision)
        elif topic == "leaving":
            (self.leaving.discard if value is None else self.leaving.add)(name)
        elif topic in ("ready", "ended", "left", "answers"):
            self._take_worker(topic, int(name), value)

    def _take_node(self, name: str, value: bytes | None) -> None:
        former = self.nodes.pop(name, None)
        for worker in former.workers if former is not None else ():
            if self.registered.get(worker) == name:
                del self.registered[worker]
        if value is None:
            return
        node = decode(Node, value)
        if node.name != name:
            raise ConfigError(f"it holds a node of another name, {node.name}")
        for worker in node.workers:
            if worker in self.registered:
                raise ConfigError(f"its worker {worker} is one of node {self.registered[worker]} already")
        self.nodes[name] = node
        self.registered.update((worker, name) for worker in node.workers)

    def _take_report(self, name: str, value: bytes | None, revision: int) -> None:
        number, _, pair = name.partition("/")
        reports = self.suspects.get(number, {})
        if value is None:
            reports.pop(pair, None)
        elif pair not in reports:  # one that is repeated is as old as the first
            reports = {**reports, pair: Report(decode(LinkReport, value), revision)}
        self.suspects[number] = reports
        if not reports:
            del self.suspects[number]

    def _take_worker(self, topic: str, worker: int, value: bytes | None) -> None:
        kept = {"ready": self.ready, "ended": self.ended, "left": self.left, "answers": self.answers}[topic]
        if value is None:
            kept.pop(worker, None)
        else:
            kept[worker] = value

    def _take_board(self, key: str, value: bytes | None, revision: int) -> None:
        if revision <= self.revision(key):
            return  # our own writing, or older than that
        if value is None:
            self._board.pop(key, None)
        else:
            self._board[key] = value, revision
        if key.startswith(keys.DECISIONS):
            self._take_decision(key.removeprefix(keys.DECISIONS), value)
            return
        if key == keys.PLAN:
            self._plan = None if value is None else decode(Plan, value)
        elif key == keys.ROSTER:
            self._roster = None if value is None else decode(Roster, value)
        elif key == keys.SPEC:
            self._spec = None if value is None else decode(JobSpec, value)
        self.version += 1

    def _take_decision(self, name: str, value: bytes | None) -> None:
        engine, commit = map(int, name.split("/"))
        known = self.decisions.setdefault(engine, set())
        if value is None:
            known.discard(commit)
        else:
            known.add(commit)


def _as_event(entry: Entry) -> Event:
    """Return an entry as the change that made it; a report is as old as its first writing."""
    first = entry.key.startswith(keys.SUSPECTS)
    return Event(EventKind.PUT, entry.key, entry.value, entry.create_revision if first else entry.revision)

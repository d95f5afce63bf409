"""A job in a `MemoryStore`: everything that agents and workers write, and coordinators that a test steps by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

from bamboo_ds.clock import ManualClock
from bamboo_ds.elastic import keys
from bamboo_ds.elastic.coordinator import Coordinator, CoordinatorSettings, Deed
from bamboo_ds.elastic.events import read_events
from bamboo_ds.elastic.hearing import Hearing
from bamboo_ds.elastic.view import View
from bamboo_ds.plan import Plan, Vote
from bamboo_ds.plan.cluster import Node
from bamboo_ds.plan.codec import decode, encode
from bamboo_ds.plan.commit import Ballot, Outcome
from bamboo_ds.plan.job import JobSpec, Roster
from bamboo_ds.plan.membership import LinkReport
from bamboo_ds.plan.roster import StartRule
from bamboo_ds.store import Lease, MemoryServer, MemoryStore, Store

TTL_SECONDS = 3.0
SPEC = JobSpec(publisher=0, num_stages=4, num_layers=8, pipelines=2, min_stages=2)
LASTING = ("board/", "desk/", "rdzv/")
"""The prefixes that say what was decided; events and progress are for people."""


@dataclass
class Chair:
    """A coordinator and what it rests on."""

    job: Job
    store: Store
    lease: Lease
    view: View
    coordinator: Coordinator
    hearing: Hearing

    def step(self) -> tuple[Deed, ...]:
        """Hear the news and take one step."""
        self.view.refresh()
        return self.coordinator.step()

    def run(self) -> list[str]:
        """Step until there is nothing to do; return the kinds of what was done."""
        kinds: list[str] = []
        for _ in range(100):
            deeds = self.step()
            kinds += [deed.kind for deed in deeds]
            if not deeds:
                return kinds
        raise AssertionError(f"the coordinator finds no rest: {kinds[-10:]}")

    def die(self) -> None:
        """End like a killed agent whose lease has run out."""
        self.view.close()
        self.job.server.expire(self.lease.id)


@dataclass
class Job:
    """The store of a job, and what is written into it."""

    settings: CoordinatorSettings = field(
        default_factory=lambda: CoordinatorSettings(ttl_seconds=TTL_SECONDS, start=StartRule(8, 10.0))
    )
    clock: ManualClock = field(default_factory=lambda: ManualClock(1000.0))
    leases: dict[str, Lease] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.server = MemoryServer(clock=self.clock, history_revisions=100_000)
        self.store = self.open()

    def open(self) -> MemoryStore:
        return MemoryStore(server=self.server)

    # ---- coordinators ----

    def elect(self, node: str = "c0", *, store: Store | None = None, hearing: Hearing | None = None) -> Chair:
        """Elect a coordinator that has heard the store for long, unless its hearing is given."""
        store = store or self.open()
        lease = store.lease(TTL_SECONDS)
        election = store.elect(keys.COORDINATOR, node.encode(), lease)
        assert election.campaign(), "there is another coordinator"
        if hearing is None:
            hearing = Hearing(self.clock, ttl_seconds=TTL_SECONDS)
            hearing._since -= 10 * TTL_SECONDS
        view = View(store)
        coordinator = Coordinator(
            store,
            view=view,
            fence=election.fence,
            node=node,
            settings=self.settings,
            hearing=hearing,
            wall_nanoseconds=lambda: round(self.clock.now() * 1e9),
        )
        return Chair(self, store, lease, view, coordinator, hearing)

    # ---- agents ----

    def join(self, node: str, *workers: int, zone: str = "", ready: bool = True) -> None:
        lease = self.leases[node] = self.store.lease(TTL_SECONDS)
        self.store.put(keys.node(node), encode(Node(node, zone, workers)), lease=lease)
        if ready:
            self.ready(*workers)

    def list_workers(self, node: str, *workers: int) -> None:
        """Let an agent write its list of workers anew."""
        zone = self.node(node).zone
        self.store.put(keys.node(node), encode(Node(node, zone, workers)), lease=self.leases[node])

    def node(self, name: str) -> Node:
        entry = self.store.get(keys.node(name))
        assert entry is not None
        return decode(Node, entry.value)

    def lapse(self, node: str) -> None:
        """End the lease of a node."""
        self.server.expire(self.leases.pop(node).id)

    def ready(self, *workers: int) -> None:
        for worker in workers:
            self.store.put(keys.ready(worker), b"node")

    def end(self, *workers: int) -> None:
        """Let agents see workers end by SIGKILL."""
        for worker in workers:
            self.store.put(keys.ended(worker), b'{"signal": "SIGKILL", "reason": "killed"}')

    # ---- workers ----

    def leave(self, *workers: int) -> None:
        for worker in workers:
            self.store.put(keys.left(worker), b"")

    def publish(self, spec: JobSpec = SPEC) -> None:
        self.store.put(keys.SPEC, encode(spec))

    def report(self, pairs: str, *, number: tuple[int, int] | None = None) -> None:
        """Write reports: `2>4` means that worker 2 reports its link to worker 4."""
        epoch, version = number or self.plan.number
        for pair in pairs.split():
            reporter, suspect = map(int, pair.split(">"))
            report = LinkReport(reporter, suspect, epoch, version, "broken pipe")
            self.store.put(keys.suspect((epoch, version), reporter, suspect), encode(report))

    def answer(self, *workers: int, roll: int | None = None) -> None:
        number = self.roll if roll is None else roll
        for worker in workers:
            self.store.put(keys.answer(worker), str(number).encode())

    def fail(self) -> None:
        self.store.put(keys.failure("job"), b'{"worker": 3, "kind": "ValueError", "message": "no"}')

    def meet(self, commit: int, *pipelines: int) -> None:
        """Let pipelines say that they are about to train."""
        for pipeline in pipelines:
            self.store.put(keys.vote(0, commit, self.plan.number, pipeline), encode(Ballot((), boundary=True)))

    def vote(
        self, commit: int, *pipelines: int, engine: int = 0, number: tuple[int, int] | None = None, loss: float = 1.0
    ) -> None:
        for pipeline in pipelines:
            text = encode(ballot(commit, pipeline, loss=loss))
            self.store.put(keys.vote(engine, commit, number or self.plan.number, pipeline), text)

    # ---- what is there ----

    @property
    def plan(self) -> Plan:
        entry = self.store.get(keys.PLAN)
        assert entry is not None, "there is no plan"
        return decode(Plan, entry.value)

    @property
    def roster(self) -> Roster | None:
        entry = self.store.get(keys.ROSTER)
        return None if entry is None else decode(Roster, entry.value)

    @property
    def roll(self) -> int:
        entry = self.store.get(keys.ROLL)
        return 0 if entry is None else int(entry.value)

    def outcome(self, commit: int, engine: int = 0) -> Outcome | None:
        entry = self.store.get(keys.decision(engine, commit))
        return None if entry is None else decode(Outcome, entry.value)

    def has(self, key: str) -> bool:
        return self.store.get(key) is not None

    def keys_of(self, *prefixes: str) -> list[str]:
        return [entry.key for prefix in prefixes for entry in self.store.list(prefix).entries]

    def lasting(self) -> dict[str, bytes]:
        """Return all that was decided and what is left of what was said, leases apart."""
        return {entry.key: entry.value for prefix in LASTING for entry in self.store.list(prefix).entries}

    def events(self, kind: str = "") -> list[str]:
        return [event.text for event in read_events(self.store) if kind in ("", event.kind)]

    def advance(self, seconds: float, step_seconds: float = 0.5) -> None:
        while seconds > 0:
            self.clock.advance(min(step_seconds, seconds))
            seconds -= step_seconds


def ballot(step: int, pipeline: int, *, loss: float = 1.0, stages: int = 4) -> Ballot:
    """Return what a pipeline votes: one micro-batch each, at the last stage."""
    votes = (
        Vote(
            worker=0, step=step, pipeline=pipeline, stage=stage,
            squared_norms={str(stage): 1.0}, losses={pipeline: loss} if stage == stages - 1 else {},
        )
        for stage in range(stages)
    )  # fmt: skip
    return Ballot(tuple(votes))


def eight(job: Job | None = None, *, spec: JobSpec = SPEC, each: int = 1, settled: bool = True) -> tuple[Job, Chair]:
    """Return a job of eight workers that has its first plan: pipelines 0 2 4 6 and 1 3 5 7 (one worker a node)."""
    job = job or Job()
    chair = job.elect()
    for number in range(8 // each):
        job.join(f"n{number}", *range(number * each, (number + 1) * each))
    chair.run()
    job.publish(spec)
    chair.run()
    if settled:
        job.store.put(keys.SETTLED, b"0")
        chair.run()
    return job, chair

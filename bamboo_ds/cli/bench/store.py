"""`bamboo-ds bench store`: what one commit costs the cluster's store, and that the store does not grow with the run.

A job of D pipelines is simulated by clients of one real etcd: the coordinator is the real one, the spokesman of each
pipeline is a real `Member` that casts a real ballot and waits for the outcome; only tensors are missing. A round begins
for all pipelines at one moment and is over when the last spokesman has the outcome.

What is demanded of the median follows from what etcd does alone on two cores: about 1,800 small writes a second, 0.55
ms each. Here etcd and all its clients, which are Python, share two cores. A ballot is written, heard by the coordinator
and answered to the spokesman; each of the three costs its client about as much as the write costs etcd. So a ballot may
take the time of three writes, and what happens once in a round `ONCE_MS`. To tell a watcher takes etcd 0.02 to 0.04 ms
of CPU. The watchers stand for other machines, so they yield to everybody else (nice 19); but they hear on the same two
cores, so each may cost four times that.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Barrier
from typing import Any

from bamboo_ds.cli.bench.report import JSON_OPTION, QUICK_OPTION, finish, progress, reported_failure, rounded, table
from bamboo_ds.cli.bench.workers import run_workers, values
from bamboo_ds.config.etcd import EtcdConfig
from bamboo_ds.elastic import keys
from bamboo_ds.elastic.coordinator import CoordinatorSettings
from bamboo_ds.elastic.leadership import Leadership
from bamboo_ds.elastic.member import Member
from bamboo_ds.elastic.membership import open_store
from bamboo_ds.errors import StoreUnavailableError
from bamboo_ds.plan import Plan, Vote
from bamboo_ds.plan.cluster import Node
from bamboo_ds.plan.codec import decode, encode
from bamboo_ds.plan.commit import Ballot, settle
from bamboo_ds.plan.job import JobSpec
from bamboo_ds.plan.roster import StartRule
from bamboo_ds.store import EventKind, Lease, Put, Store, Watch
from bamboo_ds.store.embedded import EmbeddedEtcd

STAGES, UNITS, SHARE = 8, 4, 8
"""Stages of a pipeline, layers of a stage, micro-batches of a pipeline: they make the size of a ballot."""
PIPELINES, WATCHERS = (4, 16, 64), 1000
ROUNDS, WARM_ROUNDS, PUTS = 40, 3, 1000
STEPS, QUICK_STEPS = (1_000, 10_000), (100, 400)
STEP_PIPELINES = 2
"""Of the job whose keys are counted: it is to take its steps as fast as it can."""
SCALES = (1_000, 10_000)
ONCE_MS, BALLOT_MS, WATCHER_MS = 15.0, 3 / 1.8, 0.15
QUOTA_BYTES = 2 << 30
"""How large an etcd lets its database become by default."""
VOTER_PROCESSES, WATCHER_PROCESSES = 4, 4
CLIENTS = (
    f"voters: a Member for each pipeline, in {VOTER_PROCESSES} processes with one channel each; watchers: {WATCHERS} "
    f"streams of {keys.BOARD} in {WATCHER_PROCESSES} processes with one channel each, nice 19; the coordinator: a "
    "process; etcd: embedded, without fsync; all on the same cores"
)
TTL_SECONDS = 10.0
_DEADLINE_SECONDS = 60.0
_LATE_SECONDS = 10.0  # in which watchers catch up
_LEAST_PRIORITY = 19
_STEP_SECONDS = 0.2  # far more than a step of `STEP_PIPELINES` takes
_LEAD_SECONDS = 0.02  # between the agreement on a round's beginning and the beginning
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Load:
    """A job to simulate.

    Attributes:
        pipelines: D.
        watchers: more clients that watch the board.
        rounds: to time.
    """

    pipelines: int
    watchers: int = 0
    rounds: int = ROUNDS

    @property
    def name(self) -> str:
        """Of its figures in the report."""
        return f"vote_ms_{self.watchers}_watchers" if self.watchers else "vote_ms"

    @property
    def most_ms(self) -> float:
        """What its median may be; see the head of this module."""
        return ONCE_MS + self.pipelines * BALLOT_MS + self.watchers * WATCHER_MS


@dataclass(frozen=True, slots=True)
class Rounds:
    """What a job showed.

    Attributes:
        milliseconds: of each round.
        etcd_milliseconds: of CPU that etcd used for a round, mean of all.
        unheard: outcomes that the watcher missed that missed most.
    """

    milliseconds: Sequence[float]
    etcd_milliseconds: float
    unheard: int = 0


@dataclass(frozen=True, slots=True)
class Costs:
    """What etcd's work costs on this machine.

    Attributes:
        puts_per_second: of values of a ballot's size, by one client that waits for each.
        ballot_cpu_ms: CPU of etcd for a ballot: to write it and to tell it to the coordinator, and its spokesman of
            the outcome.
        message_cpu_ms: CPU of etcd to tell one more watcher of an outcome, whatever its size.
        kilobyte_cpu_ms: likewise for each 1,000 bytes of it.
    """

    puts_per_second: float
    ballot_cpu_ms: float
    message_cpu_ms: float
    kilobyte_cpu_ms: float


def store(as_json: bool = JSON_OPTION, quick: bool = QUICK_OPTION) -> None:
    """Time commits of simulated jobs over a real etcd, and count what they leave in it."""
    started = time.monotonic()
    rounds, steps = (10, QUICK_STEPS) if quick else (ROUNDS, STEPS)
    with EmbeddedEtcd() as server, reported_failure():
        bench = StoreBench(server)
        puts = bench.puts_per_second()
        loads = [Load(pipelines, watchers, rounds) for watchers in (0, WATCHERS) for pipelines in PIPELINES]
        found = {load: bench.rounds(load) for load in progress(loads, "votes")}
        counted = bench.keys_after(steps)
    report = summarize(found, counted, puts)
    report["seconds"] = round(time.monotonic() - started, 1)
    finish(report, [_table(found), _scale_table(report)], as_json=as_json)


# ---- the figures ---------------------------------------------------------------------------------------------------


def summarize(found: Mapping[Load, Rounds], counted: Mapping[int, int], puts: float) -> dict[str, Any]:
    """Make the report."""
    failed = [f"{load.name} {load.pipelines}" for load, rounds in found.items() if not holds(load, rounds)]
    if len(set(counted.values())) > 1:
        failed.append("keys_after")
    costs = costs_of(found, puts)
    return {
        "ok": not failed,
        **figures_of(found),
        "keys_after": {str(steps): number for steps, number in counted.items()},
        "rounds": min(len(rounds.milliseconds) for rounds in found.values()),
        "failed": failed,
        "clients": CLIENTS,
        "costs": {name: rounded(value) for name, value in asdict(costs).items()},
        "scale": {str(nodes): at_scale(nodes, costs) for nodes in SCALES},
    }


def figures_of(found: Mapping[Load, Rounds]) -> dict[str, dict[str, float]]:
    """Return the figures of all jobs by name and number of pipelines: the median, what else is known, the demand."""
    figures: dict[str, dict[str, float]] = {}
    for load, rounds in found.items():
        times = rounds.milliseconds
        several = {
            "": statistics.median(times),
            "_best": min(times),
            "_worst": max(times),
            "_etcd_cpu": rounds.etcd_milliseconds,
            "_demand": load.most_ms,
        }
        for suffix, figure in several.items():
            figures.setdefault(load.name + suffix, {})[str(load.pipelines)] = round(figure, 1)
    return figures


def holds(load: Load, rounds: Rounds) -> bool:
    """Return whether a job met its demand, and no watcher missed an outcome."""
    return statistics.median(rounds.milliseconds) <= load.most_ms and not rounds.unheard


def costs_of(found: Mapping[Load, Rounds], puts: float) -> Costs:
    """Return what one more ballot and one more watcher cost: the slopes between the least and the most of them."""
    used = {(load.pipelines, load.watchers): rounds.etcd_milliseconds for load, rounds in found.items()}
    few, many = min(PIPELINES), max(PIPELINES)
    watching = {size: (used[size, WATCHERS] - used[size, 0]) / WATCHERS for size in (few, many)}
    kilobytes = {size: outcome_bytes(size) / 1e3 for size in (few, many)}
    slope = max((watching[many] - watching[few]) / (kilobytes[many] - kilobytes[few]), 0.0)
    message = max(watching[few] - slope * kilobytes[few], 0.0)
    return Costs(puts, (used[many, 0] - used[few, 0]) / (many - few), message, slope)


def outcome_bytes(pipelines: int) -> int:
    """Return the size of the outcome of a commit: it holds the mean loss of every pipeline."""
    return len(encode(settle(ballot_of(pipeline, 1) for pipeline in range(pipelines))))


def at_scale(nodes: int, costs: Costs) -> dict[str, Any]:
    """Return what a step costs a job of so many nodes of one worker each, all of which have a stage.

    Each worker and each agent watches the board; the coordinator watches the desk, where it also hears of the ballots'
    deletion. `steps_to_quota` is after how many steps an etcd that is never compacted refuses writes: it keeps every
    ballot that was ever written, also those that were deleted.
    """
    pipelines, watchers = nodes // STAGES, 2 * nodes
    ballot, outcome = len(encode(ballot_of(pipelines - 1, 1))), outcome_bytes(pipelines)
    telling_ms = costs.message_cpu_ms + costs.kilobyte_cpu_ms * outcome / 1e3
    return {
        "pipelines": pipelines,
        "writes_per_step": pipelines + 1,
        "events_per_step": 2 * pipelines + 2 * watchers,
        "ballot_bytes": ballot,
        "outcome_bytes": outcome,
        "bytes_in_per_step": pipelines * ballot + outcome,
        "bytes_out_per_step": pipelines * ballot + watchers * outcome,
        "write_seconds_per_step": rounded((pipelines + 1) / costs.puts_per_second),
        "etcd_cpu_seconds_per_step": rounded((pipelines * costs.ballot_cpu_ms + watchers * telling_ms) / 1e3),
        "renewals_per_second": rounded(nodes / (TTL_SECONDS / 3)),
        "steps_to_quota": QUOTA_BYTES // (pipelines * ballot + outcome),
    }


def _table(found: Mapping[Load, Rounds]) -> Any:
    figures = figures_of(found)
    suffixes = ("", "_best", "_worst", "_etcd_cpu", "_demand")
    rows = [
        [
            load.pipelines,
            load.watchers,
            *(figures[load.name + suffix][str(load.pipelines)] for suffix in suffixes),
            holds(load, rounds),
        ]
        for load, rounds in found.items()
    ]
    columns = ["pipelines", "watchers", "median ms", "best", "worst", "etcd's CPU", "demand", "ok"]
    return table("bench store", columns, rows, caption="from all ballots cast at once to the last voter's outcome")


def _scale_table(report: Mapping[str, Any]) -> Any:
    names = next(iter(report["scale"].values()))
    rows = [[name.replace("_", " "), *(scale[name] for scale in report["scale"].values())] for name in names]
    kept = ", ".join(f"{number} keys after {steps} steps" for steps, number in report["keys_after"].items())
    return table("a step, by arithmetic", ["nodes", *report["scale"]], rows, caption=kept)


# ---- the bench -----------------------------------------------------------------------------------------------------


class StoreBench:
    """Simulates jobs, one after the other, on one server. All clients are forks: this process opens no store.

    Args:
        server: that runs.
    """

    def __init__(self, server: EmbeddedEtcd) -> None:
        self._etcd, self._pid, self._jobs = EtcdConfig(endpoints=(server.endpoint,)), server.pid, 0

    def rounds(self, load: Load) -> Rounds:
        """Time the rounds of a job."""
        assert self._pid is not None, "the server runs"
        pid, job = self._pid, self._next_job()
        voters, watchers = min(VOTER_PROCESSES, load.pipelines), min(WATCHER_PROCESSES, load.watchers)
        starter = Starter(load.pipelines, 1 + voters + watchers, seconds=_DEADLINE_SECONDS + load.rounds)
        roles: list[Callable[[], Any]] = [lambda: _coordinate(job, load, starter, pid)]
        roles += [_role(_vote_all, job, part, load, starter) for part in parts(load.pipelines, voters)]
        roles += [_role(_watch_all, job, len(part), load, starter) for part in parts(load.watchers, watchers)]
        used, *rest = _play(roles, 2 * _DEADLINE_SECONDS + load.rounds)
        by_pipeline = [times for several in rest[:voters] for times in several]
        spans = [1000.0 * max(times) for times in zip(*by_pipeline, strict=True)]
        return Rounds(spans[WARM_ROUNDS:], 1000.0 * used / len(spans), max(rest[voters:], default=0))

    def keys_after(self, steps: Sequence[int]) -> dict[int, int]:
        """Take steps as fast as they go, and count all keys of the job at these numbers of steps."""
        job, seconds = self._next_job(), _DEADLINE_SECONDS + _STEP_SECONDS * steps[-1]
        starter = Starter(STEP_PIPELINES, 2, seconds=seconds)
        counts, _ = _play([_role(_count, job, len(steps), starter), _role(_take_steps, job, steps, starter)], seconds)
        return dict(zip(steps, counts, strict=True))

    def puts_per_second(self) -> float:
        """Return how many values of a ballot's size one client can write in a second."""
        return float(_play([_role(_put, self._next_job())], _DEADLINE_SECONDS)[0])

    def _next_job(self) -> Job:
        self._jobs += 1
        return Job(self._etcd, f"store-{self._jobs}")


@dataclass(frozen=True, slots=True)
class Job:
    """A simulated job and where its store is."""

    etcd: EtcdConfig
    name: str

    def open(self) -> Store:
        """Open the store, in a process of its own."""
        return open_store(self.etcd, job=self.name)


def _role(play: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    return lambda: play(*args)


def _play(roles: Sequence[Callable[[], Any]], seconds: float) -> list[Any]:
    """Let forked processes play roles, and return what each of them returns."""
    results = run_workers(lambda rank: roles[rank](), len(roles), timeout_seconds=seconds, grace_seconds=3.0)
    return values(results)


def parts(total: int, count: int) -> list[range]:
    """Return the numbers below `total` in so many runs of about one length."""
    return [range(total * index // count, total * (index + 1) // count) for index in range(count)]


class Starter:
    """Lets all voters of all processes begin a round at one moment. Make it before they are forked.

    Args:
        voters: threads that begin rounds.
        processes: that meet.
        seconds: the longest wait for the others.
    """

    def __init__(self, voters: int, processes: int, *, seconds: float) -> None:
        context = multiprocessing.get_context("fork")
        self._voters: Barrier = context.Barrier(voters, timeout=seconds)
        self._processes: Barrier = context.Barrier(processes, timeout=seconds)
        self._at = context.Value("d", 0.0)

    def begin(self) -> float:
        """Wait for all voters, then for the moment on which they agree; return it."""
        if self._voters.wait() == 0:
            self._at.value = time.monotonic() + _LEAD_SECONDS
        self._voters.wait()
        at = float(self._at.value)
        time.sleep(max(at - time.monotonic(), 0.0))
        return at

    def meet(self) -> None:
        """Wait for all processes."""
        self._processes.wait()


# ---- what the clients do -------------------------------------------------------------------------------------------


def _coordinate(job: Job, load: Load, starter: Starter, server_pid: int) -> float:
    """Be all agents of a job, one of which coordinates; return seconds of CPU that etcd used for the rounds."""
    with job.open() as store, leading(store, load.pipelines):
        starter.meet()
        before = cpu_seconds(server_pid)
        starter.meet()
        used = cpu_seconds(server_pid) - before
        starter.meet()
        return used


def _vote_all(job: Job, part: range, load: Load, starter: Starter) -> list[list[float]]:
    """Be the spokesmen of some pipelines; return by pipeline how many seconds each round took."""
    with job.open() as store, spokesmen(store, part) as members:
        starter.meet()
        found = vote(members, range(WARM_ROUNDS + load.rounds), begin=starter.begin)
        starter.meet()
        starter.meet()
        return found


def _watch_all(job: Job, count: int, load: Load, starter: Starter) -> int:
    """Watch the board so many times; return how many outcomes the watch missed that missed most."""
    with job.open() as store:
        revision = store.list(keys.BOARD).revision
        watches = [store.watch(keys.BOARD, from_revision=revision + 1) for _ in range(count)]
        for watch in watches:
            _outcomes(watch)
        os.nice(_LEAST_PRIORITY)
        starter.meet()
        starter.meet()
        unheard = _unheard(watches, WARM_ROUNDS + load.rounds)
        starter.meet()
        return unheard


def _unheard(watches: Sequence[Watch], outcomes: int) -> int:
    """Return how many of the outcomes the watch did not get that got fewest; some may still be on their way."""
    heard, deadline = [0] * len(watches), time.monotonic() + _LATE_SECONDS
    while min(heard) < outcomes and time.monotonic() < deadline:
        heard = [already + _outcomes(watch) for already, watch in zip(heard, watches, strict=True)]
        time.sleep(0.02)
    return outcomes - min(heard)


def _outcomes(watch: Watch) -> int:
    """Return how many outcomes a watch has got since the last call; wait until it is connected."""
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while True:
        try:
            events = watch.next(0.0)
            return sum(event.kind is EventKind.PUT and event.key.startswith(keys.DECISIONS) for event in events)
        except StoreUnavailableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _count(job: Job, times: int, starter: Starter) -> list[int]:
    """Be all agents of a job; return how many keys it has each time when its voters rest."""
    with job.open() as store, leading(store, STEP_PIPELINES):
        counts = []
        for _ in range(times):
            starter.meet()
            counts.append(len(store.list().entries))
            starter.meet()
        return counts


def _take_steps(job: Job, steps: Sequence[int], starter: Starter) -> None:
    """Be the spokesmen of a job, and rest when these numbers of steps are taken."""
    with job.open() as store, spokesmen(store, range(STEP_PIPELINES)) as members:
        for first, end in zip((0, *steps), steps, strict=False):
            vote(members, range(first, end), begin=time.monotonic)
            starter.meet()
            starter.meet()


def _put(job: Job) -> float:
    with job.open() as store:
        value, started = encode(ballot_of(0, 0)), time.monotonic()
        for _ in range(PUTS):
            store.put("value", value)
        return PUTS / (time.monotonic() - started)


@contextmanager
def spokesmen(store: Store, pipelines: range) -> Iterator[list[Member]]:
    """Be the spokesmen of some pipelines of the plan, once there is one."""
    plan = await_plan(store)
    with ExitStack() as closing:
        members = [Member(store, worker=plan.owners[pipeline][0], node="") for pipeline in pipelines]
        for member in members:
            closing.callback(member.close)
            member.await_roster(timeout_seconds=_DEADLINE_SECONDS)
        yield members


def vote(members: Sequence[Member], numbers: range, *, begin: Callable[[], float]) -> list[list[float]]:
    """Take part in commits, each member in a thread; return by member how many seconds each commit took it."""

    def take_part(member: Member) -> list[float]:
        plan, seconds = member.current(), []
        pipeline = plan.place(member.worker).pipeline
        for number in numbers:
            ballot, at = ballot_of(pipeline, number), begin()
            member.vote(0, number, pipeline, ballot, plan=plan)
            member.await_outcome(0, number, plan, timeout_seconds=_DEADLINE_SECONDS)
            seconds.append(time.monotonic() - at)
        return seconds

    with ThreadPoolExecutor(len(members)) as threads:
        return list(threads.map(take_part, members))


@contextmanager
def leading(store: Store, pipelines: int) -> Iterator[None]:
    """Be the agents of a job, and coordinate it in a thread."""
    lease = store.lease(TTL_SECONDS)
    register(store, pipelines, lease)
    settings = CoordinatorSettings(ttl_seconds=TTL_SECONDS, start=StartRule(STAGES * pipelines, _DEADLINE_SECONDS))
    leadership = Leadership(store, node=name_of(0), lease=lambda: lease, settings=settings)
    thread = threading.Thread(target=leadership.run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        leadership.stop()
        thread.join(_DEADLINE_SECONDS)


def register(store: Store, pipelines: int, lease: Lease) -> None:
    """Put the nodes of a job into the store, one for each worker, all ready, and say what they train."""
    for worker in range(STAGES * pipelines):
        node = Node(name_of(worker), "", (worker,))
        store.transact(
            (), [Put(keys.node(node.name), encode(node), lease), Put(keys.ready(worker), node.name.encode())]
        )
    spec = JobSpec(publisher=0, num_stages=STAGES, num_layers=STAGES * UNITS, pipelines=pipelines)
    store.put(keys.SPEC, encode(spec))


def name_of(worker: int) -> str:
    """Return the name of the node on which a worker runs."""
    return f"n{worker}"


def await_plan(store: Store) -> Plan:
    """Wait for the first plan.

    Raises:
        TimeoutError: it does not come.
    """
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while (entry := store.get(keys.PLAN)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no plan within {_DEADLINE_SECONDS:g} s")
        time.sleep(0.01)
    return decode(Plan, entry.value)


def ballot_of(pipeline: int, step: int) -> Ballot:
    """Return a ballot as a pipeline of some real model casts it: numbers with all their digits."""

    def vote(stage: int) -> Vote:
        norms = {str(stage * UNITS + unit): 0.1 / (1.0 + stage + unit + step) for unit in range(UNITS)}
        losses = {pipeline * SHARE + index: 3.0 + 0.7 / (1.0 + index + step) for index in range(SHARE)}
        return Vote(
            worker=pipeline * STAGES + stage, step=step, pipeline=pipeline, stage=stage, squared_norms=norms,
            losses=losses if stage == STAGES - 1 else {},
            forward_seconds=0.01 + 0.001 / (3.0 + step), backward_seconds=0.02 + 0.002 / (3.0 + step),
        )  # fmt: skip

    return Ballot(tuple(vote(stage) for stage in range(STAGES)))


def cpu_seconds(pid: int) -> float:
    """Return how many seconds of CPU a process has used."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        user, system = file.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / _TICKS

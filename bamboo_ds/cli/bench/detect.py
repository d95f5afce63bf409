"""`bamboo-ds bench detect`: milliseconds from a fault to the next plan in the hands of every survivor, in training.

Each case is a job of its own: eight nodes of one worker each train a tiny GPT as four stages in two pipelines, one of
them is broken at a random moment, and each survivor notes when its thread that follows the board has the next plan.
All clocks are one: the monotonic clock of this machine. The victim's stage and pipeline go by the number of the case,
so they visit all places; a node that coordinates is left to `coordinator_kill`, but for `worker_exit`, which leaves its
agent alive.

Last, a job trains on cores that busy loops keep loaded. Nobody dies there, and nobody may be taken for dead.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import typer

from bamboo_ds.cli.bench.job import Job, gpt_job
from bamboo_ds.cli.bench.report import JSON_OPTION, finish, progress, table, tails
from bamboo_ds.cli.bench.workers import warm_up
from bamboo_ds.cli.local import LocalCluster
from bamboo_ds.config import EtcdConfig
from bamboo_ds.config.source import CONFIG_VARIABLE, encoded
from bamboo_ds.elastic import forking
from bamboo_ds.elastic.agent import FAILED
from bamboo_ds.elastic.membership import Membership
from bamboo_ds.elastic.preemption import How
from bamboo_ds.elastic.presence import EVENTS_FILE
from bamboo_ds.store.embedded import EmbeddedEtcd

STAGES, PIPELINES, MICRO_BATCHES = 4, 2, 8
NODES = STAGES * PIPELINES
TTL_SECONDS = 3.0
TTL_MS = 1000.0 * TTL_SECONDS
CASES, QUICK_CASES = 20, 2
ALARM_MINUTES, QUICK_ALARM_MINUTES = 10.0, 0.5
WARM_STEPS = 2
"""All workers have taken so many steps when a fault strikes."""
STRIKE_WITHIN_SECONDS = 0.3
"""The fault strikes within this time after that, which is a step or two."""
BEGIN_SECONDS, NOTICE_SECONDS = 60.0, 30.0

Figure = Literal["median", "worst"]
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Kind:
    """A way of breaking a node, and what is demanded of its detection.

    Attributes:
        name: of the figures in the report.
        how: as `LocalCluster.kill` has it; None to kill the worker only.
        figure: which figure the demand is on.
        most_ms: the demand.
        coordinator: whether the node that coordinates is the victim; else it is spared.
    """

    name: str
    how: How | None
    figure: Figure
    most_ms: float
    coordinator: bool = False


KINDS = (
    Kind("worker_exit_ms", None, "median", 100.0),
    Kind("node_kill_ms", "kill", "worst", 250.0),
    Kind("stop_ms", "stop", "worst", TTL_MS + 1000.0),
    Kind("cut_ms", "cut", "worst", TTL_MS + 1000.0),
    Kind("coordinator_kill_ms", "kill", "worst", TTL_MS + 1500.0, coordinator=True),
)


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a worker trains, as it says itself."""

    worker: int
    node: str
    pipeline: int
    stage: int


@dataclass(frozen=True, slots=True)
class Notice:
    """A plan that a worker has got.

    Attributes:
        at: when, by the monotonic clock.
        number: epoch and version.
        dead: all workers that it declares dead.
        cause: of the plan.
    """

    at: float
    number: tuple[int, int]
    dead: tuple[int, ...]
    cause: str


@dataclass(frozen=True, slots=True)
class Detection:
    """What became of one fault: milliseconds until the last survivor had the plan, or what went wrong."""

    milliseconds: float
    cause: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Watchman:
    """What was seen in a job in which nobody died.

    Attributes:
        minutes: that it trained on loaded cores.
        steps: taken by the slowest worker in that time.
        alarms: what must not happen, and how often it did.
        others: other events, which only show that it was close or busy.
        problem: why the job did not train to the end.
    """

    minutes: float
    steps: int
    alarms: Mapping[str, int]
    others: Mapping[str, int]
    problem: str = ""


ALARMS = frozenset({"failover", "abort", "reconfigure", "evicted", "node_lost", "worker_ended", "failure"})
"""Kinds of events that tell of somebody taken for dead."""


def detect(
    as_json: bool = JSON_OPTION,
    quick: bool = typer.Option(False, "--quick", help=f"{QUICK_CASES} faults of each kind; about two minutes."),
    alarm_minutes: float | None = typer.Option(
        None, min=0.0, help=f"How long nothing may be seen on loaded cores; {ALARM_MINUTES:g}, quick: half a minute."
    ),
    seed: int = typer.Option(0, help="Of the moments at which faults strike."),
    only: list[str] = typer.Option([], help="These kinds only; cut_ms needs root."),
) -> None:
    """Break nodes of a training job and time how soon every survivor has the next plan."""
    kinds, started = chosen(only), time.monotonic()
    if alarm_minutes is None:
        alarm_minutes = QUICK_ALARM_MINUTES if quick else ALARM_MINUTES
    warm_up()
    with DetectBench(random.Random(seed)) as bench:
        found = {
            kind: [
                bench.break_one(kind, number) for number in progress(range(QUICK_CASES if quick else CASES), kind.name)
            ]
            for kind in kinds
        }
        watchman = bench.watch_idly(alarm_minutes) if alarm_minutes else None
    report = summarize(found, watchman)
    report["seconds"] = round(time.monotonic() - started, 1)
    finish(report, [_table(report, kinds)], as_json=as_json)


def chosen(names: Sequence[str]) -> tuple[Kind, ...]:
    """Return the kinds of these names; all without any.

    Raises:
        typer.BadParameter: there is no such kind.
    """
    if unknown := set(names) - {kind.name for kind in KINDS}:
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: there are {', '.join(kind.name for kind in KINDS)}")
    return tuple(kind for kind in KINDS if not names or kind.name in names)


# ---- the figures ---------------------------------------------------------------------------------------------------


def summarize(found: Mapping[Kind, Sequence[Detection]], watchman: Watchman | None) -> dict[str, Any]:
    """Make the report."""
    problems = [
        f"{kind.name}[{number}]: {one.problem}"
        for kind, detections in found.items()
        for number, one in enumerate(detections)
        if one.problem
    ]
    if watchman is not None and watchman.problem:
        problems.append(f"false_alarms: {watchman.problem}")
    figures = {kind.name: figures_of(detections) for kind, detections in found.items()}
    failed = [kind.name for kind in found if not holds(kind, figures[kind.name])]
    false_alarms = None if watchman is None else sum(watchman.alarms.values())
    return {
        "ok": not (failed or problems or false_alarms),
        **figures,
        "false_alarms": false_alarms,
        "ttl_ms": TTL_MS,
        "nodes": NODES,
        "demands": {kind.name: {kind.figure: kind.most_ms} for kind in found} | {"false_alarms": 0},
        "failed": failed + (["false_alarms"] if false_alarms else []),
        "problems": problems,
        "causes": {kind.name: dict(Counter(cause_of(one.cause) for one in found[kind])) for kind in found},
        "alarm_run": None if watchman is None else asdict(watchman),
    }


def figures_of(detections: Sequence[Detection]) -> dict[str, Any]:
    """Return median, worst and number of what was detected."""
    times = [one.milliseconds for one in detections if not one.problem]
    if not times:
        return {"median": None, "worst": None, "n": 0}
    return {"median": round(statistics.median(times), 1), "worst": round(max(times), 1), "n": len(times)}


def holds(kind: Kind, figures: Mapping[str, Any]) -> bool:
    """Return whether the demand on a kind is met."""
    return figures["n"] > 0 and figures[kind.figure] <= kind.most_ms


def cause_of(text: str) -> str:
    """Return in a word how a loss was confirmed, of the sentence in the plan."""
    words = {"both neighbours": "neighbours", "lease": "lease", "was ended by": "exit", "answer": "evicted"}
    return next((word for part, word in words.items() if part in text), text or "none")


def _table(report: Mapping[str, Any], kinds: Sequence[Kind]) -> Any:
    rows = [
        [
            kind.name, figures["n"], figures["median"], figures["worst"], f"{kind.figure} <= {kind.most_ms:g}",
            ", ".join(f"{word} {count}" for word, count in report["causes"][kind.name].items()), holds(kind, figures),
        ]
        for kind in kinds
        for figures in [report[kind.name]]
    ]  # fmt: skip
    if (alarms := report["false_alarms"]) is not None:
        run = report["alarm_run"]
        rows.append(["false_alarms", None, None, alarms, "0", f"{run['steps']} steps, loaded cores", alarms == 0])
    columns = ["fault", "n", "median", "worst", "demand", "confirmed by", "ok"]
    return table("bench detect", columns, rows, caption="milliseconds until every survivor has the next plan")


# ---- the bench -----------------------------------------------------------------------------------------------------


class DetectBench:
    """Runs jobs and breaks them. Use it in a `with` block.

    Args:
        draw: the moments at which faults strike.
    """

    def __init__(self, draw: random.Random) -> None:
        self._draw, self._jobs = draw, 0
        self._ending = contextlib.ExitStack()
        self._etcd: EtcdConfig | None = None

    def __enter__(self) -> DetectBench:
        """Start the etcd of all jobs but those in networks of their own."""
        self._folder = Path(self._ending.enter_context(tempfile.TemporaryDirectory(prefix="bamboo-detect-")))
        server = self._ending.enter_context(EmbeddedEtcd())
        self._etcd = EtcdConfig(endpoints=(server.endpoint,))
        return self

    def __exit__(self, *error: object) -> None:
        """End it."""
        self._ending.close()

    def break_one(self, kind: Kind, number: int) -> Detection:
        """Run a job, break a node and time how soon the survivors know.

        Raises:
            ConfigError: this machine cannot do it: `cut` needs root.
        """
        with self.job(apart=kind.how == "cut") as (cluster, folder):
            try:
                return self.strike(kind, number, cluster, folder)
            except TimeoutError as late:
                return Detection(0.0, problem=f"{late}; {tails(folder)}")

    def strike(self, kind: Kind, number: int, cluster: LocalCluster, folder: Path) -> Detection:
        """Break a node of a job that has just begun.

        Raises:
            TimeoutError: the job does not train, or not all survivors get a plan.
        """
        seats = _await(lambda: _all_seats(folder), cluster, BEGIN_SECONDS, "all workers train")
        if early := read_notices(folder):
            return Detection(0.0, problem=f"the plan changed before the fault: {early}")
        victim = choose_victim(seats, kind, number, coordinator=_coordinator(cluster))
        time.sleep(self._draw.uniform(0.0, STRIKE_WITHIN_SECONDS))
        at = cluster.kill_worker(victim.node) if kind.how is None else cluster.kill(victim.node, kind.how)
        rest = {seat.worker for seat in seats} - {victim.worker}
        notices = _await(lambda: _notices_of(folder, rest), cluster, NOTICE_SECONDS, "every survivor has the next plan")
        if wrong := [one for one in notices if (one.number, one.dead) != ((0, 1), (victim.worker,))]:
            return Detection(0.0, problem=f"worker {victim.worker} was broken, and a survivor got {wrong[0]}")
        return Detection(1000.0 * (max(notice.at for notice in notices) - at), notices[0].cause)

    def watch_idly(self, minutes: float) -> Watchman:
        """Let a job train on loaded cores and count what is taken for a death."""
        with self.job(apart=False) as (cluster, folder), busy_loops():
            try:
                _await(lambda: _all_seats(folder), cluster, BEGIN_SECONDS, "all workers train")
            except TimeoutError as late:
                return Watchman(minutes, 0, {}, {}, f"{late}; {tails(folder)}")
            before = _steps(folder)
            for _ in progress(range(round(60.0 * minutes)), "false alarms"):
                time.sleep(1.0)
            return self.judge(minutes, _steps(folder) - before, cluster, folder)

    def judge(self, minutes: float, steps: int, cluster: LocalCluster, folder: Path) -> Watchman:
        """Say what was seen in a job that has trained for so long."""
        events = Counter(event["kind"] for event in _events(cluster))
        alarms = {kind: count for kind, count in events.items() if kind in ALARMS}
        if notices := read_notices(folder):
            alarms["plans"] = max(notice.number[1] for notice in notices.values())
        ended = {name: code for name, code in cluster.codes.items() if code is not None}
        problem = f"agents have ended: {ended}; {tails(folder)}" if ended else "" if steps else "nothing was trained"
        others = {kind: count for kind, count in events.items() if kind not in ALARMS}
        return Watchman(minutes, steps, alarms, others, problem)

    @contextlib.contextmanager
    def job(self, *, apart: bool) -> Iterator[tuple[LocalCluster, Path]]:
        """Run a job; its folder goes with it.

        Args:
            apart: whether each node has a network of its own, which can be cut; their etcd must be in it.
        """
        self._jobs += 1
        folder = self._folder / f"case-{self._jobs}"
        folder.mkdir()
        cluster = LocalCluster(
            lambda: train(folder),
            nodes=NODES,
            job=f"detect-{self._jobs}",
            etcd=None if apart else self._etcd,
            ttl_seconds=TTL_SECONDS,
            log_folder=folder / "logs",
            echo=False,
            namespaces=apart,
            environment={CONFIG_VARIABLE: encoded(config_of(_job()))},
        )
        with contextlib.ExitStack() as running:
            with _stderr_to(folder / "agents.log"):
                running.enter_context(cluster)
            yield cluster, folder
        shutil.rmtree(folder)


def choose_victim(seats: Sequence[Seat], kind: Kind, number: int, *, coordinator: str) -> Seat:
    """Return whom the case of a number breaks: all places in turn, but for the spared coordinator.

    Its place falls to the same stage of the other pipeline.
    """
    if kind.coordinator:
        return next(seat for seat in seats if seat.node == coordinator)
    stage, pipeline = number % STAGES, number // STAGES % PIPELINES
    places = {(seat.stage, seat.pipeline): seat for seat in seats}
    if kind.how is not None and places[stage, pipeline].node == coordinator:
        pipeline = (pipeline + 1) % PIPELINES
    return places[stage, pipeline]


@contextlib.contextmanager
def _stderr_to(path: Path) -> Iterator[None]:
    """Let what is forked meanwhile write its stderr to a file: a progress bar is no place for what agents say."""
    kept = os.dup(2)
    try:
        with path.open("ab", buffering=0) as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@contextlib.contextmanager
def busy_loops() -> Iterator[int]:
    """Keep each core of this process busy; give the number of cores."""
    cores = len(os.sched_getaffinity(0))
    parent = os.getpid()
    loops = [forking.fork(lambda: _spin(parent)) for _ in range(cores)]
    try:
        yield cores
    finally:
        for pid in loops:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _spin(parent: int) -> NoReturn:
    forking.forget_parent()
    forking.signal_at_parents_death(signal.SIGKILL, parent=parent)
    while True:
        pass


def _await(look: Callable[[], Found | None], cluster: LocalCluster, seconds: float, what: str) -> Found:
    """Look until there is something to see.

    Raises:
        TimeoutError: there is nothing, or the job has failed.
    """
    deadline = time.monotonic() + seconds
    while (found := look()) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        if FAILED in cluster.codes.values():
            raise TimeoutError(f"the job has failed, so it will not be that {what}")
        time.sleep(0.01)
    return found


def _coordinator(cluster: LocalCluster) -> str:
    """Return the node that coordinates."""
    said = [str(event["node"]) for event in _events(cluster) if event["kind"] == "coordinator"]
    if not said:
        raise TimeoutError("no node says that it coordinates")
    return said[-1]


def _events(cluster: LocalCluster) -> list[dict[str, Any]]:
    """Return the events of the job, as the node has them that has most."""
    paths = [cluster.log_folder(name) / EVENTS_FILE for name in cluster.names]
    texts = [path.read_text(encoding="utf-8").splitlines() for path in paths if path.exists()]
    return [json.loads(line) for line in max(texts, key=len, default=[])]


# ---- what workers tell ---------------------------------------------------------------------------------------------


def read_notices(folder: Path) -> dict[int, Notice]:
    """Return the first plan after the job's first that each worker got, by worker."""
    found = {}
    for path in folder.glob("plan-*.json"):
        fields = json.loads(path.read_text(encoding="utf-8"))
        fields["number"], fields["dead"] = tuple(fields["number"]), tuple(fields["dead"])
        found[int(path.stem.removeprefix("plan-"))] = Notice(**fields)
    return found


def _notices_of(folder: Path, workers: set[int]) -> list[Notice] | None:
    """Return the notices of these workers once all are there."""
    found = read_notices(folder)
    return [found[worker] for worker in sorted(workers)] if workers <= found.keys() else None


def _all_seats(folder: Path) -> list[Seat] | None:
    """Return where all workers train, once all do."""
    paths = sorted(folder.glob("seat-*.json"))
    return [Seat(**json.loads(path.read_text(encoding="utf-8"))) for path in paths] if len(paths) == NODES else None


def _steps(folder: Path) -> int:
    """Return how many steps the slowest worker has taken."""
    return min((path.stat().st_size for path in folder.glob("steps-*")), default=0)


# ---- the workers' side ---------------------------------------------------------------------------------------------


def config_of(job: Job) -> dict[str, Any]:
    """Return the DeepSpeed config of a job."""
    return {**job.deepspeed_config(), "bamboo": {"seed": job.seed, "timeout_seconds": BEGIN_SECONDS}}


def _job() -> Job:
    return gpt_job(dropout=0.1, tied=True, micro_batches=MICRO_BATCHES, steps=0)


def train(folder: Path) -> None:
    """Train as one worker until it is ended, and tell of each new plan."""
    import bamboo_ds
    from bamboo_ds.world.joining import joined

    job = _job()
    module = bamboo_ds.BambooPipelineModule(
        layers=job.layers(), num_stages=STAGES, loss_fn=job.loss_fn, seed_layers=True, base_seed=job.base_seed
    )
    engine, *_ = bamboo_ds.initialize(model=module, config=config_of(job))
    member, membership = joined(), Membership.read()
    assert member is not None and membership is not None, "an agent has started this worker"  # noqa: PT018
    member.subscribe(_teller(member, folder))
    seat = Seat(member.worker, membership.node, engine.pipeline_id, engine.stage_id)
    with (folder / f"steps-{member.worker}").open("ab", buffering=0) as steps:
        for step in itertools.count():
            engine.train_batch(job.batches(step, engine.micro_batch_range))
            steps.write(b".")
            if step + 1 == WARM_STEPS:
                _write_whole(folder / f"seat-{member.worker}.json", seat)


def _teller(member: Any, folder: Path) -> Callable[[], None]:
    """Return what tells of the first new plan; called from the thread that follows the board."""
    first, path = member.current().number, folder / f"plan-{member.worker}.json"

    def tell() -> None:
        at, plan = time.monotonic(), member.current()
        if plan.number > first and not path.exists():
            _write_whole(path, Notice(at, plan.number, tuple(sorted(plan.dead)), plan.cause))

    return tell


def _write_whole(path: Path, record: Seat | Notice) -> None:
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(asdict(record)), encoding="utf-8")
    partial.rename(path)

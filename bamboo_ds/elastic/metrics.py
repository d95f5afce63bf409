"""What an agent tells Prometheus. The agent says what it sees on the board, and this counts it.

Each agent has a registry of its own, so two of them in one process do not mix, and nothing is registered by an import.
Every agent knows plan, step and loss, as they stand on the board; what only the coordinator measures (the latency of
the votes) shows at the agent that leads.

A *pause* is defined by the job's own rhythm: a commit that came more than twice as long after the one before as is
usual (`PAUSE_FACTOR` times the median of the last `WINDOW` intervals). It is the whole interval that counts.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from http.server import HTTPServer
from statistics import median

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from bamboo_ds.errors import ConfigError
from bamboo_ds.plan.commit import Outcome
from bamboo_ds.plan.job import JobSettings
from bamboo_ds.plan.plan import Plan

__all__ = ["PAUSE_FACTOR", "WINDOW", "Metrics"]

PAUSE_FACTOR = 2.0
WINDOW = 64
_FEWEST = 5  # intervals, before a median says what is usual
_STEP_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_VOTE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_CLOSE_SECONDS = 5.0


class Metrics:
    """The metrics of one agent. All methods may be called from all threads.

    Args:
        job: name of the job, a label of every metric.
        node: name of the node, likewise.
    """

    def __init__(self, *, job: str, node: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"job_name": job, "node": node}
        self._lock = threading.Lock()
        self._intervals: deque[float] = deque(maxlen=WINDOW)
        self._number: tuple[int, int] | None = None
        self._batch_size = 0
        self._server: tuple[HTTPServer, threading.Thread] | None = None
        self._make_gauges()
        self._make_counters()

    def serve(self, port: int, *, address: str = "") -> int:
        """Answer Prometheus from a thread, and return the port: the one asked for, or a free one for 0.

        Raises:
            ConfigError: the port is taken, or not ours to take.
        """
        try:
            server, thread = start_http_server(port, addr=address or "0.0.0.0", registry=self.registry)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(
                f"--metrics-port {port}: cannot listen there ({reason}); give another port, or 0 for a free one"
            ) from None
        self._server = (server, thread)
        return int(server.server_port)

    def close(self) -> None:
        """Stop to answer. May be called again."""
        if self._server is None:
            return
        server, thread = self._server
        self._server = None
        server.shutdown()
        server.server_close()
        thread.join(_CLOSE_SECONDS)

    def plan(self, plan: Plan) -> None:
        """Take in a plan, each number once: a failover, an abort or a reconfiguration since the plan before."""
        with self._lock:
            before = self._number
            if before is not None and plan.number <= before:
                return
            self._number = plan.number
        self._epoch.set(plan.epoch)
        self._version.set(plan.version)
        self._workers.set(0 if plan.aborted else len(plan.workers))
        self._dead.set(len(plan.dead))
        if before is not None:
            self._count_changes(plan, before)

    def _count_changes(self, plan: Plan, before: tuple[int, int]) -> None:
        """Count what led from one plan to another, also those in between that this agent did not see."""
        epochs = plan.epoch - before[0]
        versions = plan.version - (before[1] if epochs == 0 else 0)
        self._reconfigurations.inc(epochs)
        self._aborts.inc(plan.aborted)
        self._failovers.inc(versions - plan.aborted)

    def outcome(self, outcome: Outcome, seconds: float) -> None:
        """Take in the outcome of a commit.

        Args:
            outcome: as it stands on the board.
            seconds: since the outcome before it, of the same engine; 0 for the first.
        """
        if outcome.decision is None:
            self._refusals.inc(bool(outcome.refusal))  # that of an evaluation has neither
            return
        self._commits.inc()
        self._step.set(outcome.decision.step + 1)
        self._loss.set(outcome.decision.mean_loss)
        if seconds > 0:
            self._interval(seconds)

    def settings(self, settings: JobSettings) -> None:
        """Take in the config of an engine: its batch size turns steps into samples."""
        try:
            size = json.loads(settings.settings.get("train_batch_size", "0"))
        except ValueError:
            return
        self._batch_size = size if isinstance(size, int) else 0

    def vote(self, seconds: float) -> None:
        """Take in how long a commit took from its first ballot to its decision (the coordinator measures it)."""
        self._vote_seconds.observe(seconds)

    def nodes(self, count: int) -> None:
        """Take in how many nodes have a live lease."""
        self._nodes.set(count)

    def local_workers(self, count: int) -> None:
        """Take in how many workers of this node run."""
        self._local_workers.set(count)

    def leading(self, leading: bool) -> None:
        """Take in whether this agent is the coordinator."""
        self._leading.set(1 if leading else 0)

    def event(self, kind: str) -> None:
        """Count an event by its kind (`elastic.events`); `store_outage` has a metric of its own too."""
        self._events.labels(**self._labels, kind=kind).inc()
        if kind == "store_outage":
            self._outages.inc()

    def _interval(self, seconds: float) -> None:
        with self._lock:
            usual = median(self._intervals) if len(self._intervals) >= _FEWEST else None
            self._intervals.append(seconds)
            rate = self._batch_size / median(self._intervals)
        self._step_seconds.observe(seconds)
        self._samples.set(rate)
        if usual is not None and seconds > PAUSE_FACTOR * usual:
            self._pauses.observe(seconds)

    def _make_gauges(self) -> None:
        gauge = self._gauge
        self._nodes = gauge("bamboo_nodes", "Nodes whose lease lives.")
        self._workers = gauge("bamboo_workers", "Workers with a stage in the current plan; 0 while it is aborted.")
        self._local_workers = gauge("bamboo_local_workers", "Worker processes that run on this node.")
        self._dead = gauge("bamboo_dead_workers", "Workers declared dead since the job began.")
        self._epoch = gauge("bamboo_plan_epoch", "Epoch of the current plan.")
        self._version = gauge("bamboo_plan_version", "Version of the current plan inside its epoch.")
        self._step = gauge("bamboo_step", "Optimizer steps committed.")
        self._loss = gauge("bamboo_loss", "Mean loss of the last committed step.")
        self._samples = gauge(
            "bamboo_samples_per_second", f"train_batch_size / median seconds of a step, over the last {WINDOW} steps."
        )
        self._leading = gauge("bamboo_is_coordinator", "1 at the agent that is the coordinator, else 0.")

    def _make_counters(self) -> None:
        counter, histogram = self._counter, self._histogram
        self._commits = counter("bamboo_commits", "Commits seen on the board.")
        self._refusals = counter("bamboo_refused_commits", "Steps refused as a loss or gradient was not finite.")
        self._failovers = counter("bamboo_failovers", "Versions in which shadows took over, since this agent began.")
        self._aborts = counter("bamboo_aborts", "Versions in which a stage was lost and the step dropped.")
        self._reconfigurations = counter("bamboo_reconfigurations", "New epochs since this agent began.")
        self._outages = counter("bamboo_store_outages", "How often this agent could not reach the store.")
        self._step_seconds = histogram("bamboo_step_seconds", "Seconds between two commits.", _STEP_BUCKETS)
        self._pauses = histogram(
            "bamboo_pause_seconds",
            f"Seconds between two commits, where more than {PAUSE_FACTOR:g} x the median of the last {WINDOW}.",
            _STEP_BUCKETS,
        )
        self._vote_seconds = histogram(
            "bamboo_vote_seconds", "Seconds from the first ballot of a commit to its decision.", _VOTE_BUCKETS
        )
        self._events = Counter("bamboo_events", "Events seen.", [*self._labels, "kind"], registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, list(self._labels), registry=self.registry).labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, list(self._labels), registry=self.registry).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        metric = Histogram(name, text, list(self._labels), buckets=buckets, registry=self.registry)
        return metric.labels(**self._labels)

"""What the tests of agents and local clusters share.

The test process itself must never open a store: no process that is forked from it could. It looks at etcd through the
server's HTTP gateway.
"""

from __future__ import annotations

import base64
import http.client
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

from bamboo_ds.cli.local import LocalCluster
from bamboo_ds.elastic import keys
from bamboo_ds.elastic.member import Member
from bamboo_ds.elastic.membership import Membership, open_store
from bamboo_ds.plan import codec
from bamboo_ds.plan.job import JobSpec
from bamboo_ds.plan.plan import Plan

TTL_SECONDS = 2.0


def ended(pid: int) -> bool:
    """Whether a process is gone, or only waits to be reaped by whoever inherited it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def alive(pids: Iterable[int]) -> list[int]:
    return [pid for pid in pids if not ended(pid)]


def eventually(condition: Callable[[], Any], *, within_seconds: float, what: str) -> Any:
    """Wait until something is true, and return it."""
    deadline = time.monotonic() + within_seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {within_seconds} s: {what}"
        time.sleep(0.02)
    return result


class Look:
    """The keys of a job, as plain HTTP shows and changes them."""

    def __init__(self, endpoint: str, *, job: str = "local") -> None:
        self._endpoint, self._prefix = endpoint, keys.prefix(job)

    @classmethod
    def at(cls, cluster: LocalCluster) -> Look:
        return cls(cluster.etcd.endpoints[0])

    def list(self, prefix: str = "") -> dict[str, bytes]:
        first = (self._prefix + prefix).encode()
        answer = self._ask("range", key=first, range_end=first[:-1] + bytes([first[-1] + 1]))
        found = {_decode(kv["key"]).decode(): _decode(kv.get("value", "")) for kv in answer.get("kvs", [])}
        return {key.removeprefix(self._prefix): value for key, value in found.items()}

    def get(self, key: str) -> bytes | None:
        return self.list(key).get(key)

    def put(self, key: str, value: bytes) -> None:
        self._ask("put", key=(self._prefix + key).encode(), value=value)

    def plan(self) -> Plan | None:
        value = self.get(keys.PLAN)
        return None if value is None else codec.decode(Plan, value)

    def events(self, kind: str) -> list[dict[str, Any]]:
        found = [json.loads(value) for value in self.list(keys.EVENTS).values()]
        return [event for event in found if event["kind"] == kind]

    def _ask(self, call: str, **fields: bytes) -> dict[str, Any]:
        connection = http.client.HTTPConnection(self._endpoint, timeout=5)
        body = json.dumps({name: base64.b64encode(value).decode() for name, value in fields.items()})
        connection.request("POST", f"/v3/kv/{call}", body)
        try:
            return dict(json.loads(connection.getresponse().read()))
        finally:
            connection.close()


def _decode(text: str) -> bytes:
    return base64.b64decode(text)


class Train:
    """A program that takes a seat in a pipeline and "trains" until a file appears; then its script ends.

    It does what the engine does between steps: it looks whether its plan still stands.

    Args:
        flag: the file.
        stages: of the pipeline.
        step: what is done besides in each step, given the member.
    """

    def __init__(self, flag: Path, *, stages: int, step: Callable[[Member], Any] | None = None) -> None:
        self._flag, self._stages, self._step = flag, stages, step

    def __call__(self) -> tuple[str, int]:
        membership = Membership.read()
        assert membership is not None
        store = open_store(membership.etcd, job=membership.job)
        member = Member(store, worker=membership.worker, node=membership.node, outage_seconds=membership.outage_seconds)
        try:
            member.join()
            member.await_roster()
            member.take_seat(self.spec(membership))
            print(f"worker {membership.worker} of node {membership.node} trains")
            while not self._flag.exists():
                member.check(None)
                if self._step is not None:
                    self._step(member)
                time.sleep(0.01)
            member.leave()
            return membership.node, membership.worker
        finally:
            member.close()

    def spec(self, membership: Membership) -> JobSpec:
        """What this worker's script says about the job; it is asked when all have met."""
        return JobSpec(publisher=membership.worker, num_stages=self._stages, num_layers=self._stages)


def await_plan(cluster: LocalCluster, *, version: int = 0, within_seconds: float = 15.0) -> Plan:
    """Wait for a plan with that version, or a later one."""

    def found() -> Plan | None:
        plan = Look.at(cluster).plan()
        return plan if plan is not None and plan.number >= (0, version) else None

    plan = eventually(found, within_seconds=within_seconds, what=f"plan version {version}")
    assert isinstance(plan, Plan)
    return plan


def everything(cluster: LocalCluster) -> list[int]:
    """Return the ids of all processes of a cluster."""
    nodes = [cluster.processes(name).everything for name in cluster.names]
    server = cluster.server.pid if cluster.server is not None else None
    return [pid for node in nodes for pid in node] + ([server] if server else [])

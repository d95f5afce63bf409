"""Makes the workers of a stock launcher a cluster: each hosts its agent in threads of its own.

The workers are together already, in the launcher's store, when the config says where etcd is. There they agree on the
config, wait until each of them has reached etcd, and learn from the first that the job is theirs. So what cannot work
ends all of them at once, with one cause. From then on nobody needs the launcher's store: its host may die.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from bamboo_ds.config import BambooConfig
from bamboo_ds.elastic.hosted import HostedAgent, HostedSettings
from bamboo_ds.errors import PeerLostError
from bamboo_ds.plan import codec
from bamboo_ds.plan.job import JobSettings, JobSpec
from bamboo_ds.world.failure import BoundedStore, Failures, Guard
from bamboo_ds.world.joining import take_hosted_member
from bamboo_ds.world.member_failures import MemberFailures
from bamboo_ds.world.warming import import_heavy_modules, open_accelerator

_ENDPOINTS = "bamboo.etcd.endpoints"
_PRIVATE = "bamboo.etcd."
_OUTAGE_SECONDS = 60.0
_LOOK_SECONDS = 0.02

_agent: HostedAgent | None = None


def hosted() -> HostedAgent | None:
    """Return the agent that this worker hosts; None in a job without one."""
    return _agent


def shared_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """Return what all workers must have alike of a flat config; how one logs in to etcd is its own affair."""
    return {key: value for key, value in settings.items() if key == _ENDPOINTS or not key.startswith(_PRIVATE)}


class Meeting:
    """The launcher's store, where the workers of one launch meet before they are a cluster. No call hangs.

    Args:
        store: of all workers.
        board: where they say why they fail.
        rank: of this worker.
        size: how many there are.
        scope: in front of all keys.
        timeout_seconds: how long to wait for another worker.
    """

    def __init__(
        self, store: Any, board: Failures, *, rank: int, size: int, scope: str, timeout_seconds: float
    ) -> None:
        self.board, self.rank, self.size = board, rank, size
        self._store, self._scope, self._timeout_seconds = BoundedStore(store), scope, timeout_seconds

    def agree(self, settings: Mapping[str, str]) -> bool:
        """Hold this worker's config against that of whoever came first; return whether it says where etcd is.

        Configs that do not are not compared: the workers do without a cluster.

        Raises:
            ConfigError: names the first key that differs.
        """
        ours = JobSettings(self.rank, settings)
        wants = _ENDPOINTS in settings
        text = self._store.call("compare_set", self._key("settings"), "", codec.encode(ours).decode())
        if text is None and wants:
            raise _silent()
        theirs = ours if text is None else codec.decode(JobSettings, text)
        if not wants and _ENDPOINTS not in theirs.settings:
            return False
        theirs.check(ours)
        return True

    def await_all(self) -> None:
        """For the first worker: wait until all others have come here.

        Raises:
            PeerLostError: one has failed or does not come.
        """
        for rank in range(1, self.size):
            self._await(f"here/{rank}", f"worker {rank} has not reached etcd")

    def come(self) -> None:
        """For the others: say that this worker has come."""
        self._ask("set", f"here/{self.rank}", "1")

    def tell(self, text: str) -> None:
        """For the first worker: let the others go on."""
        self._ask("set", "go", text)

    def hear(self) -> str:
        """For the others: wait for the word of the first.

        Raises:
            PeerLostError: one has failed, or the word does not come.
        """
        self._await("go", "worker 0 has not begun the job")
        return str(self._ask("get", "go").decode())

    def _await(self, key: str, otherwise: str) -> None:
        deadline = time.monotonic() + self._timeout_seconds
        while not self._ask("check", [self._key(key)]):
            self.board.check()
            if time.monotonic() > deadline:
                raise PeerLostError(f"{otherwise} within bamboo.timeout_seconds = {self._timeout_seconds:g}")
            time.sleep(_LOOK_SECONDS)

    def _ask(self, call: str, *arguments: Any) -> Any:
        named = arguments if call == "check" else (self._key(arguments[0]), *arguments[1:])
        answer = self._store.call(call, *named)
        if self._store.lost:
            raise _silent()
        return answer

    def _key(self, name: str) -> str:
        return f"hosting/{self._scope}/{name}"


def _silent() -> PeerLostError:
    return PeerLostError("the launcher's store, by which the workers meet, does not answer")


def host(meeting: Meeting, *, block: BambooConfig, spec: JobSpec) -> HostedAgent:
    """Let this worker host its agent, and take its seat.

    Args:
        meeting: of all workers, which have agreed that they are a cluster.
        block: the `bamboo` block, with `etcd`.
        spec: of the job, with the plan of the launcher's ranks.

    Raises:
        ConfigError, StoreError: etcd cannot be used as the config says.
        PeerLostError: another worker has failed.
    """
    global _agent
    assert block.etcd is not None
    settings = HostedSettings(
        etcd=block.etcd,
        job=block.job,
        worker=meeting.rank,
        workers=meeting.size,
        ttl_seconds=block.ttl_seconds,
        timeout_seconds=block.timeout_seconds,
        outage_seconds=min(_OUTAGE_SECONDS, block.timeout_seconds),
    )
    with contextlib.ExitStack() as opened, Guard(meeting.board, lambda _: opened.close()):
        import_heavy_modules()  # for seconds they leave other threads, such as those of the agent, little time
        open_accelerator()
        agent = HostedAgent(settings)
        opened.callback(agent.close)
        _enter(agent, meeting)
        with Guard(MemberFailures(agent.member, plan=lambda: None), lambda _: None):
            agent.join(spec)
        opened.pop_all()
    _agent = agent
    take_hosted_member(agent.member)
    return agent


def _enter(agent: HostedAgent, meeting: Meeting) -> None:
    """Enter the job together with all others."""
    if meeting.rank != 0:
        meeting.come()
        agent.enter(int(meeting.hear()))
        return
    meeting.await_all()
    meeting.tell(str(agent.claim()))

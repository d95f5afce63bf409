"""All links and groups of one worker under one plan.

Groups form in one global order (every worker walks the same sorted list and joins those it belongs to), so forming
them cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta

from bamboo_ds.comm.groups import Group, GroupFactory
from bamboo_ds.comm.links import InboundLink, OutboundLink
from bamboo_ds.comm.rendezvous import KeyValue
from bamboo_ds.comm.wire import Kind
from bamboo_ds.plan import Plan


class Network:
    """What a worker sends and reduces through.

    Args:
        plan: who owns what.
        worker: id of this worker.
        backing: the store through which groups form.
        instance: distinguishes engines of one process.
        reductions: the gradient groups by name: the stages whose holders reduce together (one stage, or all that
            share a tied layer).
        redundancy: whether shadows hold redundant layers.
        timeout_seconds: the one time-out of every wait.
        check: called while waiting; raises when the plan has changed.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        worker: int,
        backing: KeyValue,
        instance: int,
        reductions: Mapping[str, frozenset[int]],
        redundancy: bool,
        timeout_seconds: float,
        check: Callable[[], None],
    ) -> None:
        self._plan, self._place = plan, plan.place(worker)
        self._timeout_seconds, self._check = timeout_seconds, check
        prefix = f"rdzv/{instance}/{plan.epoch}.{plan.version}"
        self._factory = GroupFactory(
            backing, prefix=prefix, worker=worker, timeout_seconds=timeout_seconds, check=check
        )
        self.world = self._factory.host("world", plan.workers)
        self.inbound: dict[Kind, InboundLink] = {}
        self.outbound: dict[Kind, OutboundLink] = {}
        for pipeline in range(plan.num_pipelines):
            for stage in range(plan.num_stages - 1):
                self._link(Kind.ACTIVATION, pipeline, stage, stage + 1)
                self._link(Kind.GRADIENT, pipeline, stage + 1, stage)
        self.reductions = {name: self._reduction(name, reductions[name], redundancy) for name in sorted(reductions)}

    @property
    def timeout(self) -> timedelta:
        """The one time-out of every wait."""
        return self._factory.timeout

    def forget(self) -> None:
        """Drop the journals: the step has committed."""
        for link in self.outbound.values():
            link.forget(self.timeout)

    def close(self) -> None:
        """End all links and groups, in order: gloo may abort a process that exits with live groups."""
        for inbound in self.inbound.values():
            inbound.close()
        for outbound in self.outbound.values():
            outbound.close()
        for group in self.reductions.values():
            if group is not None:
                group.close()
        self.world.close()

    def _link(self, kind: Kind, pipeline: int, source: int, target: int) -> None:
        owners = self._plan.owners[pipeline]
        if self._place.pipeline != pipeline or self._place.stage not in (source, target):
            return
        group = self._factory.host(
            f"{kind.name.lower()}-{pipeline}-{source}-{target}", (owners[source], owners[target])
        )
        if self._place.stage == source:
            self.outbound[kind] = OutboundLink(group, peer=_peer(pipeline, target, owners[target]))
        else:
            self.inbound[kind] = InboundLink(
                group,
                peer=_peer(pipeline, source, owners[source]),
                timeout_seconds=self._timeout_seconds,
                check=self._check,
            )

    def _reduction(self, name: str, stages: frozenset[int], redundancy: bool) -> Group | None:
        """Return the group of a reduction; None when this worker is its only member or none at all."""
        members = self._plan.holders(stages, redundancy=redundancy)
        if self._factory.worker not in members or len(members) == 1:
            return None
        return self._factory.device(f"reduce-{name}", members)


def _peer(pipeline: int, stage: int, worker: int) -> str:
    return f"worker {worker} (stage {stage} of pipeline {pipeline})"

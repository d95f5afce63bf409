"""Checkpoints that are written beside training, as `bamboo.checkpoint` says.

Whether one is begun is a fact of the commit: a worker says with its vote that it wants one, or that it still writes
the last. So all begin the same one, and none is begun that some cannot write.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType

from deepspeed.utils import logger

from bamboo_ds.checkpoint import Begun, Part, Periodic, Report, SavedUnit, periodic_tag
from bamboo_ds.config import BambooConfig
from bamboo_ds.engine.checkpoint_parts import CheckpointParts
from bamboo_ds.engine.saved_units import on_host
from bamboo_ds.plan import Decision, codec

_LOOK_SECONDS = 0.1


class BackgroundCheckpoints(CheckpointParts):
    """The part of the engine that writes checkpoints by itself."""

    bamboo: BambooConfig
    _decision: Decision | None
    _copies: Mapping[str, SavedUnit] = MappingProxyType({})
    """Of the units that this worker wrote last."""

    @cached_property
    def _periodic(self) -> Periodic | None:
        if self.bamboo.checkpoint is None:
            return None
        return Periodic(
            self.bamboo.checkpoint,
            step=self.global_steps,
            timeout_seconds=self.bamboo.timeout_seconds,
            tell=self._tell_checkpoint,
        )

    @cached_property
    def checkpoint_stalls(self) -> list[float]:
        """Seconds for which training stood still for each checkpoint that was written by itself."""
        return []

    @cached_property
    def checkpoint_reports(self) -> list[Report]:
        """What has come of this worker's part of each of them."""
        return []

    def _wants_checkpoint(self) -> bool:
        """Return whether a checkpoint is due after the running step, as far as this worker knows: for its votes."""
        return self._periodic is not None and self._periodic.due(self.global_steps + 1)

    def _writes_checkpoint(self) -> bool:
        """Return whether this worker still writes the last one: for its votes."""
        return self._periodic is not None and self._periodic.busy

    def _after_commit(self, *, checkpoint: bool) -> None:
        """Begin a checkpoint, if all do; training stands still for the copy to host memory only, or until it is there.

        Args:
            checkpoint: whether a worker wants one and none still writes one, as the commit says.
        """
        periodic = self._periodic
        if periodic is None:
            return
        periodic.lost(self.plan.dead)
        if not checkpoint:
            return
        begun, tag = time.monotonic(), periodic_tag(self.global_steps, self._stamp())
        periodic.begin(
            Begun(tag, self.global_steps, self.plan.workers, self._source.worker),
            lambda: self._copied_part(tag),
            (lambda: self._closing(tag, latest=True, common={}, keep=periodic.settings.keep))
            if self._is_first
            else None,
        )
        if not periodic.settings.asynchronous:
            self._finish_checkpoints()
        self.checkpoint_stalls.append(time.monotonic() - begun)

    def _copied_part(self, tag: str) -> Part:
        """Return what this worker writes, as copies that training does not change."""
        # The last checkpoint has been written, so its copies are free to be overwritten.
        old = self._copies
        self._copies = {name: on_host(one, into=old.get(name)) for name, one in self._saved_units().items()}
        return self._part(tag, self._copies, self._copied_stage_files())

    def _stamp(self) -> str:
        """Return what this commit shares with no other: the decision holds times that were measured."""
        assert self._decision is not None
        return hashlib.sha256(codec.encode(self._decision) + repr(self.plan.number).encode()).hexdigest()[:8]

    def _tell_checkpoint(self, report: Report) -> None:
        """Let people know what has come of a checkpoint; called from the thread that wrote it."""
        self.checkpoint_reports.append(report)
        if report.error:
            logger.warning(f"checkpoint {report.tag} failed: {report.error}")
            self._source.tell("checkpoint_failed", f"checkpoint {report.tag} failed: {report.error}", tag=report.tag)
        elif report.finished:
            self._source.tell(
                "checkpoint",
                f"checkpoint {report.tag} is whole, {report.seconds:.1f} s after it was begun",
                tag=report.tag,
                seconds=round(report.seconds, 3),
                own_bytes=report.bytes,
            )

    def _finish_checkpoints(self) -> None:
        """Wait until what is being written is there, or cannot be as a worker is lost.

        Before the engine ends, before another one is saved, and after each if training waits for them.
        """
        deadline = time.monotonic() + self.bamboo.timeout_seconds
        while self._periodic is not None and not self._periodic.finish(timeout_seconds=_LOOK_SECONDS):
            self._periodic.lost(self._source.current().dead)
            if time.monotonic() > deadline:
                logger.warning("the last checkpoint was not finished in time")
                return

"""`save_checkpoint`: all workers write, and go on together when the checkpoint exists.

They wait in rounds of the commit, so a worker that is lost meanwhile changes no more than who does what.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from deepspeed.utils import logger

from bamboo_ds.checkpoint import (
    Closing,
    DamagedError,
    Storage,
    await_notes,
    close,
    open_storage,
    read_manifest,
    remove_manifest,
    to_plain,
    write_part,
)
from bamboo_ds.engine.background_checkpoints import BackgroundCheckpoints
from bamboo_ds.errors import ConfigError
from bamboo_ds.world import world_of_one

PICKLED = "pickled"
"""In place of a script's own state: it is in DeepSpeed's file only."""


class DroppedError(Exception):
    """Another epoch has begun while a checkpoint was written: who has come with it knows nothing of it."""


class CheckpointSaving(BackgroundCheckpoints):
    """The part of the engine that saves when it is told to."""

    def save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save a checkpoint; every worker calls it. See `deepspeed.DeepSpeedEngine.save_checkpoint`.

        It exists when all of it is written. `save_dir` may be `s3://bucket/prefix`.

        Returns:
            Whether it was saved. It was not if another epoch began meanwhile: who has come with it knows nothing of
            this call.
        """
        client_state = client_state or {}
        tag = str(tag) if tag is not None else f"global_step{self.global_steps}"
        common = {"client_state": _client_state(client_state), "without_frozen": exclude_frozen_parameters}

        def write() -> str:
            saved = self._saved_units(exclude_frozen=exclude_frozen_parameters)
            write_part(storage, self._part(tag, saved, self._stage_files(client_state)))
            return ""

        with self._guarded(), world_of_one(quiet=self.global_rank != 0):
            self._finish_checkpoints()
            storage = open_storage(save_dir)
            try:
                self._adopt_or_drop()
                self._agree_on(tag, storage)
                self._in_round(write)
                closing = self._closing(tag, latest=save_latest, common=common)
                self._in_round(lambda: self._close(storage, closing))
            except DroppedError:
                logger.warning(f"checkpoint {tag} was not finished: another epoch has begun ({self.plan.cause})")
                return False
        return True

    def _in_round(self, work: Callable[[], str]) -> list[str]:
        """Do some work, say a row of it, and wait until all have; return the rows that are not empty, alike for all.

        When a worker is lost meanwhile, all do their work again: it may be shared out otherwise now.
        """
        while True:
            with self._through_plan_changes(self._adopt_or_drop):
                return self._committer.share("" if self._committer.decided() else work())

    def _adopt_or_drop(self) -> None:
        epoch = self.plan.epoch
        self._adopt_newest()
        if self.plan.epoch != epoch:
            raise DroppedError

    def _agree_on(self, tag: str, storage: Storage) -> None:
        """See that all mean the same, and that no checkpoint looks whole while it is overwritten."""
        told = [json.loads(row) for row in self._in_round(lambda: json.dumps([tag, self._is_there(storage, tag)]))]
        if len(tags := {row[0] for row in told}) > 1:
            raise ConfigError(f"save_checkpoint(tag=...): workers give different tags: {', '.join(sorted(tags))}")
        if any(row[1] for row in told):
            self._in_round(lambda: self._remove(storage, tag))

    def _is_there(self, storage: Storage, tag: str) -> bool:
        try:
            return self._is_first and read_manifest(storage, tag) is not None
        except DamagedError:
            return True

    def _remove(self, storage: Storage, tag: str) -> str:
        if self._is_first:
            remove_manifest(storage, tag)
        return ""

    def _close(self, storage: Storage, closing: Closing) -> str:
        if self._is_first:
            notes = await_notes(storage, closing, given_up=lambda: False, timeout_seconds=self.bamboo.timeout_seconds)
            close(storage, closing, notes)
        return ""


def _client_state(state: Mapping[str, Any]) -> Any:
    """Return a script's own state as JSON tells it; a mark where it cannot, as it is in DeepSpeed's file too."""
    try:
        return to_plain(dict(state), name="client_state")
    except ConfigError:
        return PICKLED

"""Checkpoints of the engine: written beside training, saved and loaded by the script, taken when nothing else is left.

The classes below one another: `StockCheckpoints` knows DeepSpeed's, `CheckpointParts` what to write,
`BackgroundCheckpoints` writes by itself, `CheckpointSaving` and `CheckpointLoading` do what they are told.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields

from bamboo_ds.checkpoint import Manifest, PatientStorage, SavedUnit, Storage, newest_but, open_storage
from bamboo_ds.engine.checkpoint_loading import CheckpointLoading, manifest_of
from bamboo_ds.engine.common import CommonState, Restored
from bamboo_ds.engine.gradients import Unit
from bamboo_ds.engine.saved_units import groups_of_saved, whole_state
from bamboo_ds.errors import StateLostError


class Checkpointing(CheckpointLoading):
    """The part of the engine that goes on from a checkpoint when nobody alive has a layer."""

    def _restored(self, units: Mapping[str, Unit]) -> Restored:
        """Read what the newest whole checkpoint of `bamboo.checkpoint.path` has of the units that this worker needs.

        All workers of the plan call it, in an epoch that is not settled. Nothing is put anywhere yet.

        Raises:
            StateLostError: there is none, or it cannot be read for half of the time-out (for all of it others wait).
            PlanChangedError: as from every wait.
        """
        settings = self.bamboo.checkpoint
        if settings is None:
            raise StateLostError("there are no checkpoints: bamboo.checkpoint.path would say where they are")
        storage = PatientStorage(open_storage(settings.path), seconds=self.bamboo.timeout_seconds / 2)
        try:
            return self._restored_from_newest(storage, units)
        except OSError as error:
            raise StateLostError(f"the checkpoints in {settings.path} cannot be read: {error}") from error

    def _restored_from_newest(self, storage: Storage, units: Mapping[str, Unit]) -> Restored:
        damaged = dict[str, str]()
        while True:
            row = self._in_world(
                lambda: json.dumps(newest_but(storage, damaged, among=_is_complete)) if self._is_first else ""
            )[0]
            tag, reasons = json.loads(row)
            if tag is None:
                raise StateLostError(f"there is no whole checkpoint in {storage.path}{reasons}")
            manifest = self._manifest_for_all(storage, tag, damaged)
            if manifest is None:
                continue
            read = self._read(storage, manifest, list(units), damaged, agree=self._in_world)
            if read is not None:
                return self._restored_from(manifest, read, units)

    def _manifest_for_all(self, storage: Storage, tag: str, damaged: dict[str, str]) -> Manifest | None:
        """Return the manifest of the chosen checkpoint; None if some worker does not find it any more.

        A checkpoint that was begun before the loss may be finished just now, and take the place of the chosen one.
        """
        manifest = manifest_of(storage, tag)
        worker = self._source.worker
        gone = self._in_world(lambda: "" if manifest is not None else f"worker {worker} does not find it any more")
        if gone:
            damaged[tag] = gone[0]
        return None if gone else manifest

    def _in_world(self, work: Callable[[], str]) -> list[str]:
        """See `Agree`; for an epoch that is not settled, in which there are no rounds yet."""
        return [row.decode() for row in self.network.world.gather_bytes(work().encode()) if row]

    @staticmethod
    def _restored_from(manifest: Manifest, read: Mapping[str, SavedUnit], units: Mapping[str, Unit]) -> Restored:
        known = {one.name for one in fields(CommonState)}
        return Restored(
            tag=manifest.tag,
            step=manifest.step,
            states={name: whole_state(unit, read[name]) for name, unit in units.items()},
            groups={name: group for one in read.values() for name, group in groups_of_saved(one).items()},
            common=CommonState(**{name: value for name, value in manifest.common.items() if name in known}),
        )


def _is_complete(manifest: Manifest) -> bool:
    """Return whether a checkpoint has all that a worker needs that has nothing."""
    return not manifest.common.get("without_frozen", False)

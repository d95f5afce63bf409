"""Writes a worker's part of a checkpoint, and the manifest when all parts are there."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bamboo_ds.checkpoint.finding import find, prune
from bamboo_ds.checkpoint.manifest import LATEST, MANIFEST, Manifest, UnitFiles, Written, decode, encode, written_name
from bamboo_ds.checkpoint.storage import DamagedError, FileRecord, Sink, Storage, write_bytes, write_file

_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 0.02, 0.5


@dataclass(frozen=True, slots=True)
class Part:
    """What one worker writes of a checkpoint.

    Attributes:
        tag: folder of the checkpoint.
        worker: its id.
        files: what writes each file, by name in the folder.
        units: whose state these files hold.
    """

    tag: str
    worker: int
    files: Mapping[str, Callable[[Sink], None]] = field(default_factory=dict)
    units: Mapping[str, UnitFiles] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Closing:
    """What the worker needs to know that writes the manifest.

    Attributes:
        manifest: without files, units and number.
        workers: all who write a part.
        units: all there are.
        latest: whether `latest` shall name this checkpoint.
        keep: how many checkpoints stay that were written by themselves; None to delete none.
    """

    manifest: Manifest
    workers: tuple[int, ...]
    units: frozenset[str]
    latest: bool = True
    keep: int | None = None


def write_part(storage: Storage, part: Part) -> Written:
    """Write the files of a part, and at last the note that it is there."""
    files: dict[str, FileRecord] = {}
    for name, write in part.files.items():
        files[name] = write_file(storage, f"{part.tag}/{name}", write)
    written = Written(worker=part.worker, files=files, units=part.units)
    leave_note(storage, part.tag, written)
    return written


def leave_note(storage: Storage, tag: str, written: Written) -> None:
    """Let the worker that writes the manifest know what was written, or why it was not."""
    write_bytes(storage, f"{tag}/{written_name(written.worker)}", encode(written))


def await_notes(
    storage: Storage, closing: Closing, *, given_up: Callable[[], bool], timeout_seconds: float
) -> list[Written]:
    """Wait for the notes of all workers.

    Args:
        storage: where they are left.
        closing: says whose.
        given_up: ends the wait.
        timeout_seconds: longest time to wait.

    Raises:
        DamagedError: a worker could not write, or leaves no note.
    """
    deadline, pause = time.monotonic() + timeout_seconds, _LOOK_SECONDS
    notes: dict[int, Written] = {}
    while True:
        there = storage.sizes(closing.manifest.tag)
        for worker in closing.workers:
            if worker not in notes and written_name(worker) in there:
                notes[worker] = read_note(storage, closing.manifest.tag, worker)
        missing = sorted(set(closing.workers) - notes.keys())
        if not missing:
            return list(notes.values())
        if given_up() or time.monotonic() > deadline:
            raise DamagedError(
                f"nothing was heard of worker(s) {', '.join(map(str, missing))}: they were lost, or "
                f"{storage.path} is not the same place for all nodes"
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_LOOK_SECONDS)


def read_note(storage: Storage, tag: str, worker: int) -> Written:
    """Return the note of a worker.

    Raises:
        DamagedError: the worker could not write its part.
    """
    note = decode(Written, storage.read(f"{tag}/{written_name(worker)}"))
    if note.error:
        raise DamagedError(f"worker {worker} could not write its part: {note.error}")
    return note


def close(storage: Storage, closing: Closing, notes: list[Written]) -> Manifest:
    """Write the manifest, which makes the checkpoint exist; then `latest`, and delete what is too old.

    Raises:
        DamagedError: the parts do not make a whole.
    """
    files = {name: record for note in notes for name, record in note.files.items()}
    units = {name: unit for note in notes for name, unit in note.units.items()}
    if missing := sorted(closing.units - units.keys()):
        raise DamagedError(f"nobody has written layer(s) {', '.join(missing)}")
    number = max((one.number for one in find(storage).whole), default=0) + 1
    manifest = dataclasses.replace(
        closing.manifest, files=files, units=units, number=number, saved_at=round(time.time(), 3)
    )
    write_bytes(storage, f"{manifest.tag}/{MANIFEST}", encode(manifest))
    if closing.latest:
        write_bytes(storage, LATEST, manifest.tag.encode())
    if closing.keep is not None:
        prune(storage, keep=closing.keep, newest=manifest)
    return manifest

"""Finds the checkpoints of a place: which are whole, which is the newest, which have had their day."""

from __future__ import annotations

from dataclasses import dataclass, field

from bamboo_ds.checkpoint.manifest import LATEST, MANIFEST, Manifest, decode
from bamboo_ds.checkpoint.storage import DamagedError, Storage

PERIODIC = "bamboo_step"
"""How the folders of checkpoints begin that are written by themselves."""


def periodic_tag(step: int, stamp: str) -> str:
    """Return the folder of a checkpoint that is written by itself.

    Args:
        step: optimizer steps committed.
        stamp: the same on all workers, and another one when another run reaches this step: then its files never mix
            with those of a run that died in the middle.
    """
    return f"{PERIODIC}{step:08d}-{stamp}"


@dataclass(frozen=True, slots=True)
class Found:
    """What there is.

    Attributes:
        whole: all whole checkpoints, the newest first.
        skipped: why the others are none, by tag.
    """

    whole: tuple[Manifest, ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)


def read_manifest(storage: Storage, tag: str) -> Manifest | None:
    """Return the manifest of a checkpoint; None if it has none.

    Raises:
        DamagedError: it cannot be used.
    """
    try:
        data = storage.read(f"{tag}/{MANIFEST}")
    except (FileNotFoundError, NotADirectoryError):
        return None
    manifest = decode(Manifest, data)
    if manifest.tag != tag:
        raise DamagedError(f"it is a copy of {manifest.tag}: its folder was renamed")
    return manifest


def remove_manifest(storage: Storage, tag: str) -> None:
    """Let a checkpoint not exist any more, though its files are there."""
    storage.delete(f"{tag}/{MANIFEST}")


def check_whole(storage: Storage, manifest: Manifest) -> None:
    """Hold the files of a checkpoint against its manifest, by size. Their bytes are checked when they are read.

    Raises:
        DamagedError: a file is missing or of another size.
    """
    sizes = storage.sizes(manifest.tag)
    for name, record in sorted(manifest.files.items()):
        if name not in sizes:
            raise DamagedError(f"{name} is missing")
        if sizes[name] != record.bytes:
            raise DamagedError(f"{name} has {sizes[name]} bytes, it was written with {record.bytes}")


def find(storage: Storage) -> Found:
    """Look at everything. Folders of other programs, stock DeepSpeed's checkpoints among them, are left out."""
    whole, skipped = [], {}
    for tag in storage.folders():
        try:
            manifest = read_manifest(storage, tag)
            if manifest is not None:
                check_whole(storage, manifest)
                whole.append(manifest)
            elif tag.startswith(PERIODIC) or any(name.startswith("bamboo_") for name in storage.sizes(tag)):
                skipped[tag] = "it has no manifest: it was not finished"
        except DamagedError as error:
            skipped[tag] = str(error)
    return Found(tuple(sorted(whole, key=lambda one: (-one.number, one.tag))), skipped)


def latest(storage: Storage) -> str | None:
    """Return the tag that `latest` names; None if there is no such file."""
    try:
        return storage.read(LATEST).decode().strip()
    except FileNotFoundError:
        return None


def prune(storage: Storage, *, keep: int, newest: Manifest) -> list[str]:
    """Delete the oldest of the checkpoints that were written by themselves, and what was never finished of older ones.

    Args:
        storage: where they are.
        keep: how many whole ones stay, `newest` among them.
        newest: a whole one, just written: nobody writes an older one any more.

    Returns:
        The tags that are gone.
    """
    found = find(storage)
    if newest.tag not in {one.tag for one in found.whole}:
        return []  # whatever has happened to it, the older ones are worth more than the room they take
    whole = [one.tag for one in found.whole if one.periodic]
    unfinished = [tag for tag in found.skipped if tag.startswith(PERIODIC) and tag < periodic_tag(newest.step, "")]
    gone = [tag for tag in (*whole[keep:], *unfinished) if tag != newest.tag]
    for tag in gone:
        remove_manifest(storage, tag)  # first: half a checkpoint must not look like one
        storage.delete_folder(tag)
    return gone

"""Says which checkpoint is meant, as DeepSpeed would, and which it is when that one is damaged."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from deepspeed.utils import logger

from bamboo_ds.checkpoint.finding import PERIODIC, check_whole, find, latest, read_manifest
from bamboo_ds.checkpoint.manifest import Manifest
from bamboo_ds.checkpoint.storage import DamagedError, Storage


def choose_or_tell(storage: Storage, tag: str | None, damaged: Mapping[str, str]) -> tuple[str | None, str]:
    """Return what is chosen, or why nothing can be."""
    try:
        return choose(storage, tag, damaged), ""
    except (DamagedError, OSError) as error:
        return None, str(error)


def choose(storage: Storage, tag: str | None, damaged: Mapping[str, str]) -> str | None:
    """Return the checkpoint to load; None if nothing says that there is one.

    Raises:
        DamagedError: none that could be meant is whole.
    """
    if tag is not None:
        reason = _why_not_whole(storage, tag)
        if reason is not None:
            raise DamagedError(f"checkpoint {storage.path}/{tag} cannot be loaded: {reason}")
        return tag
    named = latest(storage)
    if named is None or named.startswith(PERIODIC):
        # Whoever writes by itself may have died between a manifest and `latest`.
        newest = newest_but(storage, damaged, among=lambda manifest: manifest.periodic)[0]
        if newest is not None or named is None:
            return newest
    return _named_or_newest(storage, named, damaged)


def _named_or_newest(storage: Storage, named: str, damaged: Mapping[str, str]) -> str:
    """Return what `latest` names; if that is damaged, the newest whole checkpoint."""
    reason = damaged[named] if named in damaged else _why_not_whole(storage, named)
    if reason is None:
        return named
    logger.warning(f"checkpoint {storage.path}/{named}, which `latest` names, cannot be used: {reason}")
    newest, reasons = newest_but(storage, damaged)
    if newest is None:
        raise DamagedError(f"there is no whole checkpoint in {storage.path}{reasons}")
    return newest


def _why_not_whole(storage: Storage, tag: str) -> str | None:
    """Return what is wrong with a checkpoint; None if nothing is, as far as can be seen without reading all of it."""
    try:
        manifest = read_manifest(storage, tag)
        if manifest is not None:
            check_whole(storage, manifest)
            return None
    except DamagedError as error:
        return str(error)
    files = storage.sizes(tag)
    if not files:
        return "it does not exist"
    # Stock DeepSpeed's has no manifest; one of ours without a manifest was not finished.
    ours = tag.startswith(PERIODIC) or any(name.startswith("bamboo_") for name in files)
    return "it has no manifest: it was not finished" if ours else None


def newest_but(
    storage: Storage, damaged: Mapping[str, str], *, among: Callable[[Manifest], bool] = lambda _: True
) -> tuple[str | None, str]:
    """Return the newest whole checkpoint that was not found to be damaged, and what is wrong with the others."""
    found = find(storage)
    for tag, reason in found.skipped.items():
        logger.warning(f"checkpoint {storage.path}/{tag} is skipped: {reason}")
    wrong = "".join(f"; {tag}: {reason}" for tag, reason in sorted({**found.skipped, **damaged}.items()))
    return next((one.tag for one in found.whole if among(one) and one.tag not in damaged), None), wrong

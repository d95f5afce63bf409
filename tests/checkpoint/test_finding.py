"""The newest whole checkpoint is found, whatever else lies around."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from bamboo_ds.checkpoint import (
    DamagedError,
    Storage,
    await_notes,
    check_whole,
    close,
    find,
    latest,
    open_storage,
    read_manifest,
    write_part,
)
from bamboo_ds.checkpoint.finding import PERIODIC
from bamboo_ds.checkpoint.manifest import MANIFEST, Written, written_name
from bamboo_ds.checkpoint.storage import write_bytes
from bamboo_ds.checkpoint.writing import leave_note
from tests.checkpoint.saved import assert_holds, closing, part, save


def steps(storage: Storage) -> list[int]:
    return [manifest.step for manifest in find(storage).whole]


def test_a_checkpoint_is_found_and_read(storage: Storage) -> None:
    saved = save(storage, 3)
    found = find(storage)
    assert found.whole == (saved,)
    assert found.skipped == {}
    assert latest(storage) == saved.tag == f"{PERIODIC}00000003-abc"
    assert saved.bytes == sum(storage.sizes(saved.tag)[name] for name in saved.files)
    assert_holds(storage, saved)


def test_the_newest_is_the_last_that_was_written_not_the_one_of_the_largest_step(storage: Storage) -> None:
    """Somebody went back to an earlier one."""
    for step in (5, 9, 7):
        save(storage, step)
    assert steps(storage) == [7, 9, 5]


def test_other_programs_folders_are_no_checkpoints(storage: Storage) -> None:
    save(storage, 1)
    write_bytes(storage, "global_step5/mp_rank_00_model_states.pt", b"stock")
    write_bytes(storage, "logs/today.txt", b"x")
    assert [steps(storage), find(storage).skipped] == [[1], {}]


def test_without_a_manifest_there_is_no_checkpoint(storage: Storage) -> None:
    save(storage, 1)
    tag = f"{PERIODIC}00000002-abc"
    for worker in (0, 1):
        write_part(storage, part(tag, worker, 2))
    assert steps(storage) == [1]
    assert find(storage).skipped == {tag: "it has no manifest: it was not finished"}


# ---- damage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_every_file_that_is_cut_off_is_found_out(seed: int, tmp_path: Path) -> None:
    dice, storage = random.Random(seed), open_storage(str(tmp_path))
    old, new = save(storage, 1), save(storage, 2)
    names = [*sorted(new.files), MANIFEST]
    path = tmp_path / new.tag / names[seed % len(names)]
    path.write_bytes(path.read_bytes()[: dice.randrange(path.stat().st_size)])
    found = find(storage)
    assert found.whole == (old,)
    reason = found.skipped[new.tag]
    assert path.name in reason if path.name != MANIFEST else "manifest is no JSON" in reason
    assert_holds(storage, old)


@pytest.mark.parametrize("seed", range(20))
def test_a_byte_that_has_changed_is_found_out_when_it_is_read(seed: int, tmp_path: Path) -> None:
    dice, storage = random.Random(seed), open_storage(str(tmp_path))
    new = save(storage, 2)
    path = tmp_path / new.tag / sorted(new.files)[seed % len(new.files)]
    data = bytearray(path.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)
    assert find(storage).whole == (new,)
    with pytest.raises(DamagedError, match=f"{path.name} has other bytes than were written"):
        assert_holds(storage, new)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: text.update(step=7), "other bytes than were written"),
        (lambda text: text.update(format=99), "has format 99, this package reads 1"),
        (lambda text: text.update(record="Written"), "holds something else"),
        (lambda text: text.pop("checksum"), "other bytes than were written"),
    ],
)
def test_a_manifest_that_was_changed_is_not_believed(change: Any, told: str, tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    tag = save(storage, 1).tag
    text = json.loads(storage.read(f"{tag}/{MANIFEST}"))
    change(text)
    write_bytes(storage, f"{tag}/{MANIFEST}", json.dumps(text).encode())
    assert told in find(storage).skipped[tag]


def test_a_folder_that_was_renamed_is_told(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    tag = save(storage, 1).tag
    (tmp_path / tag).rename(tmp_path / "mine")
    assert f"it is a copy of {tag}" in find(storage).skipped["mine"]


def test_what_is_missing_is_named(storage: Storage) -> None:
    manifest = save(storage, 1)
    storage.delete(f"{manifest.tag}/bamboo_unit_1.safetensors")
    with pytest.raises(DamagedError, match=r"bamboo_unit_1\.safetensors is missing"):
        check_whole(storage, manifest)


# ---- old ones ------------------------------------------------------------------------------------------------------


def test_the_oldest_are_deleted(storage: Storage) -> None:
    for step in range(1, 6):
        save(storage, step, keep=2)
        assert steps(storage) == [step, step - 1][: step or 1] if step > 1 else [1]
    assert len(storage.folders()) == 2


def test_what_the_script_saved_is_never_deleted(storage: Storage) -> None:
    save(storage, 1, tag="mine")
    for step in (2, 3, 4):
        save(storage, step, keep=1)
    assert steps(storage) == [4, 1]


def test_what_was_never_finished_is_deleted_once_something_newer_is_whole(storage: Storage) -> None:
    save(storage, 1, keep=1)
    write_part(storage, part(f"{PERIODIC}00000002-x", 0, 2))
    write_part(storage, part(f"{PERIODIC}00000009-x", 0, 9))
    write_part(storage, part("mine", 0, 2))
    save(storage, 3, keep=1)
    assert storage.folders() == [f"{PERIODIC}00000003-abc", f"{PERIODIC}00000009-x", "mine"]


def test_old_ones_stay_while_the_new_one_is_damaged(tmp_path: Path) -> None:
    """Its last file vanishes just before the old ones would."""
    storage = open_storage(str(tmp_path))
    save(storage, 1)
    tag = f"{PERIODIC}00000002-abc"
    notes = [write_part(storage, part(tag, worker, 2)) for worker in (0, 1)]
    storage.delete(f"{tag}/bamboo_unit_1.safetensors")
    close(storage, closing(tag, 2, keep=1), notes)
    assert steps(storage) == [1]


# ---- several workers -----------------------------------------------------------------------------------------------


def test_who_leaves_no_note_is_named(storage: Storage) -> None:
    tag = f"{PERIODIC}00000002-abc"
    write_part(storage, part(tag, 0, 2))
    with pytest.raises(DamagedError, match=r"nothing was heard of worker\(s\) 1: they were lost, or .* same place"):
        await_notes(storage, closing(tag, 2), given_up=lambda: True, timeout_seconds=60.0)
    with pytest.raises(DamagedError, match=r"worker\(s\) 1"):
        await_notes(storage, closing(tag, 2), given_up=lambda: False, timeout_seconds=0.1)


def test_who_could_not_write_says_why(storage: Storage) -> None:
    tag = f"{PERIODIC}00000002-abc"
    write_part(storage, part(tag, 0, 2))
    leave_note(storage, tag, Written(worker=1, error="OSError: no space"))
    with pytest.raises(DamagedError, match="worker 1 could not write its part: OSError: no space"):
        await_notes(storage, closing(tag, 2), given_up=lambda: False, timeout_seconds=60.0)


def test_layers_that_nobody_wrote_are_named(storage: Storage) -> None:
    tag = f"{PERIODIC}00000002-abc"
    notes = [write_part(storage, part(tag, 0, 2))]
    with pytest.raises(DamagedError, match=r"nobody has written layer\(s\) 1"):
        close(storage, closing(tag, 2), notes)
    assert read_manifest(storage, tag) is None


def test_a_note_that_is_cut_off_is_no_note(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    tag = f"{PERIODIC}00000002-abc"
    for worker in (0, 1):
        write_part(storage, part(tag, worker, 2))
    path = tmp_path / tag / written_name(1)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DamagedError, match="its written is no JSON"):
        await_notes(storage, closing(tag, 2), given_up=lambda: True, timeout_seconds=1.0)

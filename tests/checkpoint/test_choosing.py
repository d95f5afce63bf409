"""Which checkpoint is meant: the one that is named, what `latest` names, or the newest that is whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from bamboo_ds.checkpoint import Storage, choose, choose_or_tell, open_storage
from bamboo_ds.checkpoint.finding import PERIODIC
from bamboo_ds.checkpoint.manifest import LATEST, MANIFEST
from bamboo_ds.checkpoint.storage import write_bytes
from tests.checkpoint.saved import part, save
from tests.checkpoint.saved import write_part as write_part_of


@pytest.fixture
def three(tmp_path: Path) -> Storage:
    """Give three checkpoints, of which `latest` names the second."""
    storage = open_storage(str(tmp_path))
    for step in (1, 2, 3):
        save(storage, step, tag=f"step{step}")
    write_bytes(storage, LATEST, b"step2\n")
    return storage


def cut_off(storage: Storage, tag: str) -> None:
    name = f"{tag}/bamboo_unit_1.safetensors"
    write_bytes(storage, name, storage.read(name)[:-1])


def test_latest_is_obeyed_even_if_others_are_newer(three: Storage) -> None:
    assert choose(three, None, {}) == "step2"


def test_a_name_is_obeyed(three: Storage) -> None:
    assert choose(three, "step1", {}) == "step1"


def test_if_what_latest_names_is_damaged_the_newest_whole_one_is_meant(three: Storage) -> None:
    cut_off(three, "step2")
    assert choose(three, None, {}) == "step3"
    cut_off(three, "step3")
    assert choose(three, None, {}) == "step1"


def test_what_was_found_to_be_damaged_inside_is_meant_no_more(three: Storage) -> None:
    assert choose(three, None, {"step2": "other bytes"}) == "step3"
    assert choose(three, None, {"step2": "other bytes", "step3": "other bytes"}) == "step1"
    found = choose_or_tell(three, None, {f"step{step}": "other bytes" for step in (1, 2, 3)})
    assert found[0] is None
    assert "there is no whole checkpoint in" in found[1]
    assert "step1: other bytes; step2: other bytes; step3: other bytes" in found[1]


def test_without_latest_nothing_is_meant_that_the_script_saved(three: Storage) -> None:
    """As in DeepSpeed: it may have said `save_latest=False`."""
    three.delete(LATEST)
    assert choose(three, None, {}) is None


def test_whoever_writes_by_itself_may_die_before_latest_is_written(three: Storage) -> None:
    for step in (4, 5):
        save(three, step)
    for named in (None, f"{PERIODIC}00000004-abc"):
        three.delete(LATEST)
        if named is not None:
            write_bytes(three, LATEST, named.encode())
        assert choose(three, None, {}) == f"{PERIODIC}00000005-abc"
        assert choose(three, None, {f"{PERIODIC}00000005-abc": "other bytes"}) == f"{PERIODIC}00000004-abc"


def test_where_there_is_nothing_nothing_is_meant(tmp_path: Path) -> None:
    assert choose_or_tell(open_storage(str(tmp_path / "nowhere")), None, {}) == (None, "")


def test_a_name_that_is_not_there_is_told(three: Storage) -> None:
    told = f"checkpoint {three.path}/step9 cannot be loaded: it does not exist"
    assert choose_or_tell(three, "step9", {}) == (None, told)


def test_a_name_is_never_replaced_by_another(three: Storage) -> None:
    cut_off(three, "step3")
    found, told = choose_or_tell(three, "step3", {})
    assert found is None
    assert "step3 cannot be loaded: bamboo_unit_1.safetensors has" in told


def test_a_stock_checkpoint_is_meant_if_it_is_named(three: Storage) -> None:
    write_bytes(three, "global_step7/mp_rank_00_model_states.pt", b"stock")
    write_bytes(three, LATEST, b"global_step7")
    assert choose(three, None, {}) == "global_step7"
    assert choose(three, "global_step7", {}) == "global_step7"


def test_one_that_was_not_finished_is_not_taken_for_stocks(three: Storage) -> None:
    tag = f"{PERIODIC}00000009-x"
    write_part_of(three, part(tag, 0, 9))
    write_bytes(three, LATEST, tag.encode())
    assert choose(three, None, {}) == "step3"
    assert "it has no manifest: it was not finished" in choose_or_tell(three, tag, {})[1]


def test_a_manifest_that_is_gone_makes_a_checkpoint_be_gone(three: Storage) -> None:
    three.delete(f"step2/{MANIFEST}")
    assert choose(three, None, {}) == "step3"

"""Keeps training outside of the workers: what a layer's state is, how it is written down and found again."""

from bamboo_ds.checkpoint.background import Report
from bamboo_ds.checkpoint.choice import Held, writers
from bamboo_ds.checkpoint.choosing import choose, choose_or_tell, newest_but
from bamboo_ds.checkpoint.finding import Found, check_whole, find, latest, periodic_tag, read_manifest, remove_manifest
from bamboo_ds.checkpoint.manifest import Manifest, UnitFiles, layer_name, stage_name, unit_name
from bamboo_ds.checkpoint.patient import PatientStorage
from bamboo_ds.checkpoint.periodic import Begun, Periodic
from bamboo_ds.checkpoint.plain import from_plain, to_plain
from bamboo_ds.checkpoint.reading import SavedGroup, SavedUnit, read_unit, write_rest, write_weights
from bamboo_ds.checkpoint.state import UnitState
from bamboo_ds.checkpoint.storage import DamagedError, Storage, open_storage
from bamboo_ds.checkpoint.writing import Closing, Part, await_notes, close, write_part

__all__ = [
    "Begun",
    "Closing",
    "DamagedError",
    "Found",
    "Held",
    "Manifest",
    "Part",
    "PatientStorage",
    "Periodic",
    "Report",
    "SavedGroup",
    "SavedUnit",
    "Storage",
    "UnitFiles",
    "UnitState",
    "await_notes",
    "check_whole",
    "choose",
    "choose_or_tell",
    "close",
    "find",
    "from_plain",
    "latest",
    "layer_name",
    "newest_but",
    "open_storage",
    "periodic_tag",
    "read_manifest",
    "read_unit",
    "remove_manifest",
    "stage_name",
    "to_plain",
    "unit_name",
    "write_part",
    "write_rest",
    "write_weights",
    "writers",
]

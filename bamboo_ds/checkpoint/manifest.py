"""What makes a checkpoint be one: the manifest, written last, which names every file with its size and checksum.

Files of a checkpoint lie in a folder, its tag::

    latest                            tag of the newest, as in DeepSpeed
    <tag>/
      layer_07-model_states.pt        weights of layer 7, as stock DeepSpeed writes and reads them
      mp_rank_01_model_states.pt      what stock DeepSpeed keeps of stage 1
      bamboo_unit_7.safetensors       what else layer 7 needs to be trained on: optimizer state, masters
      bamboo_written-3.json           worker 3 has written all of its files, which it lists
      bamboo_manifest.json            all workers have

There is no barrier between the workers: each leaves its note when it is done, and one of them, which finds all notes
there, writes the manifest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote

from pydantic import TypeAdapter, ValidationError

from bamboo_ds.checkpoint.storage import DamagedError, FileRecord

FORMAT = 1
"""Grows when an older package would misread what is written."""

MANIFEST = "bamboo_manifest.json"
LATEST = "latest"


def written_name(worker: int) -> str:
    """Return the name of the note of a worker."""
    return f"bamboo_written-{worker}.json"


def layer_name(index: int) -> str:
    """Return the name of the file with the weights of a layer, which is DeepSpeed's."""
    return f"layer_{index:02d}-model_states.pt"


def stage_name(stage: int) -> str:
    """Return the name of the file of a stage, which is DeepSpeed's."""
    return f"mp_rank_{stage:02d}_model_states.pt"


def unit_name(unit: str) -> str:
    """Return the name of the file with the rest of a unit's state."""
    return f"bamboo_unit_{quote(unit.replace(':', '-', 1), safe='')}.safetensors"


@dataclass(frozen=True, slots=True)
class UnitFiles:
    """Where the state of a unit is.

    Attributes:
        weights: file with its `state_dict`; empty if it has nothing in it.
        rest: file with all else; empty if there is nothing else.
        writer: id of the worker that wrote them.
    """

    weights: str
    rest: str
    writer: int


@dataclass(frozen=True, slots=True)
class Written:
    """What one worker has written.

    Attributes:
        worker: its id.
        files: by name.
        units: by name.
        error: why it has not written all that it should; empty if it has.
    """

    worker: int
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    units: Mapping[str, UnitFiles] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A whole checkpoint.

    Attributes:
        tag: its folder.
        step: optimizer steps committed.
        samples: samples consumed.
        num_stages: P of the job that wrote it; likewise `num_pipelines`.
        num_pipelines: D.
        parts: its bounds of the stages, in layers.
        periodic: whether it was written by itself, and is deleted when newer ones are there.
        common: what belongs to no layer: schedule of the learning rate, loss scaler, position in the data, as JSON.
        number: larger than that of every checkpoint that was there before. Clocks of nodes disagree; this does not.
        saved_at: Unix seconds, for people.
        files: all but the notes and the manifest.
        units: by name.
    """

    tag: str
    step: int
    samples: int
    num_stages: int
    num_pipelines: int
    parts: tuple[int, ...]
    periodic: bool
    common: Mapping[str, Any]
    number: int = 0
    saved_at: float = 0.0
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    units: Mapping[str, UnitFiles] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(record.bytes for record in self.files.values())


Record = TypeVar("Record", Manifest, Written)


def encode(record: Record) -> bytes:
    """Return the text of a record, with its checksum."""
    told = asdict(record)
    text = {"format": FORMAT, "record": type(record).__name__, **told, "checksum": _checksum(told)}
    return json.dumps(text, indent=1).encode()


def decode(kind: type[Record], data: bytes) -> Record:
    """Return the record that a text holds.

    Raises:
        DamagedError: it is not what was written, or written by a package that knows more.
    """
    try:
        told = json.loads(data)
    except ValueError as error:
        raise DamagedError(f"its {kind.__name__.lower()} is no JSON: {error}") from None
    if not isinstance(told, dict) or told.get("record") != kind.__name__:
        raise DamagedError(f"its {kind.__name__.lower()} holds something else")
    if told.get("format") != FORMAT:
        raise DamagedError(
            f"it has format {told.get('format')}, this package reads {FORMAT}: use the one that wrote it"
        )
    if told.pop("checksum", None) != _checksum({k: v for k, v in told.items() if k not in ("format", "record")}):
        raise DamagedError(f"its {kind.__name__.lower()} has other bytes than were written")
    return _record(kind, {key: value for key, value in told.items() if key not in ("format", "record")})


def _record(kind: type[Record], told: dict[str, Any]) -> Record:
    try:
        record: Record = TypeAdapter(kind).validate_python(told)
    except ValidationError as error:
        raise DamagedError(f"its {kind.__name__.lower()} is malformed: {error}") from None
    return record


def _checksum(told: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

"""The text form of what goes to the store: JSON with the name of the record and a schema number.

Nodes of one job may run different versions of this package. A text that this one cannot read with certainty is refused
with the remedy, never half understood. One record has one text, so texts may be compared.

The ids of the dead are written as ranges. Ids are handed out one after another, so there are about as many ranges as
live workers, however long the job runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from bamboo_ds.errors import ConfigError
from bamboo_ds.plan.cluster import Bounds, Node
from bamboo_ds.plan.commit import Ballot, Decision, Outcome, Vote
from bamboo_ds.plan.job import JobSettings, JobSpec, Roster
from bamboo_ds.plan.membership import LinkReport
from bamboo_ds.plan.plan import Plan

SCHEMA = 1
"""Grows when a record changes in a way that an older package would misread."""

RECORDS: Mapping[type[Any], str] = {
    Plan: "plan",
    Node: "node",
    Bounds: "bounds",
    LinkReport: "link_report",
    Vote: "vote",
    Decision: "decision",
    Ballot: "ballot",
    Outcome: "outcome",
    Roster: "roster",
    JobSpec: "job_spec",
    JobSettings: "job_settings",
}
"""What may be written, and its name in the text."""

_ADAPTERS: Mapping[type[Any], TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in RECORDS}

Record = TypeVar(
    "Record", Plan, Node, Bounds, LinkReport, Vote, Decision, Ballot, Outcome, Roster, JobSpec, JobSettings
)


def encode(record: Record) -> bytes:
    """Return the text of a record, the same for equal records."""
    found = {name: getattr(record, name) for name in record.__dataclass_fields__}
    if isinstance(record, Plan):
        found["dead"] = _ranges(record.dead)
        if record.homes == record.owners:
            del found["homes"]
        if not record.parts:
            del found["parts"]
    text = {"record": RECORDS[type(record)], "schema": SCHEMA, **found}
    return json.dumps(text, default=_plain, sort_keys=True, separators=(",", ":")).encode()


def decode(kind: type[Record], data: bytes | str) -> Record:
    """Return the record that a text holds.

    Args:
        kind: the class of the record.
        data: what `encode` gave.

    Raises:
        ConfigError: the text is of another record, another schema or malformed.
    """
    found = _opened(kind, data)
    try:
        if kind is Plan:
            found["dead"] = _members(found.get("dead", []))
        record: Record = _ADAPTERS[kind].validate_json(json.dumps(found), strict=True)
    except (ValidationError, TypeError, ValueError) as error:
        raise ConfigError(f"{_name(kind)} in the store is malformed: {error}; {_REMEDY}") from None
    return record


_REMEDY = "run the same version of bamboo_ds on all nodes, and give each job its own bamboo.job"


def _name(kind: type[Any]) -> str:
    return f"a {RECORDS[kind].replace('_', ' ')}"


def _opened(kind: type[Any], data: bytes | str) -> dict[str, Any]:
    """Return the fields of a text, after a look at its name, schema number and keys."""
    try:
        text = json.loads(data)
    except ValueError as error:
        raise ConfigError(f"{_name(kind)} in the store is no JSON: {error}; {_REMEDY}") from None
    found = (text.pop("record", None), text.pop("schema", None)) if isinstance(text, dict) else (None, None)
    if found != (RECORDS[kind], SCHEMA):
        raise ConfigError(
            f"the store holds record {found[0]!r} of schema {found[1]!r}, wanted {RECORDS[kind]!r} of schema {SCHEMA}; "
            f"{_REMEDY}"
        )
    unknown = sorted(text.keys() - kind.__dataclass_fields__.keys())
    if unknown:
        raise ConfigError(f"{_name(kind)} in the store has unknown keys {unknown}; {_REMEDY}")
    return dict(text)


def _plain(value: object) -> object:
    """Return what JSON has for a set, a mapping, or a record inside of a record."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} cannot go to the store")


def _ranges(ids: Iterable[int]) -> list[tuple[int, int]]:
    """Return ascending ranges (first, last) that hold exactly these ids."""
    ranges: list[tuple[int, int]] = []
    for id_ in sorted(ids):
        if ranges and ranges[-1][1] == id_ - 1:
            ranges[-1] = (ranges[-1][0], id_)
        else:
            ranges.append((id_, id_))
    return ranges


def _members(ranges: list[list[int]]) -> list[int]:
    return [id_ for first, last in ranges for id_ in range(first, last + 1)]

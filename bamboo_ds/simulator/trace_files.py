"""Reads and writes traces. Three forms are told apart by their first row.

- events: `milliseconds,add|remove,node`, as published with the Bamboo paper for EC2;
- counts: `date, time, live nodes`, polled, as published for GCP. Counts have no names: a node that goes is drawn with a
  fixed seed from those that are there;
- ours: JSON lines, `{"seconds": 12.5, "event": "add", "node": "n1", "zone": "a", "price": 0.918}`, where zone and price
  are optional, after an optional first line `{"trace": "name", "seconds": 86400}`.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from bamboo_ds.errors import ConfigError
from bamboo_ds.simulator.trace import Change, NodeEvent, Trace

__all__ = ["read_trace", "write_trace"]

_Row = tuple[str, str]
"""Where a row stands (`file:line`), and its text."""

_FORMS = "milliseconds,add|remove,node or date, time, live nodes or a JSON object"
_FIELDS = frozenset({"seconds", "event", "node", "zone", "price"})


def read_trace(path: Path) -> Trace:
    """Read a trace in any of the three forms.

    Raises:
        ConfigError: names the file and the line that is wrong.
    """
    rows = list(_rows(path))
    if not rows:
        raise ConfigError(f"{path}: the trace is empty; a row is {_FORMS}")
    first = rows[0][1]
    if first.startswith("{"):
        return _read_json(path.stem, rows)
    columns = first.split(",")
    if len(columns) == 3 and columns[1].strip() in ("add", "remove"):
        return _in_order(path.stem, [_event_of_csv(*row) for row in rows])
    if len(columns) == 3 and "-" in columns[0]:
        return _read_counts(path.stem, rows)
    raise ConfigError(f"{rows[0][0]}: {first!r} is no row of a trace: it is {_FORMS}")


def write_trace(trace: Trace, path: Path) -> None:
    """Write a trace as JSON lines."""
    lines: list[dict[str, Any]] = [{"trace": trace.name, "seconds": trace.seconds}]
    for event in trace.events:
        line: dict[str, Any] = {"seconds": event.seconds, "event": event.change.value, "node": event.node}
        if event.change is Change.ADD and event.zone:
            line["zone"] = event.zone
        if event.change is Change.ADD and event.price is not None:
            line["price"] = event.price
        lines.append(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _rows(path: Path) -> Iterator[_Row]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from None
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield f"{path.name}:{number}", line.strip()


def _in_order(name: str, events: list[NodeEvent], *, seconds: float | None = None) -> Trace:
    """Make a trace, by time; say so when it was not."""
    late = [event for before, event in pairwise(events) if event.seconds < before.seconds]
    warnings = (f"{late[0].source}: {_back(len(late))}",) if late else ()
    return Trace.of(name, events, seconds=seconds, warnings=warnings)


def _back(rows: int) -> str:
    return f"{rows} row(s) from here on go back in time; the trace was sorted"


def _event_of_csv(source: str, text: str) -> NodeEvent:
    columns = [column.strip() for column in text.split(",")]
    if len(columns) != 3 or columns[1] not in ("add", "remove") or not columns[2]:
        raise ConfigError(f"{source}: {text!r} must be milliseconds,add|remove,node")
    seconds = _parsed(float, columns[0], source, text, "milliseconds") / 1000
    return NodeEvent(_checked_seconds(seconds, source, text), Change(columns[1]), columns[2], source=source)


def _read_json(name: str, rows: list[_Row]) -> Trace:
    seconds = None
    events = []
    for number, (source, text) in enumerate(rows):
        found = _parsed(json.loads, text, source, text, "JSON")
        if number == 0 and isinstance(found, dict) and "trace" in found:
            name = str(found["trace"])
            seconds = _checked_seconds(found.get("seconds"), source, text) if "seconds" in found else None
        else:
            events.append(_event_of_json(found, source, text))
    last = max((event.seconds for event in events), default=0.0)
    if seconds is not None and last > seconds:
        raise ConfigError(f"{rows[0][0]}: the trace lasts {seconds:g} s, but an event is at second {last:g}")
    return _in_order(name, events, seconds=seconds)


def _event_of_json(found: Any, source: str, text: str) -> NodeEvent:
    if not isinstance(found, dict) or not {"seconds", "event", "node"} <= found.keys() <= _FIELDS:
        raise ConfigError(f"{source}: {text!r} must have seconds, event, node and no more than {sorted(_FIELDS)}")
    if found["event"] not in ("add", "remove"):
        raise ConfigError(f"{source}: event {found['event']!r} must be add or remove")
    price = found.get("price")
    if price is not None and not (isinstance(price, int | float) and 0 <= price < math.inf):
        raise ConfigError(f"{source}: price {price!r} must be dollars per hour, 0 or more")
    seconds = _checked_seconds(found["seconds"], source, text)
    zone = str(found.get("zone", ""))
    return NodeEvent(seconds, Change(found["event"]), str(found["node"]), zone, price, source)


def _read_counts(name: str, rows: list[_Row]) -> Trace:
    """Turn polled counts into nodes; rows are sorted first, as the published files go back in time."""
    polls = [(*_poll(source, text), source) for source, text in rows]
    late = [after for before, after in pairwise(polls) if after[0] < before[0]]
    ordered = sorted(polls, key=lambda poll: poll[0])
    start = ordered[0][0]
    counts = [((moment - start).total_seconds(), count, source) for moment, count, source in ordered]
    warnings = (f"{late[0][2]}: {_back(len(late))}",) if late else ()
    return Trace.of(name, _named(counts, name), seconds=counts[-1][0], warnings=warnings)


def _poll(source: str, text: str) -> tuple[datetime, int]:
    columns = [column.strip() for column in text.split(",")]
    if len(columns) != 3:
        raise ConfigError(f"{source}: {text!r} must be date, time, live nodes")
    moment = _parsed(datetime.fromisoformat, f"{columns[0]} {columns[1]}", source, text, "date and time")
    count = _parsed(int, columns[2], source, text, "a number of nodes")
    if count < 0:
        raise ConfigError(f"{source}: {text!r} must have 0 nodes or more")
    return moment, count


def _named(counts: Iterable[tuple[float, int, str]], name: str) -> Iterator[NodeEvent]:
    """Yield events that lead from count to count."""
    draw = random.Random(name)
    there: list[str] = []
    made = 0
    for seconds, count, source in counts:
        while len(there) < count:
            made += 1
            there.append(f"node{made}")
            yield NodeEvent(seconds, Change.ADD, there[-1], source=source)
        while len(there) > count:
            gone = there.pop(draw.randrange(len(there)))
            yield NodeEvent(seconds, Change.REMOVE, gone, source=source)


def _parsed(parse: Callable[[str], Any], value: str, source: str, text: str, wanted: str) -> Any:
    try:
        return parse(value)
    except ValueError:
        raise ConfigError(f"{source}: {text!r}: {value!r} is not {wanted}") from None


def _checked_seconds(value: Any, source: str, text: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigError(f"{source}: {text!r}: the time must be 0 or more, and finite")
    return float(value)

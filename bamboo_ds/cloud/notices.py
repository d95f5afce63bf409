"""Warnings that a node will be taken away. They are a bonus: nothing relies on one, a false one costs a move at most.

Each source is asked every few seconds. A cloud that takes back what it said is heard, too. SIGTERM, the last warning
of all clouds, the agent hears itself.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Protocol

from bamboo_ds.cloud.metadata import Metadata

__all__ = ["FileNotices", "Notice", "NoticeWatcher", "Source", "source_of"]

_log = logging.getLogger(__name__)

_SILENT_SECONDS = 60.0  # a source that fails is asked again after so long
_JOIN_SECONDS = 3.0
GCP_WARNING_SECONDS = 30.0
_AZURE_CERTAIN = ("Preempt", "Terminate", "Reboot", "Redeploy")
"""Events after which our processes are gone; a Freeze only stops them for seconds."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A warning.

    Attributes:
        source: who says so.
        text: what, for people.
        deadline: when the node will be gone, in Unix seconds; None if that is not said.
        certain: whether it will be; a recommendation is not.
    """

    source: str
    text: str
    deadline: float | None = None
    certain: bool = True

    def encode(self) -> bytes:
        """Return the text that goes to the store."""
        return json.dumps(asdict(self)).encode()


class Source(Protocol):
    """Who may warn."""

    def poll(self) -> Notice | None:
        """Return the warning that stands now; None if none does.

        Raises:
            OSError: it does not say.
        """
        ...


class Ec2Notices:
    """EC2: the interruption notice, two minutes before, and before that perhaps a recommendation to rebalance."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def poll(self) -> Notice | None:
        """Return the warning that stands now."""
        action = _object(self._metadata.get("/latest/meta-data/spot/instance-action"))
        if action is not None:
            what = str(action.get("action", "terminate"))
            return Notice("ec2", f"EC2 will {what} this spot instance", _iso(action.get("time")))
        advice = _object(self._metadata.get("/latest/meta-data/events/recommendations/rebalance"))
        if advice is not None:
            text = "EC2 recommends to move away from this spot instance: it is at elevated risk"
            return Notice("ec2", text, certain=False)
        return None


class GcpNotices:
    """GCP: half a minute before."""

    def __init__(self, metadata: Metadata, *, wall: Callable[[], float] = time.time) -> None:
        self._metadata, self._wall = metadata, wall
        self._deadline: float | None = None

    def poll(self) -> Notice | None:
        """Return the warning that stands now."""
        if self._metadata.get("/computeMetadata/v1/instance/preempted") != "TRUE":
            self._deadline = None
            return None
        self._deadline = self._deadline or self._wall() + GCP_WARNING_SECONDS
        return Notice("gcp", "GCP preempts this instance", self._deadline)


class AzureNotices:
    """Azure: scheduled events, half a minute before or more."""

    def __init__(self, metadata: Metadata, *, wall: Callable[[], float] = time.time) -> None:
        self._metadata, self._wall, self._name = metadata, wall, ""

    def poll(self) -> Notice | None:
        """Return the first warning that is about this machine."""
        self._name = self._name or self._own_name()
        found = _object(self._metadata.get("/metadata/scheduledevents?api-version=2020-07-01")) or {}
        events = found.get("Events")
        mine = [one for one in events if self._is_ours(one)] if isinstance(events, list) else []
        notices = [
            Notice("azure", f"Azure will {one['EventType'].lower()} this machine", self._when(one)) for one in mine
        ]
        return min(notices, key=lambda notice: notice.deadline or 0.0, default=None)

    def _own_name(self) -> str:
        return self._metadata.get("/metadata/instance/compute/name?api-version=2021-02-01&format=text") or ""

    def _is_ours(self, event: Any) -> bool:
        return (
            isinstance(event, dict)
            and event.get("EventType") in _AZURE_CERTAIN
            and event.get("EventStatus") != "Completed"
            and self._name in event.get("Resources", ())
        )

    def _when(self, event: Mapping[str, Any]) -> float:
        """Return when it happens: empty means that it does now."""
        try:
            return parsedate_to_datetime(str(event.get("NotBefore", ""))).timestamp()
        except (TypeError, ValueError):
            return self._wall()


class FileNotices:
    """A file, for tests, other clouds and schedulers: while it is there, the warning stands.

    It may be empty, or a JSON object: `{"deadline": Unix seconds}` or `{"seconds": from its writing on}`, and
    `"text"` and `"certain"`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def poll(self) -> Notice | None:
        """Return the warning that stands now."""
        try:
            text, written = self._path.read_text(encoding="utf-8"), self._path.stat().st_mtime
        except FileNotFoundError:
            return None
        found = _object(text) or {}
        deadline, seconds = _number(found.get("deadline")), _number(found.get("seconds"))
        if deadline is None and seconds is not None:
            deadline = written + seconds
        said = str(found.get("text") or f"{self._path} says that this node will be taken away")
        return Notice("file", said, deadline, certain=found.get("certain") is not False)


def source_of(metadata: Metadata) -> Source:
    """Return who warns on a cloud."""
    if metadata.cloud == "ec2":
        return Ec2Notices(metadata)
    return GcpNotices(metadata) if metadata.cloud == "gcp" else AzureNotices(metadata)


class NoticeWatcher:
    """Asks sources in a thread, and tells of what changes. Use it in a `with` block, or `close` it.

    Args:
        sources: who may warn; each is asked in this order, the first certain warning counts most.
        on_change: called from the thread with the warning that stands now, or None when it was taken back.
        poll_seconds: between two looks.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        on_change: Callable[[Notice | None], None],
        *,
        poll_seconds: float,
    ) -> None:
        self._sources, self._on_change, self._poll_seconds = sources, on_change, poll_seconds
        self._notices: dict[int, Notice | None] = {}
        self._next_at: dict[int, float] = {}
        self._standing: Notice | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="notices", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop. May be called again."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._look()
            self._stopped.wait(self._poll_seconds)

    def _look(self) -> None:
        for index, source in enumerate(self._sources):
            if time.monotonic() < self._next_at.get(index, 0.0):
                continue
            try:
                self._notices[index] = source.poll()
            except OSError as error:  # what it said last stands
                self._next_at[index] = time.monotonic() + _SILENT_SECONDS
                _log.info("%s", error)
        standing = [notice for notice in self._notices.values() if notice is not None]
        notice = next((one for one in standing if one.certain), standing[0] if standing else None)
        if notice != self._standing:
            self._standing = notice
            self._on_change(notice)


def _object(text: str | None) -> dict[str, Any] | None:
    """Return the JSON object of a text; an empty one for another text, None for no text."""
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _iso(value: object) -> float | None:
    try:
        at = datetime.fromisoformat(str(value).replace("Z", "+00:00"))
    except ValueError:
        return None
    return (at if at.tzinfo else at.replace(tzinfo=timezone.utc)).timestamp()

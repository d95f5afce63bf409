"""Warnings of EC2, GCP, Azure and a file, over real HTTP."""

from __future__ import annotations

import json
import os
import queue
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bamboo_ds.cloud.metadata import Metadata
from bamboo_ds.cloud.notices import AzureNotices, Ec2Notices, FileNotices, GcpNotices, Notice, NoticeWatcher, source_of
from tests.cloud.fake_metadata import FakeMetadata, fake_metadata

ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
PREEMPTED = "/computeMetadata/v1/instance/preempted"
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"


@pytest.fixture
def serve() -> Iterator[Callable[[str], tuple[FakeMetadata, Metadata]]]:
    from contextlib import ExitStack

    with ExitStack() as stack:

        def make(cloud: str) -> tuple[FakeMetadata, Metadata]:
            fake = stack.enter_context(fake_metadata(cloud))
            return fake, Metadata(cloud, endpoint=fake.endpoint, timeout_seconds=5.0)  # type: ignore[arg-type]

        yield make


Serve = Callable[[str], tuple[FakeMetadata, Metadata]]


def test_ec2_first_recommends_and_then_is_certain(serve: Serve) -> None:
    fake, metadata = serve("ec2")
    source = source_of(metadata)
    assert isinstance(source, Ec2Notices)
    assert source.poll() is None
    fake.paths[REBALANCE] = '{"noticeTime": "2026-11-30T08:20:00Z"}'
    advice = source.poll()
    assert advice is not None
    assert (advice.certain, advice.deadline) == (False, None)
    fake.paths[ACTION] = '{"action": "terminate", "time": "2026-11-30T08:22:00Z"}'
    notice = source.poll()
    assert notice is not None
    assert (notice.certain, notice.deadline) == (True, 1796026920.0)
    assert "terminate" in notice.text


@pytest.mark.parametrize("text", ["", "no JSON", "[]", '{"time": 3}'])
def test_an_odd_notice_of_ec2_is_one_without_a_deadline(serve: Serve, text: str) -> None:
    fake, metadata = serve("ec2")
    fake.paths[ACTION] = text
    notice = Ec2Notices(metadata).poll()
    assert notice is not None
    assert notice.deadline is None


def test_gcp_warns_half_a_minute_before_and_the_deadline_stays(serve: Serve) -> None:
    fake, metadata = serve("gcp")
    now = [1000.0]
    source = GcpNotices(metadata, wall=lambda: now[0])
    fake.paths[PREEMPTED] = "FALSE"
    assert source.poll() is None
    fake.paths[PREEMPTED] = "TRUE"
    for now[0] in (1000.0, 1010.0):
        notice = source.poll()
        assert notice is not None
        assert notice.deadline == 1030.0


def azure_event(**changes: object) -> dict[str, object]:
    event = {
        "EventId": "1",
        "EventType": "Preempt",
        "ResourceType": "VirtualMachine",
        "Resources": ["vm-1"],
        "EventStatus": "Scheduled",
        "NotBefore": "Mon, 30 Nov 2026 08:22:00 GMT",
    }
    return event | changes


@pytest.mark.parametrize(
    ("event", "deadline"),
    [
        (azure_event(), 1796026920.0),
        (azure_event(EventStatus="Started", NotBefore=""), 1000.0),
        (azure_event(EventType="Reboot"), 1796026920.0),
        (azure_event(EventType="Freeze"), None),
        (azure_event(Resources=["vm-2"]), None),
        (azure_event(EventStatus="Completed"), None),
    ],
)
def test_azure_schedules_events_also_of_other_machines(
    serve: Serve, event: dict[str, object], deadline: float | None
) -> None:
    fake, metadata = serve("azure")
    fake.paths |= {NAME: "vm-1", EVENTS: json.dumps({"DocumentIncarnation": 1, "Events": [event]})}
    notice = AzureNotices(metadata, wall=lambda: 1000.0).poll()
    assert (notice.deadline if notice else None) == deadline


def test_a_file_warns_as_long_as_it_is_there(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    source = FileNotices(path)
    assert source.poll() is None
    path.touch()
    assert source.poll() == Notice("file", f"{path} says that this node will be taken away")
    path.write_text('{"seconds": 20, "text": "maintenance", "certain": false}')
    os.utime(path, (1000.0, 1000.0))
    assert source.poll() == Notice("file", "maintenance", 1020.0, certain=False)
    path.write_text('{"deadline": 1234.5}')
    notice = source.poll()
    assert notice is not None
    assert notice.deadline == 1234.5


def test_a_notice_is_told_once_and_told_when_it_is_taken_back(tmp_path: Path) -> None:
    path, told = tmp_path / "notice", queue.Queue[Notice | None]()
    with closing(NoticeWatcher([FileNotices(path)], told.put, poll_seconds=0.01)):
        path.touch()
        assert told.get(timeout=10) is not None
        path.unlink()
        assert told.get(timeout=10) is None
    assert told.empty()


def test_a_certain_warning_counts_more_than_a_recommendation(tmp_path: Path, serve: Serve) -> None:
    fake, metadata = serve("ec2")
    path, told = tmp_path / "notice", queue.Queue[Notice | None]()
    fake.paths[REBALANCE] = "{}"
    with closing(NoticeWatcher([Ec2Notices(metadata), FileNotices(path)], told.put, poll_seconds=0.01)):
        first = told.get(timeout=10)
        assert first is not None
        assert first.source == "ec2"
        path.touch()
        second = told.get(timeout=10)
        assert second is not None
        assert second.source == "file"


def test_a_source_that_fails_does_not_silence_the_others(tmp_path: Path) -> None:
    path, told = tmp_path / "notice", queue.Queue[Notice | None]()
    path.touch()
    nobody = Ec2Notices(Metadata("ec2", endpoint="http://127.0.0.1:9"))
    with closing(NoticeWatcher([nobody, FileNotices(path)], told.put, poll_seconds=0.01)):
        notice = told.get(timeout=10)
        assert notice is not None
        assert notice.source == "file"

"""Reading traces: the published files, our own form, and what is wrong with a row."""

from __future__ import annotations

from pathlib import Path

import pytest

from bamboo_ds.errors import ConfigError
from bamboo_ds.simulator.market import Market, generate
from bamboo_ds.simulator.trace_files import read_trace, write_trace

PUBLISHED = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published traces are not here")
@pytest.mark.parametrize(
    ("name", "events", "removals", "instants", "peak", "mean", "hours"),
    [
        ("ec2-p3.csv", 344, 167, 79, 32, 24.0, 11.37),
        ("ec2-g4dn.csv", 153, 74, 48, 24, 12.6, 10.77),
        ("gcp-v100-east1c.txt", 1238, 579, 328, 80, 76.3, 24.17),
        ("gcp-a100-east1b.txt", 372, 154, 73, 64, 57.3, 27.02),
    ],
)
def test_the_published_files_have_their_known_figures(
    name: str, events: int, removals: int, instants: int, peak: int, mean: float, hours: float
) -> None:
    trace = read_trace(PUBLISHED / name)
    losing = {event.seconds for event in trace.events if event.change.value == "remove"}
    assert (len(trace.events), trace.preemptions) == (events, removals)
    assert max(count for _, count in trace.live()) == peak
    assert trace.mean_live() == pytest.approx(mean, abs=0.05)
    assert trace.seconds / 3600 == pytest.approx(hours, abs=0.01)
    assert len(losing) == instants or name.startswith("gcp")  # polls may fall together
    assert bool(trace.warnings) == (name == "gcp-v100-east1c.txt")


def written(folder: Path, text: str) -> Path:
    path = folder / "market.csv"
    path.write_text(text)
    return path


def test_rows_that_go_back_in_time_are_sorted_with_a_warning(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "5000,add,a\n2000,add,b\n9000,remove,a\n"))
    assert [event.node for event in trace.events] == ["b", "a", "a"]
    assert trace.warnings == ("market.csv:2: 1 row(s) from here on go back in time; the trace was sorted",)


def test_counts_become_nodes(tmp_path: Path) -> None:
    text = "2021-12-11, 11:00:00, 3\n2021-12-11, 11:00:30, 3\n2021-12-11, 11:01:00, 1\n2021-12-11, 11:02:00, 2\n"
    trace = read_trace(written(tmp_path, text))
    assert trace.live() == ((0, 3), (60, 1), (120, 2))
    assert trace == read_trace(tmp_path / "market.csv")  # who goes is drawn, but always alike


def test_our_own_form_keeps_everything(tmp_path: Path) -> None:
    trace = generate(Market(nodes=6, hours=3, rate=0.4, zones=2), seed=3)
    write_trace(trace, tmp_path / "t.jsonl")
    assert read_trace(tmp_path / "t.jsonl") == trace


def test_zone_and_price_are_optional(tmp_path: Path) -> None:
    text = '{"seconds": 1, "event": "add", "node": "a", "zone": "z", "price": 0.5}\n'
    text += '{"seconds": 2, "event": "add", "node": "b"}\n'
    first, second = read_trace(written(tmp_path, text)).events
    assert (first.zone, first.price, second.zone, second.price) == ("z", 0.5, "", None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the trace is empty"),
        ("hello\n", "market.csv:1: 'hello' is no row of a trace"),
        ("0,add,a\n10,leave,a\n", "market.csv:2: '10,leave,a' must be milliseconds,add|remove,node"),
        ("0,add,a\nsoon,remove,a\n", "market.csv:2: 'soon,remove,a': 'soon' is not milliseconds"),
        ("0,add,a\n-5,remove,a\n", "market.csv:2: .* the time must be 0 or more"),
        ("0,add,\n", "market.csv:1: '0,add,' must be milliseconds"),
        ("0,add,a\n10,remove,a\n30,remove,a\n", "market.csv:3: node a is removed again; .* in market.csv:2"),
        ("0,add,a\n10,add,a\n", "market.csv:2: node a is added again; .* in market.csv:1"),
        ("2021-12-11, 11:00:00, 3\n2021-12-11, 25:00:00, 3\n", "market.csv:2: .* is not date and time"),
        ("2021-12-11, 11:00:00, 3\n2021-12-11, 11:01:00, many\n", "market.csv:2: .* is not a number of nodes"),
        ("2021-12-11, 11:00:00, -3\n", "market.csv:1: .* must have 0 nodes or more"),
        ('{"seconds": 1, "event": "add"}\n', "market.csv:1: .* must have seconds, event, node"),
        ('{"seconds": 1, "event": "add", "node": "a", "size": 4}\n', "market.csv:1: .* no more than"),
        ('{"seconds": 1, "event": "come", "node": "a"}\n', "market.csv:1: event 'come' must be add or remove"),
        ('{"seconds": 1, "event": "add", "node": "a", "price": -1}\n', "market.csv:1: price -1 must be dollars"),
        ('{"seconds": "x", "event": "add", "node": "a"}\n', "market.csv:1: .* the time must be 0 or more"),
        ('{"trace": "t", "seconds": 1}\n{"seconds": 2, "event": "add", "node": "a"}\n', "lasts 1 s, but an event"),
        ("{broken\n", "market.csv:1: .* is not JSON"),
    ],
)
def test_a_malformed_row_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("|", r"\|")):
        read_trace(written(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the trace .*nothing\.csv"):
        read_trace(tmp_path / "nothing.csv")

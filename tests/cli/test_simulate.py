"""`bamboo-ds simulate`, as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from bamboo_ds.cli.options import command
from bamboo_ds.cli.simulate import SimulateOptions, simulate
from bamboo_ds.cli.simulate_plot import binned, draw
from bamboo_ds.simulator.comparison import DEFAULT_POLICIES, Comparison
from bamboo_ds.simulator.trace_files import read_trace
from tests.simulator.markets import SIMPLE, even, story

PUBLISHED = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"
EVENTS = "".join(f"0,add,n{node}\n" for node in range(8)) + "3600000,remove,n2\n5400000,add,n8\n7200000,remove,n9\n"


def run(*arguments: str) -> Result:
    app = typer.Typer(add_completion=False)
    app.command()(command(simulate, SimulateOptions, name="simulate"))
    return CliRunner().invoke(app, arguments)


@pytest.fixture
def model(tmp_path: Path) -> str:
    even().write(tmp_path / "even.json")
    return str(tmp_path / "even.json")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "market.csv"
    path.write_text(EVENTS.replace("7200000,remove,n9", "7200000,remove,n8"))
    return str(path)


def found(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_json_is_one_object_with_all_policies_constants_and_sources(model: str, trace: str) -> None:
    result = run("--trace", trace, "--model", model, "--json")
    assert len(result.stdout.splitlines()) == 1
    told = found(result)
    assert list(told["policies"]) == list(DEFAULT_POLICIES)
    assert {
        "throughput", "cost_per_hour", "value", "goodput", "failovers", "reconfigurations", "fatal_losses",
        "seconds_by_cause",
    } <= told["policies"]["bamboo"].keys()  # fmt: skip
    assert told["policies"]["bamboo"]["failovers"] == 2
    assert told["wall_seconds"] >= 0
    assert told["placement"] == "policy"
    assert told["constants"]["spot_price"] == {"value": 0.918, "source": "the paper: dollars per GPU hour"}
    assert told["trace"] == {"name": "market", "hours": 2.0, "preemptions": 2, "mean_nodes": 7.75, "zones": 1}


def test_the_table_says_the_same(model: str, trace: str) -> None:
    result = run("--trace", trace, "--model", model, "--policies", "bamboo,on-demand")
    told = found(result)
    assert "even, P = 4, D = 2, M = 8, on market" in result.stdout
    assert f"{told['policies']['bamboo']['cost_per_hour']:.2f}" in result.stdout
    assert "share of the time, by cause" in result.stdout
    assert "checkpoint" not in told["policies"]


def test_drawn_traces_are_means_with_deviations(model: str) -> None:
    arguments = ("--generate", "rate=0.4,hours=6,zones=2", "--model", model, "--seeds", "3", "--policies", "bamboo")
    told = found(run(*arguments, "--json"))
    assert told["seeds"] == 3
    assert told["deviations"]["bamboo"]["throughput"] > 0
    assert told["policies"]["bamboo"]["preemptions"] > 3
    again = found(run(*arguments, "--json", "--processes", "1"))
    assert again["policies"] == told["policies"]


def test_nodes_decide_how_many_pipelines_there_are(model: str) -> None:
    told = found(run("--generate", "nodes=30,hours=1", "--model", model, "--policies", "bamboo", "--json"))
    assert (told["model"]["pipelines"], told["model"]["micro_batches"]) == (7, 28)
    told = found(
        run("--generate", "nodes=30,hours=1", "--model", model, "--stages", "3", "--policies", "bamboo", "--json")
    )
    assert (told["model"]["pipelines"], told["model"]["stages"]) == (10, 3)


def test_a_sweep_has_a_row_for_each_value(model: str) -> None:
    arguments = ("--model", model, "--policies", "bamboo,on_demand", "--generate", "hours=4", "--seeds", "2")
    result = run(*arguments, "--sweep", "rate=.05,.5")
    told = found(result)
    assert [row["rate"] for row in told["sweep"]] == [0.05, 0.5]
    values = [row["policies"]["bamboo"]["value"] for row in told["sweep"]]
    lost = [row["policies"]["bamboo"]["preemptions"] for row in told["sweep"]]
    assert lost[0] < lost[1]
    assert values[0] > values[1]
    assert "0.05" in result.stdout
    assert "preempt" in result.stdout
    stages = found(run(*arguments, "--sweep", "stages=2,4", "--json"))["sweep"]
    assert [row["stages"] for row in stages] == [2, 4]


def test_a_trace_may_be_cut_scaled_given_zones_and_written(model: str, trace: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    arguments = ("--cut", "0.5-2", "--scale", "2", "--zones", "2", "--write-trace", str(out))
    told = found(run("--trace", trace, "--model", model, "--policies", "bamboo", "--json", *arguments))
    written = read_trace(out)
    assert written.seconds == 1.5 * 3600
    assert max(count for _, count in written.live()) == 16
    assert written.zones == ("zone1", "zone2")
    assert told["trace"]["zones"] == 2


def test_constants_may_be_set(model: str, trace: str) -> None:
    arguments = ("--trace", trace, "--model", model, "--policies", "bamboo", "--json")
    told = found(run(*arguments, "--set", "spot_price=2", "--set", "warm_up_seconds=0"))
    assert told["policies"]["bamboo"]["cost_per_hour"] == pytest.approx(2 * 7.75)
    assert told["constants"]["spot_price"]["value"] == 2


def test_an_odd_trace_is_played_with_a_warning(model: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.csv"
    path.write_text("5000,add,a\n0,add,b\n900000,remove,a\n")
    result = run("--trace", str(path), "--model", model, "--json")
    assert found(result)["warnings"] == ["odd.csv:2: 1 row(s) from here on go back in time; the trace was sorted"]
    assert "warning: odd.csv:2" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give either --trace FILE or --generate"),
        (("--trace", "x.csv", "--generate", "rate=.1"), "give either"),
        (("--trace", "nothing.csv"), "cannot read the trace nothing.csv"),
        (("--generate", "colour=3"), "--generate: there is no colour; it must be one of nodes, hours, rate"),
        (("--generate", "rate=high"), "--generate rate=high: must be name=number"),
        (("--generate", "rate=2"), "rate=2 of a generated trace: must be 0 to"),
        (("--generate", "rate=.1", "--model", "bert"), "--model bert: neither a file nor one of bert-large"),
        (("--generate", "rate=.1", "--policies", "magic"), "--policies magic: there is no magic"),
        (("--generate", "rate=.1", "--redundancy", "all"), "--redundancy all: must be one of off"),
        (("--generate", "rate=.1", "--seeds", "0"), "--seeds 0: must be at least 1"),
        (("--generate", "rate=.1", "--set", "speed=3"), "there is no constant speed"),
        (("--generate", "rate=.1", "--sweep", "colour=1"), "--sweep: there is no colour"),
        (("--generate", "rate=.1", "--sweep", "rate=a"), "--sweep rate=a: must be name=number"),
        (("--generate", "rate=.1", "--placement", "best"), "--placement best: must be one of auto"),
        (("--generate", "rate=.1", "--stages", "99"), "num_stages = 99"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("bamboo-ds simulate: ")
    assert message in result.stderr.replace("\n", " ")


def test_a_bad_cut_is_named(trace: str) -> None:
    assert "--cut 5: must be two hours" in run("--trace", trace, "--cut", "5").stderr
    assert "cannot cut" in run("--trace", trace, "--cut", "5-9").stderr


def test_a_bad_row_is_named_with_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("0,add,a\n9,gone,a\n")
    assert "t.csv:2" in run("--trace", str(tmp_path / "t.csv")).stderr


def test_the_picture_is_written(model: str, trace: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "picture.png"
    found(run("--trace", trace, "--model", model, "--plot", str(path), "--json"))
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 20_000
    swept = tmp_path / "sweep.png"
    arguments = ("--generate", "hours=1", "--seeds", "2", "--sweep", "rate=.1,.4", "--plot", str(swept), "--json")
    found(run("--model", model, *arguments))
    assert swept.read_bytes().startswith(b"\x89PNG")
    result = run("--trace", trace, "--model", model, "--plot", str(tmp_path / "no" / "folder.png"))
    assert result.exit_code == 2
    assert "--plot" in result.stderr


def test_the_line_of_the_picture_has_the_samples_of_the_run() -> None:
    comparison = Comparison(even(), constants=SIMPLE, redundancy="lflb")
    run_ = comparison.run(story("0 +8", "1000 -2", seconds=5000), "checkpoint", record=True)
    hours, rates = binned(run_, bins=50)
    assert len(hours) == len(rates) == 50
    assert sum(rates) * 100 == pytest.approx(run_.figures.samples)
    assert callable(draw)


def test_neither_torch_nor_deepspeed_is_loaded() -> None:
    code = (
        "import sys; from bamboo_ds.cli.simulate import SimulateOptions, simulate;"
        "simulate(SimulateOptions(generate='hours=2,rate=.5', as_json=True));"
        "assert not {'torch', 'deepspeed', 'matplotlib'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published traces are not here")
def test_the_papers_trace_gives_the_papers_order() -> None:
    told = found(run("--trace", str(PUBLISHED / "ec2-p3.csv"), "--model", "bert-large", "--json"))["policies"]
    assert told["bamboo"]["value"] > 2.4 * told["on_demand"]["value"]
    assert told["bamboo"]["throughput"] > 1.4 * told["checkpoint"]["throughput"]
    assert told["on_demand"]["cost_per_hour"] == 97.92

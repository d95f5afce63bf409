"""Workloads: how a model is cut, resized, written and read, and the models of the paper."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bamboo_ds.errors import ConfigError
from bamboo_ds.simulator.constants import Constants
from bamboo_ds.simulator.models import MODELS, built_in
from bamboo_ds.simulator.step_time import StepTimes
from bamboo_ds.simulator.workload import Layer, Workload, read_workload
from tests.simulator.markets import even


def test_stages_are_cut_by_cost_and_summed() -> None:
    layers = tuple(Layer(str(cost), cost, 2 * cost, activation_bytes=int(10 * cost)) for cost in (1, 1, 1, 3))
    workload = Workload("w", layers, 2, 4, num_stages=2, pipelines=1)
    assert workload.model.parts(2) == (0, 3, 4)
    costs = workload.stage_costs(2)
    assert (costs.forward, costs.backward, costs.redundant) == ((3, 3), (6, 6), (3, 3))
    assert workload.borders(2) == (10,)
    assert workload.borders(1) == ()


def test_a_job_that_declares_costs_is_cut_by_those_and_takes_what_it_takes() -> None:
    layers = tuple(Layer(str(cost), cost, cost) for cost in (1, 2, 3))
    workload = Workload("w", layers, 1, 3, num_stages=2, pipelines=1, cut_by=(5.0, 1.0, 1.0))
    assert workload.model.parts(2) == (0, 1, 3)
    assert workload.model.layer_costs == (5.0, 1.0, 1.0)
    assert workload.stage_costs(2).forward == (1, 5)


def test_a_redundant_forward_is_that_of_the_next_stage() -> None:
    layers = tuple(Layer(str(cost), cost, 1) for cost in (1, 2, 3))
    assert Workload("w", layers, 1, 3, num_stages=3, pipelines=1).stage_costs(3).redundant == (2, 3, 1)


def test_resizing_keeps_the_share_of_a_pipeline() -> None:
    resized = even(4, pipelines=2, micro_batches=8).resized(pipelines=5)
    assert (resized.micro_batches, resized.most_workers) == (20, 20)
    assert even(6).resized(num_stages=3).on_demand_stages == 2
    assert even(4, pipelines=4, micro_batches=5).resized(pipelines=3).micro_batches == 4


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    workload = even(3, state_bytes=7, gradient_bytes=5)
    for each in (workload, replace(workload, cut_by=(1.0, 2.0, 4.0))):
        each.write(tmp_path / "w.json")
        assert read_workload(tmp_path / "w.json") == each


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": []}, "num_stages = 3 must be from min_stages"),
        ({"num_stages": 9}, "num_stages = 9"),
        ({"pipelines": 0}, "pipelines = 0"),
        ({"micro_batches": 1}, "micro_batches = 1 are too few for 2 pipelines"),
        ({"cut_by": [1]}, "cut_by has 1 entries for 3 layers: give one for each"),
        ({"colour": 1}, "unknown key"),
        ({"layers": [{"name": "a", "forward_seconds": -1, "backward_seconds": 1}]}, "forward_seconds = -1"),
        ({"layers": [{"name": "a"}]}, "a workload is one object"),
        ({"layers": [{"name": "a", "weight": 2}]}, "unknown key"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "w.json"
    even(3).write(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=f"w.json: .*{message}"):
        read_workload(path)


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "w.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read the workload"):
        read_workload(tmp_path / "w.json")


# ---- the models of the paper -----------------------------------------------------------------------------------------

ON_DEMAND = {
    # shape and seconds of a step on machines that stay, of the artifact
    "bert-large": (5, 4, 264, 2.51),
    "gpt-2": (5, 3, 264, 4.25),
    "resnet-152": (5, 4, 384, 1.3),
    "gnmt-16": (4, 4, 288, 0.9),
    "vgg-19": (4, 4, 384, 2.2),
    "alexnet": (4, 4, 384, 1.6),
}

BAMBOO = {
    # seconds of steps of the paper's Bamboo by (P, D), of the artifact; the simulation was not fitted to them
    "bert-large": {(8, 3): 2.3, (8, 2): 3.1, (8, 1): 5.7, (12, 4): 1.45, (12, 3): 1.805, (12, 2): 2.39, (12, 1): 4.31},
    "gpt-2": {(8, 3): 3.08, (8, 2): 4.2, (8, 1): 7.7},
    "alexnet": {(6, 4): 1.55, (6, 3): 2.0, (6, 2): 3.1, (6, 1): 6.18},
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_takes_as_long_as_published_on_machines_that_stay(name: str) -> None:
    stages, pipelines, samples, seconds = ON_DEMAND[name]
    workload = built_in(name)
    assert workload.batch == samples
    assert (workload.pipelines, workload.num_stages) == (
        4,
        {"b": 12, "r": 8}.get(name[0], 12 if name == "gpt-2" else 6),
    )
    sized = workload.resized(num_stages=stages)
    object.__setattr__(sized, "pipelines", pipelines)  # of the same batch
    assert StepTimes(sized, Constants(), "off").whole_seconds(stages, pipelines) == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize("name", BAMBOO)
def test_the_papers_own_steps_follow_within_a_quarter(name: str) -> None:
    times = StepTimes(built_in(name), Constants(), "eflb")
    ratios = [times.whole_seconds(*shape) / seconds for shape, seconds in BAMBOO[name].items()]
    assert all(0.8 < ratio < 1.27 for ratio in ratios), ratios
    assert sum(ratios) / len(ratios) == pytest.approx(1.05, abs=0.15)


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="no built-in model bert: choose bert-large"):
        built_in("bert")


def test_every_constant_has_a_source_and_a_bad_one_is_named() -> None:
    table = Constants().table()
    assert all(row["source"] for row in table.values())
    assert Constants().with_values({"spot_price": 2.0}).spot_price == 2
    with pytest.raises(ConfigError, match="there is no constant price"):
        Constants().with_values({"price": 2.0})
    with pytest.raises(ConfigError, match="bandwidth = 0: must be above 0"):
        Constants(bandwidth=0)
    with pytest.raises(ConfigError, match="spot_price = -1: must be at least 0"):
        Constants(spot_price=-1)


def test_the_page_lists_every_constant_with_its_default() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "simulator.md").read_text(encoding="utf-8")
    for name, row in Constants().table().items():
        assert f"| `{name}` | {row['value']:g} | {row['source']} |" in page

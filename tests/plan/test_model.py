"""What is said of a model's layers adds up, or is refused."""

from __future__ import annotations

from typing import Any

import pytest

from bamboo_ds.errors import ConfigError
from bamboo_ds.plan.model import Model


def test_the_costs_of_stages_add_up_to_one() -> None:
    model = Model(partitions={2: (0, 3, 4), 1: (0, 4)}, layer_costs=(1.0, 1.0, 2.0, 4.0))
    assert model.stage_costs(model.parts(2), num_stages=2) == (0.5, 0.5)
    assert model.stage_costs((0, 1, 4), num_stages=2) == (0.125, 0.875)
    assert model.stage_costs(model.parts(1), num_stages=1) == (1.0,)


@pytest.mark.parametrize("model", [Model(), Model({4: (0, 1, 2, 3, 8)}), Model({4: (0, 1, 2, 3, 4)}, (0.0,) * 4)])
def test_stages_of_unknown_cost_count_alike(model: Model) -> None:
    assert model.stage_costs(model.parts(4), num_stages=4) == (0.25,) * 4


def test_stages_of_an_unknown_cut_count_alike() -> None:
    model = Model(layer_costs=(1.0, 2.0))
    assert model.parts(2) == ()
    assert model.stage_costs(model.parts(2), num_stages=2) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"partitions": {2: (0, 4)}}, r"partitions\[2\] = \(0, 4\): give the 3 ascending layer bounds of 2 stages"),
        ({"partitions": {2: (1, 2, 4)}}, r"partitions\[2\]"),
        ({"partitions": {2: (0, 5, 4)}}, r"partitions\[2\]"),
        ({"partitions": {2: (0, 2, 4), 1: (0, 5)}}, r"partitions\[2\] ends at 4, partitions\[1\] ends at 5"),
        ({"partitions": {1: (0, 5)}, "layer_costs": (1.0,) * 4}, r"partitions\[1\] ends at 5, layer_costs has 4"),
        ({"layer_bytes": (1,) * 3, "layer_costs": (1.0,) * 4}, "layer_costs has 4, layer_bytes has 3"),
        ({"layer_costs": (1.0, -1.0)}, r"layer_costs = \(1.0, -1.0\): each must be 0 or more"),
        ({"layer_costs": (float("nan"),)}, "layer_costs"),
        ({"layer_bytes": (-1,)}, "layer_bytes"),
        ({"micro_batches": 0}, "micro_batches = 0"),
    ],
)
def test_what_does_not_fit_together_is_refused(said: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Model(**said)

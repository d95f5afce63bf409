"""Layers start equal on every holder, leave no trace in the user's random numbers, and are cut as DeepSpeed cuts."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology
from torch import nn

from bamboo_ds.errors import ConfigError, UnsupportedFeatureError
from bamboo_ds.module.grid import PlanGrid
from bamboo_ds.module.layers import (
    SavedUse,
    build_stage,
    refuse_hidden_ties,
    saved_use,
    seed_all,
    tied_uses,
    untouched_randomness,
)
from bamboo_ds.module.module import pipelines_of, stages_of
from bamboo_ds.plan import static_plan


def draw() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def test_randomness_is_put_back_also_after_an_error() -> None:
    seed_all(3)
    expected = draw()
    seed_all(3)

    def disturb() -> None:
        with untouched_randomness():
            seed_all(99)
            draw()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        disturb()
    assert draw() == expected


def test_seeding_reaches_all_three_generators() -> None:
    seed_all(2**62 + 1)
    first = draw()
    seed_all(2**62 + 1)
    assert draw() == first
    seed_all(2**62 + 2)
    assert all(ours != theirs for ours, theirs in zip(draw(), first, strict=True))


SPECS = [
    TiedLayerSpec("t", nn.Linear, 4, 4, forward_fn=lambda module, value: -module(value)),
    LayerSpec(nn.Linear, 4, 4),
    torch.tanh,
    TiedLayerSpec("t", nn.Linear, 4, 4),
]


def built(bounds: tuple[int, int]) -> dict[int, nn.Module]:
    return build_stage(SPECS, stage=0, bounds=bounds, tied={}, seed_layer=seed_all).modules


def test_a_layer_starts_alike_whatever_is_built_around_it() -> None:
    whole, parts = built((0, 4)), {**built((0, 1)), **built((1, 3)), **built((3, 4))}
    assert whole.keys() == parts.keys() == {0, 1, 3}
    for index, module in whole.items():
        assert all(map(torch.equal, module.parameters(), parts[index].parameters()))


class Noisy(nn.Module):
    """Draws more than parameters, and keeps it where no state is looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.noise = torch.randn(3)


def test_a_layer_whose_state_comes_from_elsewhere_is_left_unfilled_but_for_what_else_it_draws() -> None:
    specs = [LayerSpec(nn.Linear, 2000, 2000), LayerSpec(Noisy)]

    def build(**kept: dict[int, nn.Module]) -> dict[int, nn.Module]:
        return build_stage(specs, stage=0, bounds=(0, 2), tied={}, seed_layer=seed_all, **kept).modules

    with untouched_randomness():
        whole, torch_state = build(), torch.get_rng_state()
        empty = build(kept={})
        assert torch.equal(torch.get_rng_state(), torch_state), "the last layer was drawn as ever"
    assert torch.equal(whole[1].noise, empty[1].noise)
    assert not torch.equal(whole[0].weight, empty[0].weight), "nobody has filled it"


def test_a_tied_layer_is_one_module_and_starts_at_its_first_use() -> None:
    tied: dict[str, nn.Module] = {}
    stage = build_stage(SPECS, stage=0, bounds=(0, 4), tied=tied, seed_layer=seed_all)
    assert stage.modules[0] is stage.modules[3] is tied["t"]
    value = torch.randn(2, 4)
    assert torch.equal(stage.functions[0](value), -stage.functions[3](value))


def test_a_tie_is_saved_where_deepspeed_saves_it_or_at_its_first_use() -> None:
    assert tied_uses(SPECS, "t") == [0, 3]
    assert saved_use(SPECS, "t") == 3
    assert saved_use(SPECS[:3], "t") == 0
    functions = [
        build_stage(s, stage=0, bounds=(0, 1), tied={}, seed_layer=seed_all).functions[0] for s in (SPECS, SPECS[:3])
    ]
    assert [isinstance(function, SavedUse) for function in functions] == [False, True]
    assert functions[1].state_dict().keys() == {"weight", "bias"}


def test_a_parameter_in_two_layers_is_refused() -> None:
    shared = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="layers 0 and 2 share the parameter"):
        refuse_hidden_ties([shared, nn.Tanh(), nn.Sequential(shared)])
    refuse_hidden_ties([nn.Sequential(shared, shared), LayerSpec(nn.Linear, 2, 2)])


def test_stages_and_pipelines_come_from_either_argument() -> None:
    topology = PipeDataParallelTopology(num_pp=3, num_dp=2)
    assert (stages_of(4, None), pipelines_of(None)) == (4, None)
    assert (stages_of(None, topology), pipelines_of(topology)) == (3, 2)
    with pytest.raises(ConfigError, match="give num_stages or topology"):
        stages_of(None, None)
    with pytest.raises(UnsupportedFeatureError, match="'model'"):
        stages_of(None, PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1))


@pytest.mark.parametrize("worker", range(6))
def test_the_grid_answers_as_deepspeeds_topology(worker: int) -> None:
    plan = static_plan(world_size=6, num_stages=3)
    grid, topology = PlanGrid(plan, worker=worker), PipeDataParallelTopology(num_pp=3, num_dp=2)
    coordinate = topology.get_coord(worker)
    assert (grid.get_stage_id(), grid.get_data_parallel_id()) == (coordinate.pipe, coordinate.data)
    assert (grid.get_pipe_parallel_world_size(), grid.get_data_parallel_world_size()) == (3, 2)
    assert grid.pp_group == topology.filter_match(data=coordinate.data)
    assert grid.dp_group == topology.filter_match(pipe=coordinate.pipe)
    assert [grid.stage_to_global(stage) for stage in range(3)] == grid.pp_group
    assert grid.stage_to_global(1, data=0) == topology.get_rank(pipe=1, data=0)
    with pytest.raises(UnsupportedFeatureError, match="no torch process group"):
        grid.get_data_parallel_group()

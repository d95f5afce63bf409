"""A module takes its place in plans of other epochs, with more stages or fewer than before."""

from __future__ import annotations

import pytest
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from bamboo_ds import BambooPipelineModule
from bamboo_ds.cli.bench.workers import run_workers, values
from bamboo_ds.plan import Plan

Held = tuple[int, list[int], list[int], dict[str, frozenset[int]]]


def held_after(rank: int, before: int, after: int) -> Held:
    """Return the stages, the layers held as own and as redundant, and who uses the tie, after a move."""
    tied = TiedLayerSpec("t", nn.Linear, 4, 4)
    layers = [tied, *(LayerSpec(nn.Linear, 4, 4) for _ in range(4)), tied]
    module = BambooPipelineModule(layers=layers, num_stages=1, loss_fn=nn.functional.mse_loss)
    for epoch, stages in enumerate((before, after), start=1):
        plan = Plan(owners=(tuple(range(stages)),), epoch=epoch)
        module.move(plan, redundancy=True, dtype=None)
    redundant = [] if module.redundant_stage is None else sorted(module.layers_of(module.redundant_stage))
    return module.num_stages, sorted(module.layers_of(module.own_stage)), redundant, module.tied_stages()


@pytest.mark.parametrize(
    ("before", "after", "held"),
    [
        (1, 3, (3, [0, 1], [2, 3], {"t": frozenset({0, 2})})),
        (2, 3, (3, [0, 1], [2, 3], {"t": frozenset({0, 2})})),
        (3, 2, (2, [0, 1, 2], [3, 4, 5], {"t": frozenset({0, 1})})),
        (3, 1, (1, [0, 1, 2, 3, 4, 5], [], {"t": frozenset({0})})),
    ],
)
def test_a_tied_layer_is_used_by_the_stages_of_the_new_cut(before: int, after: int, held: Held) -> None:
    assert values(run_workers(held_after, 1, args=(before, after), timeout_seconds=60)) == [held]

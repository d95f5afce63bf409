"""Seeds are pure functions of a position, and never meet by accident."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo_ds.plan.seeds import batch_seed, initial_seed, layer_seed

NUMBERS = st.integers(0, 2**63 - 1)
SMALL = st.integers(0, 10**6)


@given(NUMBERS, SMALL, SMALL, SMALL)
def test_a_seed_fits_every_generator(seed: int, step: int, micro_batch: int, layer: int) -> None:
    for found in (
        layer_seed(seed, step=step, micro_batch=micro_batch, layer=layer),
        batch_seed(seed, step=step, micro_batch=micro_batch),
        initial_seed(seed, layer=layer),
    ):
        assert 0 <= found < 2**63


def test_seeds_are_the_same_in_every_process_and_version() -> None:
    """Golden: a changed seed changes every run that resumes from a checkpoint."""
    assert layer_seed(7, step=3, micro_batch=2, layer=5) == 2295837190421875181
    assert batch_seed(7, step=3, micro_batch=2) == 5844357399232807840
    assert initial_seed(7, layer=5) == 465859708964509792


def test_no_two_positions_share_a_seed() -> None:
    found = {
        layer_seed(seed, step=step, micro_batch=micro_batch, layer=layer)
        for seed in range(4) for step in range(-5, 6) for micro_batch in range(10) for layer in range(10)
    }  # fmt: skip
    found |= {batch_seed(seed, step=s, micro_batch=m) for seed in range(4) for s in range(-5, 6) for m in range(10)}
    found |= {initial_seed(seed, layer=layer) for seed in range(4) for layer in range(10)}
    assert len(found) == 4 * 11 * 10 * 10 + 4 * 11 * 10 + 4 * 10


@pytest.mark.parametrize("other", [{"step": 2}, {"micro_batch": 3}, {"layer": 4}])
def test_every_coordinate_counts(other: dict[str, int]) -> None:
    place = {"step": 1, "micro_batch": 2, "layer": 3}
    assert layer_seed(1, **place) != layer_seed(1, **{**place, **other})
    assert layer_seed(1, **place) != layer_seed(2, **place)

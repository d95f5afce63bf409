"""The picture of a step, in the shape of the pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest

from bamboo_ds.schedule import StageCosts, clock_order, disturb, simulate, worker_orders
from bamboo_ds.schedule.grid import column_seconds, grid

GOLDEN = Path(__file__).parent / "golden"


def picture(stages: int, micro_batches: int, redundancy: str, costs: StageCosts | None = None) -> str:
    chosen = costs or StageCosts.uniform(stages)
    orders = worker_orders(stages, micro_batches=micro_batches, redundancy=redundancy, costs=chosen)
    return grid(simulate(orders, chosen), unit_seconds=column_seconds(chosen))


@pytest.mark.parametrize("redundancy", ["off", "fit", "eflb"])
def test_four_stages_and_eight_micro_batches(redundancy: str) -> None:
    assert picture(4, 8, redundancy) + "\n" == (GOLDEN / f"p4_m8_{redundancy}.txt").read_text()


@pytest.mark.parametrize(
    ("stages", "micro_batches", "redundancy", "expected"),
    [
        (1, 2, "eflb", ["0  F0 B0--- F1 B1---"]),
        (
            2,
            2,
            "off",
            [
                "0  F0 F1 .  .  B0--- .  B1---",
                "1  .  F0 B0--- F1 B1--- .  .",
            ],
        ),
        (
            2,
            2,
            "fit",
            [
                "0  F0 F1 r0 .  B0--- .  B1---",
                "1  .  F0 B0--- F1 B1--- r0 .",
            ],
        ),
        (
            2,
            3,
            "eflb",
            [
                "0  F0 F1 r0 r1 B0--- F2 .  B1--- r2 .  B2---",
                "1  r0 F0 B0--- F1 r1 B1--- F2 r2 B2--- .  .",
            ],
        ),
        (
            3,
            2,
            "fit",
            [
                "0  F0 F1 r0 r1 .  .  .  B0--- .  B1---",
                "1  .  F0 F1 r0 .  B0--- .  B1--- r1 .",
                "2  r0 .  F0 B0--- F1 B1--- r1 .  .  .",
            ],
        ),
    ],
)
def test_small_pipelines(stages: int, micro_batches: int, redundancy: str, expected: list[str]) -> None:
    assert picture(stages, micro_batches, redundancy).splitlines() == expected


def test_a_merged_worker_shows_both_stages_in_its_row() -> None:
    orders = {0: clock_order((0,), stages=3, micro_batches=1), 1: clock_order((1, 2), stages=3, micro_batches=1)}
    assert grid(simulate(orders, StageCosts.uniform(3))).splitlines() == [
        "0  F0 .  .  .  .  .  .  B0---",
        "1  .  F0 f0 b0--- B0--- .  .",
    ]


def test_a_lost_worker_ends_in_a_cross_and_its_shadow_goes_on_with_its_stage() -> None:
    costs = StageCosts.uniform(3)
    lost = disturb(3, micro_batches=3, victim=1, before=9, costs=costs, redundancy="fit")
    assert grid(lost.timeline, lost_seconds={1: lost.lost_seconds}).splitlines() == [
        "0  F0 F1 F2 r0 r1 r2 .  b0--- B0--- b1--- B1--- b2--- B2---",
        "1  .  F0 F1 r0 .  B0--- x",
        "2  r0 .  F0 B0--- F1 B1--- F2 B2--- r1 r2 .  .  .  .  .  .",
    ]


def test_columns_are_as_wide_as_the_longest_label() -> None:
    assert picture(1, 11, "off").startswith("0  F0- B0----- F1- B1-----")


@pytest.mark.parametrize(
    ("forward", "backward", "redundant", "unit"),
    [
        (1.0, 2.0, 1.0, 1.0),
        (10.0, 20.0, 10.0, 10.0),
        (0.01, 0.02, 0.01, 0.01),
        (1.0, 2.5, 1.0, 0.5),
        (1.5, 2.7, 1.5, 1.5),
        (1.0, 2.0, 1e-6, 0.1),
        (0.0101, 0.0199, 0.0101, 0.0101),
    ],
)
def test_a_column_is_a_unit_that_keeps_the_picture_short(
    forward: float, backward: float, redundant: float, unit: float
) -> None:
    costs = StageCosts.uniform(2, forward=forward, backward=backward, redundant=redundant)
    assert column_seconds(costs) == pytest.approx(unit)


def test_rows_stay_aligned_whatever_the_costs() -> None:
    costs = StageCosts((1.0, 1.37, 0.21), (2.2, 1.9, 3.3), (0.003, 0.7, 1.1))
    lengths = {len(line) // 3 for line in (row + "  " for row in picture(3, 5, "eflb", costs).splitlines())}
    assert len(lengths) == 1

"""The parity bench: its cases, that its comparisons can fail, and a few cases for real."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from bamboo_ds.cli.bench.bamboo import BambooOutcome, digest
from bamboo_ds.cli.bench.parity import MODES, SHAPES, Case, Verdict, cases, compare, replicas_bit_equal, summarize
from bamboo_ds.cli.bench.workers import WorkerResult

Run = Callable[..., list[WorkerResult]]


def test_all_shapes_modes_precisions_and_optimizers_are_crossed() -> None:
    crossed = {
        (case.stages, case.pipelines, case.redundancy, case.precision, case.optimizer) for case in cases(quick=False)
    }
    expected = itertools.product(SHAPES, MODES, ("fp32", "bf16"), ("Adam", "SGD"))
    assert {(*shape, *rest) for shape, *rest in expected} <= crossed
    assert all(case.dropout > 0 and case.clipping > 0 for case in cases(quick=False) if not case.against_stock)
    assert any(case.micro_batches % case.pipelines for case in cases(quick=False))


def test_quick_has_every_shape_and_mode() -> None:
    assert {(case.stages, case.pipelines, case.redundancy) for case in cases(quick=True)} == {
        (*shape, mode) for shape, mode in itertools.product(SHAPES, MODES)
    }
    assert {(case.precision, case.optimizer, case.tied) for case in cases(quick=True)} >= {
        ("fp32", "Adam", True),
        ("fp32", "SGD", False),
        ("bf16", "SGD", False),
    }


def test_only_untied_cases_of_one_pipeline_are_demanded_exact() -> None:
    assert Verdict(Case(4, 1, "fit", tied=True), loss_diff=1e-7).ok
    assert Verdict(Case(2, 2, "fit", tied=False), loss_diff=1e-7).ok
    assert not Verdict(Case(4, 1, "fit", tied=False), loss_diff=1e-7).ok


@pytest.mark.parametrize(
    "broken",
    [
        {"loss_diff": 2e-6},
        {"weight_diff": 2e-5},
        {"stock_diff": 2e-6},
        {"replicas_bit_equal": False},
        {"error": "worker 1 failed"},
        {"frc_done": 1},
    ],
)
def test_a_broken_demand_makes_the_report_not_ok(broken: dict[str, object]) -> None:
    case = Case(2, 2, "lflb")
    assert summarize([Verdict(case)])["ok"]
    report = summarize([Verdict(case), Verdict(case, **broken)])
    assert not report["ok"]
    assert report["failed"] == 1


def test_one_changed_bit_in_one_copy_after_one_step_is_found() -> None:
    layer = torch.nn.Linear(3, 2)
    before = digest(layer)
    with torch.no_grad():
        layer.weight[1, 2] = torch.nextafter(layer.weight[1, 2], torch.tensor(9.0))
    after = digest(layer)
    equal = [BambooOutcome(digests=[[(0, before), (1, before)], [(0, after)]]) for _ in range(2)]
    assert replicas_bit_equal(equal)
    assert replicas_bit_equal(equal, tied=(0, 1))
    assert not replicas_bit_equal([*equal, BambooOutcome(digests=[[(0, before)], [(0, before)]])])
    assert not replicas_bit_equal([BambooOutcome(digests=[[(0, before), (1, after)]])], tied=(0, 1))


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 1, "fit", tied=False),
        Case(2, 2, "eflb"),
        Case(1, 2, "off", "bf16", "SGD"),
        Case(2, 1, "lflb", dropout=0.0, clipping=0.0, micro_batches=4, against_stock=True),
    ],
    ids=lambda case: f"{case.stages}x{case.pipelines}-{case.redundancy}-{case.precision}",
)
def test_real_workers_agree_with_one_process(workers: Run, case: Case) -> None:
    verdict = compare(case)
    assert verdict.error is None
    assert verdict.ok, verdict

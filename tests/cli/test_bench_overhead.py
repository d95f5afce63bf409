"""The overhead bench: what it demands, and one small setting for real."""

from __future__ import annotations

from typing import Any

import pytest

from bamboo_ds.cli.bench.overhead import FULL, QUICK, Setting, demands, summarize

FIGURES: dict[str, Any] = {
    "off_vs_stock": 0.97,
    "fit_vs_off": 1.01,
    "eflb_vs_off": 1.10,
    "lflb_vs_off": 1.0,
    "eflb_bound": 1.08,
    "frc_share_fit": [1.0, 0.5],
    "host_peak_bytes": 10,
    "swap_saved_bytes": 7,
}


def test_settings_have_the_names_of_the_report() -> None:
    assert [setting.name for setting in FULL if setting.paced] == ["p4_m8", "p4_m16", "p8_m16"]
    assert [setting.stages for setting in FULL if not setting.paced] == [2]
    assert QUICK[0] == FULL[0]


@pytest.mark.parametrize("broken", [{"off_vs_stock": 1.03}, {"fit_vs_off": 1.03}, {"eflb_vs_off": 1.14}])
def test_each_demand_can_fail(broken: dict[str, float]) -> None:
    setting = Setting(4, 8)
    assert summarize({setting: FIGURES})["ok"]
    report = summarize({setting: {**FIGURES, **broken}})
    assert not report["ok"]
    assert report["failed"] == {"p4_m8": list(broken)}


def test_real_layers_are_shown_but_not_judged() -> None:
    assert demands(Setting(2, 8, paced=False), {**FIGURES, "fit_vs_off": 2.0}) == {}

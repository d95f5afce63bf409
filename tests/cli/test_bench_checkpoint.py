"""The checkpoint bench: what it makes of times that are known, and what it demands."""

from __future__ import annotations

from bamboo_ds.cli.bench.checkpoint import INTERVAL, STALL_BOUND, WARM_STEPS, Told, summarize

STEP, COUNT = 0.4, 6


def told(worker: int, *, stall: float = 0.004, beside: float = 0.002, errors: tuple[str, ...] = ()) -> Told:
    """Return what a worker tells whose steps all take as long, but for those with a checkpoint."""
    ends, now = [], 0.0
    for step in range(WARM_STEPS + COUNT * INTERVAL + 2):
        committed = step + 1
        copies = committed % INTERVAL == 0
        writes = committed % INTERVAL == 1 and committed > INTERVAL
        now += STEP + (stall if copies else beside if writes else 0.0)
        ends.append(now)
    written = [(1000 * (worker + 1), 0.5 if worker == 0 else 0.1)] * COUNT
    return Told(ends, [stall] * COUNT, written, list(errors))


def test_times_that_are_known_are_found() -> None:
    report = summarize([told(0), told(1)], whole=2)
    assert report["ok"]
    assert abs(report["stall_vs_step"] - 0.01) < 1e-6
    assert abs(report["beside_vs_step"] - 0.005) < 1e-6
    assert report["copy_seconds"] == 0.004
    assert report["step_seconds"] == STEP
    assert (report["checkpoint_bytes"], report["write_bytes_per_second"]) == (3000, 6000.0)
    assert report["checkpoints"] == COUNT


def test_each_demand_can_fail() -> None:
    assert not summarize([told(0, stall=1.1 * STALL_BOUND * STEP), told(1)], whole=2)["ok"]
    assert not summarize([told(0, errors=("OSError: no space",)), told(1)], whole=2)["ok"]
    assert not summarize([told(0), told(1)], whole=0)["ok"]

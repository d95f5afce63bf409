"""The ledger and its checkpoints."""

from __future__ import annotations

import pytest

from bamboo_ds.simulator.ledger import Cause, Checkpoints, Ledger, Pace

PACE = Pace(training=6.0, redundancy=2.0, merged=1.0, checkpoint=1.0, samples=5.0)


def test_steps_are_noted_by_cause() -> None:
    ledger = Ledger(record=True)
    ledger.train(PACE, 3, since=10)
    ledger.spend(Cause.RESTART, 4)
    found = {cause.value: seconds for cause, seconds in ledger.seconds.items() if seconds}
    assert found == {"training": 18, "redundancy": 6, "merged": 3, "checkpoint": 3, "restart": 4}
    assert (ledger.samples, ledger.steps) == (15, 3)
    assert ledger.segments == [(10, 40, 0.5)]


def trained(ledger: Ledger, checkpoints: Checkpoints, steps: int, since: float) -> None:
    ledger.train(PACE, steps, since=since)
    checkpoints.note(PACE, steps, since=since)


@pytest.mark.parametrize(
    ("steps", "write", "kept"),
    [
        (10, 5, 7),  # checkpoints begin at 0, 25, 50, 75, 100: that of 100 is not whole yet, that of 75 has 7 steps
        (11, 5, 10),  # that of 100 is whole at 105
        (10, 30, 6),  # one begins only when the last is whole: 0, 30, 60, 90; that of 60 is whole at 90
        (2, 5, 0),
    ],
)
def test_going_back_loses_what_came_after_the_last_whole_checkpoint(steps: int, write: float, kept: int) -> None:
    ledger = Ledger(record=True)
    checkpoints = Checkpoints(ledger, interval_seconds=25, write_seconds=write)
    trained(ledger, checkpoints, steps, since=0)
    before = sum(ledger.seconds.values())
    checkpoints.roll_back(10 * steps)
    assert (ledger.steps, ledger.samples) == (kept, 5 * kept)
    assert ledger.seconds[Cause.LOST] == pytest.approx(10 * (steps - kept))
    assert sum(ledger.seconds.values()) == pytest.approx(before)
    assert sum((end - start) * rate for start, end, rate in ledger.segments) == pytest.approx(5 * kept)


def test_going_back_twice_loses_nothing_twice() -> None:
    ledger = Ledger()
    checkpoints = Checkpoints(ledger, interval_seconds=50, write_seconds=1)
    trained(ledger, checkpoints, 12, since=0)
    checkpoints.roll_back(120)
    assert ledger.steps == 10
    trained(ledger, checkpoints, 1, since=200)
    checkpoints.roll_back(211)
    # the new one began at 200, when 10 steps were trained, and is whole
    assert ledger.steps == 10
    assert ledger.seconds[Cause.LOST] == 30


def test_a_long_pause_between_steps_begins_no_checkpoint_in_it() -> None:
    ledger = Ledger()
    checkpoints = Checkpoints(ledger, interval_seconds=50, write_seconds=1)
    trained(ledger, checkpoints, 2, since=0)
    trained(ledger, checkpoints, 3, since=1000)
    checkpoints.roll_back(1030)
    assert 2 <= ledger.steps <= 5
    assert ledger.seconds[Cause.LOST] == pytest.approx(10 * (5 - ledger.steps))

"""The clocks."""

from __future__ import annotations

import threading
import time

import pytest

from bamboo_ds.clock import ManualClock, SystemClock


def test_a_manual_clock_moves_only_when_told() -> None:
    clock = ManualClock(5.0)
    assert clock.now() == 5.0
    clock.advance(2.5)
    assert clock.now() == 7.5
    with pytest.raises(ValueError, match="does not go back"):
        clock.advance(-1)


def test_whoever_waits_on_a_manual_clock_wakes_when_it_moves() -> None:
    clock, condition, woken = ManualClock(), threading.Condition(), []

    def wait_for_ten() -> None:
        with condition:
            while clock.now() < 10:
                clock.wait(condition, 10 - clock.now())
            woken.append(clock.now())

    thread = threading.Thread(target=wait_for_ten)
    thread.start()
    for _ in range(10):
        assert not woken
        clock.advance(1)
    thread.join(5)
    assert woken == [10]


def test_a_manual_clock_that_nobody_moves_says_so() -> None:
    clock, condition = ManualClock(guard_seconds=0.1), threading.Condition()
    with condition, pytest.raises(TimeoutError, match="nobody moved it"):
        clock.wait(condition, 1)


def test_the_system_clock_waits_in_real_time() -> None:
    clock, condition = SystemClock(), threading.Condition()
    began = time.monotonic()
    with condition:
        clock.wait(condition, 0.1)
        clock.wait(condition, -1)
    assert 0.09 < time.monotonic() - began < 2
    assert clock.now() >= began

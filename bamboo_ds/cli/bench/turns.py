"""Several jobs on one machine that take turns, so that a slow minute of the machine slows all of them alike.

Stock DeepSpeed and Bamboo want different process groups, so each contestant is a set of processes of its own. All are
forked in one `run_workers` call; a small store says whose turn it is. Those who wait sleep, and use no core.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import median
from typing import Any, Protocol

from bamboo_ds.cli.bench.workers import free_port, run_workers, values

_GRACE_SECONDS = 5.0
"""The peers of a failed worker end by themselves; other contestants would wait for a turn that never comes."""


class Stepper(Protocol):
    """A built engine, reduced to what is timed."""

    def step(self) -> None:
        """Train one step."""

    def warmed_up(self) -> None:
        """Be told that the timed steps begin."""

    def facts(self) -> dict[str, Any]:
        """Return what this worker knows after the last step."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """One job of the comparison."""

    name: str
    build: Callable[[], Stepper]
    """Builds the engine in a worker whose environment is set."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How much is run: `rounds` of one turn per contestant, of `steps` each, after `warm_up_steps` by each."""

    rounds: int
    steps: int
    warm_up_steps: int
    timeout_seconds: float


@dataclass(slots=True)
class Timed:
    """What was measured of one contestant."""

    seconds: list[float] = field(default_factory=list)
    """By round, the median time of a step."""
    facts: list[dict[str, Any]] = field(default_factory=list)
    """By rank."""


def take_turns(contestants: Sequence[Contestant], world_size: int, pace: Pace) -> dict[str, Timed]:
    """Run all contestants, each in `world_size` workers, in turns.

    Raises:
        WorkerError: A worker of any contestant failed.
    """
    ports = [free_port() for _ in range(len(contestants) + 1)]
    arguments = (contestants, world_size, pace, ports)
    total = len(contestants) * world_size
    timeout = pace.timeout_seconds
    workers = run_workers(_worker, total, args=arguments, timeout_seconds=timeout, grace_seconds=_GRACE_SECONDS)
    results = values(workers)
    return {
        contestant.name: _timed(results[index * world_size : (index + 1) * world_size])
        for index, contestant in enumerate(contestants)
    }


def ratio(numerator: Timed, denominator: Timed) -> float:
    """Return the median over rounds of how much longer a step took, each round compared with itself."""
    return median(above / below for above, below in zip(numerator.seconds, denominator.seconds, strict=True))


@dataclass(slots=True)
class _Finished:
    """What a worker hands back: by round, when the turn began and when each step ended (monotonic seconds)."""

    turns: list[list[float]]
    facts: dict[str, Any]


def _worker(
    rank: int, contestants: Sequence[Contestant], world_size: int, pace: Pace, ports: Sequence[int]
) -> _Finished:
    own, place = divmod(rank, world_size)
    size = str(world_size)
    os.environ.update(RANK=str(place), LOCAL_RANK=str(place), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ["MASTER_PORT"] = str(ports[own])
    umpire = _Umpire(ports[-1], world_size, pace.timeout_seconds, host=rank == 0)
    stepper = umpire.turn(own, contestants[own].build)
    umpire.turn(len(contestants) + own, lambda: _train(stepper, pace.warm_up_steps))
    stepper.warmed_up()
    turns = [
        umpire.turn(turn, lambda: _train(stepper, pace.steps)) for turn in _turns(own, len(contestants), pace.rounds)
    ]
    umpire.leave(len(contestants) * world_size)
    return _Finished(turns, stepper.facts())


def _turns(own: int, count: int, rounds: int) -> list[int]:
    """Number the turns of one contestant; every other round runs backwards, so that a steady drift cancels."""
    first = 2 * count  # after building and warming up
    return [first + number * count + (own if number % 2 == 0 else count - 1 - own) for number in range(rounds)]


def _train(stepper: Stepper, steps: int) -> list[float]:
    moments = [time.monotonic()]
    for _ in range(steps):
        stepper.step()
        moments.append(time.monotonic())
    return moments


class _Umpire:
    """Lets one contestant at a time run; the others sleep in the store."""

    def __init__(self, port: int, members: int, timeout_seconds: float, *, host: bool) -> None:
        import torch.distributed as dist

        self._members, self._host = members, host
        self._store = dist.TCPStore(
            "127.0.0.1", port, is_master=host, wait_for_workers=False, timeout=timedelta(seconds=timeout_seconds)
        )

    def turn(self, number: int, run: Callable[[], Any]) -> Any:
        """Run when the turn comes; it ends when all members of the contestant have run."""
        if number:
            self._store.wait([f"turn {number}"])
        value = run()
        if self._store.add(f"done {number}", 1) == self._members:
            self._store.set(f"turn {number + 1}", "now")
        return value

    def leave(self, everyone: int) -> None:
        """Say that this worker needs the store no more; its host waits for all, as the store goes away with it."""
        if self._store.add("left", 1) == everyone:
            self._store.set("all left", "yes")
        if self._host:
            self._store.wait(["all left"])


def _timed(workers: Sequence[_Finished]) -> Timed:
    """Time each step from the moment all had ended the one before to the moment all have ended it."""
    timed = Timed(facts=[worker.facts for worker in workers])
    for moments in zip(*(worker.turns for worker in workers), strict=True):
        ends = [max(each) for each in zip(*moments, strict=True)]
        steps = [after - before for before, after in itertools.pairwise(ends)]
        timed.seconds.append(median(steps[1:] or steps))  # the first step of a turn wakes its processes up
    return timed

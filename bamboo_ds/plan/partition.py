"""Cuts a model into stages of even cost.

The slowest stage sets the pace of a pipeline, so the largest cost of a stage is made as small as can be; among the cuts
with that pace, the most even one is chosen, the one with the least sum of squares.

The trick: the best pace is the cost of *some* run of layers, and whether a pace can be kept is answered greedily. So a
binary search over all runs finds it exactly, and it leaves few cuts for the second search.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from bamboo_ds.errors import ConfigError


def balanced_parts(costs: Sequence[float], stages: int, *, ends: tuple[float, float] = (0.0, 0.0)) -> tuple[int, ...]:
    """Return layer bounds: stage s has the layers from `parts[s]` to before `parts[s + 1]`.

    Args:
        costs: of each layer, forward and backward, in any unit. If all are 0, layers count alike.
        stages: how many; each gets at least one layer.
        ends: what the first and the last stage have to do besides (reading batches, the loss).

    Returns:
        stages + 1 ascending bounds, from 0 to the number of layers; the same on every machine.

    Raises:
        ConfigError: there are fewer layers than stages, or a cost is negative or not finite.
    """
    layers = len(costs)
    if not 1 <= stages <= layers:
        raise ConfigError(f"{layers} layers make no {stages} stages: each stage has at least one layer")
    if not all(0 <= cost < float("inf") for cost in (*costs, *ends)):
        raise ConfigError(f"costs of layers must be 0 or more, and finite, not {list(costs)} with ends {ends}")
    weights = [float(cost) for cost in costs] if any(costs) else [1.0] * layers
    # The first layer is in the first stage whatever the cut, and the last layer in the last.
    weights[0] += ends[0]
    weights[-1] += ends[1]
    until = [0.0, *accumulate(weights)]
    return _most_even(until, stages, pace=_best_pace(until, stages))


def _best_pace(until: list[float], stages: int) -> float:
    """Return the least possible cost of the most expensive stage. `until[i]` is the cost of the layers before i."""
    runs = sorted({stop - start for index, start in enumerate(until) for stop in until[index + 1 :]})
    low, high = 0, len(runs) - 1
    while low < high:
        middle = (low + high) // 2
        if _stages_needed(until, runs[middle]) <= stages:
            high = middle
        else:
            low = middle + 1
    return runs[low]


def _stages_needed(until: list[float], pace: float) -> int:
    """Return the fewest stages of which none costs more; more than there are layers if one layer does.

    More stages than the fewest are no problem: a stage that is split becomes cheaper.
    """
    layers, start, needed = len(until) - 1, 0, 0
    while start < layers:
        stop = _furthest(until, start, pace)
        if stop == start:
            return layers + 1
        start, needed = stop, needed + 1
    return needed


def _furthest(until: list[float], start: int, pace: float) -> int:
    """Return the last bound such that the layers from `start` to before it keep the pace."""
    # `until[stop] <= until[start] + pace` would round otherwise than the difference that is the pace.
    stop = bisect_right(until, until[start] + pace)
    while stop < len(until) and until[stop] - until[start] <= pace:
        stop += 1
    while stop > start + 1 and until[stop - 1] - until[start] > pace:
        stop -= 1
    return stop - 1


def _most_even(until: list[float], stages: int, *, pace: float) -> tuple[int, ...]:
    """Return the bounds with the least sum of squares among those that keep the pace."""
    layers = len(until) - 1
    furthest = [_furthest(until, start, pace) for start in range(layers)]
    squares = {layers: 0.0}  # by bound: least sum of squares of all stages after it
    choices: list[dict[int, int]] = []
    for stage in reversed(range(stages)):
        after, chosen = squares, {}
        squares = {}
        for start in range(stage, layers - (stages - stage) + 1):
            reachable = (stop for stop in range(start + 1, furthest[start] + 1) if stop in after)
            best = min(((after[stop] + (until[stop] - until[start]) ** 2, stop) for stop in reachable), default=None)
            if best is not None:
                squares[start], chosen[start] = best
        choices.append(chosen)
    parts = [0]
    for chosen in reversed(choices):
        parts.append(chosen[parts[-1]])
    return tuple(parts)

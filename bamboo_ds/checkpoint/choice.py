"""Says who writes which layer, so that each is written once and nobody writes much more than the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Held:
    """A unit, as far as its writing is concerned.

    Attributes:
        holders: workers that have it.
        bytes: size of its state.
    """

    holders: tuple[int, ...]
    bytes: int


def writers(units: Mapping[str, Held]) -> dict[str, int]:
    """Return the worker that writes each unit: the largest first, each by the holder with the least to write so far.

    The same for all who ask about the same units.

    Args:
        units: by name; each has a holder.
    """
    load: dict[int, int] = {}
    chosen: dict[str, int] = {}
    for name, unit in sorted(units.items(), key=lambda item: (-item[1].bytes, item[0])):
        chosen[name] = min(unit.holders, key=lambda worker: (load.get(worker, 0), worker))
        # A unit without tensors is still a file or two: it counts, so they are not all the first holder's.
        load[chosen[name]] = load.get(chosen[name], 0) + max(unit.bytes, 1)
    return chosen


def of_writer(worker: int, chosen: Mapping[str, int]) -> Iterable[str]:
    """Return the units that one worker writes, in order."""
    return sorted(name for name, writer in chosen.items() if writer == worker)

"""Who sends which layer to whom when a new epoch begins.

All workers tell one another what they hold and what they need; then each works out the same list. A layer comes from
the holder that has least to send so far, so that all links are busy; but a further pair of workers takes time, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_PAIR_BYTES = 8 << 20
"""What could travel in the time that it takes to connect two workers: some 3 ms, at 20 Gb/s."""


@dataclass(frozen=True, slots=True)
class Stock:
    """What one worker holds and needs.

    Attributes:
        worker: its id.
        step: optimizer steps that are in what it holds; -1 when it holds nothing that counts.
        settled: whether it has ever been in an epoch that has settled. Before that, copies of a layer may differ.
        holds: bytes of the state of each unit that it can give. While nothing has settled, of those only that it owns:
            what the script has done to the weights is in these.
        digests: of the state of each unit that it has, while nothing has settled: who has the same needs none.
        needs: names of the units that it must have.
    """

    worker: int
    step: int
    settled: bool
    holds: Mapping[str, int] = field(default_factory=dict)
    digests: Mapping[str, int] = field(default_factory=dict)
    needs: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Shipment:
    """One unit that travels."""

    source: int
    target: int
    unit: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Shipping:
    """What follows from all stocks.

    Attributes:
        shipments: in an order that all workers share.
        lost: names of needed units that nobody has.
        leader: the worker whose counters are everybody's; None when nobody has any that count.
        current: workers that are at the leader's step, and need no counters.
    """

    shipments: tuple[Shipment, ...]
    lost: tuple[str, ...]
    leader: int | None
    current: frozenset[int]


def ship(stocks: Sequence[Stock]) -> Shipping:
    """Return what has to travel so that all have what they need.

    Args:
        stocks: of all workers of the plan.
    """
    counted = _that_count(stocks)
    holders: dict[str, list[Stock]] = defaultdict(list)
    for stock in counted:
        for unit in stock.holds:
            holders[unit].append(stock)
    wanted = [(unit, stock) for stock in sorted(stocks, key=lambda one: one.worker) for unit in stock.needs]
    missing = [(unit, stock) for unit, stock in wanted if unit in holders and _lacks(stock, unit, holders[unit])]
    sizes = {unit: max(stock.holds[unit] for stock in having) for unit, having in holders.items()}
    return Shipping(
        shipments=_balanced(missing, holders, sizes),
        lost=tuple(sorted({unit for unit, _ in wanted if unit not in holders})),
        leader=counted[0].worker if counted else None,
        current=frozenset(stock.worker for stock in counted),
    )


def _that_count(stocks: Sequence[Stock]) -> list[Stock]:
    """Return those whose layers are of the newest step, by id: of a settled epoch if there is any."""
    having = [stock for stock in stocks if stock.step >= 0]
    settled = [stock for stock in having if stock.settled] or having
    newest = max((stock.step for stock in settled), default=-1)
    return sorted((stock for stock in settled if stock.step == newest), key=lambda stock: stock.worker)


def _lacks(stock: Stock, unit: str, holders: Sequence[Stock]) -> bool:
    """Return whether a worker must be sent a unit. While copies may differ, the first holder's counts."""
    first = holders[0]
    if first.settled:
        return all(holder.worker != stock.worker for holder in holders)
    return first.worker != stock.worker and first.digests[unit] != stock.digests.get(unit)


def _balanced(
    missing: Sequence[tuple[str, Stock]], holders: Mapping[str, Sequence[Stock]], sizes: Mapping[str, int]
) -> tuple[Shipment, ...]:
    load: dict[int, int] = defaultdict(int)
    pairs: set[tuple[int, int]] = set()
    shipments = []
    for unit, stock in sorted(missing, key=lambda item: (-sizes[item[0]], item[0], item[1].worker)):
        having = holders[unit] if holders[unit][0].settled else holders[unit][:1]
        costs = {
            holder.worker: load[holder.worker] + ((holder.worker, stock.worker) not in pairs) * _PAIR_BYTES
            for holder in having
        }
        source = min(costs, key=lambda worker: (costs[worker], worker))
        load[source] += sizes[unit]
        pairs.add((source, stock.worker))
        shipments.append(Shipment(source=source, target=stock.worker, unit=unit, bytes=sizes[unit]))
    return tuple(shipments)

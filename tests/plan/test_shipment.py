"""Who sends what to whom: everything that is missing, from who has it, and from several at once where that pays."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from bamboo_ds.plan.shipment import Stock, ship

MEGA = 1 << 20


def stock(worker: int, holds: dict[str, int], needs: str = "", *, step: int = 5, settled: bool = True) -> Stock:
    return Stock(worker, step=step, settled=settled, holds=holds, needs=tuple(needs))


def test_large_layers_come_from_several_and_small_ones_from_one() -> None:
    for size, sources in ((100 * MEGA, {0, 1}), (MEGA, {0})):
        holds = dict.fromkeys("abcd", size)
        shipping = ship([stock(0, holds), stock(1, holds), stock(2, {}, "abcd", step=-1, settled=False)])
        assert {one.source for one in shipping.shipments} == sources
        assert sorted(one.unit for one in shipping.shipments) == list("abcd")


def test_a_layer_that_nobody_has_is_lost_and_one_of_an_older_step_does_not_count() -> None:
    shipping = ship([stock(0, {"a": 1}, "ab"), stock(1, {"b": 1}, "a", step=4)])
    assert shipping.lost == ("b",)
    assert [(one.source, one.target, one.unit) for one in shipping.shipments] == [(0, 1, "a")]
    assert (shipping.leader, shipping.current) == (0, frozenset({0}))


@given(
    st.lists(st.tuples(st.sets(st.sampled_from("abcdef")), st.sets(st.sampled_from("abcdef"))), min_size=1, max_size=6),
    st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 200 * MEGA)),
)
def test_exactly_what_is_missing_travels_and_no_source_is_much_busier_than_need_be(
    workers: list[tuple[set[str], set[str]]], sizes: dict[str, int]
) -> None:
    size = {unit: sizes.get(unit, MEGA) for unit in "abcdef"}
    stocks = [
        stock(number, {unit: size[unit] for unit in sorted(holds)}, "".join(sorted(needs)))
        for number, (holds, needs) in enumerate(workers)
    ]
    shipping = ship(stocks)
    held = set().union(*(holds for holds, _ in workers))
    missing = {(number, unit) for number, (holds, needs) in enumerate(workers) for unit in needs & held - holds}
    assert {(one.target, one.unit) for one in shipping.shipments} == missing
    assert len(shipping.shipments) == len(missing)
    assert all(one.unit in workers[one.source][0] and one.bytes == size[one.unit] for one in shipping.shipments)
    load: dict[int, int] = defaultdict(int)
    for one in shipping.shipments:
        load[one.source] += one.bytes
    assert set(shipping.lost) == {unit for _, needs in workers for unit in needs - held}
    assert shipping == ship(list(reversed(stocks))), "all work out the same, in whatever order they hear"

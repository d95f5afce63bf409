"""Each layer is written once, by somebody who has it, and nobody writes much more than the others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bamboo_ds.checkpoint import Held, writers

UNITS = st.dictionaries(
    st.text("0123456789:", min_size=1, max_size=4),
    st.builds(Held, holders=st.sets(st.integers(0, 9), min_size=1, max_size=4).map(tuple), bytes=st.integers(0, 10**9)),
    max_size=30,
)


@given(UNITS)
def test_each_unit_has_one_writer_who_holds_it(units: dict[str, Held]) -> None:
    chosen = writers(units)
    assert chosen.keys() == units.keys()
    assert all(chosen[name] in units[name].holders for name in units)


@given(UNITS, st.randoms())
def test_all_who_ask_are_told_the_same(units: dict[str, Held], random: object) -> None:
    shuffled = list(units.items())
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    again = {name: Held(tuple(reversed(held.holders)), held.bytes) for name, held in shuffled}
    assert writers(again) == writers(units)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 6))
def test_nobody_writes_much_more_than_a_fair_share(sizes: list[int], workers: int) -> None:
    """Largest first is at most 4/3 of the best there is; the best is no less than the mean and than the largest."""
    units = {str(index): Held(tuple(range(workers)), size) for index, size in enumerate(sizes)}
    load = [0] * workers
    for name, worker in writers(units).items():
        load[worker] += units[name].bytes
    pair = sorted(sizes)[-workers - 1] + sorted(sizes)[-workers] if len(sizes) > workers else 0
    assert max(load) <= 4 / 3 * max(sum(sizes) / workers, max(sizes), pair) + 1


def test_layers_without_tensors_are_shared_out_too() -> None:
    chosen = writers({str(index): Held((0, 1), 0) for index in range(6)})
    assert sorted(chosen.values()) == [0, 0, 0, 1, 1, 1]

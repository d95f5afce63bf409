"""The order of samples: every sample once per epoch, in an order that depends on seed, epoch and position only."""

from __future__ import annotations

import itertools
import math
import pickle
from collections import Counter
from dataclasses import asdict

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from bamboo_ds.engine.sampler import Draw, Permutation, Position, Share, ShareSampler, Walk
from bamboo_ds.errors import ConfigError
from bamboo_ds.plan.seeds import batch_seed

START = Position()
SEEDS = st.integers(0, 2**63 - 1)
ORDER_OF_TEN = [8, 7, 3, 6, 2, 0, 4, 5, 1, 9]
ORDER_OF_MANY = [97913389, 7684896, 37967991, 84808887]


def permuted(length: int, *, seed: int = 0, epoch: int = 0, first: int = 0, count: int | None = None) -> list[int]:
    places = numpy.arange(first, length if count is None else first + count, dtype=numpy.uint64)
    return Permutation(length, seed=seed, epoch=epoch)(places).tolist()


def share(*, micro_batches: int, size: int = 2, drawn: range | None = None, step: int = 0, samples: int = 0) -> Share:
    return Share(
        step=step,
        samples=samples,
        micro_batch_size=size,
        micro_batches=micro_batches,
        drawn=range(micro_batches) if drawn is None else drawn,
    )


def drawn(walk: Walk, wanted: Share, *, steps: int, position: Position = START) -> list[list[int]]:
    sampler = ShareSampler(walk, position=position, share=wanted, seed=0)
    return [list(draw) for draw in itertools.islice(sampler, steps * len(wanted.drawn))]


class TestPermutation:
    def test_every_number_comes_once_for_every_small_length(self) -> None:
        assert [length for length in range(1, 500) if sorted(permuted(length)) != list(range(length))] == []

    @settings(max_examples=50, deadline=None)
    @given(length=st.integers(1, 20_000), seed=SEEDS, epoch=st.integers(0, 10**9))
    def test_every_number_comes_once(self, length: int, seed: int, epoch: int) -> None:
        assert sorted(permuted(length, seed=seed, epoch=epoch)) == list(range(length))

    @settings(max_examples=50, deadline=None)
    @given(length=st.integers(1, 2**62), seed=SEEDS, first=st.integers(0, 2**62))
    def test_numbers_stay_apart_and_below_any_length(self, length: int, seed: int, first: int) -> None:
        first %= length
        found = permuted(length, seed=seed, first=first, count=min(1000, length - first))
        assert len(set(found)) == len(found)
        assert all(0 <= number < length for number in found)

    def test_a_part_is_a_part_of_the_whole(self) -> None:
        whole = permuted(1000, seed=3, epoch=5)
        assert [permuted(1000, seed=3, epoch=5, first=place, count=1)[0] for place in range(1000)] == whole

    @pytest.mark.parametrize("length", [2, 3, 4, 5])
    def test_all_orders_of_few_samples_are_equally_likely(self, length: int) -> None:
        orders = math.factorial(length)
        counts = Counter(tuple(permuted(length, seed=1, epoch=epoch)) for epoch in range(25 * orders))
        assert chi_square(counts, orders) < least_unlikely(orders - 1)

    def test_each_sample_is_equally_likely_at_each_place(self) -> None:
        length, epochs = 30, 1500
        places = Counter(pair for epoch in range(epochs) for pair in enumerate(permuted(length, epoch=epoch)))
        assert chi_square(places, length * length) < least_unlikely((length - 1) ** 2)

    def test_neighbours_come_apart(self) -> None:
        """Of 10,000 samples in a random order, one pair of neighbours stays one on average, in each direction."""
        order = numpy.array(permuted(10_000, seed=2))
        assert (numpy.abs(numpy.diff(order)) == 1).sum() <= 12
        assert abs(numpy.corrcoef(order[:-1], order[1:])[0, 1]) < 0.04
        assert abs(numpy.corrcoef(order, numpy.arange(10_000))[0, 1]) < 0.04

    def test_seed_and_epoch_choose_the_order(self) -> None:
        orders = [permuted(100, seed=seed, epoch=epoch) for seed in range(5) for epoch in range(5)]
        assert len({tuple(order) for order in orders}) == 25
        assert permuted(100, seed=4, epoch=4) == orders[-1]

    def test_the_order_is_that_of_former_versions(self) -> None:
        """Or a run that goes on from a checkpoint would repeat samples of the epoch it was in."""
        assert permuted(10, seed=1234, epoch=0) == ORDER_OF_TEN
        assert permuted(10**8, seed=1234, epoch=7, first=10**7, count=4) == ORDER_OF_MANY


def chi_square(counts: Counter[object], kinds: int) -> float:
    expected = counts.total() / kinds
    return sum((count - expected) ** 2 / expected for count in counts.values()) + (kinds - len(counts)) * expected


def least_unlikely(freedom: int) -> float:
    """Return what chi-square exceeds by chance in about one of 10,000 (Wilson and Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3


class TestWalk:
    def test_without_shuffle_it_is_the_dataset_over_and_over(self) -> None:
        assert drawn(Walk(5), share(micro_batches=2), steps=2) == [[0, 1], [2, 3], [4, 0], [1, 2]]

    def test_with_drop_last_a_batch_that_does_not_fit_begins_the_next_epoch(self) -> None:
        """9 samples, batches of 4: 1 is left out."""
        found = drawn(Walk(9, drop_last=True), share(micro_batches=2), steps=4)
        assert found == [[0, 1], [2, 3], [4, 5], [6, 7], [0, 1], [2, 3], [4, 5], [6, 7]]

    def test_with_drop_last_a_smaller_batch_still_takes_of_the_rest(self) -> None:
        """Of 9 samples 1 is left after two batches of 4, too few for another one but not for a batch of 1."""
        walk = Walk(9, drop_last=True)
        position = walk.after(Position(), samples=8, batch=4)
        assert drawn(walk, share(micro_batches=1, size=1), steps=2, position=position) == [[8], [0]]

    def test_a_shuffle_leaves_out_other_samples_each_epoch(self) -> None:
        walk = Walk(9, seed=1, shuffle=True, drop_last=True)
        batches = drawn(walk, share(micro_batches=2), steps=40)
        left_out = [set(range(9)) - {i for draw in batches[4 * e : 4 * e + 4] for i in draw} for e in range(20)]
        assert {len(one) for one in left_out} == {1}
        assert len(set.union(*left_out)) >= 6

    @given(
        length=st.integers(1, 60),
        batches=st.lists(st.integers(1, 70), min_size=1, max_size=40),
        drop_last=st.booleans(),
    )
    def test_a_step_ends_where_the_next_begins(self, length: int, batches: list[int], drop_last: bool) -> None:
        """One step after the other leads to where a loop over single samples leads."""
        walk, position, counted = Walk(length, drop_last=drop_last), Position(), [0, 0]
        for batch in (min(batch, length) if drop_last else batch for batch in batches):
            if drop_last and counted[1] + batch > length:
                counted = [counted[0] + 1, 0]
            begin = walk.begin(position, batch=batch)
            for _ in range(batch):
                if counted[1] == length:
                    counted = [counted[0] + 1, 0]
                counted[1] += 1
            position = walk.after(position, samples=batch, batch=batch)
            assert position == walk.after(begin, samples=batch, batch=batch)
            assert length * position.epoch + position.offset == length * counted[0] + counted[1]

    @given(
        length=st.integers(1, 50),
        begin=st.integers(0, 49),
        batch=st.integers(1, 50),
        steps=st.integers(0, 200),
        drop_last=st.booleans(),
    )
    def test_many_steps_at_once_lead_where_they_lead_one_by_one(
        self, length: int, begin: int, batch: int, steps: int, drop_last: bool
    ) -> None:
        walk, position = Walk(length, drop_last=drop_last), Position(2, begin % length)
        batch = min(batch, length) if drop_last else batch
        at_once = walk.after(position, samples=steps * batch, batch=batch)
        for _ in range(steps):
            position = walk.after(position, samples=batch, batch=batch)
        assert at_once == position

    def test_a_dataset_that_has_become_smaller_goes_on_with_the_next_epoch(self) -> None:
        position = Position(3, 80)
        assert drawn(Walk(50, drop_last=True), share(micro_batches=1), steps=1, position=position) == [[0, 1]]
        assert drawn(Walk(50), share(micro_batches=1), steps=1, position=position) == [[30, 31]]

    def test_a_batch_that_never_fits_is_refused_with_what_to_do(self) -> None:
        Walk(10, drop_last=True).check(batch=10)
        Walk(9).check(batch=10)
        with pytest.raises(ConfigError, match=r"9 samples never fill a global batch of 10\. Lower train_batch_size"):
            Walk(9, drop_last=True).check(batch=10)

    def test_a_position_is_json(self) -> None:
        assert Position(**asdict(Position(3, 4))) == Position(3, 4)


class TestShares:
    @settings(max_examples=200, deadline=None)
    @given(data=st.data())
    def test_the_shares_of_a_step_are_the_global_batch_in_order(self, data: st.DataObject) -> None:
        size, micro_batches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
        pipelines = data.draw(st.integers(1, micro_batches))
        drop_last = data.draw(st.booleans())
        length = data.draw(st.integers(size * micro_batches if drop_last else 1, 60))
        walk = Walk(length, seed=data.draw(SEEDS), shuffle=data.draw(st.booleans()), drop_last=drop_last)
        bounds = sorted(data.draw(st.permutations(range(1, micro_batches)))[: pipelines - 1])
        parts = [range(*pair) for pair in itertools.pairwise([0, *bounds, micro_batches])]
        one = drawn(walk, share(micro_batches=micro_batches, size=size), steps=3)
        each = [drawn(walk, share(micro_batches=micro_batches, size=size, drawn=part), steps=3) for part in parts]
        for step in range(3):
            together = [draw for part, found in zip(parts, each, strict=True) for draw in of_step(found, step, part)]
            assert together == one[step * micro_batches : (step + 1) * micro_batches]

    def test_a_draw_carries_the_seed_of_its_place(self) -> None:
        sampler = ShareSampler(
            Walk(100), position=Position(), share=share(micro_batches=4, drawn=range(1, 3), step=5), seed=9
        )
        seeds = [draw.seed for draw in itertools.islice(sampler, 4)]  # type: ignore[attr-defined]
        assert seeds == [batch_seed(9, step=step, micro_batch=m) for step in (5, 6) for m in (1, 2)]

    def test_a_draw_reaches_another_process_whole(self) -> None:
        again = pickle.loads(pickle.dumps(Draw([3, 1], seed=4)))
        assert (type(again), list(again), again.seed) == (Draw, [3, 1], 4)

    @pytest.mark.parametrize("pipelines", [1, 2, 4])
    def test_a_step_takes_the_samples_that_stock_deepspeed_takes(self, pipelines: int) -> None:
        """Where batches fill the epochs, so that stock's sampler repeats none. With D > 1 it deals them out in turn."""
        length, size, micro_batches = 48, 2, 4
        samplers = [DistributedSampler(range(length), pipelines, rank, shuffle=False) for rank in range(pipelines)]
        streams = [itertools.cycle(list(sampler)) for sampler in samplers]
        ours = drawn(Walk(length), share(micro_batches=micro_batches, size=size), steps=15)
        for step in range(15):
            batch = [index for draw in ours[step * micro_batches : (step + 1) * micro_batches] for index in draw]
            stock = [list(itertools.islice(stream, size * micro_batches // pipelines)) for stream in streams]
            assert sorted(batch) == sorted(itertools.chain(*stock))
            assert pipelines > 1 or batch == stock[0]


def of_step(draws: list[list[int]], step: int, part: range) -> list[list[int]]:
    return draws[step * len(part) : (step + 1) * len(part)]

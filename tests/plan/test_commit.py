"""One decision of many votes: independent of who casts them, and of how stages and pipelines cut the job."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_ds.errors import NonFiniteLossError
from bamboo_ds.plan import Vote, static_plan, tally
from bamboo_ds.plan.codec import decode, encode
from bamboo_ds.plan.commit import Ballot, Outcome, settle

NUMBERS = st.floats(0, 1e6, allow_nan=False)
LAYERS = 8


def ballots(stages: int, pipelines: int, losses: list[float], norms: list[float], **last: Any) -> list[Vote]:
    """Cast the votes of a step with given losses by micro-batch and squared norms by layer."""
    plan = static_plan(world_size=stages * pipelines, num_stages=stages)
    votes = []
    for worker in plan.workers:
        place = plan.place(worker)
        own = range(place.stage * LAYERS // stages, (place.stage + 1) * LAYERS // stages)
        share = plan.share(place.pipeline, micro_batches=len(losses)) if place.stage == stages - 1 else range(0)
        votes.append(
            Vote(
                worker=worker, step=3, pipeline=place.pipeline, stage=place.stage,
                squared_norms={str(layer): norms[layer] for layer in own},
                losses={m: losses[m] for m in share},
                **{key: value(place) for key, value in last.items()},
            )
        )  # fmt: skip
    return votes


@settings(deadline=None)
@given(
    st.lists(NUMBERS, min_size=6, max_size=12), st.lists(NUMBERS, min_size=LAYERS, max_size=LAYERS),
    st.integers(1, 4), st.integers(1, 4), st.randoms(),
)  # fmt: skip
def test_shape_and_order_of_votes_change_no_bit(
    losses: list[float], norms: list[float], stages: int, pipelines: int, shuffle: random.Random
) -> None:
    one = tally(ballots(1, 1, losses, norms))
    votes = ballots(stages, pipelines, losses, norms)
    shuffle.shuffle(votes)
    many = tally(votes)
    assert (many.mean_loss, many.global_norm, many.step) == (one.mean_loss, one.global_norm, 3)
    assert one.mean_loss == pytest.approx(math.fsum(losses) / len(losses))
    assert one.global_norm == pytest.approx(math.sqrt(math.fsum(norms)))
    assert len(many.pipeline_losses) == pipelines


def test_a_tied_unit_counts_once_though_two_stages_own_it() -> None:
    votes = [
        Vote(worker=0, step=0, pipeline=0, stage=0, squared_norms={"0:words": 9.0}),
        Vote(worker=1, step=0, pipeline=0, stage=1, squared_norms={"0:words": 9.0, "3": 16.0}, losses={0: 1.0}),
    ]
    assert tally(votes).global_norm == 5.0


def test_layers_are_summed_in_the_order_of_numbers_not_of_digits() -> None:
    """2**53 absorbs a single 1 but not two at once: the order shows in the last bit."""
    big, votes = float(2**53), []
    for worker, norms in enumerate(({"10": big, "2": 1.0}, {"9": 1.0})):
        votes.append(Vote(worker=worker, step=0, pipeline=0, stage=worker, squared_norms=norms, losses={}))
    assert tally(votes).global_norm == math.sqrt((1.0 + 1.0) + big)
    assert math.sqrt((big + 1.0) + 1.0) ** 2 != (1.0 + 1.0) + big or math.sqrt(big) == math.sqrt(big + 2)


def test_the_loss_scale_is_taken_out_of_the_norm() -> None:
    assert tally(ballots(2, 1, [1.0], [4.0] * LAYERS), loss_scale=8.0).global_norm == math.sqrt(32) / 8


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_named_by_step_and_micro_batch(bad: float) -> None:
    with pytest.raises(NonFiniteLossError, match="step 3, micro-batch 4 "):
        tally(ballots(2, 2, [1.0, 1.0, 1.0, 1.0, bad, 1.0], [1.0] * LAYERS))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_named_by_layer(bad: float) -> None:
    with pytest.raises(NonFiniteLossError, match="gradient of layer 5 is not finite in step 3"):
        tally(ballots(4, 1, [1.0], [1.0] * 5 + [bad] + [1.0] * 2))


def test_an_overflow_skips_the_step_instead_of_ending_the_job() -> None:
    votes = ballots(2, 2, [math.inf] * 4, [math.inf] * LAYERS, overflow=lambda place: place.stage == 1)
    assert tally(votes).overflow
    assert tally(votes).global_norm == math.inf


def test_stage_times_are_medians_over_pipelines_and_wait_for_all_stages() -> None:
    def seconds(place: Any) -> float:
        return (1.0, 5.0, 2.0)[place.pipeline] + 10 * place.stage

    votes = ballots(2, 3, [1.0] * 3, [1.0] * LAYERS, forward_seconds=seconds, backward_seconds=seconds)
    assert tally(votes).stage_seconds == ((2.0, 2.0), (12.0, 12.0))
    unknown = [dataclasses.replace(vote, forward_seconds=0.0) if vote.stage == 1 else vote for vote in votes]
    assert tally(unknown).stage_seconds == ()


def test_additional_losses_are_weighted_by_micro_batches() -> None:
    votes = ballots(1, 2, [1.0, 1.0, 1.0], [0.0] * LAYERS)
    told = [dataclasses.replace(vote, additional_losses={"z": float(len(vote.losses))}) for vote in votes]
    assert tally(told).additional_losses == {"z": pytest.approx((1 * 1 + 2 * 2) / 3)}


def by_pipeline(votes: list[Vote], *, loss_scale: float = 1.0) -> list[Ballot]:
    """Put votes into one ballot per pipeline."""
    pipelines = sorted({vote.pipeline for vote in votes})
    return [Ballot(tuple(v for v in votes if v.pipeline == pipeline), loss_scale) for pipeline in pipelines]


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 3), st.integers(1, 4), st.permutations(range(4)))
def test_ballots_are_settled_as_their_votes_are_tallied_in_whatever_order_they_came(
    stages: int, pipelines: int, order: list[int]
) -> None:
    votes = ballots(stages, pipelines, [0.5, 1.5, 2.5, 3.5], [2.0] * LAYERS)
    cast = by_pipeline(votes, loss_scale=4.0)
    shuffled = [cast[index] for index in order if index < len(cast)]
    assert settle(shuffled) == Outcome(decision=tally(votes, loss_scale=4.0))
    assert encode(settle(shuffled)) == encode(settle(cast))


@pytest.mark.parametrize(
    ("losses", "norms", "words"),
    [
        ([1.0, math.nan], [1.0] * LAYERS, "loss is nan in step 3, micro-batch 1 "),
        ([1.0, 1.0], [1.0, math.inf] + [1.0] * (LAYERS - 2), "the gradient of layer 1 is not finite in step 3"),
    ],
)
def test_what_cannot_be_committed_is_refused_with_the_reason(
    losses: list[float], norms: list[float], words: str
) -> None:
    outcome = settle(by_pipeline(ballots(2, 2, losses, norms)))
    assert outcome.decision is None
    assert words in outcome.refusal
    assert decode(Outcome, encode(outcome)) == outcome


def test_the_rows_of_an_evaluation_come_back_in_the_order_of_the_ballots() -> None:
    assert settle([Ballot((), rows=("a", "b")), Ballot(()), Ballot((), rows=("c",))]) == Outcome(rows=("a", "b", "c"))


def test_an_overflow_is_settled_as_a_skipped_step() -> None:
    votes = ballots(2, 2, [math.inf] * 4, [math.inf] * LAYERS, overflow=lambda place: place.stage == 1)
    outcome = settle(by_pipeline(votes, loss_scale=2.0**16))
    assert outcome.refusal == ""
    assert outcome.decision is not None
    assert outcome.decision.overflow
    assert decode(Outcome, encode(outcome)) == outcome


@settings(deadline=None)
@given(
    st.dictionaries(st.integers(0, 99), st.floats(allow_nan=False), max_size=5),
    st.dictionaries(st.text(max_size=4), NUMBERS, max_size=4),
    st.booleans(),
)
def test_a_vote_survives_the_wire_with_all_its_bits(
    losses: dict[int, float], norms: dict[str, float], flag: bool
) -> None:
    vote = Vote(
        worker=3, step=2**40, pipeline=1, stage=2, squared_norms=norms, losses=losses, overflow=flag,
        additional_losses=norms, forward_seconds=0.1, backward_seconds=1 / 3,
    )  # fmt: skip
    assert decode(Vote, encode(vote)) == vote


def test_a_vote_of_nan_survives_the_wire() -> None:
    found = decode(Vote, encode(Vote(worker=0, step=0, pipeline=0, stage=0, losses={1: math.nan, 2: -math.inf})))
    assert math.isnan(found.losses[1])
    assert found.losses[2] == -math.inf

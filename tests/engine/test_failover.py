"""A worker dies in mid-step: its shadow takes over in the same step, and the numbers stay those of the undisturbed run.

Real processes, a real etcd, real kills. What must agree agrees bit by bit: losses and norms of every step, the final
weights of every layer, and all copies of a layer after every step. The exhaustive form of this is
`bamboo-ds bench failover`.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from tests.engine.disturbed import Cluster, Fault, kill
from tests.engine.test_redundancy import normed
from tests.engine.test_unusual_models import WithLoss, embedded, first_two, frozen, two
from tests.engine.training import (
    Outcome,
    Training,
    assert_copies_equal,
    assert_equals_one_process,
    batches,
    build_engine,
    held_digests,
    own_weights,
    train_one_process,
    train_step,
)
from tests.engine.zoo import WIDTH, blocks, tokens, vectors

MODES = ("eflb", "fit", "lflb")
WARM_UP: dict[str, Any] = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 0.01}}}


class Table(nn.Module):
    """An embedding whose weights the last layer uses again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, WIDTH))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(value, self.weight)


def scores(table: Table, value: torch.Tensor) -> torch.Tensor:
    return value @ table.weight.t()


def tied() -> list[Any]:
    return [
        TiedLayerSpec("table", Table, tied_weight_attr="weight"),
        *blocks(4),
        TiedLayerSpec("table", Table, forward_fn=scores, tied_weight_attr="weight"),
    ]


def growing(step: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Give every micro-batch another number of rows."""
    generator = torch.Generator().manual_seed(50 * step + micro_batch)
    inputs = torch.randn(1 + micro_batch, WIDTH, generator=generator)
    return inputs, inputs.flip(1)


def halved(step: int, micro_batch: int) -> tuple[torch.Tensor, ...]:
    inputs, labels = vectors(step, micro_batch)
    return inputs.bfloat16(), labels.bfloat16()


def score_sum(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    del labels
    return outputs.square().mean()


def noisy_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(nn.functional.dropout(outputs, 0.3), labels)


JOBS: Mapping[str, Training] = {
    "dropout, clipping and Adam": Training(lambda: blocks(6), vectors),
    "a tied layer": Training(tied, tokens, score_sum),
    "bf16": Training(lambda: blocks(6), halved, bf16=True),
    "running statistics": Training(normed, vectors),
    "activation checkpointing": Training(
        lambda: embedded(5), tokens, module={"activation_checkpoint_interval": 1}
    ),
    "tuples of floats and a mask": Training(two, tokens, first_two),
    "a frozen first stage": Training(lambda: [*frozen(2), *blocks(4)], vectors),
    "a loss in the last layer": Training(lambda: [*blocks(5), LayerSpec(WithLoss)], vectors, None),
    "a loss that draws": Training(lambda: blocks(6), vectors, noisy_loss),
    "shapes that change": Training(lambda: blocks(6), growing),
    "a learning rate schedule": Training(lambda: blocks(6), vectors, config=WARM_UP),
    "no clipping": Training(lambda: blocks(6), vectors, clipping=0.0),
}  # fmt: skip

_references: dict[tuple[str, tuple[int, int], str], dict[int, Outcome]] = {}


def reference(cluster: Cluster, name: str, shape: tuple[int, int], redundancy: str) -> dict[int, Outcome]:
    """Return the undisturbed run."""
    key = name, shape, redundancy
    if key not in _references:
        _references[key] = cluster.train(JOBS[name], shape, redundancy=redundancy)
    return _references[key]


def assert_undisturbed(got: Mapping[int, Outcome], expected: Mapping[int, Outcome]) -> None:
    """Hold the survivors against the undisturbed run, bit by bit."""
    first = next(iter(expected.values()))
    weights = {name: value for outcome in expected.values() for name, value in outcome.weights.items()}
    held: set[str] = set()
    for worker, outcome in got.items():
        assert outcome.losses == first.losses, f"worker {worker}"
        assert outcome.norms == first.norms, f"worker {worker}"
        differing = [name for name, value in outcome.weights.items() if not torch.equal(value, weights[name])]
        assert differing == [], f"worker {worker}"
        held |= outcome.weights.keys()
    assert held == weights.keys()
    assert_copies_equal(list(got.values()))


def test_a_cluster_trains_as_one_process_does(cluster: Cluster) -> None:
    job = JOBS["dropout, clipping and Adam"]
    assert_equals_one_process(list(cluster.train(job, (3, 1)).values()), train_one_process(job), exact=True)


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize(
    ("shape", "redundancy", "faults"),
    [
        ((3, 1), "eflb", [kill(0, 0, before=12)]),
        ((3, 1), "fit", [kill(0, 1, before=17)]),
        ((3, 1), "eflb", [kill(0, 2, before=14)]),
        ((2, 2), "lflb", [kill(1, 0, before=9), kill(0, 1, before=3, step=2)]),
    ],
)
def test_whatever_is_trained_stays_what_it_was(
    cluster: Cluster, name: str, shape: tuple[int, int], redundancy: str, faults: list[Fault]
) -> None:
    expected = reference(cluster, name, shape, redundancy)
    assert_undisturbed(cluster.train(JOBS[name], shape, faults, redundancy=redundancy), expected)


def moments() -> list[tuple[int, int, str]]:
    """Return a seeded part of all (stage, instruction, redundancy)."""
    every = [(stage, k, mode) for stage in range(4) for k in range(27) for mode in MODES]
    return random.Random(7).sample(every, 24)


@pytest.mark.sample(5)
@pytest.mark.parametrize(("stage", "before", "redundancy"), moments())
def test_the_moment_does_not_matter(cluster: Cluster, stage: int, before: int, redundancy: str) -> None:
    name = "dropout, clipping and Adam"
    expected = reference(cluster, name, (4, 1), redundancy)
    got = cluster.train(JOBS[name], (4, 1), [kill(0, stage, before=before)], redundancy=redundancy)
    assert_undisturbed(got, expected)


def several_losses() -> list[tuple[list[Fault], str]]:
    """Return (losses, redundancy): up to four losses, no two of which are neighbours; chosen ones, and a seeded part.

    They follow so closely that a worker is interrupted in the middle of one failover by the news of the next.
    """
    chosen = [
        [kill(0, 0, before=9), kill(0, 2, before=14)],
        [kill(0, 1, before=15), kill(0, 3, before=3)],
        [kill(0, 1, before=9), kill(1, 1, before=9)],
        [kill(0, 0, before=5), kill(0, 2, before=5), kill(1, 1, before=20), kill(1, 3, before=9)],
        [kill(0, 3, before=0, step=0), kill(1, 0, before=7), kill(0, 1, before=11, step=2)],
    ]
    chance, apart = random.Random(11), ((0, 2), (1, 3), (0,), (1,), (2,), (3,))
    drawn = [
        [kill(d, stage, before=chance.randrange(11)) for d in (0, 1) for stage in chance.choice(apart)]
        for _ in range(45)
    ]
    return [(faults, "eflb") for faults in chosen] + [(faults, mode) for faults in drawn for mode in MODES]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("faults", "redundancy"), several_losses())
def test_several_losses_that_are_no_neighbours_change_nothing(
    cluster: Cluster, faults: list[Fault], redundancy: str
) -> None:
    name = "dropout, clipping and Adam"
    expected = reference(cluster, name, (4, 2), redundancy)
    assert_undisturbed(cluster.train(JOBS[name], (4, 2), faults, redundancy=redundancy), expected)


# ---- moments outside of instructions -------------------------------------------------------------------------------


def dying(moment: str, pipeline: int, stage: int) -> Callable[..., Outcome]:
    """Return what trains as `train` does, but evaluates as well, and dies on one worker at a named moment."""

    def target(rank: int, job: Training, num_stages: int, redundancy: str) -> Outcome:
        del rank
        engine, outcome = build_engine(job, num_stages, redundancy), Outcome()
        victim = (engine.pipeline_id, engine.stage_id) == (pipeline, stage)
        for step in range(job.steps):
            if victim and step == 1:
                MOMENTS[moment](engine)
            train_step(engine, job, step, outcome)
            outcome.losses.append(float(engine.eval_batch(batches(job, engine, 90 + step))))
        outcome.weights = own_weights(engine)
        return outcome

    return target


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before_call(owner: Any, name: str, count: int = 1) -> None:
    """Die before the n-th call of a method."""
    stock, calls = getattr(owner, name), iter(range(1, 1000))

    def called(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == count:
            die()
        return stock(*args, **kwargs)

    setattr(owner, name, called)


def after_call(owner: Any, name: str) -> None:
    stock = getattr(owner, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        stock(*args, **kwargs)
        die()

    setattr(owner, name, called)


def in_evaluation(engine: Any, forward: int) -> None:
    """Die before the n-th forward of an evaluation."""
    left = iter(range(1, 1000))

    def look(*_: Any) -> None:
        if not torch.is_grad_enabled() and next(left) == forward:
            die()

    first = next(iter(engine.module.layers_of(engine.stage_id).values()))
    first.register_forward_pre_hook(look)


MOMENTS: Mapping[str, Callable[[Any], None]] = {
    "inside the gradient reduction": lambda engine: before_call(engine._replicas, "follow_buffers"),
    "before the vote": lambda engine: before_call(engine._committer, "decide"),
    "between vote and decision": lambda engine: after_call(engine._committer, "_cast"),
    "between decision and optimizer step": lambda engine: before_call(engine, "_install_gradients"),
    "after the optimizer step": lambda engine: before_call(engine, "_report_step"),
    "before an evaluation": lambda engine: before_call(engine, "eval_batch"),
    "in the first forward of an evaluation": lambda engine: in_evaluation(engine, 1),
    "late in an evaluation": lambda engine: in_evaluation(engine, 3),
    "at the end of an evaluation": lambda engine: before_call(engine._committer, "share"),
}


@pytest.fixture(scope="module")
def evaluated(cluster: Cluster) -> Mapping[int, Outcome]:
    """Give the undisturbed run of a job that evaluates."""
    return cluster.train(JOBS["a tied layer"], (3, 2), target=dying("never", -1, -1))


@pytest.mark.sample(6)
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("moment", MOMENTS)
def test_no_moment_around_the_commit_or_in_an_evaluation_matters(
    cluster: Cluster, evaluated: Mapping[int, Outcome], moment: str, stage: int
) -> None:
    target, lost = dying(moment, 1, stage), [kill(9, 9, before=0)]  # a fault that never comes, for the count
    assert_undisturbed(cluster.train(JOBS["a tied layer"], (3, 2), lost, target=target), evaluated)


# ---- a user's iterator ---------------------------------------------------------------------------------------------


def iterate(job: Training, engine: Any) -> Iterator[Any]:
    step = 0
    while True:
        yield from batches(job, engine, step)
        step += 1


def of_an_endless_iterator(rank: int, job: Training, num_stages: int, redundancy: str) -> Outcome:
    """Draw all steps from one iterator, as most scripts do; every worker has it."""
    del rank
    engine, outcome = build_engine(job, num_stages, redundancy), Outcome()
    data = iterate(job, engine)
    for _ in range(job.steps):
        outcome.losses.append(float(engine.train_batch(data)))
        outcome.norms.append(float(engine.get_global_grad_norm()))
        outcome.digests.append(held_digests(engine))
    outcome.weights = own_weights(engine)
    return outcome


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_users_iterator_goes_on_where_the_lost_worker_was(cluster: Cluster, stage: int) -> None:
    expected = reference(cluster, "dropout, clipping and Adam", (3, 1), "eflb")
    faults = [kill(0, stage, before=8, step=2)]
    got = cluster.train(JOBS["dropout, clipping and Adam"], (3, 1), faults, target=of_an_endless_iterator)
    assert_undisturbed(got, expected)

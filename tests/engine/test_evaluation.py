"""`eval_batch` with every argument, against the same layers in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bamboo_ds.cli.bench.workers import WorkerResult, values
from tests.engine.training import OneProcess, Training, batches, build_engine, largest, relative, single
from tests.engine.zoo import blocks, vectors

Run = Callable[..., list[WorkerResult]]
SHAPES = [(1, 1), (2, 1), (3, 1), (2, 2)]
JOB = Training(lambda: blocks(6), vectors, micro_batches=4)
Answers = dict[str, Any]


def held_out(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    return vectors(77, index)


def evaluate(rank: int, num_stages: int) -> Answers:
    """Train a step, then ask in every way."""
    engine = build_engine(JOB, num_stages, "fit")
    engine.train_batch(batches(JOB, engine, 0))

    def ask(count: int = 2, **arguments: Any) -> Any:
        share = range(engine.pipeline_id * count, (engine.pipeline_id + 1) * count)
        return engine.eval_batch(iter([held_out(index) for index in share]), **arguments)

    own = len(engine.micro_batch_range)
    answers = {
        "place": (engine.pipeline_id, engine.stage_id),
        "default": ask(own),
        "count": ask(3, num_micro_batches=3),
        "logits": ask(num_micro_batches=2, return_logits=True),
        "not told": ask(num_micro_batches=2, bcast_loss=False),
        "all losses": ask(num_micro_batches=2, reduce_output=None),
        "outputs": ask(num_micro_batches=2, compute_loss=False),
        "all outputs": ask(num_micro_batches=2, compute_loss=False, reduce_output=None),
        "mode": engine.module.training,
    }
    answers["next loss"] = float(engine.train_batch(batches(JOB, engine, 1)))
    engine.close()
    return answers


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def asked(request: pytest.FixtureRequest, workers: Run) -> tuple[tuple[int, int], list[Answers]]:
    stages, pipelines = request.param
    return request.param, values(workers(evaluate, stages * pipelines, args=(stages,), timeout_seconds=60))


@pytest.fixture(scope="module")
def one() -> OneProcess:
    trained = OneProcess(JOB)
    trained.train_batch()
    return trained


def last_stages(asked: tuple[tuple[int, int], list[Answers]]) -> list[Answers]:
    shape, answers = asked
    return sorted((a for a in answers if a["place"][1] == shape[0] - 1), key=lambda answer: answer["place"])


def losses_of(one: OneProcess, indices: range) -> list[float]:
    return [one.evaluate([held_out(index)])[0] for index in indices]


def mean_of(one: OneProcess, count: int) -> float:
    losses = losses_of(one, range(count))
    return sum(losses) / count


def test_the_mean_loss_is_on_every_worker(asked: Any, one: OneProcess) -> None:
    for answer in asked[1]:
        assert relative(answer["default"], mean_of(one, JOB.micro_batches)) < 1e-6
        assert answer["default"].dtype == torch.float32


def test_any_number_of_micro_batches_can_be_evaluated(asked: Any, one: OneProcess) -> None:
    for answer in asked[1]:
        assert relative(answer["count"], mean_of(one, 3 * asked[0][1])) < 1e-6


def test_logits_of_the_last_micro_batch_are_on_last_stages(asked: Any, one: OneProcess) -> None:
    last = last_stages(asked)
    for pipeline, answer in enumerate(last):
        expected = one.evaluate([held_out(2 * pipeline + 1)])[1]
        assert relative(answer["logits"][1], expected) < 1e-6
    assert all(answer["logits"][1] is None for answer in asked[1] if answer not in last)
    assert all(relative(answer["logits"][0], mean_of(one, 2 * asked[0][1])) < 1e-6 for answer in asked[1])


def test_without_bcast_loss_only_last_stages_know_it(asked: Any, one: OneProcess) -> None:
    last = last_stages(asked)
    assert all(relative(answer["not told"], mean_of(one, 2 * asked[0][1])) < 1e-6 for answer in last)
    assert all(answer["not told"] is None for answer in asked[1] if answer not in last)


def test_without_reduction_the_list_of_losses_comes_back(asked: Any, one: OneProcess) -> None:
    for pipeline, answer in enumerate(last_stages(asked)):
        expected = losses_of(one, range(2 * pipeline, 2 * pipeline + 2))
        assert single([float(loss) for loss in answer["all losses"]]) == single(expected)


def test_without_loss_the_outputs_are_reduced(asked: Any, one: OneProcess) -> None:
    outputs = [one.evaluate([held_out(index)])[1] for index in range(2 * asked[0][1])]
    for pipeline, answer in enumerate(last_stages(asked)):
        assert relative(answer["outputs"], torch.stack(outputs).mean(dim=0)) < 1e-6
        mine = outputs[2 * pipeline : 2 * pipeline + 2]
        assert all(relative(*pair) < 1e-6 for pair in zip(answer["all outputs"], mine, strict=True))


def test_training_goes_on_as_if_nothing_was_asked(asked: Any) -> None:
    expected = OneProcess(JOB)
    expected.train_batch()
    second = expected.train_batch()
    assert all(largest([answer["next loss"]], single([second])) <= 1e-6 for answer in asked[1])


def test_an_unknown_reduction_is_refused(workers: Run) -> None:
    results = workers(_sum, 2, timeout_seconds=30)
    assert all("ConfigError: eval_batch(reduce_output='sum')" in str(result.error) for result in results)


def _sum(rank: int) -> None:
    build_engine(JOB, 2).eval_batch(iter([held_out(0)]), reduce_output="sum")


def test_an_engine_without_optimizer_can_evaluate(workers: Run, one: OneProcess) -> None:
    found = values(workers(_evaluate_only, 2, timeout_seconds=30))
    fresh = OneProcess(JOB)
    assert found == [single([mean_of(fresh, 2)])[0]] * 2


def _evaluate_only(rank: int) -> float:
    import bamboo_ds

    module = bamboo_ds.BambooPipelineModule(JOB.layers(), num_stages=2, loss_fn=JOB.loss_fn, seed_layers=True)
    engine, *_ = bamboo_ds.initialize(model=module, config=JOB.deepspeed_config("fit"))
    return float(engine.eval_batch(iter([held_out(0), held_out(1)]), num_micro_batches=2))

"""The models of the paper, as tables of costs.

The paper's artifact holds measured step times. Of each model we take the one without redundancy, on machines that stay,
and scale the layers' relative costs (those of their multiplications) so that our simulation gives the same. A backward
is taken as two forwards. Whatever else is simulated follows: nothing is fitted to the steps of the paper's Bamboo,
which tests hold ours against.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from bamboo_ds.errors import ConfigError
from bamboo_ds.simulator.constants import Constants
from bamboo_ds.simulator.step_time import StepTimes
from bamboo_ds.simulator.workload import Layer, Workload

__all__ = ["MODELS", "built_in"]

MICRO_BATCH_SAMPLES = 4
"""The artifact does not say; with 4 the step times of BERT in its four shapes of 8 stages lie within 5%."""

_SECANTS = 12

GRADIENT_BYTES, ACTIVATION_BYTES = 2, 2
"""Per value, in fp16."""

STATE_BYTES = 16
"""Per parameter: fp16 with its gradient, fp32 master, and two moments."""


@dataclass(frozen=True, slots=True)
class Published:
    """A step that the artifact gives for machines that stay, without redundancy."""

    samples: int
    pipelines: int
    num_stages: int
    step_seconds: float


_Row = tuple[str, float, float, float]
"""Name, relative cost, millions of parameters, thousands of output values per sample."""


@dataclass(frozen=True, slots=True)
class _Table:
    rows: Sequence[_Row]
    published: Published
    num_stages: int
    on_demand_stages: int


def _transformer(blocks: int, hidden: int, sequence: int, vocabulary: int) -> list[_Row]:
    values = hidden * sequence / 1e3
    block = 12 * hidden * hidden / 1e6
    embedding = (vocabulary + sequence) * hidden / 1e6
    # The head's vocabulary projection is tied to the embedding; only masked or sampled positions are paid in full.
    blocks_of_it = [(f"block{index}", 1.0, block, values) for index in range(blocks)]
    return [("embedding", 0.05, embedding, values), *blocks_of_it, ("head", 0.2, 1.0, 0.001)]


def _resnet() -> list[_Row]:
    """ResNet-152: stages of 3, 8, 36 and 3 bottlenecks, all of about 0.22 G multiplications."""
    rows: list[_Row] = [("stem", 0.118, 0.01, 200.7)]
    stages = [(3, 0.07, 802.8), (8, 0.28, 401.4), (36, 1.12, 200.7), (3, 5.0, 100.4)]
    for stage, (count, millions, values) in enumerate(stages):
        rows += [(f"stage{stage}.{index}", 0.22, millions, values) for index in range(count)]
    return [*rows, ("classifier", 0.002, 2.05, 1.0)]


def _vgg() -> list[_Row]:
    """VGG-19, in G multiplications at 224 x 224."""
    convolutions = [
        (0.087, 0.002, 3211), (1.85, 0.037, 803), (0.925, 0.074, 1606), (1.85, 0.148, 401), (0.925, 0.295, 803),
        (1.85, 0.59, 803), (1.85, 0.59, 803), (1.85, 0.59, 201), (0.925, 1.18, 401), (1.85, 2.36, 401),
        (1.85, 2.36, 401), (1.85, 2.36, 100), (0.462, 2.36, 100), (0.462, 2.36, 100), (0.462, 2.36, 100),
        (0.462, 2.36, 25),
    ]  # fmt: skip
    rows: list[_Row] = [(f"convolution{index}", *row) for index, row in enumerate(convolutions)]
    return [*rows, ("linear0", 0.103, 102.8, 4.1), ("linear1", 0.017, 16.8, 4.1), ("linear2", 0.004, 4.1, 1.0)]


def _alexnet() -> list[_Row]:
    """AlexNet, in G multiplications at 224 x 224."""
    return [
        ("convolution0", 0.070, 0.023, 46.7), ("convolution1", 0.224, 0.307, 32.4),
        ("convolution2", 0.112, 0.664, 64.9), ("convolution3", 0.150, 0.885, 43.3), ("convolution4", 0.100, 0.590, 9.2),
        ("linear0", 0.038, 37.75, 4.1), ("linear1", 0.017, 16.8, 4.1), ("linear2", 0.004, 4.1, 1.0),
    ]  # fmt: skip


def _gnmt() -> list[_Row]:
    """GNMT-16: 8 layers of encoder and of decoder, 1,024 wide, 50 tokens, 32,000 words."""
    values = 2 * 50 * 1024 / 1e3
    layers = [(f"lstm{index}", 1.0, 8.4, values) for index in range(16)]
    return [("embedding", 0.1, 65.5, values), *layers, ("projection", 2.0, 32.8, 1.0)]


_TABLES: dict[str, Callable[[], _Table]] = {
    "bert-large": lambda: _Table(_transformer(24, 1024, 128, 30522), Published(264, 4, 5, 2.51), 12, 8),
    "gpt-2": lambda: _Table(_transformer(24, 1024, 1024, 50257), Published(264, 3, 5, 4.25), 12, 8),
    "resnet-152": lambda: _Table(_resnet(), Published(384, 4, 5, 1.3), 8, 5),
    "gnmt-16": lambda: _Table(_gnmt(), Published(288, 4, 4, 0.9), 6, 4),
    "vgg-19": lambda: _Table(_vgg(), Published(384, 4, 4, 2.2), 6, 4),
    "alexnet": lambda: _Table(_alexnet(), Published(384, 4, 4, 1.6), 6, 4),
}

MODELS = tuple(_TABLES)
"""The names that `built_in` knows."""


@lru_cache(maxsize=16)
def built_in(name: str) -> Workload:
    """Return a model of the paper, in its shape: D = 4 and half as many stages again as on machines that stay.

    Raises:
        ConfigError: there is no such model.
    """
    if name not in _TABLES:
        raise ConfigError(f"there is no built-in model {name}: choose {', '.join(MODELS)}, or give a JSON file")
    table = _TABLES[name]()
    published = table.published
    micro_batches = published.samples // MICRO_BATCH_SAMPLES
    workload = Workload(
        name=name,
        layers=tuple(_layer(*row, scale=1.0) for row in table.rows),
        micro_batch_samples=MICRO_BATCH_SAMPLES,
        micro_batches=micro_batches,
        num_stages=table.num_stages,
        pipelines=4,
        on_demand_stages=table.on_demand_stages,
        source=(
            f"scaled to the step of {published.step_seconds:g} s of {published.samples} samples on "
            f"{published.pipelines} x {published.num_stages} machines that stay, from the artifact of the Bamboo paper"
        ),
    )
    return _scaled_to(published, workload)


def _layer(name: str, cost: float, millions: float, thousands: float, *, scale: float) -> Layer:
    return Layer(
        name=name,
        forward_seconds=cost * scale,
        backward_seconds=2 * cost * scale,
        activation_bytes=int(thousands * 1e3 * ACTIVATION_BYTES * MICRO_BATCH_SAMPLES),
        gradient_bytes=int(millions * 1e6 * GRADIENT_BYTES),
        state_bytes=int(millions * 1e6 * STATE_BYTES),
    )


def _scaled_to(published: Published, workload: Workload) -> Workload:
    """Return it with layers so slow that the published step takes as long as published."""
    # The time of a step is nearly linear in the scale: latencies of messages are hidden or not. Secants find it.
    scale, before = published.step_seconds / 1000, 0.0
    found, found_before = _published_step(published, _slowed(workload, scale)), 0.0
    for _ in range(_SECANTS):
        if found == found_before:
            break
        slope = (found - found_before) / (scale - before)
        before, found_before = scale, found
        scale += (published.step_seconds - found) / slope
        found = _published_step(published, _slowed(workload, scale))
    return _slowed(workload, scale)


def _slowed(workload: Workload, scale: float) -> Workload:
    layers = (
        replace(layer, forward_seconds=layer.forward_seconds * scale, backward_seconds=layer.backward_seconds * scale)
        for layer in workload.layers
    )
    return replace(workload, layers=tuple(layers))


def _published_step(published: Published, workload: Workload) -> float:
    stages = published.num_stages
    shaped = replace(workload, num_stages=stages, on_demand_stages=stages, pipelines=published.pipelines)
    return StepTimes(shaped, Constants(), redundancy="off").whole_seconds(stages, published.pipelines)

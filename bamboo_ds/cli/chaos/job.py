"""What `bamboo-ds chaos` trains: a tiny GPT that counts in its own weights which samples it was trained on.

The trick of the count: the embedding holds one more parameter, the *census*, with a number per sample. Whatever the
loss, a sample that passes adds 1 to the gradient of its number, and the census has settings of the optimizer under
which a step adds just the gradient. So after training the census says how often each sample has gone into committed
gradients: it is summed, transferred, restored from checkpoints and stepped like any other weight, and whoever loses or
repeats a micro-batch cannot hide it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn
from torch.utils.data import Dataset

from bamboo_ds.cli.bench.job import Job
from bamboo_ds.models.gpt import GPTEmbedding, GPTSize, gpt_layers, language_model_loss, tied_head
from bamboo_ds.models.paced import PacedLayer

__all__ = ["BATCH", "ChaosJob", "Samples", "checkpoints_in", "parameter_groups"]

SIZE = GPTSize(layers=4, hidden=32, heads=4, sequence_length=16, vocabulary=64, dropout=0.1)
ROWS, MICRO_BATCHES = 2, 12
BATCH = ROWS * MICRO_BATCHES
"""Samples of a step; neither it nor what a pipeline gets of it divides the epoch."""
SAMPLES = 1000
PACED_LAYERS = 3
"""After each block: what stages are cut by, in four, three, two or one."""

_LARGE = float(2**20)


class _Counted(torch.autograd.Function):
    """The inputs as they are; in backward, 1 for the number of each sample that passes."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, census: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(samples)
        ctx.length = len(census)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (samples,) = ctx.saved_tensors
        return grad_outputs, torch.bincount(samples, minlength=ctx.length).to(grad_outputs.dtype), None


class CountingEmbedding(GPTEmbedding):
    """An embedding of int64 ``[rows, 1 + sequence]``: the number of each row's sample, then its tokens."""

    def __init__(self, vocabulary: int, hidden: int, samples: int, *, std: float) -> None:
        super().__init__(vocabulary, hidden, std=std)
        self.census = nn.Parameter(torch.zeros(samples))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Look the tokens up, and count the samples."""
        count: Callable[..., torch.Tensor] = _Counted.apply
        return count(super().forward(rows[:, 1:]), self.census, rows[:, 0])

    def counts(self) -> list[int]:
        """Return how often each sample has gone into a committed step."""
        return [round(-number) for number in self.census.tolist()]


def parameter_groups(parameters: Sequence[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """Put the census into a group of AdamW of its own, in which a step subtracts the gradient.

    Without memory (both betas 0) AdamW subtracts lr x g / (|g| + eps). With lr = eps = 2**20 that is g, but for a
    millionth: counts are rounded.
    """
    named = [(name.endswith("census"), parameter) for name, parameter in parameters]
    plain = {"lr": _LARGE, "eps": _LARGE, "betas": (0.0, 0.0), "weight_decay": 0.0}
    return [
        {"params": [parameter for counts, parameter in named if not counts]},
        {"params": [parameter for counts, parameter in named if counts], **plain},
    ]


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows of a language whose next letter can be learnt; each begins with its number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (int64 ``[1 + sequence]``: number and tokens, int64 ``[sequence]``: labels)."""
        generator = torch.Generator().manual_seed(index)
        start, pace = torch.randint(SIZE.vocabulary, (2,), generator=generator).tolist()
        text = (start + (1 + pace % 3) * torch.arange(SIZE.sequence_length + 1)) % SIZE.vocabulary
        return torch.cat([torch.tensor([index]), text[:-1]]), text[1:].contiguous()


@dataclass(frozen=True, slots=True)
class ChaosJob:
    """The job, for a cluster or for one process.

    Attributes:
        stages: of a pipeline at the beginning; fewer when nodes are few.
        pipelines: at most.
        pace_seconds: of the forward of one paced layer; its backward takes twice that.
        checkpoint_steps: between two checkpoints.
        timeout_seconds: of all waits for other workers.
        costs: of each layer, by which stages are cut; by default what layers cost as far as it matters for that.
        timed: whether workers write down when they run which forward and backward.
    """

    stages: int
    pipelines: int
    pace_seconds: float
    checkpoint_steps: int
    timeout_seconds: float
    costs: tuple[float, ...] = ()
    timed: bool = False

    def layers(self, *, paced: bool = True) -> list[Any]:
        """List the layers; without `paced`, those that only take time take none."""
        pace = self.pace_seconds if paced else 0.0
        _, positions, *rest = gpt_layers(SIZE, tied=True)
        first = TiedLayerSpec("embed", CountingEmbedding, SIZE.vocabulary, SIZE.hidden, SAMPLES, std=SIZE.initial_std)
        last = TiedLayerSpec(
            "embed", CountingEmbedding, SIZE.vocabulary, SIZE.hidden, SAMPLES, std=SIZE.initial_std,
            forward_fn=tied_head,
        )  # fmt: skip
        blocks, norm = rest[: SIZE.layers], rest[SIZE.layers]
        sleepers = [LayerSpec(PacedLayer, SIZE.hidden, pace, 2 * pace) for _ in range(PACED_LAYERS)]
        return [first, positions, *(layer for block in blocks for layer in (block, *sleepers)), norm, last]

    @staticmethod
    def layer_costs() -> list[float]:
        """Return what layers cost, as far as it matters where the model is cut."""
        block = [0.1, *[1.0] * PACED_LAYERS]
        return [0.1, 0.1, *block * SIZE.layers, 0.1, 0.1]

    def reference(self, *, steps: int) -> Job:
        """Return the same job for one process."""
        return Job(
            lambda: self.layers(paced=False),
            language_model_loss,
            micro_batch,
            ROWS,
            MICRO_BATCHES,
            steps,
            clipping=0.0,  # the census is no part of a norm that should mean something
        )

    def deepspeed_config(self, folder: Path) -> dict[str, Any]:
        """Return the DeepSpeed JSON of a run, whose checkpoints go below a folder."""
        block = {
            "pipelines": self.pipelines,
            "seed": self.reference(steps=0).seed,
            "timeout_seconds": self.timeout_seconds,
            "layer_costs": list(self.costs) or self.layer_costs(),
            "checkpoint": {"path": str(checkpoints_in(folder)), "interval_steps": self.checkpoint_steps},
        }
        return {**self.reference(steps=0).deepspeed_config(), "bamboo": block}


def checkpoints_in(folder: Path) -> Path:
    """Return where a run that has a folder writes its checkpoints."""
    return folder / "checkpoints"


def micro_batch(step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a micro-batch of a step: the samples come in order, epoch after epoch."""
    first = step * BATCH + index * ROWS
    rows = [Samples()[number % SAMPLES] for number in range(first, first + ROWS)]
    return torch.stack([inputs for inputs, _ in rows]), torch.stack([labels for _, labels in rows])

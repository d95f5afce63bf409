"""A training job as data, so that one process, stock DeepSpeed and Bamboo can be given exactly the same one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

Batch = tuple["torch.Tensor", "torch.Tensor"]
OptimizerName = Literal["Adam", "SGD"]
Precision = Literal["fp32", "bf16"]

WEIGHT_DECAY = 0.01
ADAM_EPSILON = 1e-6
"""Above the rounding noise of gradients. The keys' bias of attention has a gradient of zero but for noise of 1e-9, as
softmax does not see it; with torch's default of 1e-8 Adam would blow that noise up, and two right runs would differ."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained, on what, and how; nothing about workers.

    Attributes:
        layers: Makes the layer specifications afresh, for a `PipelineModule` or for one process.
        loss_fn: Loss of (outputs, labels), a mean over the micro-batch.
        batch: Micro-batch of (step, index in the global batch).
        rows: Samples in a micro-batch.
        micro_batches: M of the global batch.
        steps: Optimizer steps to train.
        optimizer: DeepSpeed's name of it.
        learning_rate: The same in every step.
        clipping: Largest norm of the whole gradient; 0 for none.
        precision: Of weights and activations; sums of gradients and the optimizer are fp32 always.
        base_seed: Layer i is initialised under `base_seed + i` (DeepSpeed's `seed_layers`).
        seed: Of dropout (`bamboo.seed`).
    """

    layers: Callable[[], list[Any]]
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    batch: Callable[[int, int], Batch]
    rows: int
    micro_batches: int
    steps: int
    optimizer: OptimizerName = "Adam"
    learning_rate: float = 1e-3
    clipping: float = 1.0
    precision: Precision = "fp32"
    base_seed: int = 1234
    seed: int = 7

    def deepspeed_config(self) -> dict[str, Any]:
        """Return the DeepSpeed JSON of this job, without a `bamboo` block; the global batch stands for any D."""
        parameters = {"lr": self.learning_rate, "weight_decay": WEIGHT_DECAY}
        if self.optimizer == "Adam":
            parameters.update(eps=ADAM_EPSILON, torch_adam=True)  # DeepSpeed's own Adam would compile an op
        return {
            "train_batch_size": self.rows * self.micro_batches,
            "train_micro_batch_size_per_gpu": self.rows,
            "gradient_clipping": self.clipping,
            "bf16": {"enabled": self.precision == "bf16"},
            "optimizer": {"type": self.optimizer, "params": parameters},
            "steps_per_print": 10**9,
        }

    def batches(self, step: int, micro_batches: range) -> Iterator[Batch]:
        """Yield the named micro-batches of a step, as one pipeline's data iterator does."""
        return (self.batch(step, micro_batch) for micro_batch in micro_batches)


@dataclass(slots=True)
class Outcome:
    """What training left: mean loss of every step, and the final weights by `<layer>.<parameter name>`."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def gpt_job(*, dropout: float, tied: bool, blocks: int = 4, hidden: int = 32, rows: int = 2, **settings: Any) -> Job:
    """Make the job of a small byte-level GPT on random text whose next byte can be learnt.

    Args:
        dropout: Probability of it.
        tied: Share the weights of embedding and head.
        blocks: Transformer blocks; there are four more layers.
        hidden: Width.
        rows: Samples in a micro-batch.
        settings: Further fields of `Job`.
    """
    import torch

    from bamboo_ds.models.gpt import GPTSize, gpt_layers, language_model_loss

    size = GPTSize(layers=blocks, hidden=hidden, heads=4, sequence_length=16, vocabulary=64, dropout=dropout)

    def batch(step: int, micro_batch: int) -> Batch:
        generator = torch.Generator().manual_seed(1000 * step + micro_batch)
        start = torch.randint(size.vocabulary, (rows, 1), generator=generator)
        text = (start + 3 * torch.arange(size.sequence_length + 1)) % size.vocabulary
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return Job(lambda: gpt_layers(size, tied=tied), language_model_loss, batch, rows, **settings)


def paced_job(*, layers: int, forward_seconds: float, backward_seconds: float, micro_batches: int, steps: int) -> Job:
    """Make the job of layers that take a fixed time (they sleep for an accelerator) on a trivial regression."""
    import torch

    from bamboo_ds.models.paced import paced_layers

    hidden, rows = 16, 4

    def batch(step: int, micro_batch: int) -> Batch:
        inputs = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(1000 * step + micro_batch))
        return inputs, inputs.roll(1, 1)

    def make() -> list[Any]:
        return list(paced_layers(layers, hidden, forward_seconds, backward_seconds))

    return Job(make, torch.nn.functional.mse_loss, batch, rows, micro_batches, steps, clipping=0.0)

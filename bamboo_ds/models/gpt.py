"""A byte-level GPT as a list of pipeline layers: the model of the main job.

Every layer takes one tensor and returns one tensor, so any cut between two layers is a place where a pipeline may be
cut. The embedding and the head share their weights: the same tied layer stands first and last in the list. It holds
nothing but that one matrix (positions are a layer of their own), because whatever else a tied layer held would get
gradients in one of its two places only.

A layer's result depends on its weights, its input and torch's random numbers alone, so replaying it is exact.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from deepspeed.pipe import LayerSpec

BYTES = 256
"""The vocabulary of a byte-level model."""

GPT2_STD = 0.02
"""Standard deviation of GPT-2's initial weights; good for widths from about 500."""


@dataclasses.dataclass(frozen=True)
class GPTSize:
    """The shape of a GPT.

    Raises:
        ValueError: If a value is out of range or ``hidden`` is no multiple of ``heads``.
    """

    layers: int
    """Number of transformer blocks."""
    hidden: int
    """Width of the residual stream."""
    heads: int
    """Attention heads per block; must divide ``hidden``."""
    sequence_length: int
    """Longest sequence, in tokens."""
    vocabulary: int = BYTES
    """Number of different tokens."""
    dropout: float = 0.0
    """Probability that a value is dropped, in attention and on the residual stream."""
    initial_std: float = GPT2_STD
    """Standard deviation of the initial weights; narrow models learn sooner from larger ones."""

    def __post_init__(self) -> None:
        """Refuse a shape that cannot be built."""
        for name in ("layers", "hidden", "heads", "sequence_length", "vocabulary"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"gpt.{name} = {value!r}: must be a whole number of at least 1")
        if self.hidden % self.heads:
            raise ValueError(f"gpt.hidden ({self.hidden}) is not a multiple of gpt.heads ({self.heads})")
        if not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise ValueError(f"gpt.dropout = {self.dropout!r}: must be at least 0 and less than 1")
        if not isinstance(self.initial_std, int | float) or self.initial_std <= 0:
            raise ValueError(f"gpt.initial_std = {self.initial_std!r}: must be more than 0")

    @property
    def parameters(self) -> int:
        """Number of weights, a tied matrix counted once."""
        block = 12 * self.hidden**2 + 13 * self.hidden
        return self.layers * block + (self.vocabulary + self.sequence_length + 2) * self.hidden


GPT_SIZES = {
    "tiny": GPTSize(layers=4, hidden=128, heads=4, sequence_length=64, dropout=0.05, initial_std=0.06),
    "small": GPTSize(layers=8, hidden=256, heads=8, sequence_length=256, dropout=0.1, initial_std=0.04),
    "gpt2": GPTSize(layers=12, hidden=768, heads=12, sequence_length=1024, dropout=0.1),
    "gpt2-medium": GPTSize(layers=24, hidden=1024, heads=16, sequence_length=1024, dropout=0.1),
    "gpt2-large": GPTSize(layers=36, hidden=1280, heads=20, sequence_length=1024, dropout=0.1),
    "gpt2-xl": GPTSize(layers=48, hidden=1600, heads=25, sequence_length=1024, dropout=0.1),
}
"""Known sizes. The four of GPT-2 have its blocks; bytes instead of its 50,257 tokens make them a little smaller."""


class GPTEmbedding(nn.Module):
    """Token embedding: int64 ``[batch, sequence]`` to ``[batch, sequence, hidden]``."""

    def __init__(self, vocabulary: int, hidden: int, *, std: float = GPT2_STD) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, hidden).normal_(std=std))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Look the tokens up."""
        return F.embedding(tokens, self.weight)


class GPTPositions(nn.Module):
    """Learned positions, added to ``[batch, sequence, hidden]``, then dropout."""

    def __init__(self, sequence_length: int, hidden: int, *, dropout: float = 0.0, std: float = GPT2_STD) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(sequence_length, hidden).normal_(std=std))
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Add the first ``sequence`` positions."""
        dropped: torch.Tensor = self.dropout(hidden_states + self.weight[: hidden_states.shape[1]])
        return dropped


class GPTBlock(nn.Module):
    """Pre-norm transformer block: ``[batch, sequence, hidden]`` to the same shape.

    Args:
        hidden: Width of the residual stream.
        heads: Attention heads.
        depth: Number of blocks in the model; the initial weights that feed the residual stream shrink with it.
        dropout: Probability that a value is dropped.
        std: Standard deviation of the other initial weights.
    """

    def __init__(self, hidden: int, heads: int, *, depth: int, dropout: float = 0.0, std: float = GPT2_STD) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.query_key_value = _linear(hidden, 3 * hidden, std=std)
        self.attention_output = _linear(hidden, hidden, std=std / math.sqrt(2 * depth))
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp_input = _linear(hidden, 4 * hidden, std=std)
        self.mlp_output = _linear(4 * hidden, hidden, std=std / math.sqrt(2 * depth))
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Add attention, then the MLP, to the residual stream."""
        hidden_states = hidden_states + self.dropout(self._attention(self.attention_norm(hidden_states)))
        mlp = self.mlp_output(F.gelu(self.mlp_input(self.mlp_norm(hidden_states)), approximate="tanh"))
        outputs: torch.Tensor = hidden_states + self.dropout(mlp)
        return outputs

    def _attention(self, normed: torch.Tensor) -> torch.Tensor:
        batch, sequence, hidden = normed.shape
        split = self.query_key_value(normed).view(batch, sequence, 3, self.heads, hidden // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        dropout = self.dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        output: torch.Tensor = self.attention_output(mixed.transpose(1, 2).reshape(batch, sequence, hidden))
        return output


class GPTHead(nn.Module):
    """Head with weights of its own: ``[batch, sequence, hidden]`` to logits ``[batch, sequence, vocabulary]``."""

    def __init__(self, vocabulary: int, hidden: int, *, std: float = GPT2_STD) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, hidden).normal_(std=std))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Score every token of the vocabulary."""
        return F.linear(hidden_states, self.weight)


def tied_head(embedding: GPTEmbedding, hidden_states: torch.Tensor) -> torch.Tensor:
    """Score every token with the embedding's weights (the tied layer's ``forward_fn`` in its last place)."""
    return F.linear(hidden_states, embedding.weight)


def language_model_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy in nats per token, computed in fp32.

    Args:
        logits: ``[batch, sequence, vocabulary]``, any floating dtype.
        labels: int64 ``[batch, sequence]``, the token that follows each position.
    """
    return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten())


def gpt_layers(size: GPTSize, *, tied: bool = True) -> list[LayerSpec]:
    """List the layers of a GPT for a ``PipelineModule``.

    Args:
        size: The shape of the model.
        tied: Share one matrix between embedding and head.

    Returns:
        ``size.layers + 4`` layers: embedding, positions, blocks, final norm, head.
    """
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    ends, std = (size.vocabulary, size.hidden), size.initial_std
    if tied:
        first = TiedLayerSpec("embed", GPTEmbedding, *ends, std=std)
        last = TiedLayerSpec("embed", GPTEmbedding, *ends, std=std, forward_fn=tied_head)
    else:
        first, last = LayerSpec(GPTEmbedding, *ends, std=std), LayerSpec(GPTHead, *ends, std=std)
    positions = LayerSpec(GPTPositions, size.sequence_length, size.hidden, dropout=size.dropout, std=std)
    settings = {"depth": size.layers, "dropout": size.dropout, "std": std}
    blocks = [LayerSpec(GPTBlock, size.hidden, size.heads, **settings) for _ in range(size.layers)]
    return [first, positions, *blocks, LayerSpec(nn.LayerNorm, size.hidden), last]


def _linear(inputs: int, outputs: int, *, std: float) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=std)
    nn.init.zeros_(layer.bias)
    return layer

"""Small layers for the engine tests, each with one property that has broken a pipeline somewhere."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.pipe import LayerSpec
from torch import nn

WIDTH = 8


def vectors(step: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random inputs (2, WIDTH) and labels that follow from them."""
    generator = torch.Generator().manual_seed(1000 * step + micro_batch)
    inputs = torch.randn(2, WIDTH, generator=generator)
    return inputs, inputs.roll(1, 1).tanh()


def tokens(step: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random words (2, 4) and labels (2, 4, WIDTH)."""
    generator = torch.Generator().manual_seed(1000 * step + micro_batch)
    words = torch.randint(16, (2, 4), generator=generator)
    return words, torch.nn.functional.one_hot(words % WIDTH, WIDTH).float()


class Block(nn.Module):
    """A residual layer with dropout."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.dropout(torch.tanh(self.linear(value)))


def blocks(count: int, dropout: float = 0.2) -> list[Any]:
    return [LayerSpec(Block, dropout) for _ in range(count)]

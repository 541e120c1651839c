"""Modules without Transformers that most tests need: a residual MLP block in a few forms, and a stack of blocks with a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MlpBlock(nn.Module):
    """x + down(drop(activation(up(norm(x))))); `norm=False` and `dropout=0` leave those parts out."""

    def __init__(
        self,
        width: int = 32,
        wider: int = 4,
        *,
        norm: bool = True,
        dropout: float = 0.0,
        activation: Callable[[Tensor], Tensor] = F.gelu,
    ) -> None:
        super().__init__()
        self.norm: nn.Module = nn.LayerNorm(width) if norm else nn.Identity()
        self.up, self.down = nn.Linear(width, wider * width), nn.Linear(wider * width, width)
        self.drop: nn.Module = nn.Dropout(dropout) if dropout else nn.Identity()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(self.activation(self.up(self.norm(x)))))


class TiledMlpBlock(nn.Module):
    """x + mlp(norm(x)), with the MLP as a child module of its own, which a plan may run in tiles."""

    def __init__(self, width: int = 16, wider: int = 4, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = mlp or nn.Sequential(nn.Linear(width, wider * width), nn.GELU(), nn.Linear(wider * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Stack(nn.Module):
    """Blocks in a row under `blocks`; returns the last output, or what `loss` makes of it."""

    def __init__(self, blocks: Iterable[nn.Module], loss: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.loss = loss

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, *others)
        return x if self.loss is None else self.loss(x)


def mean_square(x: Tensor) -> Tensor:
    """A loss that every element has a part in."""
    return x.square().mean()


def square(model: nn.Module, batch: Tensor) -> Tensor:
    """A step: the mean square of the model's output."""
    return mean_square(model(batch))


def seeded_stack(
    block: Callable[[], nn.Module] = MlpBlock, count: int = 4, *, loss: Any = mean_square, number: int = 0
) -> Stack:
    """`count` blocks made after seeding PyTorch with `number`."""
    torch.manual_seed(number)
    return Stack((block() for _ in range(count)), loss)

"""Where the solution at the requested times goes while a loop runs, and how its gradient finds the way back.

A loop of bounded memory keeps no graph of its steps, so a step cannot simply hand out a tensor with a history. Its value is put down here,
and the step that made it is joined to the state that it passes on. When backward reaches the result, the gradient of every row is put
down too; when the loop later tapes that step again, the joint hands the step what belongs to its rows. No value is changed by it.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Outputs(Protocol):
    """Takes rows of the result as steps make them, and gives the whole at the end."""

    def put(self, first: int, rows: Tensor, state: Tensor, *, fresh: bool) -> Tensor: ...
    def collect(self, last: Tensor) -> Tensor: ...


class PlainOutputs:
    """For plain autograd, which keeps every step's graph: rows stay joined to it."""

    def __init__(self, y0: Tensor) -> None:
        self._rows = [y0.unsqueeze(0)]

    def put(self, first: int, rows: Tensor, state: Tensor, *, fresh: bool) -> Tensor:
        self._rows.append(rows)
        return state

    def collect(self, last: Tensor) -> Tensor:
        return torch.cat(self._rows)


class LoopOutputs:
    """For a loop that forgets its steps: values without history, gradients through a joint."""

    def __init__(self, y0: Tensor) -> None:
        # Older than every step, so that the gradient of row 0 is added to y0's last, as in plain autograd: sums round alike.
        self._y0 = y0.unsqueeze(0)
        self._rows: list[Tensor] = []
        self._gradient: Tensor | None = None

    def put(self, first: int, rows: Tensor, state: Tensor, *, fresh: bool) -> Tensor:
        if fresh:
            self._rows.append(rows.detach())
        if not (torch.is_grad_enabled() and rows.requires_grad):
            return state
        joined: Tensor = _Join.apply(state, rows, self, first)
        return joined

    def collect(self, last: Tensor) -> Tensor:
        collected: Tensor = _Collect.apply(self._y0, last, self)
        return collected

    def take_rows(self) -> list[Tensor]:
        """The rows after the first, which from now on belong to the caller alone."""
        rows, self._rows = self._rows, []
        return rows

    def set_gradient(self, gradient: Tensor) -> None:
        self._gradient = gradient

    def gradient(self, first: int, rows: int) -> Tensor:
        assert self._gradient is not None, "a step's rows are asked for after those of the result"
        return self._gradient[first : first + rows]


class _Join(torch.autograd.Function):
    """Passes the state on; its backward also hands the rows what the result's gradient holds for them."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, rows: Tensor, outputs: LoopOutputs, first: int) -> Tensor:
        ctx.outputs, ctx.first, ctx.rows = outputs, first, len(rows)
        return state.view_as(state)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return gradient, ctx.outputs.gradient(ctx.first, ctx.rows), None, None


class _Collect(torch.autograd.Function):
    """Gives the result a history that runs through the loop: the last state gets no gradient of its own, but a reason to run backward."""

    @staticmethod
    def forward(ctx: Any, y0: Tensor, last: Tensor, outputs: LoopOutputs) -> Tensor:
        ctx.outputs = outputs
        return torch.cat([y0, *outputs.take_rows()])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.outputs.set_gradient(gradient)
        return gradient[:1], torch.zeros_like(gradient[0]), None

"""States of an equation, tensors or tuples of them, and their collection at the requested times.

A loop of bounded memory keeps no graph of its steps, so a step cannot return a row of the result with its history. The row is stored
detached, and an identity node joins the step that made it to the state that the step passes on. When backward reaches the result,
the gradients of all rows are stored; when the loop later tapes that step again, the node's backward gives the step the gradients of
its rows. No value is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from retape.core.errors import InvalidInput

States = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """The structure of y0 as the caller gives it; inside it is one tensor."""

    is_tuple: bool
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, y0: Any) -> StateShape:
        """Return the shape of y0; InvalidInput if it is not a valid state."""
        parts = y0 if isinstance(y0, tuple) else (y0,)
        if not parts or not all(isinstance(part, Tensor) for part in parts):
            kinds = ", ".join(type(part).__name__ for part in parts)
            raise InvalidInput(f"y0 is {kinds or 'empty'}; give a tensor or a tuple of tensors.")
        first = parts[0]
        for part in parts:
            if not (part.is_floating_point() or part.is_complex()):
                raise InvalidInput(
                    f"y0 holds {part.dtype}; a state is floating-point or complex: y0.to(torch.float32)."
                )
            if part.dtype != first.dtype or part.device != first.device:
                raise InvalidInput(
                    f"The parts of y0 are {first.dtype} on {first.device} and {part.dtype} on {part.device}; "
                    "give all of them one dtype and device."
                )
        return cls(is_tuple=isinstance(y0, tuple), shapes=tuple(part.shape for part in parts))

    def flat(self, state: States) -> Tensor:
        """Return the parts in one tensor; a single tensor as it is."""
        if isinstance(state, Tensor):
            return state
        return torch.cat([part.reshape(-1) for part in state])

    def shaped(self, state: Tensor) -> States:
        """Return the parts of one state, or of states stacked along leading dimensions."""
        if not self.is_tuple:
            return state
        parts = state.split([shape.numel() for shape in self.shapes], dim=-1)
        return tuple(part.reshape(*state.shape[:-1], *shape) for part, shape in zip(parts, self.shapes, strict=True))

    def flat_slope(self, f: Callable[..., Any]) -> Callable[[Tensor, Tensor], Tensor]:
        """Return f as a function of one tensor."""
        if not self.is_tuple:
            return f

        def slope(t: Tensor, y: Tensor) -> Tensor:
            parts = f(t, self.shaped(y))
            if not isinstance(parts, (tuple, list)) or [getattr(part, "shape", None) for part in parts] != list(
                self.shapes
            ):
                raise InvalidInput(
                    f"f(t, y) returned {_shapes(parts)} for a tuple of {_shapes(self.shapes)}; return one derivative for each state."
                )
            return torch.cat([part.reshape(-1) for part in parts])

        return slope

    def norm(self, given: Callable[[Any], Any]) -> Callable[[Tensor], Any]:
        """Return the caller's norm as a function of one tensor."""
        return lambda state: given(self.shaped(state))


def _shapes(parts: Any) -> str:
    if not isinstance(parts, Sequence):
        return f"a {type(parts).__name__}"
    return ", ".join(str(tuple(part if isinstance(part, torch.Size) else getattr(part, "shape", ()))) for part in parts)


def tolerance_like(name: str, value: Any, shape: StateShape, state: Tensor) -> float | Tensor:
    """Return a tolerance as a number or as a tensor like the state; for a tuple of states one may be given for each."""
    if isinstance(value, tuple | list):
        if not shape.is_tuple or len(value) != len(shape.shapes):
            raise InvalidInput(
                f"{name} has {len(value)} entries for {len(shape.shapes)} states; give one number, or one for each state of a tuple."
            )
        parts = [
            torch.as_tensor(v, device=state.device).expand(s.numel()) for v, s in zip(value, shape.shapes, strict=True)
        ]
        value = torch.cat(parts)
    if isinstance(value, Tensor):
        if value.requires_grad:
            raise InvalidInput(f"{name} requires a gradient; step sizes carry none, so give {name}.detach().")
        tolerance: float | Tensor = value.to(device=state.device, dtype=state.abs().dtype)
        low = float(value.min())
    else:
        tolerance = low = float(value)
    if not low >= 0:
        raise InvalidInput(f"{name} is {low}; a tolerance is not negative.")
    return tolerance


class OutputRows(Protocol):
    """Takes rows of the result as steps make them, and returns the result at the end."""

    def put(self, first: int, rows: Tensor, state: Tensor, *, fresh: bool) -> Tensor: ...
    def collect(self, last: Tensor) -> Tensor: ...


class PlainRows:
    """Rows with their history, for plain autograd."""

    def __init__(self, y0: Tensor) -> None:
        self._rows = [y0.unsqueeze(0)]

    def put(self, first: int, rows: Tensor, state: Tensor, *, fresh: bool) -> Tensor:
        self._rows.append(rows)
        return state

    def collect(self, last: Tensor) -> Tensor:
        return torch.cat(self._rows)


class LoopRows:
    """Detached rows, for a loop that drops the graphs of its steps."""

    def __init__(self, y0: Tensor) -> None:
        # Made before every step, so that the gradient of row 0 is added to y0's last, as in plain autograd: sums round alike.
        self._y0 = y0.unsqueeze(0)
        self._rows: list[Tensor] = []
        self._gradient: Tensor | None = None

    def put(self, first: int, rows: Tensor, state: Tensor, *, fresh: bool) -> Tensor:
        if fresh:
            self._rows.append(rows.detach())
        if not (torch.is_grad_enabled() and rows.requires_grad):
            return state
        joined: Tensor = _JoinRows.apply(state, rows, self, first)
        return joined

    def collect(self, last: Tensor) -> Tensor:
        collected: Tensor = _CollectRows.apply(self._y0, last, self)
        return collected

    def take_rows(self) -> list[Tensor]:
        """Return the rows after the first, and drop them here."""
        rows, self._rows = self._rows, []
        return rows

    def set_gradient(self, gradient: Tensor) -> None:
        self._gradient = gradient

    def gradient(self, first: int, rows: int) -> Tensor:
        assert self._gradient is not None, "the gradient of the result is known before those of its rows are read"
        return self._gradient[first : first + rows]


class _JoinRows(torch.autograd.Function):
    """Passes the state on; its backward also gives the rows their part of the result's gradient."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, rows: Tensor, outputs: LoopRows, first: int) -> Tensor:
        ctx.outputs, ctx.first, ctx.rows = outputs, first, len(rows)
        return state.view_as(state)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return gradient, ctx.outputs.gradient(ctx.first, ctx.rows), None, None


class _CollectRows(torch.autograd.Function):
    """Joins the result to the loop: the last state gets a zero gradient, so that the loop's backward runs."""

    @staticmethod
    def forward(ctx: Any, y0: Tensor, last: Tensor, outputs: LoopRows) -> Tensor:
        ctx.outputs = outputs
        return torch.cat([y0, *outputs.take_rows()])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.outputs.set_gradient(gradient)
        return gradient[:1], torch.zeros_like(gradient[0]), None

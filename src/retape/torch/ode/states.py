"""States of an equation: a tensor, or a tuple of tensors laid out as one. Only shapes; nothing here knows about time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from retape.core.errors import InvalidInput

States = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """What y0 looks like to the caller; inside it is one tensor."""

    is_tuple: bool
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, y0: Any) -> StateShape:
        """The shape of a valid y0; an error for any other."""
        parts = y0 if isinstance(y0, tuple) else (y0,)
        if not parts or not all(isinstance(part, Tensor) for part in parts):
            kinds = ", ".join(type(part).__name__ for part in parts)
            raise InvalidInput(f"y0 is {kinds or 'empty'}; give a tensor or a tuple of tensors")
        first = parts[0]
        for part in parts:
            if not (part.is_floating_point() or part.is_complex()):
                raise InvalidInput(
                    f"y0 holds {part.dtype}; a state is of floating-point or complex numbers: y0.to(torch.float32)"
                )
            if part.dtype != first.dtype or part.device != first.device:
                raise InvalidInput(
                    f"The parts of y0 are {first.dtype} on {first.device} and {part.dtype} on {part.device}; "
                    "give all of them one dtype and device"
                )
        return cls(is_tuple=isinstance(y0, tuple), shapes=tuple(part.shape for part in parts))

    def flat(self, state: States) -> Tensor:
        """The parts in one tensor; a lone tensor is itself."""
        if isinstance(state, Tensor):
            return state
        return torch.cat([part.reshape(-1) for part in state])

    def shaped(self, state: Tensor) -> States:
        """The parts again, of one state or of several stacked in front."""
        if not self.is_tuple:
            return state
        parts = state.split([shape.numel() for shape in self.shapes], dim=-1)
        return tuple(part.reshape(*state.shape[:-1], *shape) for part, shape in zip(parts, self.shapes, strict=True))

    def flat_slope(self, f: Callable[..., Any]) -> Callable[[Tensor, Tensor], Tensor]:
        """F on one tensor."""
        if not self.is_tuple:
            return f

        def slope(t: Tensor, y: Tensor) -> Tensor:
            parts = f(t, self.shaped(y))
            if not isinstance(parts, (tuple, list)) or [getattr(part, "shape", None) for part in parts] != list(
                self.shapes
            ):
                raise InvalidInput(
                    f"f(t, y) returned {_shapes(parts)} for a tuple of {_shapes(self.shapes)}; return one derivative for each state"
                )
            return torch.cat([part.reshape(-1) for part in parts])

        return slope

    def norm(self, given: Callable[[Any], Any]) -> Callable[[Tensor], Any]:
        """A norm of the caller's states, on one tensor."""
        return lambda state: given(self.shaped(state))


def _shapes(parts: Any) -> str:
    if not isinstance(parts, Sequence):
        return f"a {type(parts).__name__}"
    return ", ".join(str(tuple(part if isinstance(part, torch.Size) else getattr(part, "shape", ()))) for part in parts)


def tolerance_like(name: str, value: Any, shape: StateShape, state: Tensor) -> float | Tensor:
    """A tolerance as a number, or as a tensor beside the state; for a tuple of states also one for each."""
    if isinstance(value, tuple | list):
        if not shape.is_tuple or len(value) != len(shape.shapes):
            raise InvalidInput(
                f"{name} has {len(value)} entries for {len(shape.shapes)} states; give one number, or one for each state of a tuple"
            )
        parts = [
            torch.as_tensor(v, device=state.device).expand(s.numel()) for v, s in zip(value, shape.shapes, strict=True)
        ]
        value = torch.cat(parts)
    if isinstance(value, Tensor):
        if value.requires_grad:
            raise InvalidInput(f"{name} requires a gradient; step sizes carry none, so give {name}.detach()")
        tolerance: float | Tensor = value.to(device=state.device, dtype=state.abs().dtype)
        low = float(value.min())
    else:
        tolerance = low = float(value)
    if not low >= 0:
        raise InvalidInput(f"{name} is {low}; a tolerance is not negative")
    return tolerance

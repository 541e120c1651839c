"""Step sizes of an adaptive solver: options, error norm, first size, next size; numbers only, never part of a graph.

The rules are those of Hairer, Nørsett and Wanner, Solving Ordinary Differential Equations I (2nd edition, 1993), section II.4, with
torchdiffeq's constants and option names, so that the same problem takes the same steps. One number is read from the device for each
attempt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from retape.core.errors import IntegrationFailed, InvalidInput

Slope = Callable[[Tensor, Tensor], Tensor]
Norm = Callable[[Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveOptions:
    """Options of an adaptive method; the names are torchdiffeq's."""

    first_step: float | None = None
    min_step: float = 0.0
    max_step: float = math.inf
    step_t: tuple[float, ...] = ()
    safety: float = 0.9
    ifactor: float = 10.0
    dfactor: float = 0.2
    max_num_steps: int = 2**31 - 1
    norm: Norm | None = None

    def __post_init__(self) -> None:
        if self.first_step is not None and not 0 < self.first_step < math.inf:
            raise InvalidInput(f"first_step is {self.first_step}; it is a positive number of time units.")
        if not 0 <= self.min_step <= self.max_step or self.max_step == 0:
            raise InvalidInput(
                f"min_step is {self.min_step} and max_step {self.max_step}; give 0 <= min_step <= max_step."
            )
        if not (0 < self.safety <= 1 and 0 < self.dfactor < 1 <= self.ifactor):
            raise InvalidInput(
                f"safety, dfactor and ifactor are {self.safety}, {self.dfactor} and {self.ifactor}; "
                "the first is in (0, 1], the second in (0, 1), the last is at least 1."
            )
        if self.max_num_steps < 1:
            raise InvalidInput(f"max_num_steps is {self.max_num_steps}; give at least 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class GridOptions:
    """Options of a method on a given grid; the names are torchdiffeq's."""

    step_size: float | None = None
    grid_constructor: Callable[..., Tensor] | None = None
    interp: str = "linear"

    def __post_init__(self) -> None:
        if self.step_size is not None and not 0 < self.step_size < math.inf:
            raise InvalidInput(f"step_size is {self.step_size}; it is a positive number of time units.")
        if self.step_size is not None and self.grid_constructor is not None:
            raise InvalidInput("Both step_size and grid_constructor are given; a grid comes from one of them.")
        if self.interp not in ("linear", "cubic"):
            raise InvalidInput(f"interp is {self.interp!r}; it is 'linear' or 'cubic'.")


def read_adaptive(options: Mapping[str, Any], method: str) -> AdaptiveOptions:
    """Return the options of an adaptive method, as numbers."""
    given = dict(_known(options, AdaptiveOptions, method))
    for name in given.keys() - {"norm", "step_t", "max_num_steps"}:
        given[name] = None if given[name] is None else float(given[name])
    landings = given.pop("step_t", None)
    return AdaptiveOptions(**given, step_t=() if landings is None else tuple(torch.as_tensor(landings).tolist()))


def read_grid(options: Mapping[str, Any], method: str) -> GridOptions:
    """Return the options of a method on a grid."""
    given = dict(_known(options, GridOptions, method))
    if given.get("step_size") is not None:
        given["step_size"] = float(given["step_size"])
    return GridOptions(**given)


def _known(options: Mapping[str, Any], kind: type, method: str) -> Mapping[str, Any]:
    names = [field.name for field in fields(kind)]
    unknown = sorted(set(options) - set(names))
    if unknown:
        hint = "; for a jump of f, integrate up to it and start again there" if "jump_t" in unknown else ""
        raise InvalidInput(
            f"{method} knows no option {', '.join(map(repr, unknown))}; it knows {', '.join([*names, 'block'])}{hint}."
        )
    return options


def rms_norm(state: Tensor) -> Tensor:
    """Return the root mean square of all components, the batch included."""
    return state.abs().pow(2).mean().sqrt()


def largest_rms_norm(shapes: Sequence[torch.Size]) -> Norm:
    """Return a norm for a tuple of states: the largest of theirs."""
    sizes = [shape.numel() for shape in shapes]

    def norm(state: Tensor) -> Tensor:
        return torch.stack([rms_norm(part) for part in state.split(sizes) if part.numel()]).max()

    return norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """The step sizes of one integration; `rtol` and `atol` are numbers, or tensors like the state."""

    rtol: float | Tensor
    atol: float | Tensor
    order: int
    norm: Norm
    options: AdaptiveOptions

    def error_ratio(self, error: Tensor, start: Tensor, end: Tensor) -> float:
        """Return the error over the allowed error; a step is accepted up to 1."""
        with torch.no_grad():
            allowed = self.atol + self.rtol * torch.max(start.detach().abs(), end.detach().abs())
            return abs(float(self.norm(error.detach() / allowed)))

    def first_size(self, f: Slope, t: Tensor, y: Tensor, slope: Tensor, direction: float) -> float:
        """Return the size of the first attempt (algorithm of section II.4), which costs one evaluation of f."""
        with torch.no_grad():
            t, y, slope = t.detach(), y.detach(), slope.detach()
            scale = self.atol + y.abs() * self.rtol
            of_state, of_slope = (abs(float(self.norm(part / scale))) for part in (y, slope))
            if not (math.isfinite(of_state) and math.isfinite(of_slope)):
                raise IntegrationFailed(
                    f"The first state or f(t, y), over its tolerance, is not finite at t = {float(t):.6g}, so that no step can start; "
                    "correct y0 or f, or give an atol above 0 where y is 0.",
                    t=float(t),
                )
            if self.options.first_step is not None:
                return self.options.first_step
            trial = 1e-6 if of_state < 1e-5 or of_slope < 1e-5 else 0.01 * of_state / of_slope
            ahead = f((t + direction * trial).to(t.dtype), torch.add(y, slope, alpha=direction * trial))
            of_change = abs(float(self.norm((ahead - slope) / scale))) / trial
        steepest = max(of_slope, of_change)
        size = max(1e-6, trial * 1e-3) if steepest <= 1e-15 else (0.01 / steepest) ** (1 / self.order)
        return min(100 * trial, size if math.isfinite(size) else math.inf)

    def next_size(self, size: float, ratio: float) -> float:
        """Return the next size after an attempt with this error ratio."""
        options = self.options
        if ratio == 0:
            factor = options.ifactor
        elif not math.isfinite(ratio):
            factor = options.dfactor
        else:
            least = 1.0 if ratio < 1 else options.dfactor
            factor = min(options.ifactor, max(options.safety / ratio ** (1 / self.order), least))
        return min(max(size * factor, options.min_step), options.max_step)

"""Compare loss, gradients, buffers, random streams and fields of a managed model with plain autograd, bit for bit.

Gradients are those of every leaf that the loss depends on. Regions are off in every thread while plain autograd runs.
Plain autograd runs twice first. If it differs from itself, no comparison is possible, and the result says so, with the ops
that PyTorch knows to be nondeterministic.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from retape.core.errors import InvalidInput
from retape.torch.capture.mutation import checksum, equal_bits
from retape.torch.engine.context import plain_everywhere
from retape.torch.measure.sandbox import InitialGradients, Sandbox, in_own_context, sandboxed
from retape.torch.measure.step_function import (
    StepFunction,
    default_step,
    refuse_lazy,
    refuse_other_arguments,
    refuse_step,
    scalar_loss,
)

_GRADIENT = "gradient of "


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A value that differs after a managed step: its name, and the largest difference of its elements."""

    what: str
    worst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Result of `verify`. `equal` is True if the managed step equals plain autograd in every bit that was compared."""

    equal: bool
    plain_repeats: bool
    compared: int
    differences: tuple[Difference, ...]
    nondeterministic_ops: tuple[str, ...] = ()

    @property
    def worst(self) -> Difference | None:
        """The largest difference, if there is one."""
        return max(self.differences, key=lambda difference: difference.worst, default=None)

    def __str__(self) -> str:
        if not self.plain_repeats:
            ops = ", ".join(self.nondeterministic_ops) or "PyTorch names none of them"
            return f"Plain autograd differs from itself, so nothing can be compared. Nondeterministic ops: {ops}."
        if self.equal:
            return f"Equal to plain autograd in all of {self.compared} tensors and streams."
        worst = self.worst
        assert worst is not None
        return f"{len(self.differences)} of {self.compared} differ from plain autograd; the worst is {worst.what}, by {worst.worst:.3g}."


def verify(model: nn.Module, batch: Any, *, step: StepFunction | None = None) -> Verification:
    """Compare one step of a managed model with plain autograd; leave the model, its gradients and every stream as they were."""
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"verify() got a {type(model).__name__} as its model; give a torch.nn.Module.")
    refuse_step(step, "verify")
    refuse_lazy(model)
    if step is None:
        refuse_other_arguments(model, batch)
    with sandboxed(model, batch, step, gradients=InitialGradients.NONE) as sandbox:

        def run_step() -> tuple[Tensor, list[Tensor]]:
            loss = scalar_loss(step or default_step, model, batch)
            unnamed = sandbox.add_leaves(loss)
            value = loss.detach().clone()
            loss.backward()
            return value, unnamed

        def run(context: AbstractContextManager[Any]) -> dict[str, Any]:
            sandbox.rewind()
            with context:
                value, unnamed = in_own_context(run_step)
            return {"loss": value} | _gradients(sandbox, unnamed) | _state(model, sandbox)

        first, second = run(plain_everywhere()), run(plain_everywhere())
        _require_gradients(first)
        if _differences(first, second):
            return Verification(
                equal=False,
                plain_repeats=False,
                compared=len(first),
                differences=tuple(_differences(first, second)),
                nondeterministic_ops=_nondeterministic_ops(lambda: run(plain_everywhere())),
            )
        differences = tuple(_differences(first, run(nullcontext())))
        return Verification(equal=not differences, plain_repeats=True, compared=len(first), differences=differences)


def _gradients(sandbox: Sandbox, unnamed: list[Tensor]) -> dict[str, Tensor]:
    """Gradients of every leaf that has one: parameters, the batch, and other leaves of the loss."""
    found = {f"{_GRADIENT}{name}": gradient for name, gradient in sandbox.gradients().items()}
    # The step makes new leaves in each run; shape and values match them between runs.
    made = sorted((leaf for leaf in unnamed if leaf.grad is not None), key=lambda leaf: (leaf.shape, checksum(leaf)))
    for number, leaf in enumerate(made):
        assert leaf.grad is not None
        found[f"{_GRADIENT}leaf {number} outside the model, of shape {tuple(leaf.shape)}"] = leaf.grad.detach().clone()
    return found


def _state(model: nn.Module, sandbox: Sandbox) -> dict[str, Any]:
    """Buffers, streams, and other values that the step has changed."""
    found: dict[str, Any] = {f"buffer {name}": buffer.detach().clone() for name, buffer in model.named_buffers()}
    changes = {what: value for what, value in sandbox.changes().items() if f"buffer {what.split()[-1]}" not in found}
    return found | sandbox.streams() | changes


def _require_gradients(results: dict[str, Any]) -> None:
    if not any(what.startswith(_GRADIENT) for what in results):
        raise InvalidInput(
            "No leaf has a gradient after the step, so there is nothing to compare. Check requires_grad of the parameters and of the "
            "batch, and that no hook removes .grad in backward."
        )


def _differences(first: dict[str, Any], second: dict[str, Any]) -> list[Difference]:
    return [
        Difference(what=name, worst=_distance(first.get(name), second.get(name)))
        for name in dict.fromkeys([*first, *second])
        if not _equal(first.get(name), second.get(name))
    ]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _equal_tensors(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    return bool(one == other) or (isinstance(one, float) and one != one and other != other)  # noqa: PLR0124 - NaN


def _equal_tensors(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
        return False
    if one.layout is torch.sparse_coo:
        one, other = one.coalesce(), other.coalesce()
        return _equal_tensors(one.indices(), other.indices()) and _equal_tensors(one.values(), other.values())
    if one.layout is not torch.strided:
        return equal_bits(one, other)
    return torch.equal(one, other) or torch.equal(
        torch.nan_to_num(one, nan=1.25e7), torch.nan_to_num(other, nan=1.25e7)
    )


def _distance(one: Any, other: Any) -> float:
    if isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape:
        return float((_numbers(one) - _numbers(other)).abs().max())
    return float("inf")


def _numbers(tensor: Tensor) -> Tensor:
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return dense.to(torch.complex128 if dense.is_complex() else torch.float64)


def _nondeterministic_ops(run: Callable[[], Any]) -> tuple[str, ...]:
    """Ops that PyTorch warns about when asked for deterministic algorithms."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            run()
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    texts = [str(warning.message) for warning in caught]
    return tuple(
        dict.fromkeys(text.split(" does not have")[0] for text in texts if "does not have a deterministic" in text)
    )

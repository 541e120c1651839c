"""Proof: the gradients, buffers and random streams of a managed model beside those of plain autograd, bit for bit.

Plain autograd runs twice first. Where it differs from itself, no comparison can show anything, and the report says so, with
the ops that PyTorch knows to be nondeterministic.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from retape.torch import state
from retape.torch.buffers import Buffers
from retape.torch.runs import plain
from retape.torch.stepping import StepFunction, default_step, scalar_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Something that is not the same after a managed step: what it is, and the largest difference where it has numbers."""

    what: str
    worst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What `verify` found. `equal` is whether the managed step equals plain autograd in every bit that was compared."""

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
    """Compare one step of a managed model with plain autograd; the model, its gradients and every stream are left as they were."""
    with _as_found(model) as rewind:

        def run(context: AbstractContextManager[Any]) -> dict[str, Any]:
            rewind()
            with context:
                scalar_loss(step or default_step, model, batch).backward()
            return _results(model)

        first, second = run(plain()), run(plain())
        if _differences(first, second):
            return Verification(
                equal=False,
                plain_repeats=False,
                compared=len(first),
                differences=tuple(_differences(first, second)),
                nondeterministic_ops=_nondeterministic_ops(lambda: run(plain())),
            )
        differences = tuple(_differences(first, run(nullcontext())))
        return Verification(equal=not differences, plain_repeats=True, compared=len(first), differences=differences)


@contextmanager
def _as_found(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Yield a function that puts gradients, buffers and streams back to the start; at the end they are as they were."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = Buffers(model)
    draws = state.streams([])

    def rewind() -> None:
        for parameter, _ in gradients:
            parameter.grad = None
        buffers.put_back()
        state.seek(draws)

    try:
        yield rewind
    finally:
        rewind()
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _results(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        found[f"gradient of {name}"] = None if parameter.grad is None else parameter.grad.detach().clone()
    for name, buffer in model.named_buffers():
        found[f"buffer {name}"] = buffer.detach().clone()
    draws = state.streams([])
    for number, (stream, token) in enumerate(zip(*draws, strict=True)):
        found[f"random stream {number} ({type(stream).__name__})"] = token
    return found


def _differences(first: dict[str, Any], second: dict[str, Any]) -> list[Difference]:
    return [
        Difference(what=name, worst=_distance(first.get(name), second.get(name)))
        for name in dict.fromkeys([*first, *second])
        if not _equal(first.get(name), second.get(name))
    ]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return torch.equal(one, other) or torch.equal(
            torch.nan_to_num(one, nan=1.25e7), torch.nan_to_num(other, nan=1.25e7)
        )
    return type(one) is type(other) and bool(one == other)


def _distance(one: Any, other: Any) -> float:
    if isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape:
        return float((one.double() - other.double()).abs().max())
    return float("inf")


def _nondeterministic_ops(run: Callable[[], Any]) -> tuple[str, ...]:
    """The ops that PyTorch itself warns of when it is asked for deterministic algorithms."""
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

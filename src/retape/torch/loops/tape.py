"""The tape of consecutive steps: a graph of their own, and its reversal.

Gradients are summed in the order in which plain autograd sums them over the unrolled loop: what came from later steps is handed to the
graph first, as the gradient of the leaf itself, and the contributions of these steps are added to it one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

Grads = list[Tensor | None]


class StepEnds(NamedTuple):
    """What one step of a tape was given beside its carry, and what it gave beside its carry: leaves."""

    xs: list[Any]
    ys: list[Any]


class Reversed(NamedTuple):
    """The gradients of a tape's first carry, of each step's xs, and the sums of all captured tensors so far."""

    carry: Grads
    xs: list[Grads]
    sums: Grads


class Tape(NamedTuple):
    """The graph of consecutive steps from `start` on, by its ends."""

    start: int
    carry_in: list[Any]
    carry_out: list[Any]
    steps: list[StepEnds]

    def roots(self) -> list[Tensor]:
        """Everything that a gradient may come in through."""
        leaves = chain(self.carry_out, *[step.ys for step in self.steps])
        return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]

    def own_leaves(self) -> set[int]:
        """The ids of the leaves of this graph that stand for the carry and the xs."""
        return set(map(id, chain(self.carry_in, *[step.xs for step in self.steps])))

    def reverse(
        self,
        carry: Grads,
        ys: Sequence[Grads],
        *,
        seeds: Grads,
        captured: Sequence[Tensor],
        sums: Grads,
        xs_wanted: bool,
        retain: bool,
    ) -> Reversed:
        """Carry gradients back through these steps. `seeds` are gradients of the first carry that come before all others.

        `ys` are those of each step's ys, or nothing at all; the gradients of xs are found only if they are `xs_wanted`.

        What is given is taken out of its list, and where the graph is not kept its far ends are let go: then the engine frees
        gradients as soon as they are used, and adds to the sums in place.
        """
        pairs = [(captured, sums), (self.carry_in, seeds), (self.carry_out, carry)]
        if ys:
            pairs += zip([step.ys for step in self.steps], ys, strict=True)
        ends: list[Tensor] = []
        grads: Grads = []
        for leaves, given in pairs:
            for index, (leaf, grad) in enumerate(zip(leaves, given, strict=True)):
                if grad is not None and isinstance(leaf, Tensor) and leaf.requires_grad:
                    ends.append(leaf)
                    grads.append(grad)
                    given[index] = None
        groups = [self.carry_in, *[step.xs for step in self.steps if xs_wanted], list(captured)]
        wanted = [[isinstance(leaf, Tensor) and leaf.requires_grad for leaf in group] for group in groups]
        inputs = list(compress(chain.from_iterable(groups), chain.from_iterable(wanted)))
        found: Sequence[Tensor | None] = [None] * len(inputs)
        if ends and inputs:
            root = _Given.apply(grads, *ends)
            ends.clear()
            if not retain:
                self.carry_out.clear()
            with _hooks_aside(captured):
                found = torch.autograd.grad(root, inputs, retain_graph=retain, allow_unused=True)
        rest = iter(found)
        result: list[Grads] = [[next(rest) if n else None for n in needed] for needed in wanted]
        return Reversed(result[0], result[1:-1], result[-1])


class _Given(torch.autograd.Function):
    """Hands gradients to their tensors, as the one node that a backward pass starts from.

    Given to the engine as they are they would stay in the caller's hands, and the first addition to a sum would need room for a copy.
    """

    @staticmethod
    def forward(ctx: Any, grads: Grads, *ends: Tensor) -> Tensor:
        ctx.grads = grads
        return torch.ones((), device=ends[0].device)  # on the stream of the steps

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        handed = (None, *ctx.grads)
        ctx.grads.clear()
        return handed


@contextmanager
def _hooks_aside(captured: Sequence[Tensor]) -> Iterator[None]:
    """Hooks of a parameter, and `retain_grad`, are for its whole gradient: they run when the loop hands that over, not at every step."""
    hooked = [(tensor._backward_hooks, dict(tensor._backward_hooks)) for tensor in captured if tensor._backward_hooks]
    retained = [(tensor, tensor.grad) for tensor in captured if tensor.retains_grad]
    for hooks, _ in hooked:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in hooked:
            hooks.update(kept)
        for tensor, grad in retained:
            tensor.grad = grad

"""The one autograd node of a loop: its inputs are what gradients go to, its outputs what the loop returns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from retape.core.errors import UnsupportedTransform
from retape.torch.compat import compiler_internals, internals
from retape.torch.loops.run import Driver
from retape.torch.loops.tape import Grads


class LoopNode(torch.autograd.Function):
    """The one autograd node of a loop. Its inputs: the driver, then leaves of the carry, of xs, and captured tensors."""

    @staticmethod
    def forward(ctx: Any, driver: Driver, outputs: Outputs, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.driver, ctx.outputs = driver, outputs
        ctx.set_materialize_grads(False)
        tensors = outputs.take()
        ctx.mark_non_differentiable(*[t for t, needed in zip(tensors, outputs.needs_grad, strict=True) if not needed])
        return tuple(tensors)

    @staticmethod
    @compiler_internals.left_alone
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        driver, outputs = ctx.driver, ctx.outputs
        if torch.is_grad_enabled():
            raise UnsupportedTransform(
                f"{driver.body.name} was differentiated with create_graph=True; its backward pass has no graph of its own. "
                "Call backward without create_graph, or run the loop plainly where second derivatives are needed."
            )
        carry, ys = outputs.sorted(grads)
        found_carry, found_xs, sums = driver.backward(carry, ys, keep=internals.graph_is_kept())
        wanted = [grad for grad, needed in zip(found_carry, outputs.carry_inputs, strict=True) if needed]
        xs = [grad for grad, needed in zip(found_xs, driver.body.xs.needs_grad, strict=True) if needed]
        return (None, None, *wanted, *xs, *sums)


class Outputs:
    """The tensors that a loop returns, on their way through its autograd node."""

    def __init__(self, carry_inputs: tuple[bool, ...], carry: list[Any], ys: list[Any], needs_grad: list[bool]) -> None:
        self.carry_inputs = carry_inputs
        self._places = [isinstance(leaf, Tensor) for leaf in (*carry, *ys)]
        self._carry_count = len(carry)
        self._leaves: list[Any] = [*carry, *ys]
        self.needs_grad = [n for n, place in zip(needs_grad, self._places, strict=True) if place]

    def take(self) -> list[Tensor]:
        tensors = [leaf for leaf, place in zip(self._leaves, self._places, strict=True) if place]
        self._leaves = [None if place else leaf for leaf, place in zip(self._leaves, self._places, strict=True)]
        return tensors

    def filled(self, tensors: tuple[Tensor, ...]) -> tuple[list[Any], list[Any]]:
        """The leaves of the final carry and of the ys, with what the node returned."""
        rest = iter(tensors)
        leaves = [next(rest) if place else leaf for leaf, place in zip(self._leaves, self._places, strict=True)]
        return leaves[: self._carry_count], leaves[self._carry_count :]

    def sorted(self, grads: tuple[Tensor | None, ...]) -> tuple[Grads, Grads]:
        rest = iter(grads)
        every = [next(rest) if place else None for place in self._places]
        return every[: self._carry_count], every[self._carry_count :]

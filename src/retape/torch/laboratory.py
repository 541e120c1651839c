"""Steps that leave no trace: whatever runs inside, weights, gradients, buffers and random streams are afterwards as before.

Gradients are allocated while it lasts, as they are in the middle of an accumulation: that is when a step stands highest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from retape.torch import state
from retape.torch.buffers import Buffers


class Laboratory:
    """A model whose step can be run again and again from the same start."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._found = [parameter.grad for parameter in self._parameters]
        # Kept on the host, so that the device holds no more gradients than it does in training.
        self._gradients = [None if p.grad is None else p.grad.detach().to("cpu", copy=True) for p in self._parameters]
        self._buffers = Buffers(model)
        self._draws = state.streams([])

    def rewind(self) -> None:
        """Back to the start: gradients zero and allocated, buffers and random streams as they were."""
        with torch.no_grad():
            for parameter in self._parameters:
                _zero(parameter)
        self._put_back()

    def close(self) -> None:
        """Leave everything as it was found."""
        with torch.no_grad():
            for parameter, found, gradient in zip(self._parameters, self._found, self._gradients, strict=True):
                if found is not None and gradient is not None and not _shares_numbers(found):
                    found.copy_(gradient)
                parameter.grad = found
        self._put_back()

    def _put_back(self) -> None:
        self._buffers.put_back()
        state.seek(self._draws)


def _zero(parameter: nn.Parameter) -> None:
    """Zero its gradient where it is (it may be a view of a buffer); one that cannot be written to gets another in its place."""
    gradient = parameter.grad
    if gradient is None or _shares_numbers(gradient):
        parameter.grad = torch.zeros_like(parameter)
        return
    if gradient.requires_grad:  # made with create_graph
        parameter.grad = gradient = gradient.detach()
    gradient.zero_()


def _shares_numbers(gradient: Tensor) -> bool:
    """Whether several of its elements are one number in memory, as in an expanded tensor."""
    if gradient.layout is not torch.strided:
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(gradient.stride(), gradient.shape, strict=True))


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[Laboratory]:
    """Run steps of a model and leave no trace of them."""
    laboratory = Laboratory(model)
    try:
        laboratory.rewind()
        yield laboratory
    finally:
        laboratory.close()

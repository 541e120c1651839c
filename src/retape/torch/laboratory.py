"""Steps that leave no trace: whatever runs inside, weights, gradients, buffers and random streams are afterwards as before.

Gradients are allocated while it lasts, as they are in the middle of an accumulation: that is when a step stands highest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from retape.torch import state
from retape.torch.buffers import Buffers


class Laboratory:
    """A model whose step can be run again and again from the same start."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # Kept on the host, so that the device holds no more gradients than it does in training.
        self._gradients = [None if p.grad is None else p.grad.detach().to("cpu", copy=True) for p in self._parameters]
        self._buffers = Buffers(model)
        self._draws = state.streams([])

    def rewind(self) -> None:
        """Back to the start: gradients zero and allocated, buffers and random streams as they were."""
        with torch.no_grad():
            for parameter in self._parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                else:
                    parameter.grad.detach_().zero_()
        self._put_back()

    def close(self) -> None:
        """Leave everything as it was found."""
        with torch.no_grad():
            for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
                if gradient is None:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.copy_(gradient)
        self._put_back()

    def _put_back(self) -> None:
        self._buffers.put_back()
        state.seek(self._draws)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[Laboratory]:
    """Run steps of a model and leave no trace of them."""
    laboratory = Laboratory(model)
    try:
        laboratory.rewind()
        yield laboratory
    finally:
        laboratory.close()

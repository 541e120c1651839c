"""The buffers of a model as they stand, and how they are put back: values that were written, and names that were bound anew."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Buffers:
    """A copy of every buffer. Of a name that a forward binds to another tensor, the tensor that was there comes back."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [(module._buffers, dict(module._buffers)) for module in model.modules()]
        tensors = {id(buffer): buffer for _, found in self._places for buffer in found.values() if buffer is not None}
        self._values: list[tuple[Tensor, Tensor]] = [(buffer, buffer.detach().clone()) for buffer in tensors.values()]

    def put_back(self) -> None:
        for place, found in self._places:
            if any(place.get(name) is not buffer for name, buffer in found.items()) or len(place) != len(found):
                place.clear()
                place.update(found)
        with torch.no_grad():
            for buffer, value in self._values:
                if not torch.equal(buffer, value):  # also where it holds NaN: then it is written back
                    buffer.copy_(value)

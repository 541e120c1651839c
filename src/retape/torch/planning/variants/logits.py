"""A stand-in of a head's logits: what a model does to them before the loss is written down, and not done.

Multiplying, dividing and tanh are followed: the scales and soft caps of the models that are. Anything else is refused, because a
stand-in has no numbers to give.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from retape.core.errors import InvalidInput
from retape.torch.slicing.linear_cross_entropy import linear_cross_entropy, rows_within, usual_chunk_bytes
from retape.torch.slicing.loss_kernels import loss_is_compiled, may_compile
from retape.torch.slicing.products import wide

CHUNK_BYTES = "_retape_chunk_bytes"  # of a head: what the buffers of a chunk may take at most
COMPILED = "_retape_compiled_loss"  # of a head: whether what its loss does between matrix products may be compiled
_LEAST_ROWS = 64  # a chunk of fewer would keep a GPU waiting
_ROOMY = (
    2  # times the usual bytes: larger matrix products are faster, and the gradient of the weight is added up less often
)


class Logits:
    """Stands for `cap * tanh(scale / cap * head(rows))`, or without a cap for `scale * head(rows)`."""

    def __init__(self, rows: Tensor, head: nn.Linear, *, scale: float = 1.0, cap: float | None = None) -> None:
        self.rows = rows
        self.head = head
        self.scale = scale
        self.cap = cap
        self.shape = torch.Size((*rows.shape[:-1], head.out_features))
        self.device = rows.device
        self.dtype = rows.dtype

    def loss(self, labels: Tensor, *, ignore_index: int, reduction: str, shift: bool) -> Tensor:
        """The cross entropy of the logits with `labels`."""
        with may_compile(getattr(self.head, COMPILED, False)):
            return linear_cross_entropy(
                self.rows,
                self.head.weight,
                labels.reshape(self.shape[:-1]) if labels.numel() == self.shape[:-1].numel() else labels,
                bias=self.head.bias,
                ignore_index=ignore_index,
                logit_scale=self.scale,
                soft_cap=self.cap,
                reduction=reduction,
                shift=shift,
                chunk_rows=self._chunk_rows(),
            )

    def _chunk_rows(self) -> int | None:
        """Fewer rows than usual, where the head says that there is less room; more on a GPU, where it says that there is room."""
        weight, most = self.head.weight, getattr(self.head, CHUNK_BYTES, None)
        if most is None:
            return None
        usual = usual_chunk_bytes(self.device, *weight.shape, weight_gradient=weight.requires_grad)
        roomy = _ROOMY * usual if self.device.type == "cuda" else usual
        if usual == roomy <= most:
            return None
        plain = self.cap is None and self.head.bias is None and loss_is_compiled(self.device)
        # Compiled, the slopes are made from the logits, and nothing stands between.
        each = (wide(weight.dtype).itemsize + weight.dtype.itemsize,) if plain else ()
        return max(_LEAST_ROWS, rows_within(min(most, roomy), len(weight), *each))

    def __mul__(self, factor: Any) -> Logits:
        if not isinstance(factor, (int, float)) or (self.cap is not None and factor <= 0):
            raise _refused(f"multiply them with {factor!r}")
        cap = None if self.cap is None else self.cap * factor
        return Logits(self.rows, self.head, scale=self.scale * factor, cap=cap)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Logits:
        if not isinstance(divisor, (int, float)):
            raise _refused(f"divide them by {divisor!r}")
        return self * (1.0 / divisor)

    def float(self) -> Logits:
        """Itself: the loss is computed in float32 anyway."""
        return self

    def tanh(self) -> Logits:
        if self.cap is not None:
            raise _refused("take tanh twice")
        return Logits(self.rows, self.head, scale=self.scale, cap=1.0)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tanh:
            return args[0].tanh()
        raise _refused(f"call {getattr(func, '__name__', func)}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a protocol that Python asks about
            raise AttributeError(name)
        raise _refused(f"use .{name}")


def _refused(what: str) -> InvalidInput:
    return InvalidInput(
        f"The model would {what} between head and loss, and its logits are not there: its loss is fused with its head. Multiplying "
        "with numbers, dividing by them and tanh are followed. Undo the fusing for this model (unfuse_loss)."
    )

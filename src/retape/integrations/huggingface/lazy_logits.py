"""Logits that are not computed: ops between head and loss are recorded for a loss in slices.

Multiplying, dividing and tanh are recorded: the scales and soft caps of Transformers' models; `.float()` and `.contiguous()` do nothing.
Anything else raises an error, because the values do not exist.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from retape.core.errors import InvalidInput
from retape.torch.compat import compiler_internals, hook_internals
from retape.torch.slicing.linear_cross_entropy import (
    linear_cross_entropy,
    loss_is_compiled,
    may_compile,
    rows_within,
    usual_chunk_bytes,
)
from retape.torch.slicing.linear_layers import wide

_LOG = logging.getLogger("retape")
CHUNK_BYTES = "_retape_chunk_bytes"  # attribute of a head: the most bytes that the buffers of a chunk may take
COMPILED = "_retape_compiled_loss"  # attribute of a head: True if the ops between matrix products may be compiled


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceTuning:
    """Thresholds of the fused loss."""

    min_chunk_rows: int = 64  # rows: smaller matrix products do not fill a GPU
    gpu_chunk_factor: int = (
        2  # times the default bytes: larger products are faster, and the weight's gradient is accumulated less often
    )
    chunks_in_room: int = 4  # a chunk of logits takes at most this part of the bytes for activations


TUNING = HuggingFaceTuning()


class LazyLogits:
    """The value `cap * tanh(scale / cap * head(rows))`, or without a cap for `scale * head(rows)`."""

    def __init__(self, rows: Tensor, head: nn.Linear, *, scale: float = 1.0, cap: float | None = None) -> None:
        self.rows = rows
        self.head = head
        self.scale = scale
        self.cap = cap
        self.shape = torch.Size((*rows.shape[:-1], head.out_features))
        self.device = rows.device
        self.dtype = rows.dtype

    def loss(self, labels: Tensor, *, ignore_index: int, reduction: str, shift: bool) -> Tensor:
        """Return the cross entropy of the logits with `labels`, computed in slices."""
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
                chunk_rows=self.chunk_rows(),
            )

    def chunk_rows(self) -> int | None:
        """Return the rows of a chunk that fit the head's limit, at most twice the default on a GPU; None for the default."""
        weight, most = self.head.weight, getattr(self.head, CHUNK_BYTES, None)
        if most is None:
            return None
        usual = usual_chunk_bytes(self.device, *weight.shape, weight_gradient=weight.requires_grad)
        roomy = TUNING.gpu_chunk_factor * usual if self.device.type == "cuda" else usual
        if usual == roomy <= most:
            return None
        plain = self.cap is None and self.head.bias is None and loss_is_compiled(self.device)
        # Compiled, the loss's derivatives overwrite the logits, without a buffer in between.
        each = (wide(weight.dtype).itemsize + weight.dtype.itemsize,) if plain else ()
        return max(TUNING.min_chunk_rows, rows_within(min(most, roomy), len(weight), *each))

    def __mul__(self, factor: Any) -> LazyLogits:
        if not isinstance(factor, (int, float)) or (self.cap is not None and factor <= 0):
            raise _refused(f"multiply them with {factor!r}")
        cap = None if self.cap is None else self.cap * factor
        return LazyLogits(self.rows, self.head, scale=self.scale * factor, cap=cap)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> LazyLogits:
        if not isinstance(divisor, (int, float)):
            raise _refused(f"divide them by {divisor!r}")
        return self * (1.0 / divisor)

    def float(self) -> LazyLogits:
        """Return itself: the loss is computed in float32 in any case."""
        return self

    def contiguous(self) -> LazyLogits:
        """Return itself: there is no memory to arrange."""
        return self

    def tanh(self) -> LazyLogits:
        if self.cap is not None:
            raise _refused("take tanh twice")
        return LazyLogits(self.rows, self.head, scale=self.scale, cap=1.0)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tanh:
            return args[0].tanh()
        raise _refused(f"call {getattr(func, '__name__', func)}")

    def __getitem__(self, index: Any) -> Any:
        raise _refused("index them")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python looks up protocols
            raise AttributeError(name)
        raise _refused(f"use .{name}")


def _refused(what: str) -> InvalidInput:
    return InvalidInput(
        f"The model would {what} between head and loss, and its logits do not exist: its loss is fused with its head. Multiplying "
        "with numbers, dividing by them and tanh are supported. Undo the fusing for this model (unfuse_loss)."
    )


# --- heads --------------------------------------------------------------------------------------------------------------


def is_plain(head: nn.Linear, last: Callable[..., Any]) -> bool:
    """True if a head returns its linear map and nothing changes its gradients; else log why once."""
    changed = changed_by(head, last)
    if changed is not None:
        log_not_fused_once(changed)
    return changed is None


def changed_by(head: nn.Linear, last: Callable[..., Any]) -> str | None:
    """Name what makes a head return something else than its linear map, or change its gradients; None if nothing does.

    `last` is the hook before the forward that must be the last one.
    """
    forward = compiler_internals.uncompiled_function(vars(head).get("forward", nn.Linear.forward))
    if getattr(forward, "__func__", forward) is not nn.Linear.forward:
        return "a forward of its own"
    hooks = hook_internals.hooks_beside_forward(head, after=last)
    return f"the hook {getattr(hooks[0], '__qualname__', type(hooks[0]).__qualname__)}" if hooks else None


@cache
def log_not_fused_once(changed: str) -> None:
    """Log that whole logits are computed, once per process and reason."""
    _LOG.warning("retape: the loss is not computed in slices: the head has %s, which needs whole logits.", changed)

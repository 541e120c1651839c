"""What the usual loss does to a chunk of logits, as one function for a compiler: two passes over them instead of four.

Only on a GPU, where a pass over the logits costs a third of a matrix product, and only where whoever fused the loss compiles the
model as well. Everything else about the loss is in `linear_cross_entropy.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch
from torch import Tensor

from retape.torch.compat import compiler_internals

Slopes = tuple[Tensor, Tensor]

_LOG = logging.getLogger("retape")
_MAY_COMPILE: ContextVar[bool] = ContextVar("retape_may_compile_loss", default=False)
_REFUSED: list[str] = []  # what the compiler said; then it is not asked again


@contextmanager
def may_compile(allowed: bool) -> Iterator[None]:
    """Inside, the usual loss of a chunk may run compiled."""
    token = _MAY_COMPILE.set(allowed)
    try:
        yield
    finally:
        _MAY_COMPILE.reset(token)


def loss_is_compiled(device: torch.device) -> bool:
    """Whether the usual loss of a chunk there runs compiled."""
    return _MAY_COMPILE.get() and device.type == "cuda" and not _REFUSED


def compiled_loss(logits: Tensor, labels: Tensor, narrow: torch.dtype) -> Slopes | None:
    """`losses_and_slopes` in compiled form; None where that is not wanted, or cannot be had."""
    if not loss_is_compiled(logits.device):
        return None
    try:
        with (
            compiler_internals.many_compilations()
        ):  # an error where there are too many: eager, it would take more than was planned
            return _compiled()(logits, labels, narrow)
    except compiler_internals.compiler_errors() as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        _REFUSED.append(reason[0])
        _LOG.warning("retape: the loss does not compile and stays eager: %s", reason[0])
        return None


def losses_and_slopes(logits: Tensor, labels: Tensor, narrow: torch.dtype) -> Slopes:
    """The cross entropy of each row of logits with its label, and its derivative by the logits; labels are a column."""
    below = logits - logits.amax(1, keepdim=True)  # differences of large numbers would lose what they differ by
    log_sum = below.exp().sum(1, keepdim=True).log()
    losses = (log_sum - below.gather(1, labels)).squeeze(1)
    classes = torch.arange(logits.shape[1], device=logits.device)
    return losses, ((below - log_sum).exp() - (classes == labels).to(logits.dtype)).to(narrow)


@cache
def _compiled() -> Callable[[Tensor, Tensor, torch.dtype], Slopes]:
    return torch.compile(losses_and_slopes)

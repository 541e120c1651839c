"""Decisions that a re-run repeats instead of taking them again: which experts, which rows, which branch (Rule 10).

With nondeterministic kernels a router may choose other experts in the re-run than in the forward, and only the gradient would show
it. Integer and boolean results of functions that decide (topk, argmax, sort, nonzero, comparisons of floating-point
numbers, `.item()`) are small, so the forward records them and the re-run uses the record. Only regions whose code names such a
function run under a torch-function mode for it. A dispatch mode around a forward would see more, but some PyTorch kernels
(`_foreach_mul_` on a view) give autograd another graph under one. A result that is large compared with the region's inputs is not recorded;
`retape.keep` records anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from retape.torch.capture.host_access import TransparentMode
from retape.torch.capture.tuning import TUNING
from retape.torch.compat import internals

_COMPARISONS = frozenset(
    {
        *("gt", "lt", "ge", "le", "eq", "ne", "greater", "less", "greater_equal", "less_equal", "not_equal"),
        *("__gt__", "__lt__", "__ge__", "__le__", "__eq__", "__ne__"),
    }
)
# Functions that return a Python value.
_READS = frozenset(
    {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "is_nonzero", "equal", "allclose"}
)
_FUNCTIONS = frozenset(
    {
        *("topk", "kthvalue", "argmax", "argmin", "sort", "argsort", "msort", "nonzero", "nonzero_static", "argwhere"),
        *("multinomial", "searchsorted", "bucketize", "unique", "unique_consecutive", "max", "min", "median", "mode"),
        *("cummax", "cummin", "aminmax"),
    }
)
_ALL = _COMPARISONS | _READS | _FUNCTIONS


# --- recording and repeating ----------------------------------------------------------------------------------------


class Decisions:
    """The decisions of one forward, in order."""

    __slots__ = ("_limit_bytes", "entries")

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        input_bytes = sum(tensor.nbytes for tensor in inputs if _is_plain(tensor))
        self._limit_bytes = max(TUNING.decision_bytes, input_bytes // TUNING.decision_share)
        self.entries: list[tuple[str, list[Any]]] = []

    def record(self, name: str, out: Any) -> None:
        if name in _READS:
            self.entries.append((name, [_copied(out)]))
            return
        leaves = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
        with internals.unobserved():
            self.entries.append((name, [leaf.detach().clone() if self._is_kept(leaf) else None for leaf in leaves]))

    def _is_kept(self, leaf: Tensor) -> bool:
        counts = not (leaf.is_floating_point() or leaf.is_complex())
        return counts and _is_plain(leaf) and leaf.nbytes <= self._limit_bytes


def _copied(value: Any) -> Any:
    """Return what a read has given; of the list of `tolist`, and the lists in it, a copy, since code may change them."""
    if type(value) is not list:
        return value
    return list(map(_copied, value)) if value and type(value[0]) is list else value.copy()


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested


_PLAIN = (Tensor, nn.Parameter)


def _decision(func: Any, args: Any) -> str | None:
    """Return the name of the function if it decides something, else None."""
    name = getattr(func, "__name__", "")
    if name not in _ALL or not args or not isinstance(args[0], Tensor):
        return None
    return None if name in _COMPARISONS and not args[0].is_floating_point() else name


class Recording(TransparentMode):
    """A mode that records what a forward decides."""

    def __init__(self, decisions: Decisions) -> None:
        super().__init__()
        self._decisions = decisions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = _decision(func, args)
        if name is not None:
            self._decisions.record(name, out)
        return out


class Repeating(TransparentMode):
    """A mode that repeats the decisions of the forward in a re-run, until the re-run calls a different sequence of functions."""

    def __init__(self, decisions: Decisions, was_run: Callable[[], bool] = lambda: True) -> None:
        super().__init__()
        self._entries = iter(decisions.entries)
        self._follows = True
        # False for an op that a mode below answered, perhaps with what its result became later.
        self._was_run = was_run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = _decision(func, args) if self._follows else None
        return out if name is None else self._repeat(name, out)

    def _repeat(self, name: str, out: Any) -> Any:
        known, kept = next(self._entries, ("", []))
        if known != name:
            self._follows = False
            return out
        if name in _READS:
            return _copied(kept[0])
        leaves, tree = pytree.tree_flatten(out)
        if len(kept) != sum(isinstance(leaf, Tensor) for leaf in leaves) or not self._was_run():
            return out
        values = iter(kept)
        again = [_repeated(leaf, next(values)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return pytree.tree_unflatten(again, tree)


def _repeated(again: Tensor, kept: Tensor | None) -> Tensor:
    """Return the kept values in the memory of the new result, whose storage other modes know; a copy if the shape differs."""
    if kept is None or again.dtype is not kept.dtype:
        return again
    with internals.unobserved(), torch.no_grad():
        if again.shape != kept.shape:
            return kept.clone()
        internals.write_unseen(again, kept)  # autograd may have saved it by now
        return again

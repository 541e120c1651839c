"""Decisions of a region that are kept by themselves: which experts, which rows, which branch (Rule 10).

Where kernels are nondeterministic, a router may choose other experts in the re-run than in the forward, and nothing but the gradient
would show it. Integer and boolean results of ops that decide (topk, argmax, sort, nonzero, comparisons of floating-point numbers,
`.item()`) are small, so the forward records them and the re-run uses the record. Only regions whose code names such an op run under
a dispatch mode for it; what is large compared with the region's inputs is not recorded (`retape.keep` records anything).
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from retape.torch import _compat, _compat_compiler

_NAMES = frozenset(
    {
        *("topk", "kthvalue", "argmax", "argmin", "sort", "argsort", "msort", "nonzero", "nonzero_static", "argwhere"),
        *("multinomial", "item", "tolist", "searchsorted", "bucketize", "unique", "masked_select", "gumbel_softmax"),
        *("gt", "lt", "ge", "le", "greater", "less", "greater_equal", "less_equal"),
    }
)
_COMPARISONS = ("gt", "lt", "ge", "le", "eq", "ne")
_DECIDING = ("topk", "kthvalue", "argmax", "argmin", "sort", "argsort", "nonzero", "nonzero_static", "multinomial")
_DECIDING_DIMS = ("max", "min", "median", "mode", "cummax", "cummin")
_SHARE = 8  # a result larger than one in so many parts of the region's inputs is not recorded
_ALWAYS_BYTES = 64 * 1024  # a result up to this size always is
_ITEM = torch.ops.aten._local_scalar_dense.default


def _overloads(names: Iterable[str]) -> Iterator[Any]:
    for name in names:
        packet = getattr(torch.ops.aten, name)
        yield from (getattr(packet, overload) for overload in packet.overloads())


_OF_NUMBERS = frozenset(_overloads(_COMPARISONS))  # which decide where they compare computed numbers
_OPS = frozenset({*_overloads(_DECIDING), *_overloads(_DECIDING_DIMS), *_overloads(("searchsorted", "bucketize"))})
_ALL = _OPS | _OF_NUMBERS | {_ITEM}


# --- which code may decide ------------------------------------------------------------------------------------------


@cache
def class_decides(kind: type) -> bool:
    """True if the methods of a module's class, or functions that they call, name an op that decides."""
    bases = [base for base in kind.__mro__ if issubclass(base, nn.Module) and base is not nn.Module]
    methods = [value for base in bases for value in vars(base).values() if isinstance(value, types.FunctionType)]
    return any(map(function_decides, methods))


_KNOWN: dict[int, tuple[types.CodeType, bool]] = {}  # by the id of the code, which is kept so that the id stays its own


def function_decides(function: types.FunctionType) -> bool:
    """True if a function, or one that it calls through its module or closure, names an op that decides."""
    code = function.__code__
    known = _KNOWN.get(id(code))
    if known is None:
        known = _KNOWN[id(code)] = (code, _names_a_decision(function))
    return known[1]


def _names_a_decision(function: types.FunctionType) -> bool:
    seen: set[int] = set()
    pending = [function]
    while pending:
        each = pending.pop()
        if id(each.__code__) in seen or _is_library(each):
            continue
        seen.add(id(each.__code__))
        if code_decides(each.__code__):
            return True
        pending += _called(each)
    return False


def code_decides(code: types.CodeType) -> bool:
    """True if code, or code inside it, names an op that decides."""
    if not _NAMES.isdisjoint(code.co_names):
        return True
    return any(code_decides(inner) for inner in code.co_consts if isinstance(inner, types.CodeType))


def _is_library(function: types.FunctionType) -> bool:
    return (function.__module__ or "").startswith(("torch.", "retape."))


def _called(function: types.FunctionType) -> list[types.FunctionType]:
    names = function.__globals__
    found = [names[name] for name in function.__code__.co_names if name in names]
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # a variable that has no value yet
            continue
    return [value for value in found if isinstance(value, types.FunctionType)]


# --- recording and repeating ----------------------------------------------------------------------------------------


class Decisions:
    """What the ops of one forward decided, in order."""

    __slots__ = ("_limit_bytes", "entries")

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        self._limit_bytes = max(_ALWAYS_BYTES, sum(tensor.nbytes for tensor in inputs if _is_plain(tensor)) // _SHARE)
        self.entries: list[tuple[Any, list[Any]]] = []

    def record(self, func: Any, out: Any) -> None:
        if func is _ITEM:
            self.entries.append((func, [out]))
            return
        leaves = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
        with _compat.unobserved():
            self.entries.append((func, [leaf.clone() if self._is_kept(leaf) else None for leaf in leaves]))

    def _is_kept(self, leaf: Tensor) -> bool:
        counts = not (leaf.is_floating_point() or leaf.is_complex())
        return counts and _is_plain(leaf) and leaf.nbytes <= self._limit_bytes


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested


_PLAIN = (Tensor, nn.Parameter)


def _decides(func: Any, args: Any) -> bool:
    if func not in _ALL:
        return False
    return func not in _OF_NUMBERS or (isinstance(args[0], Tensor) and args[0].is_floating_point())


class Recording(_compat_compiler.LightMode):
    """Records what a forward decides."""

    def __init__(self, decisions: Decisions) -> None:
        super().__init__()
        self._decisions = decisions

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs) if kwargs else func(*args)
        if _decides(func, args):
            self._decisions.record(func, out)
        return out


class Repeating(_compat_compiler.LightMode):
    """Puts what the forward decided in the place of what a re-run decides; a re-run that does other ops is left alone from there."""

    def __init__(self, decisions: Decisions) -> None:
        super().__init__()
        self._entries = iter(decisions.entries)
        self._follows = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs) if kwargs else func(*args)
        if not self._follows or not _decides(func, args):
            return out
        known, kept = next(self._entries, (None, []))
        leaves, tree = pytree.tree_flatten(out)
        if known is not func or len(kept) != sum(isinstance(leaf, Tensor) or func is _ITEM for leaf in leaves):
            self._follows = False
            return out
        if func is _ITEM:
            return kept[0]
        values = iter(kept)
        again = [_repeated(leaf, next(values)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return pytree.tree_unflatten(again, tree)


def _repeated(again: Tensor, kept: Tensor | None) -> Tensor:
    """What was kept, in the memory of what came again, whose storage other modes know; a copy where the shape differs."""
    if kept is None or again.dtype is not kept.dtype:
        return again
    with _compat.unobserved(), torch.no_grad():
        return again.copy_(kept) if again.shape == kept.shape else kept.clone()

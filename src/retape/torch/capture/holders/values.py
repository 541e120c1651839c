"""Values that a re-run must see again: which lead to more, which are plain, and how each is kept.

Tensors are kept without their history, which could close a cycle through the graph. Objects of PyTorch and of C types that lead to no
state are not held (`LEFT`). Not here: what holds several of them (`containers.py`, `places.py`).
"""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import functools
import numbers
import re
import types
import weakref
from collections import deque
from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Immutable values through which nothing can be reached.
ATOMS = frozenset(
    {type(None), int, float, bool, str, bytes, complex, torch.dtype, torch.device, torch.Size, slice, range, type(...)}
)
# Other immutable values, most of C types: they too are restored where another one has been bound, and sets of them are held.
PLAIN_TYPES = frozenset(
    {
        *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, np.ufunc),
        *(decimal.Decimal, fractions.Fraction, re.Pattern, torch.layout, torch.memory_format),
        *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    }
)
_PLAIN_CLASSES = (numbers.Number, enum.Enum, np.dtype, type, *PLAIN_TYPES)
ABSENT = object()  # in place of a name that has no value
LEFT = object()  # in place of an object that is not held and not restored


def tracked(tensor: Tensor) -> Tensor:
    """Return a tensor for a re-run: itself, or without its history, which could close a cycle through the graph.

    Of a tensor in several places it is one object, since code may ask whether they are one.
    """
    if tensor.grad_fn is None:
        return tensor
    alias = _ALIASES.get(id(tensor))
    if alias is None or alias.requires_grad is not tensor.requires_grad or not _same_memory(alias, tensor):
        alias = _ALIASES[id(tensor)] = tensor.detach().requires_grad_(tensor.requires_grad)
    return alias


_ALIASES: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()  # by the id of the tensor


def is_in_a_tuple(tensor: Tensor, holders: Iterable[Any]) -> bool:
    """True if a tuple in a list, a dict or a field that one of these holders restores has this very tensor."""
    dicts = [each for holder in holders for each in getattr(holder, "fields", ())]  # of modules
    containers = [*dicts, *[holder.container for holder in holders if hasattr(holder, "container")]]
    values = [each.values() if isinstance(each, dict) else each for each in containers if isinstance(each, _ITERATED)]
    return any(isinstance(value, tuple) and _is_item(tensor, value) for value in chain.from_iterable(values))


_ITERATED = (dict, list, deque)


def _is_item(tensor: Tensor, items: tuple[Any, ...]) -> bool:
    return any(item is tensor or (isinstance(item, tuple) and _is_item(tensor, item)) for item in items)


def tracked_item(item: Any) -> Any:
    """Return `tracked` of a tensor or of the tensors in a tuple; any other item, and a tuple without a history, unchanged."""
    kind: Any = type(item)
    if issubclass(kind, Tensor):
        return tracked(item)
    if not issubclass(kind, tuple) or not _has_history(item):
        return item
    items = [tracked_item(each) for each in item]
    # `torch.return_types.max` and other tuples of C types are made of a sequence; classes of users may take something else.
    return kind(items) if hasattr(kind, "n_sequence_fields") else tuple.__new__(kind, items)


def without_history(item: Any) -> Any:
    """Return `tracked_item` of a tuple, or of the arguments of a partial, in which a tensor has a history; any other item unchanged."""
    kind: Any = type(item)
    if issubclass(kind, tuple):
        return tracked_item(item)
    if kind is functools.partial and (_has_history(item.args) or _has_history(tuple(item.keywords.values()))):
        keywords = {name: tracked_item(value) for name, value in item.keywords.items()}
        return functools.partial(item.func, *tracked_item(item.args), **keywords)
    return item


def _has_history(item: Any) -> bool:
    kind: Any = type(item)
    if issubclass(kind, Tensor):
        return item.grad_fn is not None
    return issubclass(kind, tuple) and any(map(_has_history, item))


WEAK_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)
# Classes of objects through which tensors or modules are reached; a `torch.Generator` and numbers of numpy are state themselves.
_LEADING_TO_STATE = (
    *(np.ndarray, np.generic, *_PLAIN_CLASSES),
    *(nn.Module, tuple, list, dict, deque, set, frozenset, torch.Generator),
    *(functools.partial, types.MethodType, types.FunctionType, types.SimpleNamespace, weakref.ReferenceType),
    *(*WEAK_PROXIES, type(functools.lru_cache(lambda: None))),
)


# Packages of PyTorch whose objects are values that code of the user's makes: distributions and their transforms, sequences, masks.
_VALUES_OF_TORCH = ("torch.distributions.", "torch.quasirandom", "torch.nn.attention.")


def is_value_of_torch(kind: type) -> bool:
    """True for classes of PyTorch whose objects are looked at as a user's are; others (FSDP's state, groups) keep their own record."""
    return str(getattr(kind, "__module__", "")).startswith(_VALUES_OF_TORCH)


@functools.lru_cache(maxsize=4096)
def is_restored(kind: type) -> bool:
    """True if a field that holds an object of this class is restored where another object has been bound to it.

    These are plain values, and modules, containers, callables and objects of users' classes, whose tensors a call holds anyway.
    """
    if issubclass(kind, _LEADING_TO_STATE) or is_value_of_torch(kind):
        return True
    made_at_run_time = kind.__flags__ & 1 << 9  # Py_TPFLAGS_HEAPTYPE
    return bool(made_at_run_time) and not str(kind.__module__).startswith(("torch.", "functools", "builtins"))


def is_plain_value(value: Any) -> bool:
    """True for an immutable value through which no tensor is reached, and for a tuple or frozen set of such values."""
    kind: Any = type(value)
    if kind in ATOMS or issubclass(kind, _PLAIN_CLASSES):
        return True
    return issubclass(kind, (tuple, frozenset)) and all(map(is_plain_value, value))


def holds_state(item: Any) -> bool:
    """True for a tensor or a module, and for a tuple, list or dict that has one at any depth."""
    pending, seen = [item], set[int]()
    while pending:
        each = pending.pop()
        kind: Any = type(each)  # `isinstance` would ask the object behind a weak proxy, which may be gone
        if issubclass(kind, (Tensor, nn.Module)):
            return True
        if issubclass(kind, (tuple, list, dict)) and id(each) not in seen:
            seen.add(id(each))
            values: Any = each.values() if isinstance(each, dict) else each
            if not ATOMS.issuperset(map(type, values)):
                pending.extend(values)
    return False


def saved_item(item: Any) -> Any:
    """Return an item as it is kept for a re-run: without history, where that is not inside an object of its own; or `LEFT`."""
    kind: Any = type(item)
    if kind in ATOMS or kind in _HARMLESS or kind in PLAIN_TYPES:
        return item
    if issubclass(kind, Tensor):
        return tracked(item)
    return without_history(tracked_item(item)) if is_restored(kind) else LEFT


_HARMLESS = frozenset({type, types.ModuleType})


def content_of(cell: types.CellType) -> Any:
    """Return what a variable of a closure is bound to; `ABSENT` if it has no value yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def _same_memory(one: Tensor, other: Tensor) -> bool:
    """True if two tensors are the same view of the same memory, of one class."""
    return (
        one.layout is torch.strided
        and other.layout is torch.strided
        and type(one) is type(other)
        and one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype is other.dtype
        and one.is_conj() is other.is_conj()
        and one.is_neg() is other.is_neg()
        and one.numel() > 0
    )


def same(now: Any, then: Any) -> bool:
    """True if a container still holds the same object, or the tensor of which a detached alias was saved."""
    if now is then or then is LEFT:
        return True
    if isinstance(now, Tensor) and isinstance(then, Tensor):
        return _same_memory(now, then)
    if type(now) is type(then) and isinstance(now, tuple):
        return len(now) == len(then) and all(map(same, now, then))
    if type(now) is not type(then) or type(now) not in ATOMS:
        return False
    return repr(now) == repr(then) if type(now) in (float, complex) else bool(now == then)  # 0.0 == -0.0


def holds_history(value: Any) -> bool:
    """True if a field of an object is a tensor with a history: holding the object would keep the graph of an earlier step."""
    fields = getattr(value, "__dict__", None)
    tensors = [each for each in fields.values() if isinstance(each, Tensor)] if type(fields) is dict else []
    return any(tensor.grad_fn is not None for tensor in tensors)

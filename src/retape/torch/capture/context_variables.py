"""Context variables (`contextvars`): a re-run sees what they were bound to, and collects nothing in containers that they hold.

Backward may run in another thread, where none is bound, or after a variable was set back: plain values, tensors and objects are
bound again for a re-run. Containers are not. Transformers binds a dict of lists for the time of a model's forward, in which hooks
of its layers collect hidden states, attentions and router logits: a region that held it until backward would keep every tensor
that was collected, and close a cycle through the graph. A re-run while a container is bound leaves no tensors there: what they
are made of is gone afterwards.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from contextvars import Context, ContextVar, copy_context
from enum import Enum
from typing import Any

from torch import Tensor, nn

from retape.torch.capture.containers import ATOMS, DictHolder, ListHolder, tracked

_MOST_DEPTH = 4  # an object, its dict, a list in it, what an item of that holds
_MOST_ITEMS = 1 << 14  # of a container that is looked into; collectors have one or a few for each layer
# Whose values say how numbers are computed or printed, or what runs next: no tensors are collected there.
_OTHERS = ("numpy", "decimal", "torch", "asyncio", "concurrent")

ABSENT = object()

Holder = DictHolder | ListHolder
Binding = tuple[ContextVar[Any], "Held"]


class Kind(Enum):
    """What is done about a value, by its class."""

    NOTHING = "nothing"
    PLAIN = "bound again"
    TENSOR = "bound again, without its history"
    CONTAINER = "looked into"
    OBJECT = "bound again as long as it lives, and looked into"


class _Kinds(dict[type, Kind]):
    """By class. Every region asks: what was found out before is one look in a dict."""

    def __missing__(self, kind: type) -> Kind:
        found = self[kind] = _kind_of(kind)
        return found


def _kind_of(kind: type) -> Kind:
    if kind in ATOMS:
        return Kind.PLAIN
    if issubclass(kind, Tensor):
        return Kind.TENSOR
    if issubclass(kind, (dict, list, deque, tuple)):
        return Kind.CONTAINER
    others = issubclass(kind, type) or kind.__module__.partition(".")[0] in _OTHERS
    return Kind.NOTHING if others or not kind.__weakrefoffset__ else Kind.OBJECT


KINDS = _Kinds()


# --- what variables are bound to -------------------------------------------------------------------------------------


class Held:
    """What a variable was bound to: held where that leads to no graph, and otherwise as long as it lives."""

    __slots__ = ("_get",)

    def __init__(self, get: Callable[[], Any]) -> None:
        self._get = get

    def value(self) -> Any:
        """The object, or `ABSENT` where it is gone."""
        return self._get()

    def __eq__(self, other: object) -> bool:
        return type(other) is Held and other._get() is self._get()  # never by what a user's class says

    __hash__ = None  # type: ignore[assignment]


def bindings(context: Context) -> tuple[Binding, ...]:
    """What variables are bound to: plain values, tensors without their history, and other objects as long as they live."""
    return tuple(
        (variable, _held(value))
        for variable, value in context.items()
        if KINDS[type(value)] not in _UNBOUND or (type(value) is tuple and ATOMS.issuperset(map(type, value)))
    )


_UNBOUND = (Kind.NOTHING, Kind.CONTAINER)


class LastBindings(threading.local):
    """What the last look at the context of a thread found, while nothing but plain values is bound there.

    PyTorch's compiler binds hundreds of settings, and each region looks. Two copies of a context that nobody changed in between
    compare equal at once. Nothing else is remembered: a context keeps alive what it holds.
    """

    context: Context | None = None
    found: tuple[tuple[Binding, ...], bool] = ((), False)

    def look(self, context: Context) -> tuple[tuple[Binding, ...], bool]:
        """What the variables are bound to, and whether something may be collected in them."""
        if self.context is not None and _is_same(context, self.context):
            return self.found
        others = [value for value in context.values() if KINDS[type(value)] not in _HARMLESS and not _is_frozen(value)]
        found = (bindings(context), any(KINDS[type(value)] in _LOOKED_INTO for value in others))
        self.context, self.found = (None, ((), False)) if others else (context, found)
        return found


_HARMLESS = (Kind.NOTHING, Kind.PLAIN)


def _is_frozen(value: Any) -> bool:
    """True for a tuple or a set of plain values: PyTorch's compiler leaves such a variable behind for each of its settings."""
    return isinstance(value, (tuple, set, frozenset)) and ATOMS.issuperset(map(type, value))


def _is_same(one: Context, other: Context) -> bool:
    try:
        return one == other
    except Exception:  # values whose comparison is no truth value: another context
        return False


def _held(value: Any) -> Held:
    kind = KINDS[type(value)]
    if kind is Kind.OBJECT:
        reference = weakref.ref(value)
        return Held(lambda: ABSENT if (found := reference()) is None else found)
    kept = tracked(value) if kind is Kind.TENSOR else value
    return Held(lambda: kept)


def bind(wanted: tuple[Binding, ...], stack: ExitStack) -> None:
    """Bind variables as they were; `stack` sets them back."""
    for variable, held in wanted:
        value = held.value()
        if value is not ABSENT and variable.get(ABSENT) is not value:
            stack.callback(variable.reset, variable.set(value))


# --- what is collected in them ---------------------------------------------------------------------------------------


def context_values() -> list[Any]:
    """What context variables hold here, other than plain values, tensors and what belongs to numpy, decimal, torch or asyncio."""
    return [value for value in copy_context().values() if KINDS[type(value)] in _LOOKED_INTO]


_LOOKED_INTO = (Kind.CONTAINER, Kind.OBJECT)


def enter_collectors() -> Iterable[Holder]:
    """Note what such containers hold; `leave` of what is returned takes away the tensors that have come since."""
    found: dict[int, Holder] = {}
    for value in context_values():
        _collect(value, found, 0)
    for holder in found.values():
        holder.enter()
    return found.values()


def _collect(value: Any, found: dict[int, Holder], depth: int) -> None:
    kind = KINDS[type(value)]
    if depth > _MOST_DEPTH or kind not in _LOOKED_INTO or isinstance(value, nn.Module):
        return
    container = value if kind is Kind.CONTAINER else getattr(value, "__dict__", ())
    if id(container) in found or len(container) > _MOST_ITEMS:
        return
    if isinstance(container, (list, deque)):
        found[id(container)] = ListHolder(container)
    elif isinstance(container, dict):
        found[id(container)] = DictHolder(container)
    for inner in list(container.values() if isinstance(container, dict) else container):
        _collect(inner, found, depth + 1)

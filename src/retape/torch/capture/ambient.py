"""The settings around a call that a re-run must see again: autocast, flags, modes, context variables.

`capture` reads them, `RestoredAmbient` puts them back for a re-run, with the random streams (`rng.py`). What a function reads through
its arguments, closure and modules is in `call.py`.

Backward may run in another thread, where no context variable is bound, or after one was reset: plain values, tensors, tuples of them
and objects are bound again for a re-run; plain fields of objects are those of the forward. A list or dict of plain values is bound as a
copy. Other containers are not bound: Transformers binds a dict of lists during a model's forward, in which hooks of its layers collect
hidden states, attentions and router logits; a region that held it until backward would keep every collected tensor, and close a
cycle through the graph. Tensors that a re-run adds to a bound container are removed again afterwards.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import Context, ContextVar, copy_context
from enum import Enum
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from retape.core.errors import StateChanged
from retape.torch.capture import rng
from retape.torch.capture.holders.containers import DictHolder, ListHolder
from retape.torch.capture.holders.values import ATOMS, tracked_item
from retape.torch.capture.host_access import TransparentMode
from retape.torch.capture.tuning import TUNING
from retape.torch.compat import compiler_internals, internals

# Packages whose variables hold settings or tasks: no tensors are collected there.
_OTHERS = ("numpy", "decimal", "torch", "asyncio", "concurrent")

_ABSENT = object()

Holder = DictHolder | ListHolder
Binding = tuple[ContextVar[Any], "_BoundValue"]
Bindings = tuple[tuple[Binding, ...], tuple[ContextVar[Any], ...]]


class _ValueKind(Enum):
    """Treatment of a context variable's value in a re-run, by its class."""

    NOTHING = "nothing"
    PLAIN = "bound again"
    TENSOR = "bound again, without its history"
    CONTAINER = "looked into"
    TUPLE = "bound again, its tensors without their history, and looked into"
    OBJECT = "bound again, as long as it lives if it may refer to tensors, and looked into"


class _ValueKinds(dict[type, _ValueKind]):
    """The kind of each class, found once."""

    def __missing__(self, kind: type) -> _ValueKind:
        found = self[kind] = _kind_of(kind)
        return found


def _kind_of(kind: type) -> _ValueKind:
    if kind in ATOMS or issubclass(kind, _NUMBERS):
        return _ValueKind.PLAIN
    if issubclass(kind, Tensor):
        return _ValueKind.TENSOR
    if issubclass(kind, (tuple, frozenset)):
        return _ValueKind.TUPLE
    if issubclass(kind, (dict, list, deque)):
        return _ValueKind.CONTAINER
    others = issubclass(kind, (type, set)) or kind.__module__.partition(".")[0] in _OTHERS
    of_c = kind.__module__ == "builtins" and not kind.__weakrefoffset__  # such as the capsule that numpy binds
    return _ValueKind.NOTHING if others or of_c else _ValueKind.OBJECT


_NUMBERS = (Number, Enum, np.generic)


_KINDS = _ValueKinds()


# --- bindings of context variables -------------------------------------------------------------------------------------


class _BoundValue:
    """The value of a variable: held if it refers to no graph, else referred to weakly. `fields` are an object's, if all are plain."""

    __slots__ = ("_get", "fields", "name_of_needed")

    def __init__(self, get: Callable[[], Any], fields: dict[str, Any] | None = None, name_of_needed: str = "") -> None:
        """`name_of_needed` is the class of an object that a re-run could read numbers or tensors of; a collector has none."""
        self._get, self.fields, self.name_of_needed = get, fields, name_of_needed

    def value(self) -> Any:
        """Return the object, or `_ABSENT` if it is gone."""
        return self._get()

    def __eq__(self, other: object) -> bool:
        # By identity: a user's class may define ==. An object whose fields may have changed is bound anew.
        return type(other) is _BoundValue and other._get() is self._get() and self.fields is None

    __hash__ = None  # type: ignore[assignment]


def _bindings(context: Context) -> tuple[Binding, ...]:
    """Return what variables are bound to: plain values, tensors without history, other objects weakly."""
    return tuple((variable, _held(value)) for variable, value in context.items() if _can_be_bound(value))


def _can_be_bound(value: Any) -> bool:
    kind = _KINDS[type(value)]
    if kind is _ValueKind.CONTAINER:
        return _plain_contents(value) is not None
    return kind is not _ValueKind.NOTHING and (kind is not _ValueKind.TUPLE or _is_frozen(value))


class _LastBindings(threading.local):
    """The bindings that a thread's context had last time, unless a tensor is bound there.

    PyTorch's compiler binds hundreds of settings, and 200 more with each compilation, and each region reads them. Two copies of an
    unchanged context compare equal at once. A context keeps alive what it holds, so that of last time is kept without its containers
    and objects, of which only the kind or the identity counts.
    """

    context: Context | None = None  # with None in place of each of the others
    others: tuple[
        tuple[ContextVar[Any], weakref.ref[Any] | None, Any], ...
    ] = ()  # the object, or None for a container; fields
    plain: tuple[tuple[ContextVar[Any], Any], ...] = ()  # values that equal ones of another type would be taken for
    found: Bindings = ((), ())

    def look(self, context: Context) -> Bindings:
        """Return what the variables are bound to, and those whose values are looked into."""
        if self.context is not None and self._is_known(context):
            return self.found
        others = [(variable, value) for variable, value in context.items() if not _is_harmless(variable, value)]
        found = (_bindings(context), tuple([v for v, value in others if _KINDS[type(value)] in _LOOKED_INTO]))
        self.context, self.others, self.plain, self.found = None, (), (), ((), ())
        if all(_may_be_left_out(value) for _, value in others):
            self.context, self.found = _without(context, [variable for variable, _ in others]), found
            self.others = tuple([(v, *_known_by(value)) for v, value in others])
            left_out = {variable for variable, _ in others}
            self.plain = tuple(
                [(v, value) for v, value in context.items() if v not in left_out and not _is_compilers(v)]
            )
        return found

    def _is_known(self, context: Context) -> bool:
        """True if nothing but the contents of containers and objects can have changed."""
        if any(context.get(variable, _ABSENT) is not value for variable, value in self.plain):
            return False
        if not self.others:
            return _is_same(context, self.context)
        for variable, reference, fields in self.others:
            value = context.get(variable)
            if value is None or (not isinstance(value, _MUTABLE) if reference is None else reference() is not value):
                return False
            if not _are_same(_plain_contents(value) if reference is None else _plain_fields(value), fields):
                return False
        return _is_same(_without(context, [variable for variable, *_ in self.others]), self.context)


def _may_be_left_out(value: Any) -> bool:
    if isinstance(value, _MUTABLE):
        return True
    return _KINDS[type(value)] is _ValueKind.OBJECT and bool(type(value).__weakrefoffset__)


def _known_by(value: Any) -> tuple[weakref.ref[Any] | None, Any]:
    if isinstance(value, _MUTABLE):
        return None, _plain_contents(value)
    return weakref.ref(value), _plain_fields(value)


def _plain_contents(value: Any) -> Any:
    """Return a copy of a list or dict of plain values; None for an empty one, in which something may be collected, and for others."""
    if type(value) not in (list, dict) or not value:
        return None
    items = [*value, *value.values()] if type(value) is dict else value
    return value.copy() if all(map(_is_plain, items)) else None


def _plain_fields(value: Any) -> dict[str, Any] | None:
    """Return a copy of an object's fields if all of them are plain values, so that it refers to no tensor; else None."""
    fields = getattr(value, "__dict__", None)
    if type(fields) is not dict or not all(_is_plain(each) for each in fields.values()):
        return None
    return dict(fields)


def _is_frozen(value: Iterable[Any]) -> bool:
    """True if a tuple holds plain values, tensors and tuples of them: no container that collects tensors."""
    return all(
        _is_frozen(each) if isinstance(each, (tuple, frozenset)) else _KINDS[type(each)] in _FREE for each in value
    )


_FREE = (_ValueKind.PLAIN, _ValueKind.TENSOR)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_plain, value))
    return _KINDS[type(value)] is _ValueKind.PLAIN


def _are_same(one: Any, other: Any) -> bool:
    """True if two copies of contents hold the same objects."""
    if one is None or other is None or type(one) is not type(other) or len(one) != len(other):
        return one is other
    same = all(map(operator.is_, one, other))
    return same and (type(one) is not dict or all(map(operator.is_, one.values(), other.values())))


_MUTABLE = (dict, list, deque)


def _without(context: Context, variables: Iterable[ContextVar[Any]]) -> Context:
    """Return a copy of a context in which these variables are bound to None."""
    bare = context.copy()
    for variable in variables:
        bare.run(variable.set, None)
    return bare


_HARMLESS = (_ValueKind.NOTHING, _ValueKind.PLAIN)


def _is_harmless(variable: ContextVar[Any], value: Any) -> bool:
    """True if keeping a value keeps no tensor alive: plain ones, tuples and sets of them, and settings of PyTorch's compiler."""
    if _KINDS[type(value)] in _HARMLESS:
        return True
    is_frozen = isinstance(value, (tuple, set, frozenset)) and all(map(_is_plain, value))
    return is_frozen or _is_compilers(variable)


def _is_compilers(variable: ContextVar[Any]) -> bool:
    return compiler_internals.is_compiler_setting(variable.name)


def _is_same(one: Context, other: Context | None) -> bool:
    try:
        return one == other
    except Exception:  # values whose comparison is no bool: treated as another context
        return False


def _held(value: Any) -> _BoundValue:
    kind = _KINDS[type(value)]
    if kind is not _ValueKind.OBJECT:
        kept = _plain_contents(value) if kind is _ValueKind.CONTAINER else tracked_item(value)
        return _BoundValue(lambda: kept)
    fields = _plain_fields(value)
    if fields is not None or not type(value).__weakrefoffset__:
        return _BoundValue(lambda: value, fields)
    reference, contents = weakref.ref(value), getattr(value, "__dict__", {}).values()
    needed = any(each is not None and _KINDS[type(each)] in _FREE for each in contents)
    name = type(value).__name__ if needed else ""
    return _BoundValue(lambda: _ABSENT if (found := reference()) is None else found, None, name)


def _bind(wanted: tuple[Binding, ...], stack: ExitStack) -> None:
    """Bind variables as they were; `stack` sets them back."""
    for variable, held in wanted:
        value = held.value()
        if value is _ABSENT and held.name_of_needed:
            raise StateChanged(
                f"The context variable {variable.name!r} was bound to a {held.name_of_needed} in the forward, which is gone, so that a "
                "re-run could compute something else. Keep that object until backward has ended."
            )
        if value is _ABSENT:
            continue
        if variable.get(_ABSENT) is not value:
            stack.callback(variable.reset, variable.set(value))
        if held.fields is not None:
            fields = DictHolder(vars(value), held.fields)
            fields.enter()
            stack.callback(fields.leave)


# --- containers in context variables ---------------------------------------------------------------------------------------


_LOOKED_INTO = (_ValueKind.CONTAINER, _ValueKind.TUPLE, _ValueKind.OBJECT)


def _enter_collectors() -> Iterable[Holder]:
    """Record what containers and objects in context variables hold; `leave` of the result removes tensors that were added since.

    Those of numpy, decimal, torch and asyncio are left out.
    """
    context, found = copy_context(), dict[int, Holder]()
    for variable in _LAST.look(context)[1]:
        _collect(context[variable], found, 0)
    for holder in found.values():
        holder.enter()
    return found.values()


def _collect(value: Any, found: dict[int, Holder], depth: int) -> None:
    kind = _KINDS[type(value)]
    if depth > TUNING.context_depth or kind not in _LOOKED_INTO or isinstance(value, nn.Module):
        return
    container = value if kind is _ValueKind.CONTAINER else getattr(value, "__dict__", ())
    if id(container) in found or len(container) > TUNING.context_items:
        return
    if isinstance(container, (list, deque)):
        found[id(container)] = ListHolder(container)
    elif isinstance(container, dict):
        found[id(container)] = DictHolder(container, dict(container))
    for inner in list(container.values() if isinstance(container, dict) else container):
        _collect(inner, found, depth + 1)


# --- everything around a call -----------------------------------------------------------------------------------------

_is_grad_enabled, _set_grad_enabled = torch.is_grad_enabled, internals.set_grad_enabled
_count_function_modes = internals.count_function_modes
_CUDA_BUILT = internals.CUDA_BUILT
_LAST = _LastBindings()
_rewind, _seek = rng.rewind, rng.seek


# PyTorch's settings; autocast on or off, and its dtype, for each device; torch-function modes; the current CUDA device; bindings of
# context variables; and the variables in whose values tensors may be collected.
Ambient = tuple[
    list[Any],
    tuple[bool, ...],
    tuple[Any, ...],
    tuple[Any, ...],
    int | None,
    tuple[Binding, ...],
    tuple[ContextVar[Any], ...],
]


def capture(modes: tuple[Any, ...] | None = None) -> Ambient:
    """Return the settings around the caller; `modes` are its torch-function modes, if they are known."""
    if modes is None:
        modes = function_modes() if _count_function_modes() else ()
    context = copy_context()
    bound, collecting = _LAST.look(context) if context else ((), ())
    if not _CUDA_BUILT:
        return _read_settings(), (_autocast("cpu"),), (_autocast_dtype("cpu"),), modes, None, bound, collecting
    return (
        _read_settings(),
        (_autocast("cpu"), _autocast("cuda")),
        (_autocast_dtype("cpu"), _autocast_dtype("cuda")),
        modes,
        torch.cuda.current_device() if internals.cuda_initialized() else None,
        bound,
        collecting,
    )


def function_modes() -> tuple[Any, ...]:
    """Return the torch-function modes around the caller, without retape's own."""
    return tuple(mode for mode in internals.function_modes() if not isinstance(mode, TransparentMode))


_DEVICES = ("cpu", "cuda") if _CUDA_BUILT else ("cpu",)
_OFF = (False,) * len(_DEVICES)
_autocast, _autocast_dtype, _read_settings = (
    torch.is_autocast_enabled,
    torch.get_autocast_dtype,
    internals.read_settings,
)


class RestoredAmbient:
    """The settings and random streams of a first run, from construction until `leave`; then all is as it was found.

    Containers that context variables hold are restored too, unless it surrounds a `first_run`: what that collects stays.
    """

    __slots__ = ("_collectors", "_context", "_grad", "_settings", "_streams")

    def __init__(self, ambient: Ambient, draws: rng.Draws = rng.NONE_DRAWN, *, first_run: bool = False) -> None:
        now = capture()
        self._settings = now[0]
        self._grad = _is_grad_enabled()
        self._context: Any = None
        if now[:6] != ambient[:6] or now[1] != _OFF:  # an autocast is on
            self._context = _with_settings(ambient, now)
            self._context.__enter__()
        collects = not first_run and (now[6] or ambient[6])
        self._collectors: Iterable[Holder] = _enter_collectors() if collects else ()
        self._streams = _rewind(draws)
        _set_grad_enabled(True)

    def __enter__(self) -> None:
        """Do nothing: it was entered when it was made."""

    def __exit__(self, *error: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Leave everything as it was found."""
        _set_grad_enabled(self._grad)
        _seek(self._streams)
        for holder in self._collectors:
            holder.leave()
        if self._context is not None:
            self._context.__exit__(None, None, None)
        if (settings := _read_settings()) != self._settings:  # the stop came before the function had set them back
            _put_settings(settings, self._settings)


@contextmanager
def _with_settings(ambient: Ambient, now: Ambient) -> Iterator[None]:
    settings, enabled_then, dtypes, modes, cuda_device, bound, _ = ambient
    with ExitStack() as stack:
        _bind(bound, stack)
        stack.callback(_put_settings, settings, now[0])
        _put_settings(now[0], settings)
        if cuda_device != now[4] and cuda_device is not None:
            stack.enter_context(torch.cuda.device(cuda_device))
        for mode in modes:  # `torch.set_default_device` is one of them
            if mode not in now[3]:
                stack.enter_context(mode)
        for kind, enabled, dtype in zip(_DEVICES, enabled_then, dtypes, strict=True):
            # Without the weight cache: a cast in the cache belongs to another graph than the re-run's, and code outside would find
            # one that the re-run left there.
            if enabled or torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=False))
        yield


def _put_settings(present: list[Any], wanted: list[Any]) -> None:
    """Set those settings that differ."""
    if present == wanted:
        return
    for (_, _, put), now, then in zip(internals.SETTINGS, present, wanted, strict=True):
        if now != then:
            put(then)

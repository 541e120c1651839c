"""The settings around a call that a re-run must see again: autocast, flags, modes, context variables.

`capture` reads them, `RestoredAmbient` puts them back for a re-run, with the random streams (`rng.py`). What a function reads through
its arguments, closure and modules is in `call.py`.

Backward may run in another thread, where no context variable is bound, or after one was reset: plain values, tensors and objects are
bound again for a re-run. Containers are not. Transformers binds a dict of lists during a model's forward, in which hooks of its layers
collect hidden states, attentions and router logits: a region that held it until backward would keep every collected tensor, and close
a cycle through the graph. Tensors that a re-run adds to a bound container are removed again afterwards.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import Context, ContextVar, copy_context
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from retape.torch.capture import rng
from retape.torch.capture.containers import ATOMS, DictHolder, ListHolder, tracked
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
    OBJECT = "bound again as long as it lives, and looked into"


class _ValueKinds(dict[type, _ValueKind]):
    """The kind of each class, found once."""

    def __missing__(self, kind: type) -> _ValueKind:
        found = self[kind] = _kind_of(kind)
        return found


def _kind_of(kind: type) -> _ValueKind:
    if kind in ATOMS:
        return _ValueKind.PLAIN
    if issubclass(kind, Tensor):
        return _ValueKind.TENSOR
    if issubclass(kind, (dict, list, deque, tuple)):
        return _ValueKind.CONTAINER
    others = issubclass(kind, type) or kind.__module__.partition(".")[0] in _OTHERS
    return _ValueKind.NOTHING if others or not kind.__weakrefoffset__ else _ValueKind.OBJECT


_KINDS = _ValueKinds()


# --- bindings of context variables -------------------------------------------------------------------------------------


class _BoundValue:
    """The value of a variable: held if it refers to no graph, else referred to weakly."""

    __slots__ = ("_get",)

    def __init__(self, get: Callable[[], Any]) -> None:
        self._get = get

    def value(self) -> Any:
        """Return the object, or `_ABSENT` if it is gone."""
        return self._get()

    def __eq__(self, other: object) -> bool:
        return type(other) is _BoundValue and other._get() is self._get()  # by identity: a user's class may define ==

    __hash__ = None  # type: ignore[assignment]


def _bindings(context: Context) -> tuple[Binding, ...]:
    """Return what variables are bound to: plain values, tensors without history, other objects weakly."""
    return tuple(
        (variable, _held(value))
        for variable, value in context.items()
        if _KINDS[type(value)] not in _UNBOUND or (type(value) is tuple and ATOMS.issuperset(map(type, value)))
    )


_UNBOUND = (_ValueKind.NOTHING, _ValueKind.CONTAINER)


class _LastBindings(threading.local):
    """The bindings that a thread's context had last time, unless a tensor is bound there.

    PyTorch's compiler binds hundreds of settings, and 200 more with each compilation, and each region reads them. Two copies of an
    unchanged context compare equal at once. A context keeps alive what it holds, so that of last time is kept without its containers
    and objects, of which only the kind or the identity counts.
    """

    context: Context | None = None  # with None in place of each of the others
    others: tuple[tuple[ContextVar[Any], weakref.ref[Any] | None], ...] = ()  # with the object, or None for a container
    found: Bindings = ((), ())

    def look(self, context: Context) -> Bindings:
        """Return what the variables are bound to, and those whose values are looked into."""
        if self.context is not None and self._is_known(context):
            return self.found
        others = [(variable, value) for variable, value in context.items() if not _is_harmless(variable, value)]
        found = (_bindings(context), tuple([v for v, value in others if _KINDS[type(value)] in _LOOKED_INTO]))
        self.context, self.others, self.found = None, (), ((), ())
        if all(_may_be_left_out(value) for _, value in others):
            self.context, self.found = _without(context, [variable for variable, _ in others]), found
            self.others = tuple(
                [(v, None if isinstance(value, _MUTABLE) else weakref.ref(value)) for v, value in others]
            )
        return found

    def _is_known(self, context: Context) -> bool:
        """True if nothing but the contents of containers and objects can have changed."""
        if not self.others:
            return _is_same(context, self.context)
        for variable, reference in self.others:
            value = context.get(variable)
            if value is None or (not isinstance(value, _MUTABLE) if reference is None else reference() is not value):
                return False
        return _is_same(_without(context, [variable for variable, _ in self.others]), self.context)


def _may_be_left_out(value: Any) -> bool:
    return isinstance(value, _MUTABLE) or _KINDS[type(value)] is _ValueKind.OBJECT


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
    is_frozen = isinstance(value, (tuple, set, frozenset)) and ATOMS.issuperset(map(type, value))
    return is_frozen or compiler_internals.is_compiler_setting(variable.name)


def _is_same(one: Context, other: Context | None) -> bool:
    try:
        return one == other
    except Exception:  # values whose comparison is no bool: treated as another context
        return False


def _held(value: Any) -> _BoundValue:
    kind = _KINDS[type(value)]
    if kind is _ValueKind.OBJECT:
        reference = weakref.ref(value)
        return _BoundValue(lambda: _ABSENT if (found := reference()) is None else found)
    kept = tracked(value) if kind is _ValueKind.TENSOR else value
    return _BoundValue(lambda: kept)


def _bind(wanted: tuple[Binding, ...], stack: ExitStack) -> None:
    """Bind variables as they were; `stack` sets them back."""
    for variable, held in wanted:
        value = held.value()
        if value is not _ABSENT and variable.get(_ABSENT) is not value:
            stack.callback(variable.reset, variable.set(value))


# --- containers in context variables ---------------------------------------------------------------------------------------


_LOOKED_INTO = (_ValueKind.CONTAINER, _ValueKind.OBJECT)


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
_rewind = rng.rewind


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


def capture() -> Ambient:
    """Return the settings around the caller."""
    modes = _user_modes() if _count_function_modes() else ()
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


def _user_modes() -> tuple[Any, ...]:
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

    Containers that context variables hold are put back too, unless it surrounds a `first_run`: what that collects stays.
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
        _rewind(self._streams)
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

"""State that forward hooks own: closures, modules that they call, and the fields of their objects that their code names.

The object of a hook may be a trainer, with a data set, meters that change between forward and backward, and queues of other threads, so
only what the code of the hook names is followed. A module that it names (an adapter, a probe) may be called, and is captured whole,
unless it contains what the region is around, as the module of a trainer does. Not here: hooks of tensors, and global module hooks.
"""

from __future__ import annotations

import functools
import types
import weakref
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from retape.torch.capture.functions import (
    Names,
    behind_function,
    code_and_roots,
    names_with_methods,
    names_with_stored,
)
from retape.torch.capture.holders.containers import ItemsHolder, SlotHolder, slots_of
from retape.torch.capture.holders.places import CellItem
from retape.torch.capture.holders.values import WEAK_PROXIES, content_of, holds_history
from retape.torch.capture.unrepeatable import is_iterator
from retape.torch.compat import process_internals

if TYPE_CHECKING:
    from retape.torch.capture.call import Call

_HELD = ("_buffers", "_modules", "_parameters")
_WEAK = (weakref.ReferenceType, *WEAK_PROXIES)
_NO_NAMES = Names(frozenset(), frozenset())


def meet_hook(call: Call, hook: Any, names: Names | None = None) -> None:
    """Add what a hook, or a function that a hook closes over, reads and changes; `names` are those of the hook around it."""
    if isinstance(hook, nn.Module):
        forward, _ = code_and_roots(hook.forward)
        follow_named(call, hook, _NO_NAMES if forward is None else names_with_stored(forward))
        return
    function, roots = code_and_roots(hook)
    if function is None or call.was_met(hook):
        return
    if type(hook) is types.FunctionType:
        call.note_met(hook)
    own = names_with_stored(function)
    names = own if names is None else Names(own.read | names.read, own.stored | names.stored)
    found = call.visit_code(function)
    call.hold_cells(function)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        content = content_of(cell)
        if isinstance(content, Tensor) and not call.was_met(content):
            call.hold_tensor(CellItem(cell), name, content)
    for value in (*roots, *found, *behind_function(function)):
        follow_named(call, value, names)


def follow_named(call: Call, value: Any, names: Names) -> None:
    """Add a value that a hook reaches; of an object, or a module around the region, only the fields that have one of the names."""
    if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        meet_hook(call, value, names)
        return
    kind: Any = type(value)
    if issubclass(kind, _WEAK):
        value = process_internals.referent(value)
        kind = type(value)
    if is_iterator(kind):  # of a hook mostly a counter, on which nothing depends
        return
    if not call.has_fields(kind):
        call.meet(value)
    elif call.was_met(value):
        return
    elif _may_be_called(call, value):
        call.meet_module_of_hook(value)
    else:
        _follow_fields(call, value, names_with_methods(kind, names))


def _may_be_called(call: Call, value: Any) -> bool:
    """True for a module that does not contain what the region is around."""
    return isinstance(value, nn.Module) and not any(_is_inside(root, value) for root in call.roots)


def _is_inside(module: nn.Module, other: nn.Module) -> bool:
    """True if a module is a part of another one, at any depth; a path that was found before is only confirmed."""
    key = (id(module), id(other))
    path, known = _PATHS.get(key), cast("Any", other)
    for name in path or ():
        known = _children(known).get(name)
    if path and known is module:
        return True
    if not _has_part(other, module):
        return False
    if len(_PATHS) >= _MOST_PATHS:
        _PATHS.clear()
    _PATHS[key] = next(path for path, each in other.named_modules() if each is module).split(".")
    return True


# The names on the way from one module to another, by their ids: those of objects that are gone fail to be confirmed.
_PATHS: dict[tuple[int, int], list[str]] = {}
_MOST_PATHS = 4096


def _has_part(module: nn.Module, part: nn.Module) -> bool:
    pending, met = [module], {id(module)}
    for each in pending:
        for child in _children(each).values():
            if child is part:
                return True
            if child is not None and id(child) not in met:
                met.add(id(child))
                pending.append(child)
    return False


def _children(module: nn.Module | None) -> dict[str, Any]:
    """Return the children of a module; a scripted one keeps its own elsewhere."""
    children = {} if module is None else module.__dict__.get("_modules")
    return children if isinstance(children, dict) else {}


def _follow_fields(call: Call, value: Any, names: Names) -> None:
    if (id(value), names) in call.followed:
        return
    call.followed |= {(id(value), names)}
    fields: Any = getattr(value, "__dict__", None)
    spaces = [fields] if type(fields) is dict else []
    if isinstance(value, nn.Module):  # FSDP exchanges parameters itself
        parts = [fields.get(part) for part in _HELD if not (call.fsdp and part == "_parameters")]
        spaces += [part for part in parts if isinstance(part, dict)]  # scripted modules have others
    for space in spaces:
        present = space.keys() & names.read
        call.holders.append(ItemsHolder(space, present | names.stored if space is fields else present))
        for name in present:
            if isinstance(space[name], Tensor):
                call.hold_tensor(space, name, space[name])
            elif not holds_history(space[name]) or _may_be_called(call, space[name]):
                follow_named(call, space[name], names)
    kind: Any = type(value)
    call.note_kind(kind)
    slots = tuple([name for name in slots_of(kind) if name in names.read])
    if slots:
        call.holders.append(SlotHolder(value, slots))
        for name in slots:
            follow_named(call, getattr(value, name, None), names)

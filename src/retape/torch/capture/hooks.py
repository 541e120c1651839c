"""What forward hooks own: closures, modules that they call, and the fields of their objects that their code names.

The object of a hook may be a trainer, with a data set, meters that change between forward and backward, and queues of other threads, so
only what the code of the hook names is followed. Not here: hooks of tensors, and global module hooks.
"""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

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
from retape.torch.capture.holders.values import content_of, holds_history
from retape.torch.capture.unrepeatable import is_iterator

if TYPE_CHECKING:
    from retape.torch.capture.call import Call

_HELD = ("_buffers", "_modules", "_parameters")


def meet_hook(call: Call, hook: Any, names: Names | None = None) -> None:
    """Add what a hook, or a function that a hook closes over, reads and changes; `names` are those of the hook around it."""
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
    """Add a value that a hook reaches; of a module or another object only the fields that have one of the names."""
    if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        meet_hook(call, value, names)
        return
    kind: Any = type(value)
    if is_iterator(kind):  # of a hook mostly a counter, on which nothing depends
        return
    if not call.has_fields(kind):
        call.meet(value)
    elif not call.was_met(value):
        _follow_fields(call, value, names_with_methods(kind, names))


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
            elif not holds_history(space[name]):
                follow_named(call, space[name], names)
    kind: Any = type(value)
    call.note_kind(kind)
    slots = tuple([name for name in slots_of(kind) if name in names.read])
    if slots:
        call.holders.append(SlotHolder(value, slots))
        for name in slots:
            follow_named(call, getattr(value, name, None), names)

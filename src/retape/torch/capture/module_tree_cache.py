"""The layouts of the module trees that have been walked, each kept as long as its root lives; a tree that does not fit is walked anew.

What a layout is, and how it is read, is in `module_tree.py`.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from torch import nn

from retape.torch.capture.module_tree import Layout, Tree

_NONE: list[Any] = []  # never changed

# By the id of the root, held weakly: asking a WeakKeyDictionary costs as much as the rest of a look.
_LAYOUTS: dict[int, tuple[weakref.ref[nn.Module], Layout]] = {}


def known_layout(root: nn.Module) -> Layout | None:
    """The layout of the last walk from `root`, if it is kept."""
    entry = _LAYOUTS.get(id(root))
    return entry[1] if entry is not None and entry[0]() is root else None


def _keep(root: nn.Module, layout: Layout) -> None:
    before, key = known_layout(root), id(root)
    layout.kinds = before.kinds if before is not None else {}
    _LAYOUTS[key] = (weakref.ref(root, partial(_forget, key)), layout)


def _forget(key: int, reference: weakref.ref[nn.Module]) -> None:
    if key in _LAYOUTS and _LAYOUTS[key][0] is reference:  # unless a new module has taken the id meanwhile
        del _LAYOUTS[key]


def read_tree(root: nn.Module, seen: set[int], *, fsdp: bool) -> tuple[Tree | None, list[nn.Module]]:
    """What a root and the modules below it hold, but for those in `seen`; and the scripted ones, which keep theirs elsewhere."""
    entry = _LAYOUTS.get(id(root))
    if entry is not None and entry[0]() is root and entry[1].with_parameters is not fsdp:
        tree = entry[1].read(root)
        if tree is not None and (len(seen) <= 1 or seen.isdisjoint(map(id, tree.modules[1:]))):
            return tree, _NONE
    return _walked(root, seen, not fsdp)


def _walked(root: nn.Module, seen: set[int], with_parameters: bool) -> tuple[Tree | None, list[nn.Module]]:
    found, modules, scripted, whole = [root], [], [], True
    met = {id(root)}
    for module in found:
        fields = module.__dict__
        if not isinstance(fields.get("_parameters"), dict):
            scripted.append(module)
            continue
        modules.append(module)
        for child in fields["_modules"].values():
            if child is None or id(child) in met:
                continue
            if id(child) in seen:
                whole = False
                continue
            met.add(id(child))
            found.append(child)
    if not modules:
        return None, scripted
    layout = Layout(modules, with_parameters=with_parameters)
    if whole and not scripted:
        _keep(root, layout)
    tree = layout.read(modules[0])
    assert tree is not None
    return tree, scripted

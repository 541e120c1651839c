"""A function over variables of its own: its closure and its own globals as they are now, whatever is bound to their names later.

What can be reached through them is in `call.py`.
"""

from __future__ import annotations

import types
from typing import Any

# Globals that hold no state: most of what a function names.
NEVER_READ = {types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type}


class _Globals(dict[str, Any]):
    """The globals of a function's twin: a few names as they were, the rest as they are."""

    __slots__ = ("real",)

    def __init__(self, pinned: dict[str, Any], real: dict[str, Any]) -> None:
        super().__init__(pinned)
        self.real = real
        # What the interpreter itself reads, past __missing__: builtins, and for imports the names of the module.
        self.update({name: value for name, value in real.items() if name.startswith("__")})
        self.setdefault("__builtins__", __builtins__)

    def __missing__(self, name: str) -> Any:
        return self.real[name]


def as_of_now(function: types.FunctionType, depth: int = 0) -> types.FunctionType:
    """The same function over variables of its own, so that one bound anew later does not reach the re-run.

    A lambda in a loop closes over the loop's variable, not over its value: run again after the loop it would see the last.
    """
    names = function.__globals__
    pinned = {
        name: names[name]
        for name in function.__code__.co_names
        if name in names and type(names[name]) not in NEVER_READ
    }
    if not pinned and not function.__closure__:
        return function
    cells = _cells_of_now(function, depth)
    if cells is None:
        return function
    real = names.real if isinstance(names, _Globals) else names
    space = _Globals(pinned, real) if pinned and type(real) is dict else names
    twin = types.FunctionType(function.__code__, space, function.__name__, function.__defaults__, cells)
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__qualname__ = function.__qualname__
    if function.__dict__:
        twin.__dict__.update(function.__dict__)
    return twin


def _cells_of_now(function: types.FunctionType, depth: int) -> tuple[Any, ...] | None:
    cells = []
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:  # a variable that has no value yet: the function itself, perhaps
            return None
        if type(content) is types.FunctionType and content is not function and depth < 4:
            content = as_of_now(content, depth + 1)
        cells.append(types.CellType(content))
    return tuple(cells)

"""The names that code mentions: of a function and those that it calls, or of a module's class. Found once for each code object.

What a call really runs is not known from this; it says what a region may run, so that costly precautions are taken only there.
"""

from __future__ import annotations

import types
from functools import cache

from torch import nn

RRELU = frozenset({"rrelu", "rrelu_", "RReLU"})  # saves an output before its kernel has filled it
_KNOWN: dict[
    int, tuple[types.CodeType, frozenset[str]]
] = {}  # by the id of the code, which is kept so that the id stays its own


@cache
def names_of_class(kind: type) -> frozenset[str]:
    """The names in the methods of a module's class, and in the functions that they call."""
    bases = [base for base in kind.__mro__ if issubclass(base, nn.Module) and base is not nn.Module]
    methods = [value for base in bases for value in vars(base).values() if isinstance(value, types.FunctionType)]
    return frozenset().union(*map(names_of_function, methods))


def names_of_function(function: types.FunctionType) -> frozenset[str]:
    """The names in a function, and in those that it calls through its globals or closure; PyTorch's own are not entered."""
    code = function.__code__
    known = _KNOWN.get(id(code))
    if known is None:
        known = _KNOWN[id(code)] = (code, _names(function))
    return known[1]


def _names(function: types.FunctionType) -> frozenset[str]:
    seen: set[int] = set()
    found: set[str] = set()
    pending = [function]
    while pending:
        each = pending.pop()
        if id(each.__code__) in seen or (each.__module__ or "").startswith(("torch.", "retape.")):
            continue
        seen.add(id(each.__code__))
        _add_names(each.__code__, found)
        pending += _called(each)
    return frozenset(found)


def _add_names(code: types.CodeType, found: set[str]) -> None:
    found.update(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            _add_names(inner, found)


def _called(function: types.FunctionType) -> list[types.FunctionType]:
    names = function.__globals__
    found = [names[name] for name in function.__code__.co_names if name in names]
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # a variable that has no value yet
            continue
    return [value for value in found if isinstance(value, types.FunctionType)]

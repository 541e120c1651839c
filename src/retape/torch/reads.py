"""What a call reads: its tensors at any depth, the modules and closures behind it, and how to call it once more.

`capture_call` walks a function and its arguments once. The result can be called again as if at the first time: containers
are rebuilt, closure variables are the ones of then, tensors are held detached. What the walk found is version-checked
before that. Values of Python globals and attributes of ordinary objects are not followed.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_MOST_DEPTH = 8


class Entry(NamedTuple):
    """A tensor that a module holds: which dict, under which key."""

    holder: dict[str, Any]
    key: str
    tensor: Tensor


class Leaf:
    """The place of tensor number `index` in a rebuilt container."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class Call:
    """A function and its arguments as they were, and everything that the walk met on the way."""

    __slots__ = (
        "_seen",
        "arguments",
        "entries",
        "extras",
        "function",
        "generators",
        "keywords",
        "modules",
        "plain",
        "roots",
        "tensors",
    )

    def __init__(self) -> None:
        self.function: Callable[..., Any] = _nothing
        self.arguments: tuple[Any, ...] = ()
        self.keywords: dict[str, Any] = {}
        self.plain = True  # every argument is a tensor or no container: nothing to rebuild
        self.tensors: list[Tensor] = []  # of the arguments, in order
        self.extras: list[Tensor] = []  # of closures and defaults
        self.roots: list[nn.Module] = []
        self.modules: list[nn.Module] = []
        self.entries: list[Entry] = []
        self.generators: list[torch.Generator] = []
        self._seen: set[int] = set()

    # --- the walk ----------------------------------------------------------------------------------------------

    def take(self, value: Any, depth: int = 0) -> Any:
        """Note what an argument holds; return what stands for it when the call is rebuilt."""
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return Leaf(len(self.tensors) - 1)
        kind = type(value)
        if kind in _ATOMS or depth > _MOST_DEPTH:
            return value
        if kind in (list, tuple):
            return kind([self.take(item, depth + 1) for item in value])
        if kind is dict:
            return {key: self.take(item, depth + 1) for key, item in value.items()}
        return self._take_other(value, depth)

    def _take_other(self, value: Any, depth: int) -> Any:
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*[self.take(item, depth + 1) for item in value])
        if isinstance(value, (list, dict)):
            return self._take_container(value, depth)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {name: self.take(field, depth + 1) for name, field in _fields_of(value)}
            return _Rebuilt(value, fields)
        self.meet(value, depth)
        return value

    def _take_container(self, value: Any, depth: int) -> Any:
        """A subclass of list or dict, such as a model's output class: its tensors count, the object is passed as it is."""
        for item in value.values() if isinstance(value, dict) else value:
            self.meet(item, depth + 1)
        return value

    def meet(self, value: Any, depth: int = 0) -> None:
        """Note what the function can reach through `value`, other than through its arguments."""
        if type(value) in _ATOMS or depth > _MOST_DEPTH or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            self.extras.append(value)
        elif isinstance(value, nn.Module):
            self.roots.append(value)
            self._meet_module(value)
        elif type(value) is torch.Generator:
            self.generators.append(value)
        else:
            for inner in _reachable(value, depth):
                self.meet(inner, depth + 1)

    def _meet_module(self, root: nn.Module) -> None:
        stack = [root]
        while stack:
            module = stack.pop()
            self._seen.add(id(module))
            self.modules.append(module)
            fields = module.__dict__
            for holder in (fields["_parameters"], fields["_buffers"], fields):
                for key, value in holder.items():
                    kind = type(value)
                    if kind in _NO_TENSORS:
                        continue
                    if kind is nn.Parameter or isinstance(value, Tensor):
                        self.entries.append(Entry(holder, key, value))
                    elif kind is torch.Generator:
                        self.generators.append(value)
            for child in fields["_modules"].values():
                if child is not None and id(child) not in self._seen:
                    stack.append(child)

    # --- the call, once more ------------------------------------------------------------------------------------

    def rebuild(self, tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments and keywords with `tensors` in their places, in containers of their own."""
        if self.plain:
            return (
                tuple([tensors[a.index] if type(a) is Leaf else a for a in self.arguments]),
                {k: tensors[a.index] if type(a) is Leaf else a for k, a in self.keywords.items()},
            )
        return (
            tuple([_put_back(a, tensors) for a in self.arguments]),
            {k: _put_back(a, tensors) for k, a in self.keywords.items()},
        )


def _reachable(value: Any, depth: int) -> Iterable[Any]:
    """What stands directly behind a container, a function or a method; of other objects only those near the call."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, types.FunctionType):
        return _behind_function(value)
    if isinstance(value, types.MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords)
    if depth <= 2 and not isinstance(value, (type, types.ModuleType)):
        return list(getattr(value, "__dict__", _EMPTY).values())
    return ()


def _behind_function(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a variable that has no value yet
            continue
    yield function.__defaults__
    yield function.__kwdefaults__
    names = function.__globals__
    for name in function.__code__.co_names:
        value = names.get(name)
        if isinstance(value, (nn.Module, Tensor, torch.Generator)):
            yield value


class _Rebuilt:
    """A dataclass whose fields are taken one by one."""

    __slots__ = ("fields", "original")

    def __init__(self, original: Any, fields: dict[str, Any]) -> None:
        self.original = original
        self.fields = fields


_ATOMS = frozenset(
    {type(None), int, float, bool, str, bytes, complex, torch.dtype, torch.device, torch.Size, slice, range, type(...)}
)
# What most fields of a module are; telling by type is far cheaper than asking isinstance of a tensor class.
_NO_TENSORS = _ATOMS | {dict, OrderedDict, set, list, tuple}
_EMPTY: dict[str, Any] = {}


def _fields_of(value: Any) -> list[tuple[str, Any]]:
    """What a dataclass holds, whether it keeps it in a dict or in slots."""
    if hasattr(value, "__dict__"):
        return list(vars(value).items())
    return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]


def _nothing() -> None:
    """The function of a call that has none yet."""


def capture_call(function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Call:
    """Walk a function and its arguments."""
    while type(function) is functools.partial:
        arguments = (*function.args, *arguments)
        keywords = {**function.keywords, **keywords}
        function = function.func
    call = Call()
    call.arguments = tuple([call.take(value) for value in arguments])
    call.keywords = {key: call.take(value) for key, value in keywords.items()} if keywords else {}
    call.plain = not any(
        isinstance(a, (list, tuple, dict, _Rebuilt)) for a in (*call.arguments, *call.keywords.values())
    )
    call.meet(function)
    call.function = _with_closure_of_now(function)
    return call


def _put_back(value: Any, tensors: list[Tensor]) -> Any:
    kind = type(value)
    if kind is Leaf:
        return tensors[value.index]
    if kind in (list, tuple):
        return kind([_put_back(item, tensors) for item in value])
    if kind is dict:
        return {key: _put_back(item, tensors) for key, item in value.items()}
    if kind is _Rebuilt:
        twin = object.__new__(type(value.original))
        for name, field in value.fields.items():
            object.__setattr__(twin, name, _put_back(field, tensors))
        return twin
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*[_put_back(item, tensors) for item in value])
    return value


def _with_closure_of_now(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function over cells of its own, so that a variable bound anew later does not reach the re-run.

    A lambda in a loop closes over the loop's variable, not over its value: run again after the loop it would see the last.
    """
    if type(function) is not types.FunctionType or not function.__closure__:
        return function
    cells = []
    for cell in function.__closure__:
        try:
            content = cell.cell_contents
        except ValueError:
            return function
        if (
            type(content) is types.FunctionType
            and content is not function
            and content.__closure__
            and not _refers_to_itself(content)
        ):
            content = _with_closure_of_now(content)
        cells.append(types.CellType(content))
    twin = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__dict__.update(function.__dict__)
    return twin


def _refers_to_itself(function: types.FunctionType, depth: int = 0) -> bool:
    """Whether following closures leads back to where it began, or too deep to tell."""
    if depth > 4:
        return True
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:
            return True
        if type(content) is types.FunctionType and (content is function or _refers_to_itself(content, depth + 1)):
            return True
    return False

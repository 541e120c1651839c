"""What a call reads: its tensors at any depth, the modules and closures behind it, and how to call it once more.

`capture_call` walks a function and its arguments once. The result can be called again as if at the first time: containers
of arguments are rebuilt, closure variables and globals are the ones of then, and what modules, lists and dicts held then can
be put back (`holders.py`). The tensors that it found are version-checked before that (`watch.py`). Ordinary objects are
followed a little way, and for their tensors alone.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from retape.torch import _compat
from retape.torch.holders import ATOMS, OWN_FIELDS, DictHolder, Holder, ListHolder, ModuleHolder, SlotHolder, tracked

_MOST_DEPTH = 8
_MOST_ITEMS = 256


class Leaf:
    """The place of tensor number `index` in a rebuilt container."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class Call:
    """A function and its arguments as they were, and everything that the walk met on the way."""

    __slots__ = (
        "_leaves",
        "_seen",
        "arguments",
        "codes",
        "extras",
        "function",
        "generators",
        "holders",
        "keywords",
        "modules",
        "places",
        "plain",
        "renormalised",
        "roots",
        "state",
        "statistics",
        "tensors",
        "twins",
    )

    def __init__(self) -> None:
        self.function: Callable[..., Any] = _nothing
        self.arguments: tuple[Any, ...] = ()
        self.keywords: dict[str, Any] = {}
        self.plain = True  # every argument is a tensor or no container: nothing to rebuild
        self.tensors: list[Tensor] = []  # of the arguments, in order
        self.extras: list[Tensor] = []  # of closures, defaults and globals
        self.roots: list[nn.Module] = []
        self.modules: list[nn.Module] = []
        self.holders: list[Holder] = []
        self.places: list[tuple[Any, Any]] = []  # where holders hold their tensors: which container, which key
        self.state: list[Tensor] = []  # those tensors
        self.generators: list[Any] = []
        self.codes: list[Any] = []  # of functions met, to tell apart what one wrapper wraps
        self.renormalised: set[int] = set()  # parameters that their own module writes to in its forward
        self.statistics: set[int] = (
            set()
        )  # buffers that their module writes to, though its first batch may leave them as they are
        self.twins: list[tuple[int, int]] = []  # places that hold the same tensor: code asks `q is k`
        self._leaves: dict[int, int] = {}
        self._seen: set[int] = set()

    # --- arguments ----------------------------------------------------------------------------------------------

    def take(self, value: Any, depth: int = 0) -> Any:
        """Note what an argument holds; return what stands for it when the call is rebuilt."""
        if isinstance(value, Tensor):
            # One for each place, though the same tensor may stand in several: how many a nested region saves must not
            # depend on which tensors are one object, since in a re-run they may be an argument and its closure's twin.
            leaf = Leaf(len(self.tensors))
            first = self._leaves.setdefault(id(value), leaf.index)
            if first != leaf.index:
                self.twins.append((leaf.index, first))
            self.tensors.append(value)
            return leaf
        kind = type(value)
        if kind in ATOMS or depth > _MOST_DEPTH:
            return value
        if kind is list or kind is tuple:
            return kind([self.take(item, depth + 1) for item in value])
        if kind is dict:
            return {key: self.take(item, depth + 1) for key, item in value.items()}
        if kind in _COPIED:
            twin = copy.copy(value)
            _refill(twin, [(key, self.take(item, depth + 1)) for key, item in _items(value)])
            return twin
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return tuple.__new__(kind, [self.take(item, depth + 1) for item in value])
        if dataclasses.is_dataclass(value) and not isinstance(value, (type, dict)):
            return _Rebuilt(value, {name: self.take(field, depth + 1) for name, field in _fields_of(value)})
        self.meet(value, depth)
        return value

    # --- everything else ------------------------------------------------------------------------------------------

    @property
    def has_switches(self) -> bool:
        """Whether some argument is a plain value."""
        return not ATOMS.isdisjoint(map(type, self.arguments)) or not ATOMS.isdisjoint(
            map(type, self.keywords.values())
        )

    @property
    def fills_what_it_saved(self) -> bool:
        """Whether it runs `rrelu`, the one op that autograd saves an output of before its kernel has filled it."""
        return nn.RReLU in map(type, self.modules) or any("rrelu" in code.co_names for code in self.codes)

    @property
    def is_lazy(self) -> bool:
        """Whether a parameter has no shape yet: the first call of a lazy module makes it."""
        return not _PARAMETERS.issuperset(map(type, self.state)) and any(map(is_lazy, self.state))

    def meet(self, value: Any, depth: int = 0) -> None:
        """Note what the function can reach through `value`, other than through its arguments."""
        if type(value) in ATOMS or depth > _MOST_DEPTH or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            self.extras.append(value)
        elif isinstance(value, nn.Module):
            self.roots.append(value)
            self._meet_modules(value)
        elif is_generator(value):
            self.generators.append(value)
        elif isinstance(value, (dict, list, deque)):
            self._meet_container(value, depth)
        else:
            try:
                self._meet_other(value, depth)
            except Exception:  # code of the user's ran (a property, __getattr__) and refused: it is not followed
                return

    def _meet_other(self, value: Any, depth: int) -> None:
        if isinstance(value, types.FunctionType):
            self.codes.append(value.__code__)
        for inner in _reachable(value, depth):
            self.meet(inner, depth + 1)
        if depth > 2 or isinstance(value, _NOT_FOLLOWED):
            return
        if hasattr(value, "__dict__"):
            self._follow(value.__dict__, depth)
        elif hasattr(type(value), "__slots__"):
            self._meet_slots(value, depth)

    def _meet_modules(self, root: nn.Module) -> None:
        stack = [root]
        while stack:
            module = stack.pop()
            self._seen.add(id(module))
            self.modules.append(module)
            fields = module.__dict__
            if "_parameters" not in fields:  # a scripted module keeps everything elsewhere
                self.extras += [*module.parameters(), *module.buffers()]
                continue
            # FSDP itself exchanges sharded for gathered parameters, in the forward and again in the re-run.
            holder = ModuleHolder(fields, parameters=not _compat.fsdp_in_use())
            self.holders.append(holder)
            for held in (fields["_parameters"], fields["_buffers"]):
                for key, tensor in held.items() if held else ():
                    if tensor is not None:  # as _place does
                        self._seen.add(id(tensor))
                        self.places.append((held, key))
                        self.state.append(tensor)
            if isinstance(module, _compat.NORMS) and fields["training"]:
                self.statistics.update(id(buffer) for buffer in fields["_buffers"].values() if buffer is not None)
            own = fields.keys() - OWN_FIELDS
            if own:
                self._meet_fields(holder, own, 1)
                if fields.get("max_norm") is not None:  # an embedding that scales its rows as it looks them up
                    self.renormalised.update(map(id, fields["_parameters"].values()))
            for child in fields["_modules"].values():
                if child is not None and id(child) not in self._seen:
                    stack.append(child)

    def _meet_fields(self, holder: DictHolder, keys: Iterable[Any], depth: int, *, only_tensors: bool = False) -> None:
        """Remember what a dict holds under `keys`, and follow its containers."""
        container, then = holder.container, holder.then
        for key in keys:
            value = container[key]
            kind = type(value)
            if kind in ATOMS or kind is types.FunctionType:
                if not only_tensors:  # a setting
                    then[key] = value
            elif isinstance(value, Tensor):
                self._place(container, key, value)
                then[key] = tracked(value)
            elif only_tensors or not isinstance(value, nn.Module):
                self.meet(value, depth + 1)

    def _follow(self, container: dict[Any, Any], depth: int) -> None:
        """A dict that is no module's: its tensors count, its plain values are the user's own."""
        holder = DictHolder(container)
        self.holders.append(holder)
        self._meet_fields(holder, list(container), depth, only_tensors=True)

    def _meet_slots(self, value: Any, depth: int) -> None:
        names = [name for kind in type(value).__mro__ for name in _slots_of(kind) if hasattr(value, name)]
        tensors = [name for name in names if isinstance(getattr(value, name), Tensor)]
        if tensors and not getattr(type(value), "__dataclass_params__", None):
            self.holders.append(SlotHolder(value, tensors))
        for name in names:
            self.meet(getattr(value, name), depth + 1)

    def _meet_container(self, value: Any, depth: int) -> None:
        if len(value) > _MOST_ITEMS:  # a data set, a vocabulary: nothing that a forward writes to
            return
        if isinstance(value, (list, deque)) and type(value).__iter__ in (list.__iter__, deque.__iter__):
            self.holders.append(ListHolder(value))
            for index, item in enumerate(value):
                if isinstance(item, Tensor):
                    self._place(value, index, item)
                else:
                    self.meet(item, depth + 1)
        elif type(value) in _COPIED or (isinstance(value, dict) and type(value).__setitem__ is dict.__setitem__):
            self._follow(value, depth)
        else:
            for item in value.values() if isinstance(value, dict) else value:
                self.meet(item, depth + 1)

    def _place(self, container: Any, key: Any, tensor: Tensor) -> None:
        self._seen.add(id(tensor))
        self.places.append((container, key))
        self.state.append(tensor)

    def function_again(self) -> Callable[..., Any]:
        """The function over variables of its own: a re-run may write to them, and the next one must not see that."""
        return _as_of_now(self.function) if type(self.function) is types.FunctionType else self.function

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


class _Rebuilt:
    """A dataclass whose fields are taken one by one."""

    __slots__ = ("fields", "original")

    def __init__(self, original: Any, fields: dict[str, Any]) -> None:
        self.original = original
        self.fields = fields

    def rebuild(self, fields: dict[str, Any]) -> Any:
        twin = object.__new__(type(self.original))
        for name, value in fields.items():
            object.__setattr__(twin, name, value)
        return twin


class Opaque:
    """Base of objects of retape's own that a step or region calls and that keep their own record: none of it is the user's state."""

    __slots__ = ()


_PARAMETERS = frozenset({nn.Parameter})
# Objects whose attributes say nothing about what a forward reads.
_NOT_FOLLOWED = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    functools.partial,
    torch.optim.Optimizer,
    Opaque,
)
# Globals that hold no state: most of what a function names.
_NEVER_READ = {types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type}


def is_generator(value: Any) -> bool:
    """Whether a value draws random numbers: torch's, Python's or numpy's generator objects."""
    kind = type(value)
    if kind is torch.Generator or isinstance(value, random.Random):
        return True
    return str(getattr(kind, "__module__", "")).startswith("numpy.random") and kind.__name__ in (
        "Generator",
        "RandomState",
    )


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _reachable(value: Any, depth: int) -> Iterable[Any]:
    """What stands directly behind a tuple, a set, a function or a method."""
    if isinstance(value, types.FunctionType):
        return _behind_function(value)
    if isinstance(value, types.MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords)
    if isinstance(value, (tuple, set, frozenset)) and len(value) <= _MOST_ITEMS:
        return value
    return ()


def _behind_function(function: types.FunctionType) -> list[Any]:
    found: list[Any] = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # a variable that has no value yet
            continue
    if function.__defaults__:
        found.extend(function.__defaults__)
    if function.__kwdefaults__:
        found.extend(function.__kwdefaults__.values())
    names = function.__globals__
    found.extend(
        [
            names[name]
            for name in function.__code__.co_names
            if type(names.get(name)) not in _NEVER_READ and name in names
        ]
    )
    return found


def _fields_of(value: Any) -> list[tuple[str, Any]]:
    """What a dataclass holds, whether it keeps it in a dict or in slots."""
    if hasattr(value, "__dict__"):
        return list(vars(value).items())
    names = [field.name for field in dataclasses.fields(value)]
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]


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
    for value in (*call.arguments, *call.keywords.values()):
        if type(value) is not Leaf and isinstance(value, (list, tuple, dict, deque, _Rebuilt)):
            call.plain = False
    call.meet(function)
    call.function = _as_of_now(function) if type(function) is types.FunctionType else function
    return call


def _put_back(value: Any, tensors: list[Tensor], depth: int = 0) -> Any:
    kind = type(value)
    if kind is Leaf:
        return tensors[value.index]
    if depth > _MOST_DEPTH:
        return value
    if kind is list or kind is tuple:
        return kind([_put_back(item, tensors, depth + 1) for item in value])
    if kind is dict:
        return {key: _put_back(item, tensors, depth + 1) for key, item in value.items()}
    if kind is _Rebuilt:
        return value.rebuild({name: _put_back(field, tensors, depth + 1) for name, field in value.fields.items()})
    if kind in _COPIED:
        twin = copy.copy(value)
        _refill(twin, [(key, _put_back(item, tensors, depth + 1)) for key, item in _items(value)])
        return twin
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return tuple.__new__(kind, [_put_back(item, tensors, depth + 1) for item in value])
    return value


# Containers of the standard library that are rebuilt by copying: a copy keeps their factory, their length limit.
_COPIED = frozenset({OrderedDict, defaultdict, deque})


def _items(container: Any) -> list[tuple[Any, Any]]:
    return list(enumerate(container)) if isinstance(container, deque) else list(container.items())


def _refill(container: Any, items: list[tuple[Any, Any]]) -> None:
    for key, item in items:
        container[key] = item


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


def _as_of_now(function: types.FunctionType, depth: int = 0) -> types.FunctionType:
    """The same function over variables of its own, so that one bound anew later does not reach the re-run.

    A lambda in a loop closes over the loop's variable, not over its value: run again after the loop it would see the last.
    """
    names = function.__globals__
    pinned = {
        name: names[name]
        for name in function.__code__.co_names
        if name in names and type(names[name]) not in _NEVER_READ
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
            content = _as_of_now(content, depth + 1)
        cells.append(types.CellType(content))
    return tuple(cells)

"""What a call reads: its tensors at any depth, the modules and closures behind it, and how to call it once more.

`capture_call` walks a function and its arguments once. The result can be called again as if at the first time: containers
of arguments are rebuilt, closure variables and globals are the ones of then, and what modules, lists and dicts held then can
be put back (`containers.py`). The tensors that it found are version-checked before that (`mutation.py`). Ordinary objects are
followed for their tensors alone. Everything that can be reached is walked, whatever its size: where that is very much, a
warning says so once.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import random
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from retape.torch.capture.code_names import RRELU, names_of_function
from retape.torch.capture.containers import (
    ATOMS,
    BLANKS,
    DictHolder,
    ListHolder,
    SlotHolder,
    StateFields,
    holds_tensor,
    tracked,
    tracked_item,
)
from retape.torch.capture.decisions import may_decide
from retape.torch.capture.function_copy import NEVER_READ, as_of_now
from retape.torch.capture.module_tree import Tree
from retape.torch.capture.module_tree_cache import read_tree
from retape.torch.capture.opaque import CompiledCall, Opaque
from retape.torch.compat import internals
from retape.torch.model_libraries import LIBRARIES

_MANY_OBJECTS = 100_000  # walking them takes about 0.1 s for each call of a region


class Leaf:
    """The place of tensor number `index` in a rebuilt container."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


_LOG = logging.getLogger("retape")
_LEAVES = tuple([Leaf(index) for index in range(32)])
_IMPORTED = sys.modules
_ONLY_LEAVES = frozenset({Leaf})
_NOTHING: frozenset[int] = frozenset()


class Call:
    """A function and its arguments as they were, and everything that the walk met on the way."""

    # What most calls leave as it is has its value here: setting two dozen fields is what making one costs.
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}  # noqa: RUF012 - never changed, only replaced
    plain = True  # every argument is a tensor or no container: nothing to rebuild
    only_tensors = False  # every argument is a tensor
    has_switches = False  # some argument is a plain value
    roots: tuple[nn.Module, ...] = ()
    modules: list[nn.Module] = []  # noqa: RUF012 - so is this
    kinds: dict[Any, frozenset[int]] | None = None  # what calls of the first root are known to change
    only_parameters = True  # `state` holds nothing else
    switches: tuple[bool, ...] = ()  # plain truth values in fields of modules
    generators: tuple[Any, ...] = ()
    codes: tuple[Any, ...] = ()  # of functions met, to tell apart what one wrapper wraps
    fills_what_it_saved = False  # it runs `rrelu`: autograd saves an output of it before its kernel has filled it
    decides = False  # its code names an op that decides (`decisions.py`)
    renormalised: frozenset[int] = _NOTHING  # parameters that their own module writes to in its forward
    # Buffers that their module writes to, though its first batch may leave them as they are.
    statistics: frozenset[int] = _NOTHING
    twins: tuple[tuple[int, int], ...] = ()  # places that hold the same tensor: code asks `q is k`
    fsdp = False
    tensors: list[Tensor]  # of the arguments, in order
    extras: list[Tensor]  # of closures, defaults and globals
    state: list[Tensor]  # the tensors that holders hold
    holders: list[Any]
    _placed: list[Any]
    _seen: set[int]

    def begin(self) -> None:
        """Have room for what a walk meets."""
        self.tensors, self.extras, self.state = [], [], []
        self.holders, self._placed, self._seen = [], [], set()
        self._pending: list[Any] = []
        self._walking = False

    # --- arguments ----------------------------------------------------------------------------------------------

    def take(self, value: Any, inside: tuple[int, ...] = ()) -> Any:
        """Note what an argument holds; return what stands for it when the call is rebuilt. `inside`: the containers around it."""
        if isinstance(value, Tensor):
            # One for each place, though the same tensor may stand in several: how many a nested region saves must not
            # depend on which tensors are one object, since in a re-run they may be an argument and its closure's twin.
            index = len(self.tensors)
            self.tensors.append(value)
            return _LEAVES[index] if index < len(_LEAVES) else Leaf(index)
        kind = type(value)
        if kind in ATOMS:
            self.has_switches = True
            return value
        if id(value) in inside:  # a container that holds itself
            self.meet(value)
            return _AsIs(value)
        inside = (*inside, id(value))
        if kind is list or kind is tuple:
            return kind([self.take(item, inside) for item in value])
        if kind is dict:
            return {key: self.take(item, inside) for key, item in value.items()}
        if kind in _COPIED:
            twin = copy.copy(value)
            _refill(twin, [(key, self.take(item, inside)) for key, item in _items(value)])
            return twin
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return tuple.__new__(kind, [self.take(item, inside) for item in value])
        if dataclasses.is_dataclass(value) and not isinstance(value, (type, dict)):
            return _Rebuilt(value, {name: self.take(field, inside) for name, field in _fields_of(value)})
        self.meet(value)
        return value

    # --- everything else ------------------------------------------------------------------------------------------

    @property
    def places(self) -> list[tuple[Any, Any]]:
        """Where the tensors of `state` stand: in which container, under which key."""
        found: list[tuple[Any, Any]] = []
        for place in self._placed:
            found += place.places() if isinstance(place, Tree) else [place]
        return found

    @property
    def is_lazy(self) -> bool:
        """Whether a parameter has no shape yet: the first call of a lazy module makes it."""
        return not self.only_parameters and any(map(is_lazy, self.state))

    def meet(self, value: Any) -> None:
        """Note what the function can reach through `value`, other than through its arguments."""
        pending = self._pending
        pending.append(value)
        if len(pending) > 1 or self._walking:
            return
        self._walking = True
        try:
            while pending:
                self._visit(pending.pop())
        finally:
            self._walking = False
            pending.clear()
        if len(self._seen) > _MANY_OBJECTS:
            _say_many(self, len(self._seen))

    def _visit(self, value: Any) -> None:
        if type(value) in ATOMS or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            self.extras.append(value)
        elif isinstance(value, nn.Module):
            self.roots += (value,)
            self._meet_modules(value)
        elif is_generator(value):
            self.generators += (value,)
        elif isinstance(value, (dict, list, deque)):
            self._meet_container(value)
        else:
            try:
                self._meet_other(value)
            except Exception:  # code of the user's ran (a property, __getattr__) and refused: it is not followed
                return

    def _meet_other(self, value: Any) -> None:
        if isinstance(value, types.FunctionType):
            self.codes += (value.__code__,)
            names = names_of_function(value)
            self.fills_what_it_saved = self.fills_what_it_saved or not RRELU.isdisjoint(names)
            self.decides = self.decides or may_decide(names)
        for inner in _reachable(value):
            self.meet(inner)
        if isinstance(value, _NOT_FOLLOWED) or type(value).__module__.startswith("torch."):
            return  # PyTorch's own objects (FSDP's state, process groups) keep their own record
        if type(getattr(value, "__dict__", None)) is dict:
            follow = self._meet_state if LIBRARIES.restores_plain_fields(type(value)) else self._follow
            follow(value.__dict__)
        elif hasattr(type(value), "__slots__"):
            self._meet_slots(value)

    def _meet_modules(self, root: nn.Module, *, last: bool = False) -> None:
        """Note what a tree of modules holds; after the `last` one nothing is met that could be a part of it."""
        seen = self._seen
        tree, scripted = read_tree(root, seen, fsdp=self.fsdp)
        for module in scripted:
            seen.add(id(module))
            self.modules = [*self.modules, module]
            self.extras += [*module.parameters(), *module.buffers()]
        if tree is None:
            return
        layout = tree.layout
        if len(self.roots) == 1:
            self.kinds = layout.kinds
        self.modules = self.modules + tree.modules if self.modules else tree.modules
        self.holders.append(tree)
        self._placed.append(tree)
        self.state += tree.state
        self.switches += tuple(tree.switches)
        if not layout.is_simple:
            self.only_parameters = self.only_parameters and layout.only_parameters
            self.fills_what_it_saved = self.fills_what_it_saved or layout.fills_what_it_saved
            self.decides = self.decides or layout.decides
            self.statistics |= tree.statistics or _NOTHING
            self.renormalised |= tree.renormalised or _NOTHING
        elif last:
            return
        seen.update(map(id, tree.modules))
        seen.update(map(id, tree.state))
        others, tree.others = tree.others, ()
        for value in others:
            self.meet(value)

    def _follow(self, container: dict[Any, Any]) -> None:
        """A dict that is no module's: its tensors count, its plain values are the user's own."""
        holder = DictHolder(container)
        self.holders.append(holder)
        if ATOMS.issuperset(map(type, container.values())):
            holder.blanks = container.copy()
            return
        for key, value in list(container.items()):
            kind = type(value)
            if isinstance(value, Tensor):
                self._place(container, key, value)
                holder.then[key] = tracked(value)
            elif kind is tuple and holds_tensor(value):
                holder.then[key] = tracked_item(value)
                self.meet(value)
            elif kind in BLANKS:
                holder.blanks[key] = value
                if kind not in ATOMS:
                    self.meet(value)
            elif kind is not types.FunctionType:
                self.meet(value)

    def _meet_state(self, fields: dict[str, Any]) -> None:
        """Follow an object whose plain fields describe its tensors: the dicts behind it are restored whole."""
        before, around = len(self.holders), self._pending
        self._pending = []
        self._follow(fields)
        while self._pending:
            self._visit(self._pending.pop())
        self._pending = around
        met = self.holders[before:]
        self.holders[before:] = [StateFields(each.container) if type(each) is DictHolder else each for each in met]

    def _meet_slots(self, value: Any) -> None:
        names = [name for kind in type(value).__mro__ for name in _slots_of(kind)]
        if not getattr(getattr(type(value), "__dataclass_params__", None), "frozen", False):
            self.holders.append(SlotHolder(value, names))
        for name in names:
            self.meet(getattr(value, name, None))

    def _meet_container(self, value: Any) -> None:
        if isinstance(value, (list, deque)) and type(value).__iter__ in (list.__iter__, deque.__iter__):
            holder = ListHolder(value)
            self.holders.append(holder)
            if ATOMS.issuperset(map(type, holder.then)):
                return
            for index, item in enumerate(list(value)):
                if isinstance(item, Tensor):
                    self._place(value, index, item)
                else:
                    self.meet(item)
        elif type(value) in _COPIED or (isinstance(value, dict) and type(value).__setitem__ is dict.__setitem__):
            self._follow(value)
        else:
            for item in value.values() if isinstance(value, dict) else value:
                self.meet(item)

    def _place(self, container: Any, key: Any, tensor: Tensor) -> None:
        self._seen.add(id(tensor))
        self._placed.append((container, key))
        self.state.append(tensor)
        self.only_parameters = False

    @property
    def name(self) -> str:
        return name_of(self.function)

    def function_again(self) -> Callable[..., Any]:
        """The function over variables of its own: a re-run may write to them, and the next one must not see that."""
        return as_of_now(self.function) if type(self.function) is types.FunctionType else self.function

    # --- the call, once more ------------------------------------------------------------------------------------

    def rebuild(self, tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments and keywords with `tensors` in their places, in containers of their own."""
        if self.only_tensors:
            return tuple(tensors), {}
        if self.plain:
            arguments = tuple([tensors[a.index] if type(a) is Leaf else a for a in self.arguments])
            if not self.keywords:
                return arguments, {}
            return arguments, {k: tensors[a.index] if type(a) is Leaf else a for k, a in self.keywords.items()}
        return (
            tuple([_put_back(a, tensors) for a in self.arguments]),
            {k: _put_back(a, tensors) for k, a in self.keywords.items()},
        )


class _AsIs:
    """A value that is handed to a re-run as it is."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


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


# Objects whose attributes say nothing about what a forward reads.
_NOT_FOLLOWED = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    functools.partial,
    logging.Logger,
    torch.optim.Optimizer,
    Opaque,
)


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
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    owner = kind.__name__.lstrip("_")  # as the language spells a private name
    return tuple([f"_{owner}{n}" if n.startswith("__") and not n.endswith("__") else n for n in names])


def _reachable(value: Any) -> Iterable[Any]:
    """What stands directly behind a tuple, a set, a function or a method."""
    if isinstance(value, types.FunctionType):
        return _behind_function(value)
    if isinstance(value, types.MethodType):
        return (value.__self__, value.__func__)
    if type(value) is CompiledCall:
        return (value.__self__,)
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords)
    if isinstance(value, (tuple, set, frozenset)):
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
            if type(names.get(name)) not in NEVER_READ and name in names
        ]
    )
    return found


def _fields_of(value: Any) -> list[tuple[str, Any]]:
    """What a dataclass holds, whether it keeps it in a dict or in slots."""
    if hasattr(value, "__dict__"):
        return list(vars(value).items())
    names = [field.name for field in dataclasses.fields(value)]
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]


_CONTAINERS = (list, tuple, dict, deque, _Rebuilt, _AsIs)


def _holds_no_container(taken: Iterable[Any]) -> bool:
    return not any(type(value) is not Leaf and isinstance(value, _CONTAINERS) for value in taken)


_SAID: set[str] = set()  # in this process


def _say_many(call: Call, count: int) -> None:
    """Warn once of a call through which very many objects can be reached."""
    name = getattr(getattr(call, "function", None), "__qualname__", "") or "a region's function"
    if name not in _SAID:
        _SAID.add(name)
        _LOG.warning(
            "retape: %s can reach %d objects through its closure, globals or attributes, and all are looked at in each call. "
            "Pass what it needs as arguments.",
            name,
            count,
        )


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a call in messages: its module's class, or its function and source line."""
    owner = getattr(function, "__self__", None)
    if isinstance(function, nn.Module):
        return type(function).__name__
    if isinstance(owner, nn.Module):
        return type(owner).__name__
    inner = getattr(function, "func", None)
    if inner is not None:
        return name_of(inner)
    code = getattr(function, "__code__", None)
    where = f" ({code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno})" if code else ""
    return f"{getattr(function, '__qualname__', type(function).__name__)}{where}"


def twins_of(tensors: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    """The places of tensors that stand elsewhere before, with the first such place."""
    first: dict[int, int] = {}
    pairs = [(index, first.setdefault(id(tensor), index)) for index, tensor in enumerate(tensors)]
    return tuple([pair for pair in pairs if pair[0] != pair[1]])


def capture_call(function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Call:
    """Walk a function and its arguments."""
    while type(function) is functools.partial:
        arguments = (*function.args, *arguments)
        keywords = {**function.keywords, **keywords}
        function = function.func
    fsdp = internals.FSDP_STATE in _IMPORTED and internals.fsdp_in_use()
    called = whose_call(function) if type(function) is types.MethodType else function
    call = Call()
    call.begin()
    call.fsdp = fsdp
    call.arguments = tuple([call.take(value) for value in arguments])
    call.only_tensors = _ONLY_LEAVES.issuperset(map(type, call.arguments))
    call.plain = call.only_tensors or _holds_no_container(call.arguments)
    if keywords:
        call.only_tensors = False
        call.keywords = {key: call.take(value) for key, value in keywords.items()}
        call.plain = call.plain and _holds_no_container(call.keywords.values())
    if len(call.tensors) > 1:
        call.twins = twins_of(call.tensors)
    if isinstance(called, nn.Module):
        call._seen.add(id(called))
        call.roots = (called,)
        call._meet_modules(called, last=True)
        call.function = function
        return call
    call.meet(function)
    call.function = as_of_now(function) if type(function) is types.FunctionType else function
    return call


def whose_call(method: types.MethodType) -> Any:
    """The module whose call a method is, as its class has it, if nothing else stands behind it; else the method."""
    owner, function = method.__self__, method.__func__
    if type(function) is not types.FunctionType or not isinstance(owner, nn.Module):
        return method
    if function is _MODULE_CALL:
        return owner
    if not any(vars(base).get("__call__") is function for base in type(owner).__mro__):
        return method
    behind = [value for value in _behind_function(function) if type(value) not in ATOMS]
    return owner if all(isinstance(value, _BEHIND_EVERY_CALL) for value in behind) else method


_MODULE_CALL = nn.Module.__call__
_BEHIND_EVERY_CALL = (type, logging.Logger)  # the class itself, for `super()`, and what only writes


def _put_back(value: Any, tensors: list[Tensor]) -> Any:
    kind = type(value)
    if kind is Leaf:
        return tensors[value.index]
    if kind is _AsIs:
        return value.value
    if kind is list or kind is tuple:
        return kind([_put_back(item, tensors) for item in value])
    if kind is dict:
        return {key: _put_back(item, tensors) for key, item in value.items()}
    if kind is _Rebuilt:
        return value.rebuild({name: _put_back(field, tensors) for name, field in value.fields.items()})
    if kind in _COPIED:
        twin = copy.copy(value)
        _refill(twin, [(key, _put_back(item, tensors)) for key, item in _items(value)])
        return twin
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return tuple.__new__(kind, [_put_back(item, tensors) for item in value])
    return value


# Containers of the standard library that are rebuilt by copying: a copy keeps their factory, their length limit.
_COPIED = frozenset({OrderedDict, defaultdict, deque})


def _items(container: Any) -> list[tuple[Any, Any]]:
    return list(enumerate(container)) if isinstance(container, deque) else list(container.items())


def _refill(container: Any, items: list[tuple[Any, Any]]) -> None:
    for key, item in items:
        container[key] = item

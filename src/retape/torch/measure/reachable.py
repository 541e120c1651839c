"""Containers, tensors and generators that a model, a batch and a step refer to: everything that a step can change.

Fields of modules and their contents belong to the model and are saved, to be restored. What a step function, a hook or an
object of another package refers to is only searched for generators, modules and tensors that require gradients.
"""

from __future__ import annotations

import array
import random
import sys
import types
from collections import deque
from collections.abc import Iterator, MutableMapping, MutableSequence, MutableSet
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from retape.torch.capture.settings import variables_of
from retape.torch.compat import fsdp_internals, hook_internals
from retape.torch.compat.bytecode import names_in

_ATOMS = (int, float, complex, str, bytes, type, types.ModuleType, torch.dtype, torch.device, torch.Size, Enum)
_PLAIN_ATOMS = frozenset(
    {int, float, bool, str, bytes, type(None)}
)  # the most frequent values, skipped without a visit
_HIDDEN = ("_parameters", "_buffers", "_modules")  # fields of a module that do not appear in names
_HARMLESS = frozenset({"builtins", "collections", "types", "typing", "abc", "dataclasses", "__main__"})
_OPENED = ("torch.quasirandom", "torch.distributions")  # plain PyTorch objects with state in Python


class Role(Enum):
    """The part that a value plays in the model."""

    FIELD = auto()
    BUFFER = auto()
    PARAMETER = auto()
    OPTIMIZER_STATE = auto()
    SEARCHED = auto()  # looked into, never restored


class NamedValue(NamedTuple):
    """A value with its role and the name under which it was found first."""

    name: str
    value: Any
    role: Role


class Reachable:
    """Everything found by `walk`, each object once, in the order of a model's own names."""

    def __init__(self) -> None:
        self.containers: list[tuple[str, Any]] = []
        self.objects: list[tuple[str, Any]] = []  # their fields are in slots
        self.tensors: list[NamedValue] = []
        self.generators: list[tuple[str, Any]] = []
        self.modules: list[tuple[str, nn.Module]] = []
        self._known: dict[int, Any] = {}  # held, so that no id is reused
        self._packages: set[str] = set()

    def walk(self, name: str, root: Any, role: Role = Role.FIELD) -> None:
        """Add what a root refers to. Walk roots whose fields are restored before those that are only searched."""
        waiting = [NamedValue(name, root, role)]
        while waiting:
            named = waiting.pop()
            value = named.value
            if id(value) in self._known or isinstance(value, _ATOMS):
                continue
            self._known[id(value)] = value
            found = [each for each in self._contents(*named) if type(each.value) not in _PLAIN_ATOMS]
            waiting.extend(reversed(found))

    def _contents(self, name: str, value: Any, role: Role) -> Iterator[NamedValue]:
        if isinstance(value, Tensor):
            self.tensors.append(NamedValue(name, value, role))
        elif isinstance(value, nn.Module):
            yield from self._of_module(name, value)
        elif isinstance(value, (dict, list, deque, set, bytearray, array.array)) or is_array(value):
            yield from self._of_container(name, value, role)
        elif is_generator(value):
            self.generators.append((name, value))
        elif isinstance(value, (tuple, frozenset)):
            yield from (NamedValue(f"{name}[{i}]", part, role) for i, part in enumerate(value))
        elif isinstance(value, (types.FunctionType, types.MethodType, partial)):
            yield from (NamedValue(_joined(name, at), part, Role.SEARCHED) for at, part in _of_function(value))
        elif _may_be_opened(type(value)):
            yield from self._of_object(name, value, role)

    def _of_module(self, name: str, module: nn.Module) -> Iterator[NamedValue]:
        self.modules.append((name, module))
        self._packages |= {_package(kind) for kind in type(module).__mro__} - {"torch", "builtins", "retape"}
        fields = vars(module)
        if hook_internals.keeps_its_own_books(module):
            fields = {field: fields[field] for field in _HIDDEN}
            for state in hook_internals.communication_states(module):
                self.objects.append((f"{name} communication state", state))
                yield from (NamedValue(f"{name}.{at}", part, Role.FIELD) for at, part in slots_of(state).items())
        else:
            self.containers.append((name, fields))
        roles = {"_parameters": Role.PARAMETER, "_buffers": Role.BUFFER}
        for field, value in list(fields.items()):
            inner = name if field in _HIDDEN else _joined(name, field)
            yield NamedValue(inner, value, roles.get(field, Role.FIELD))
        forward = getattr(type(module), "forward", None)
        yield NamedValue(_joined(name, "forward"), forward, Role.SEARCHED)

    def _of_container(self, name: str, value: Any, role: Role) -> Iterator[NamedValue]:
        # FSDP2 replaces the parameters of modules during a step and restores them itself.
        if role is not Role.SEARCHED and not (role is Role.PARAMETER and fsdp_internals.in_use()):
            self.containers.append((name, value))
        if isinstance(value, dict):
            yield from (NamedValue(keyed(name, key, i), part, role) for i, (key, part) in enumerate(value.items()))
        elif isinstance(value, (list, deque, set)):
            yield from (NamedValue(f"{name}[{i}]", part, role) for i, part in enumerate(value))
        if hasattr(value, "__dict__"):  # a subclass with fields
            yield NamedValue(name, vars(value), role)

    def _of_object(self, name: str, value: Any, role: Role) -> Iterator[NamedValue]:
        """Fields of containers and of objects from the model's packages; others are only searched, as threads may be using them."""
        containers = (MutableMapping, MutableSequence, MutableSet, types.SimpleNamespace)
        known = _package(type(value)) in self._packages or type(value).__module__.startswith(_OPENED)
        if not known and not isinstance(value, containers):
            role = Role.SEARCHED
        slots = slots_of(value)
        if slots and role is not Role.SEARCHED:
            self.objects.append((name, value))
        yield from (NamedValue(_joined(name, field), part, role) for field, part in slots.items())
        if hasattr(value, "__dict__"):
            yield NamedValue(name, vars(value), role)


def is_generator(value: Any) -> bool:
    """True if a value is a random number generator whose state can be read."""
    if isinstance(value, (torch.Generator, random.Random)):
        return not isinstance(value, random.SystemRandom)
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is None:
        return False
    kinds = (numpy_random.Generator, numpy_random.RandomState, numpy_random.BitGenerator)
    return isinstance(value, kinds)


def slots_of(value: Any) -> dict[str, Any]:
    """The fields of an object that are in slots and set."""
    names: list[str] = []
    for kind in type(value).__mro__:
        own = vars(kind).get("__slots__", ())
        private = f"_{kind.__name__.lstrip('_')}"
        for name in [own] if isinstance(own, str) else list(own):
            if not name.endswith("__"):
                names.append(private + name if name.startswith("__") else name)
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def is_array(value: Any) -> bool:
    """True for a numpy array; numpy is not imported for it."""
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _joined(name: str, field: str) -> str:
    return f"{name}.{field}" if name and field else name or field


def keyed(name: str, key: object, position: int) -> str:
    """Name of the value under a key: strings and integers by themselves, other keys by position."""
    return _joined(name, str(key) if isinstance(key, (str, int)) else f"[{position}]")


def _of_function(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function refers to: closure, defaults and globals; of a method or partial, its parts."""
    if isinstance(function, types.MethodType):
        yield from (("", function.__self__), ("", function.__func__))
    elif isinstance(function, partial):
        yield from (("", function.func), ("", function.args), ("", function.keywords))
    else:
        yield from variables_of(function)
        yield from (("", function.__defaults__), ("", function.__kwdefaults__))
        names = sorted(names_in(function.__code__) & function.__globals__.keys())
        yield from ((name, function.__globals__[name]) for name in names)


def _package(kind: type) -> str:
    return kind.__module__.split(".", 1)[0]


def _may_be_opened(kind: type) -> bool:
    """True if fields of objects of this class may be read: not classes of PyTorch, numpy, the standard library or retape."""
    return all(map(_is_open, kind.__mro__))


def _is_open(kind: type) -> bool:
    package = _package(kind)
    if package in _HARMLESS or kind.__module__.startswith(_OPENED):
        return True
    return package not in {"torch", "numpy", "retape"} and package not in sys.stdlib_module_names

"""Arguments of a call: templates to rebuild them with other tensors, and signatures that tell calls apart.

A template has the containers of an argument, copied, with a `Leaf` in the place of each tensor. A signature has the shapes, dtypes,
devices and strides of the tensors of a call, or of a module's weights. Not here: what a call reaches besides its arguments (`call.py`).
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from retape.torch.capture.holders.values import ATOMS, WEAK_PROXIES
from retape.torch.compat import internals

# --- templates ----------------------------------------------------------------------------------------------------------


class Leaf:
    """The place of tensor number `index` in a rebuilt container."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _AsIs:
    """A value that is passed to a re-run as it is."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class _Rebuilt:
    """A dataclass whose fields are rebuilt one by one."""

    __slots__ = ("fields", "original")

    def __init__(self, original: Any, fields: dict[str, Any]) -> None:
        self.original = original
        self.fields = fields

    def rebuild(self, fields: dict[str, Any]) -> Any:
        twin = object.__new__(type(self.original))
        for name, value in fields.items():
            object.__setattr__(twin, name, value)
        return twin


_LEAVES = tuple([Leaf(index) for index in range(32)])
_ONLY_LEAVES = frozenset({Leaf})
_CONTAINERS = (list, tuple, dict, deque, _Rebuilt, _AsIs)
# Containers of the standard library that are rebuilt by copying: a copy keeps their factory, their length limit.
COPIED = frozenset({OrderedDict, defaultdict, deque})


class ArgumentTemplates:
    """The templates of all arguments of a call.

    Their tensors are added to `tensors`, in order, and are not kept here; objects that are neither tensors nor containers of them are
    added to `others`. Containers that are one object in the call are one object when they are rebuilt.
    """

    __slots__ = (
        "_as_given",
        "_containers",
        "_ids",
        "_plain",
        "_tuples",
        "has_containers",
        "keywords",
        "kinds",
        "only_tensors",
        "positional",
    )

    def __init__(
        self, arguments: tuple[Any, ...], keywords: dict[str, Any], tensors: list[Tensor], others: list[Any]
    ) -> None:
        self._containers: dict[int, Any] = {}  # those in the arguments that can change, by id, until `share`
        self._tuples: list[Any] | None = []  # those in the arguments, so that no other object gets their ids meanwhile
        self._ids: dict[int, int] = {}  # by the id of a template: the id of the container that it represents
        self._as_given: dict[int, Any] = _NO_CONTAINERS  # those that are passed to a re-run as they are, by id
        self.kinds = _NO_KINDS  # the classes of containers and tuples among them, without those that Python has
        self.positional = tuple([self._template(value, tensors, others) for value in arguments])
        self.only_tensors = not keywords and _ONLY_LEAVES.issuperset(map(type, self.positional))
        self._plain = self.only_tensors or _holds_no_container(self.positional)  # there is nothing to copy
        self.keywords: dict[str, Any] = _NO_KEYWORDS
        if keywords:
            self.keywords = {key: self._template(value, tensors, others) for key, value in keywords.items()}
            self._plain = self._plain and _holds_no_container(self.keywords.values())
        self._tuples = None
        self.has_containers = bool(self._containers)  # that can change, at any depth

    def share(self, held: Container[int]) -> None:
        """Pass containers, or dataclasses with fields, that have these ids as they are: what holds them restores their contents."""
        containers, self._containers = self._containers, {}
        self._as_given = {number: value for number, value in containers.items() if _held_id(value) in held}

    def rebuild(self, tensors: list[Tensor], *, as_given: bool = True) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments and keywords with `tensors` in their places, in containers of their own.

        Without `as_given` those that `share` named are copied too: they have other tensors.
        """
        if self.only_tensors:
            return tuple(tensors), {}
        if self._plain:
            arguments = tuple([tensors[a.index] if type(a) is Leaf else a for a in self.positional])
            return arguments, {k: tensors[a.index] if type(a) is Leaf else a for k, a in self.keywords.items()}
        made = dict(self._as_given) if as_given else {}
        return (
            tuple([self._put_back(a, tensors, made) for a in self.positional]),
            {k: self._put_back(a, tensors, made) for k, a in self.keywords.items()},
        )

    def _template(self, value: Any, tensors: list[Tensor], others: list[Any], inside: tuple[int, ...] = ()) -> Any:
        """Return the template of one argument; `inside` has the ids of the containers around it."""
        kind: Any = type(value)
        if issubclass(kind, Tensor):
            # One entry for each place, though several may hold one tensor: the number that a nested region saves must not depend
            # on which tensors are one object, since in a re-run they may be an argument and its copy in a closure.
            index = len(tensors)
            tensors.append(value)
            return _LEAVES[index] if index < len(_LEAVES) else Leaf(index)
        if kind in ATOMS:
            return value
        if kind in WEAK_PROXIES:
            others.append(value)
            return value
        if id(value) in inside:  # a container that holds itself
            others.append(value)
            return _AsIs(value)
        inside = (*inside, id(value))
        made = _with_items(value, lambda item: self._template(item, tensors, others, inside))
        if made is None:
            others.append(value)
            return value
        self._ids[id(made)] = id(value)
        if kind not in _BUILT_IN:
            self.kinds |= {kind}
        if issubclass(kind, tuple):
            assert self._tuples is not None
            self._tuples.append(value)
        else:
            self._containers[id(value)] = value
        return made

    def _put_back(self, value: Any, tensors: list[Tensor], made: dict[int, Any]) -> Any:
        """Return what a template represents, with these tensors; `made` has the containers so far, by the ids of the originals."""
        kind: Any = type(value)
        if kind is Leaf:
            return tensors[value.index]
        if kind in ATOMS:
            return value
        if kind is _AsIs:
            return value.value
        original = self._ids.get(id(value))
        if original in made:
            return made[original]
        found = _with_items(value, lambda item: self._put_back(item, tensors, made))
        if original is not None:
            made[original] = found
        return value if found is None else found


_BUILT_IN = frozenset({list, tuple, dict, *COPIED})
_NO_KINDS = frozenset[type]()
_NO_KEYWORDS: dict[str, Any] = {}  # never changed
_NO_CONTAINERS: dict[int, Any] = {}  # never changed


def _with_items(value: Any, each: Callable[[Any], Any]) -> Any:
    """Return a container with `each` of its items, a dataclass as `_Rebuilt` and back; None for what is no container."""
    kind: Any = type(value)
    if kind is list or kind is tuple:
        return kind([each(item) for item in value])
    if kind is dict:
        return {key: each(item) for key, item in value.items()}
    if kind is _Rebuilt:
        return value.rebuild({name: each(field) for name, field in value.fields.items()})
    if kind in COPIED:
        return _refilled(value, [(key, each(item)) for key, item in _items(value)])
    if issubclass(kind, tuple) and hasattr(value, "_fields"):
        return tuple.__new__(kind, [each(item) for item in value])
    if not issubclass(kind, dict) and dataclasses.is_dataclass(kind):
        return _Rebuilt(value, {name: each(field) for name, field in _fields_of(value)})
    return None


def _held_id(value: Any) -> int:
    """Return the id of a container, or that of the fields of an object, as holders have it."""
    return id(value.__dict__) if dataclasses.is_dataclass(value) and hasattr(value, "__dict__") else id(value)


def _holds_no_container(taken: Iterable[Any]) -> bool:
    return not any(type(value) is not Leaf and issubclass(type(value), _CONTAINERS) for value in taken)


def _fields_of(value: Any) -> list[tuple[str, Any]]:
    """Return the fields of a dataclass, which are in a dict or in slots."""
    if hasattr(value, "__dict__"):
        return list(vars(value).items())
    names = [field.name for field in dataclasses.fields(value)]
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]


def _items(container: Any) -> list[tuple[Any, Any]]:
    return list(enumerate(container)) if isinstance(container, deque) else list(container.items())


def _refilled(container: Any, items: list[tuple[Any, Any]]) -> Any:
    """Return a copy of a container with other values under the same keys."""
    twin = copy.copy(container)
    for key, item in items:
        twin[key] = item
    return twin


def twins_of(tensors: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    """Return the places of tensors that were met before, each with the first place of the same tensor."""
    if len(set(map(id, tensors))) == len(tensors):
        return ()
    first: dict[int, int] = {}
    pairs = [(index, first.setdefault(id(tensor), index)) for index, tensor in enumerate(tensors)]
    return tuple([pair for pair in pairs if pair[0] != pair[1]])


# --- tensors and signatures ---------------------------------------------------------------------------------------------

Signature: TypeAlias = tuple[Any, ...]


def tensors_of(outputs: Any) -> list[Tensor]:
    """Return the tensors in a value, such as a region's output, in order."""
    if isinstance(outputs, Tensor):
        return [outputs]
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]


def signature(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Signature:
    """Return shapes, dtypes and strides of a call's tensors, in order; equal for calls that run the same kernels."""
    found: list[Any] = []
    for value in arguments:
        _note(value, found)
    for name, value in keywords.items():
        if value is not None:
            found.append(name)
            _note(value, found)
    return tuple(found)


def _note(value: Any, found: list[Any]) -> None:
    if isinstance(value, Tensor) and value.is_nested:
        found.append(_look_into(value))
    elif isinstance(value, Tensor):
        # Strides too: another layout runs other kernels, and may need copies.
        strides = value.stride() if value.layout is torch.strided else value.layout
        found.append((tuple(value.shape), value.dtype, value.device, strides))
    elif isinstance(value, (tuple, list)):
        found.append(len(value))
        for item in value:
            _note(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _note(item, found)
    elif value is None or isinstance(value, (bool, int, float, str)):
        found.append(value)


def _look_into(nested: Any) -> tuple[Any, ...]:
    """Return what a signature has of a nested tensor: its elements as a shape, its even sides, and its offsets or lengths.

    Those on a device are not read, which would wait for it: there the number of elements tells batches apart.
    """
    even: tuple[int, ...] = ()
    with internals.unobserved(), torch.no_grad():
        if nested.layout is torch.jagged:
            rows: Any = nested.offsets() if nested.lengths() is None else nested.lengths()
            lengths = tuple(rows.tolist()) if rows.device.type == "cpu" else (len(rows),)
            even = tuple([side for side in nested.shape if type(side) is int])
        else:
            lengths = tuple([tuple(row.shape) for row in nested.unbind()])
    return ((int(nested.numel()),), nested.dtype, nested.device, nested.layout, even, lengths)


def weights_signature(module: nn.Module) -> Signature:
    """Return shapes, strides, dtypes and `requires_grad` of a module's parameters and buffers."""
    parameters = tuple((*_look(p), p.device, p.requires_grad) for p in module.parameters())
    return (parameters, tuple(map(_look, module.buffers())), module.training)


def _look(tensor: Tensor) -> tuple[Any, ...]:
    # Strides too: another memory format runs other kernels, whose results have other strides.
    if is_lazy(tensor):
        return (tensor.dtype,)
    return (tuple(tensor.shape), tensor.stride() if tensor.layout is torch.strided else tensor.layout, tensor.dtype)


def shapes(of: Signature) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a call's tensors, in order."""
    return tuple(part[0] for part in of if isinstance(part, tuple) and part and isinstance(part[0], tuple))


def elements(of: Signature) -> int:
    """Return the number of elements of all tensors of a call."""
    return sum(map(math.prod, shapes(of)))

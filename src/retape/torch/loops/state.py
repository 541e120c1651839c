"""The carry of a loop without its autograd history: flat leaves, and the structure to rebuild the carry from them.

Containers are PyTorch's trees (tuples, lists, dicts, named tuples, deques, at any depth) and dataclasses. A leaf that is not a
tensor is passed through unchanged. Running steps is in `step.py`, storing states in `snapshots.py`.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from retape.core.errors import InvalidInput, StateChanged
from retape.torch.capture.holders.values import ATOMS
from retape.torch.capture.mutation import versions_of
from retape.torch.engine.host.tensor_files import byte_view


class _Dataclass(NamedTuple):
    """A dataclass among the leaves of a tree; its fields are flattened in its place."""

    kind: type
    names: tuple[str, ...]
    inner: Spec
    leaves: int


class Spec(NamedTuple):
    """The structure that leaves make up; equal for equal structures.

    `tree` is None for a single leaf and an int for a plain tuple of that many leaves: both are faster to rebuild than a TreeSpec.
    """

    tree: pytree.TreeSpec | int | None
    classes: tuple[tuple[int, _Dataclass], ...] = ()


_LEAF = Spec(None)
_SIMPLE = ATOMS | {Tensor, Parameter}
_TUPLES = [Spec(count) for count in range(16)]


def flatten(tree: Any) -> tuple[list[Any], Spec]:
    """Return the leaves of a tree and its structure."""
    if type(tree) in _SIMPLE or isinstance(tree, Tensor):
        return [tree], _LEAF
    if type(tree) is tuple and _SIMPLE.issuperset(map(type, tree)):
        return list(tree), _TUPLES[len(tree)] if len(tree) < len(_TUPLES) else Spec(len(tree))
    leaves, spec = pytree.tree_flatten(tree)
    if len(leaves) == 1 and leaves[0] is tree and not _is_dataclass(tree):
        return leaves, _LEAF
    if not any(_is_dataclass(leaf) for leaf in leaves):
        return leaves, Spec(spec)
    found: list[Any] = []
    classes: list[tuple[int, _Dataclass]] = []
    for index, leaf in enumerate(leaves):
        if not _is_dataclass(leaf):
            found.append(leaf)
            continue
        names = tuple(field.name for field in dataclasses.fields(leaf))
        inner, inner_spec = flatten([getattr(leaf, name) for name in names])
        classes.append((index, _Dataclass(type(leaf), names, inner_spec, len(inner))))
        found.extend(inner)
    return found, Spec(spec, tuple(classes))


def unflatten(leaves: Sequence[Any], spec: Spec) -> Any:
    """Rebuild a tree from its leaves, in new containers."""
    if spec.tree is None:
        return leaves[0]
    if isinstance(spec.tree, int):
        return tuple(leaves)
    if not spec.classes:
        return pytree.tree_unflatten(list(leaves), spec.tree)
    rest = list(leaves)
    whole: list[Any] = []
    classes = dict(spec.classes)
    for index in range(spec.tree.num_leaves):
        if index not in classes:
            whole.append(rest.pop(0))
            continue
        kind, names, inner, used = classes[index]
        fields, rest = unflatten(rest[:used], inner), rest[used:]
        made: Any = object.__new__(kind)  # not its constructor, which may take other arguments
        for name, value in zip(names, fields, strict=True):
            object.__setattr__(made, name, value)
        whole.append(made)
    return pytree.tree_unflatten(whole, spec.tree)


def _is_dataclass(leaf: Any) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)


def first_places(leaves: Sequence[Any]) -> tuple[int, ...] | None:
    """Return for each leaf the place of the first one that is the same object; None if all of them differ."""
    numbers = list(map(id, leaves))
    if len(set(numbers)) == len(numbers):
        return None
    first: dict[int, int] = {}
    return tuple([first.setdefault(number, place) for place, number in enumerate(numbers)])


class State:
    """The carry before a step, detached. `needs_grad`: the leaves that would require gradients in the plain loop.

    `same_as` is None, or has for each leaf the place of the first one that was the same tensor: those are one input of the graph, so that
    the parts of its gradient are summed in the order of plain autograd.
    """

    __slots__ = ("_versions", "leaves", "needs_grad", "same_as", "spec")

    def __init__(
        self,
        leaves: Sequence[Any],
        spec: Spec,
        needs_grad: tuple[bool, ...] | None = None,
        same_as: tuple[int, ...] | None = None,
    ) -> None:
        if needs_grad is None:
            needs_grad = tuple([isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves])
            same_as = first_places(leaves)
        self.needs_grad, self.same_as = needs_grad, same_as
        self.leaves: list[Any] = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.spec = spec
        self._versions = versions_of(self.leaves)

    @classmethod
    def of(cls, tree: Any) -> State:
        return cls(*flatten(tree))

    def with_leaves(self, leaves: Sequence[Any]) -> State:
        """Return a state of the same structure with other leaves."""
        return State(leaves, self.spec, self.needs_grad, self.same_as)

    def emptied(self) -> State:
        """Return a state of the same structure that holds nothing."""
        return State([], self.spec, ())

    def fresh(self) -> list[Any]:
        """Return the leaves as new autograd leaves."""
        made = [
            leaf.detach().requires_grad_() if needed else leaf
            for leaf, needed in zip(self.leaves, self.needs_grad, strict=True)
        ]
        return made if self.same_as is None else [made[place] for place in self.same_as]

    def modified_leaf(self) -> int | None:
        """Return the index of the first leaf that was modified in place since this state was made, if any."""
        now = versions_of(self.leaves)
        if now == self._versions:
            return None
        return next(i for i, (old, new) in enumerate(zip(self._versions, now, strict=True)) if old != new)

    def check(self, name: str, step: int) -> None:
        """Raise StateChanged if a leaf was modified in place: the backward pass starts from this state."""
        leaf = self.modified_leaf()
        if leaf is not None:
            raise StateChanged(
                f"{name}: leaf {leaf} of the carry before step {step} has been modified by an inplace operation after the loop, so that "
                "its gradients would be wrong. Change it after backward, or change a copy (.clone())."
            )

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors, each storage counted once."""
        return storage_bytes([leaf for leaf in self.leaves if isinstance(leaf, Tensor)])


def storage_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of tensors, each storage counted once."""
    found = {}
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            found[id(tensor)] = tensor.numel() * tensor.element_size()
            continue
        storage = tensor.untyped_storage()
        found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def checksum_of(leaves: Sequence[Any]) -> int | None:
    """Return a CRC of the tensors, or None if reading would wait for a device or kernels may be nondeterministic."""
    total = 0
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            continue
        if leaf.device.type != "cpu" or leaf.layout is not torch.strided or leaf.is_conj() or leaf.is_neg():
            return None
        plain = leaf.detach().contiguous()
        if plain.numel():
            total = zlib.crc32(byte_view(plain).numpy().data, total)
    return total


def check_same_kind(name: str, step: int, before: State, leaves: Sequence[Any], spec: Spec) -> None:
    """Raise InvalidInput if a step changed the structure, a shape, a dtype or a device of its carry."""
    if spec is not before.spec and spec != before.spec:
        raise InvalidInput(
            f"{name}: step {step} returned a carry of another structure than it was given ({_shown(spec)}, not {_shown(before.spec)}). "
            "Return the same containers in every step."
        )
    for index, (old, new) in enumerate(zip(before.leaves, leaves, strict=True)):
        if type(old) is Tensor is type(new) and _same_kind_on_cpu(old, new):
            continue
        if isinstance(old, Tensor) != isinstance(new, Tensor):
            raise InvalidInput(
                f"{name}: step {step} returned a {type(new).__name__} for leaf {index} of the carry, which was a {type(old).__name__}. "
                "Return a tensor where a tensor was given, and a plain value where a plain value was."
            )
        if isinstance(old, Tensor) and (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device):
            raise InvalidInput(
                f"{name}: step {step} changed leaf {index} of the carry from {_kind(old)} to {_kind(new)}. "
                "A carry must keep its shapes, dtypes and devices; start with a carry of the final kind."
            )


def _same_kind_on_cpu(one: Tensor, other: Tensor) -> bool:
    return one.is_cpu and other.is_cpu and one.dtype is other.dtype and one.shape == other.shape


def _shown(spec: Spec) -> str:
    if spec.tree is None:
        return "one leaf"
    return f"a tuple of {spec.tree} tensors" if isinstance(spec.tree, int) else str(spec.tree)


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"

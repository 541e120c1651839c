"""States of a loop: the leaves of a carry without their history, and how to put the carry together again.

Containers are PyTorch's trees (tuples, lists, dicts, named tuples, deques, at any depth) and dataclasses. A leaf that is no tensor is
passed through as it is. No running and no storing here.
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
from retape.torch.capture.containers import ATOMS
from retape.torch.capture.mutation import versions_of


class _Dataclass(NamedTuple):
    """Where a dataclass stands among the leaves of a tree: its fields are flattened in its place."""

    kind: type
    names: tuple[str, ...]
    inner: Spec
    leaves: int


class Spec(NamedTuple):
    """How leaves make up a tree; equal for equal structures."""

    tree: pytree.TreeSpec | int | None  # an int: a plain tuple of so many leaves; None: the one leaf itself
    classes: tuple[tuple[int, _Dataclass], ...] = ()


_LEAF = Spec(None)
_SIMPLE = ATOMS | {Tensor, Parameter}
_TUPLES = [Spec(count) for count in range(16)]


def flatten(tree: Any) -> tuple[list[Any], Spec]:
    """The leaves of a tree, and how to put them back."""
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
    """The tree whose leaves these are, in containers of its own."""
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
        whole.append(_rebuilt(kind, names, fields))
    return pytree.tree_unflatten(whole, spec.tree)


def _is_dataclass(leaf: Any) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)


def _rebuilt(kind: type, names: tuple[str, ...], fields: list[Any]) -> Any:
    """A dataclass with these fields, made without its constructor, which may ask for something else."""
    made: Any = object.__new__(kind)
    for name, value in zip(names, fields, strict=True):
        object.__setattr__(made, name, value)
    return made


class State:
    """The carry before a step, without its history. `needs_grad` says which leaves would require gradients in the plain loop."""

    __slots__ = ("_versions", "leaves", "needs_grad", "spec")

    def __init__(self, leaves: Sequence[Any], spec: Spec, needs_grad: tuple[bool, ...] | None = None) -> None:
        if needs_grad is None:
            needs_grad = tuple([isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves])
        self.needs_grad = needs_grad
        self.leaves: list[Any] = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.spec = spec
        self._versions = versions_of(self.leaves)

    @classmethod
    def of(cls, tree: Any) -> State:
        return cls(*flatten(tree))

    def fresh(self) -> list[Any]:
        """The leaves, fit to be the inputs of a graph of their own."""
        return [
            leaf.detach().requires_grad_() if needed else leaf
            for leaf, needed in zip(self.leaves, self.needs_grad, strict=True)
        ]

    def written_to(self) -> int | None:
        """The first leaf that has been changed in place since this state was made, if any."""
        now = versions_of(self.leaves)
        if now == self._versions:
            return None
        return next(i for i, (then, new) in enumerate(zip(self._versions, now, strict=True)) if then != new)

    def check(self, name: str, step: int) -> None:
        """Nobody may have written to a state that the backward pass starts from."""
        leaf = self.written_to()
        if leaf is not None:
            raise StateChanged(
                f"{name}: leaf {leaf} of the carry before step {step} has been modified by an inplace operation after the loop, so that "
                "its gradients would be wrong. Change it after backward, or change a copy (.clone())."
            )

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors, each storage once."""
        return storage_bytes([leaf for leaf in self.leaves if isinstance(leaf, Tensor)])


def storage_bytes(tensors: Sequence[Tensor]) -> int:
    """What tensors weigh, each storage counted once."""
    found = {}
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            found[id(tensor)] = tensor.numel() * tensor.element_size()
            continue
        storage = tensor.untyped_storage()
        found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def mark_of(leaves: Sequence[Any]) -> int | None:
    """A checksum of what a state holds; None where looking would wait for a device, or where kernels may differ from run to run."""
    total = 0
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            continue
        if leaf.device.type != "cpu" or leaf.layout is not torch.strided or leaf.is_conj() or leaf.is_neg():
            return None
        plain = leaf.detach().contiguous()
        if plain.numel():
            total = zlib.crc32(octets_of(plain).numpy().data, total)
    return total


def octets_of(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, sharing its memory."""
    count = tensor.numel() * tensor.element_size()
    start = int(tensor.storage_offset()) * tensor.element_size()
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), start, (count,), (1,))


def check_same(name: str, step: int, before: State, leaves: Sequence[Any], spec: Spec) -> None:
    """A carry keeps its structure, shapes, dtypes and devices from step to step."""
    if spec is not before.spec and spec != before.spec:
        raise InvalidInput(
            f"{name}: step {step} returned a carry of another structure than it was given ({_shown(spec)}, not {_shown(before.spec)}). "
            "Return the same containers in every step."
        )
    for index, (old, new) in enumerate(zip(before.leaves, leaves, strict=True)):
        if type(old) is Tensor is type(new) and _alike_on_the_cpu(old, new):
            continue
        if isinstance(old, Tensor) != isinstance(new, Tensor):
            raise InvalidInput(
                f"{name}: step {step} returned a {type(new).__name__} for leaf {index} of the carry, which was a {type(old).__name__}. "
                "Return what was given: a tensor for a tensor."
            )
        if isinstance(old, Tensor) and (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device):
            raise InvalidInput(
                f"{name}: step {step} changed leaf {index} of the carry from {_kind(old)} to {_kind(new)}. "
                "A carry must keep its shapes, dtypes and devices; start with a carry of the final kind."
            )


def _alike_on_the_cpu(one: Tensor, other: Tensor) -> bool:
    """What most leaves are; quicker to ask than what they are exactly."""
    return one.is_cpu and other.is_cpu and one.dtype is other.dtype and one.shape == other.shape


def _shown(spec: Spec) -> str:
    if spec.tree is None:
        return "one leaf"
    return f"a tuple of {spec.tree} tensors" if isinstance(spec.tree, int) else str(spec.tree)


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"

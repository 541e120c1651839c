"""Changes of tensors, seen by version or by bits, and copies of tensors that a call changes.

Versions count writes. `checksum` and `digest` notice other bits, and a swap of two rows: for `check="values"`, tensors without a
version, and proofs of recipes. `Copies` keeps what aliased aliasing: two arguments may be views of one storage, or an argument may be
a buffer too, so that a write through one is seen through the other. Tensors that share a storage are copied together, and restored
over one new storage.
"""

from __future__ import annotations

import types
import weakref
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from retape.core.errors import RegionError, StateChanged
from retape.torch.capture.tuning import TUNING
from retape.torch.compat import internals

PLAIN_TENSORS = frozenset({Tensor, nn.Parameter})  # their own version counts every write
_PRIME = 2_654_435_761  # odd, with bits spread over 32: Knuth's multiplicative hash

# --- versions ---------------------------------------------------------------------------------------------------------


def version_of(tensor: Tensor) -> Any:
    """Return a value that differs once a tensor was written to: its version, and those of tensors inside a subclass."""
    if type(tensor) in PLAIN_TENSORS:
        try:
            return tensor._version
        except RuntimeError:  # an inference tensor has no version
            return checksum(tensor)
    if tensor.is_inference():
        return 0
    inner = inner_tensors(tensor)
    # An alias of a subclass without tensors inside may be a plain tensor: both have the same version.
    return (tensor._version, *map(version_of, inner)) if inner else tensor._version


def versions_of(values: Sequence[Any]) -> list[Any]:
    """Return `version_of` each tensor, and None for other values."""
    try:
        return [
            v._version if type(v) in PLAIN_TENSORS else version_of(v) if isinstance(v, Tensor) else None for v in values
        ]
    except RuntimeError:  # an inference tensor
        return [version_of(v) if isinstance(v, Tensor) else None for v in values]


def hold(tensor: Tensor) -> Tensor:
    """Return the tensor without its history: holding that could close a cycle through the graph."""
    return tensor if tensor.grad_fn is None else tensor.detach()


def fresh(tensor: Tensor, needs_grad: bool) -> Tensor:
    """Return a leaf with the same values, for a graph of its own."""
    return tensor.detach().requires_grad_(needs_grad)


# --- bits -------------------------------------------------------------------------------------------------------------


def checksum(tensor: Tensor) -> int:
    """Return a number that is the same for equal tensors, and almost never for other values or another order."""
    with internals.unobserved(), torch.no_grad():
        inner = inner_tensors(tensor)
        if inner:
            return hash(tuple(checksum(part) for part in inner))
        if tensor.device.type == "meta" or tensor.numel() == 0:
            return 0
        return int(_sum(_bits(tensor.detach())))


Digest = tuple[Any, ...]


def digest(tensor: Tensor) -> Digest:
    """Return shape, strides, dtype and a checksum in memory order; nothing waits for a device.

    Compare two digests with `same_digests`. A tensor that is dense in memory is summed without a copy.
    """
    with internals.unobserved(), torch.no_grad():
        inner = inner_tensors(tensor)
        if inner:
            return (type(tensor), tensor.layout, tensor.shape, *[digest(part) for part in inner])
        return (tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg(), _total(tensor))


def _total(tensor: Tensor) -> Tensor | int | None:
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return None
    tensor = tensor.detach()
    if tensor.layout is torch.strided and tensor.dim() > 1 and not tensor.is_nested:
        strides = tensor.stride()
        tensor = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
    octets = _bits(tensor)
    if octets.device.type == "cpu":  # without temporaries: a step that is measured may take digests
        return zlib.crc32(internals.memory_of(octets))
    return _sum(octets)


def same_digests(one: Digest, other: Digest) -> bool:
    """True if two digests are of equal bits in the same memory layout."""
    return len(one) == len(other) and all(map(_same_part, one, other))


def _same_part(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        with internals.unobserved():
            return one.device == other.device and bool(one == other)
    if type(one) is tuple and type(other) is tuple and one and isinstance(one[-1], (Tensor, tuple)):
        return same_digests(one, other)
    return bool(one == other)


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the tensors inside a subclass such as DTensor, the parts of a sparse tensor, or none."""
    if tensor.layout is not torch.strided:
        return internals.sparse_parts(tensor)
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if type(tensor) is Tensor or flatten is None:
        return []
    parts = [getattr(tensor, name) for name in flatten()[0]]
    return [part for part in parts if isinstance(part, Tensor)]


def _bits(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.reshape(-1).view(torch.uint8)


def _sum(octets: Tensor) -> Tensor:
    padding = -octets.numel() % 8
    if padding:
        octets = torch.nn.functional.pad(octets, (0, padding))
    elif octets.storage_offset() % 8:
        octets = octets.clone()  # a view as 64-bit words must start at a multiple of 8 bytes
    words = octets.view(torch.int64)
    weights = (
        torch.arange(min(TUNING.checksum_words, words.numel()), device=words.device, dtype=torch.int64)
        .mul_(2 * _PRIME)
        .add_(1)
    )
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), TUNING.checksum_words):
        part = words[start : start + TUNING.checksum_words]
        # Each word is multiplied by an odd number of its own, so value and position count; the sum wraps around.
        mixed = (part >> 29).bitwise_xor_(part).mul_(weights[: part.numel()])
        total = total * _PRIME + mixed.sum()
    return total


# --- copies -----------------------------------------------------------------------------------------------------------


_ALIGNMENT = 64  # bytes, of memory that PyTorch allocates


class _View(NamedTuple):
    """The layout of one tensor in its storage."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conjugated: bool
    negated: bool
    same_as: int  # the first index under which this very tensor was met

    @property
    def extent(self) -> int:
        """The number of elements from the first to the last one."""
        if 0 in self.size:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))


class _Alone:
    """A contiguous tensor that shares its storage with no other one, and its copy."""

    __slots__ = ("_copy", "numbers")

    def __init__(self, number: int, tensor: Tensor) -> None:
        self.numbers = (number,)
        self._copy = tensor.detach().clone() if tensor.requires_grad else tensor.clone()

    def differs(self, number: int, tensor: Tensor) -> bool:
        return not equal_bits(self._copy, tensor)

    def rebuild(self, made: dict[int, Tensor], *, needs_grad: bool) -> None:
        twin = self._copy.clone()
        made[self.numbers[0]] = twin.requires_grad_(True).clone() if needs_grad else twin


class _Group:
    """Tensors of one storage, and a copy of the part of that storage that they cover."""

    __slots__ = ("_device", "_members", "_storage", "numbers")

    def __init__(self, watched: list[Tensor], numbers: list[int]) -> None:
        self.numbers = tuple(numbers)
        first = watched[numbers[0]]
        seen: dict[int, int] = {}
        views = [
            _View(
                t.shape,
                t.stride(),
                int(t.storage_offset()),
                t.dtype,
                t.is_conj(),
                t.is_neg(),
                seen.setdefault(id(t), number),
            )
            for number, t in ((number, watched[number]) for number in numbers)
        ]
        # No more than the tensors cover: a batch may be a slice of a whole data set.
        start = min(v.offset * v.dtype.itemsize for v in views) // _ALIGNMENT * _ALIGNMENT
        stop = max((v.offset + v.extent) * v.dtype.itemsize for v in views)
        octets = torch.empty(0, dtype=torch.uint8, device=first.device)
        octets.set_(first.untyped_storage(), start, (max(stop - start, 0),), (1,))
        self._storage, self._device = octets.clone().untyped_storage(), first.device
        self._members = {
            number: view._replace(offset=view.offset - start // view.dtype.itemsize)
            for number, view in zip(numbers, views, strict=True)
        }

    def differs(self, number: int, tensor: Tensor) -> bool:
        return not equal_bits(self._view(self._members[number]), tensor)

    def rebuild(self, made: dict[int, Tensor], *, needs_grad: bool) -> None:
        views = self._members.values()
        base = None if len({view.same_as for view in views}) == 1 else self._shared_base(needs_grad)
        for number, view in self._members.items():
            if view.same_as in made:
                made[number] = made[view.same_as]
            elif base is None:
                made[number] = self._lone(view, needs_grad)
            else:
                made[number] = base.as_strided(view.size, view.stride, view.offset)

    def _view(self, view: _View) -> Tensor:
        """Return a tensor over the copied storage, with the layout that the original has in its own."""
        tensor = torch.empty(0, dtype=view.dtype, device=self._device)
        tensor.set_(self._storage, view.offset, view.size, view.stride)
        if view.conjugated:
            tensor = tensor.conj()
        return internals.neg_view(tensor) if view.negated else tensor

    def _shared_base(self, needs_grad: bool) -> Tensor:
        """Return a flat tensor that several others are views of."""
        views = self._members.values()
        dtype = next(iter(views)).dtype
        if any(view.dtype is not dtype or view.conjugated or view.negated for view in views):
            raise RegionError(
                "A region changes tensors in place that share memory under different dtypes (a complex tensor and its real view, say). "
                "Give it a copy of one of them (.clone())."
            )
        flat = torch.empty(0, dtype=dtype, device=self._device).set_(self._storage.clone())
        return flat.requires_grad_(True).clone() if needs_grad else flat

    def _lone(self, view: _View, needs_grad: bool) -> Tensor:
        """Return a tensor that shares its storage with no other: not a view, as the original was none."""
        if not needs_grad:
            return self._own(view)
        root = torch.empty(0, device=self._device, requires_grad=True)
        return _WithHistory.apply(root, partial(self._own, view))  # type: ignore[no-any-return]

    def _own(self, view: _View) -> Tensor:
        """Return a copy with the strides and the alignment of the original, on which the rounding of kernels depends."""
        twin = torch.empty(0, dtype=view.dtype, device=self._device)
        if not (view.conjugated or view.negated):
            return twin.set_(self._storage.clone(), view.offset, view.size, view.stride)
        with torch.no_grad():
            return torch.empty_strided(view.size, view.stride, dtype=view.dtype, device=self._device).copy_(
                self._view(view)
            )


class _WithHistory(torch.autograd.Function):
    """A tensor that is neither a leaf nor a view, with any strides: a clone of a slice has other strides than the slice."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, make: Callable[[], Tensor]) -> Tensor:
        return make()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None


def alias(tensor: Tensor, *, needs_grad: bool) -> Tensor:
    """Return a tensor over the same memory, without the history of the original; one that needs gradients is no leaf."""
    if not needs_grad:
        return tensor.detach()
    root = torch.empty(0, device=tensor.device, requires_grad=True)
    return _WithHistory.apply(root, tensor.detach)  # type: ignore[no-any-return]


def _copied(watched: list[Tensor], numbers: list[int]) -> _Alone | _Group:
    if len(numbers) == 1:
        tensor = watched[numbers[0]]
        aligned = tensor.storage_offset() * tensor.itemsize % _ALIGNMENT == 0
        if aligned and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
            return _Alone(numbers[0], tensor)
    return _Group(watched, numbers)


class Copies:
    """Copies of the tensors `watched[index]` for some indices."""

    __slots__ = ("_groups", "indices")

    def __init__(self, watched: list[Tensor], indices: Sequence[int]) -> None:
        by_storage: dict[int, list[int]] = {}
        for index in indices:
            by_storage.setdefault(watched[index].untyped_storage()._cdata, []).append(index)
        self._groups = [_copied(watched, numbers) for numbers in by_storage.values()]
        self.indices = frozenset(indices)

    def only(self, changed: Set[int]) -> Copies:
        """Return these copies without those of storages that nothing was written to."""
        if self.indices <= changed:
            return self
        kept = object.__new__(Copies)
        kept._groups = [group for group in self._groups if not changed.isdisjoint(group.numbers)]
        kept.indices = frozenset(number for group in kept._groups for number in group.numbers)
        return kept

    def joined(self, other: Copies) -> Copies:
        """Return these copies and others, which take the place of those of the same storages."""
        both = object.__new__(Copies)
        kept = [group for group in self._groups if other.indices.isdisjoint(group.numbers)]
        both._groups, both.indices = [*kept, *other._groups], self.indices | other.indices
        return both

    def different(self, watched: list[Tensor], skip: Set[int] = frozenset()) -> set[int]:
        """Return the indices whose tensors have other bits now, of those that are not in `skip`."""
        return {n for group in self._groups for n in group.numbers if n not in skip and group.differs(n, watched[n])}

    def rebuild(self, needs_grad: Set[int] = frozenset()) -> dict[int, Tensor]:
        """Return new tensors with the copied values, which alias as the originals did; call it with grad enabled.

        None of them is a leaf that requires gradients, because autograd refuses to change such a one in place (`leaves_like`).
        """
        made: dict[int, Tensor] = {}
        for group in self._groups:
            group.rebuild(made, needs_grad=not needs_grad.isdisjoint(group.numbers))
        return made

    def sharing_with(self, indices: range) -> set[int]:
        """Return the indices of every tensor that shares its storage with one of `indices`."""
        if not indices:
            return set()
        return {n for group in self._groups if any(other in indices for other in group.numbers) for n in group.numbers}

    def on_the_cpu(self, watched: list[Tensor]) -> bool:
        """True if comparing them waits for no device."""
        return all(watched[index].is_cpu for index in self.indices)


def is_lasting_leaf(tensor: Tensor, *, is_state: bool) -> bool:
    """True for a parameter, and for a leaf in a field: code may copy it (`deepcopy`), ask for its class, or read its `.grad`."""
    return tensor.is_leaf and (type(tensor) is nn.Parameter or (is_state and tensor.requires_grad))


def leaves_like(
    originals: Sequence[Tensor], copies: Mapping[int, Tensor], numbers: Collection[int]
) -> dict[int, Tensor]:
    """Return leaves over the memory of copies, with the class, the setting and the gradient of the originals, which are leaves too."""
    made: dict[int, Tensor] = {}
    for number in numbers:
        original, copy = originals[number], copies[number]
        if id(original) not in made:
            needs_grad = original.requires_grad
            is_parameter = type(original) is nn.Parameter
            leaf = nn.Parameter(copy, needs_grad) if is_parameter else fresh(copy, needs_grad)
            leaf.grad = original.grad
            made[id(original)] = leaf
    return {number: made[id(originals[number])] for number in numbers}


def as_leaf(tensor: Tensor, need: bool) -> Tensor:
    """Return an argument without its history, requiring a gradient as it did in the first run."""
    if need:
        return tensor.detach().requires_grad_(True)
    return tensor.detach() if tensor.requires_grad else tensor


def by_storages(tensors: Sequence[Tensor]) -> dict[int, list[int]]:
    """Return the numbers of plain tensors that can be copied, by the storage that they share."""
    found: dict[int, list[int]] = {}
    for number, tensor in enumerate(tensors):
        if is_plain(tensor):
            found.setdefault(tensor.untyped_storage()._cdata, []).append(number)
    return found


def is_plain(tensor: Tensor) -> bool:
    """True if a tensor is of no subclass, and can be copied."""
    return type(tensor) in PLAIN_TENSORS and copyable(tensor)


def copyable(tensor: Tensor) -> bool:
    """True if a tensor has plain memory of its own to copy and compare."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        # FSDP frees the memory of gathered parameters.
        and (tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0)
    )


def equal_bits(one: Tensor, other: Tensor) -> bool:
    """True if two tensors are equal, where NaN equals NaN; meta tensors have no values."""
    if one.is_meta and other.is_meta:
        return one.shape == other.shape
    if one.shape != other.shape or one.layout is not other.layout:
        return False
    if one.layout is not torch.strided:
        return all(map(equal_bits, inner_tensors(one), inner_tensors(other)))
    if torch.equal(one, other):
        return True
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


# --- gradients --------------------------------------------------------------------------------------------------------


class _Gradient(NamedTuple):
    """The gradient of a leaf, not held, and its version."""

    value: weakref.ref[Tensor] | None
    version: Any

    def is_still(self, then: _Gradient) -> bool:
        if self.value is None or then.value is None:
            return self.value is then.value
        return self.value() is then.value() is not None and self.version == then.version


def _gradient_of(leaf: Tensor) -> _Gradient:
    gradient = leaf.grad if leaf.is_leaf else None
    return _NO_GRADIENT if gradient is None else _Gradient(weakref.ref(gradient), version_of(gradient))


_NO_GRADIENT = _Gradient(None, None)


class ReadGradients:
    """The `.grad` of leaves, among some, before a call and when it first read them; the gradients themselves are not held."""

    __slots__ = ("_before", "_made", "_read")

    def __init__(self, known: Sequence[Tensor]) -> None:
        """`known` are the leaves as they are before the call."""
        with internals.unobserved():
            self._before = {id(leaf): _gradient_of(leaf) for leaf in known}
        # Each leaf and its gradient when it was read, and whether the call had changed one that was there before.
        self._read: dict[int, tuple[Tensor, _Gradient, bool]] = {}
        self._made: list[Tensor] = []  # leaves to which the call's own backward pass gave their first gradient

    def note(self, leaf: Tensor) -> None:
        """Note that the gradient of a tensor is about to be read."""
        before = self._before.get(id(leaf))
        if before is not None and id(leaf) not in self._read:
            with internals.unobserved():
                read = _gradient_of(leaf)
                self._read[id(leaf)] = (leaf, read, before.value is not None and not read.is_still(before))
                if before.value is None and leaf.grad is not None:
                    self._made.append(leaf)

    def cleared(self) -> list[tuple[Tensor, Tensor | None]]:
        """Take the gradients that the call's own backward pass has made, which a re-run makes again; return where they belong."""
        taken = [(leaf, leaf.grad) for leaf in self._made]
        for leaf in self._made:
            leaf.grad = None
        return taken

    def check(self, name: str) -> None:
        """Raise if a gradient that region `name` read is not what it was, or was another one before the region."""
        for leaf, read, is_lost in self._read.values():
            if is_lost:
                raise StateChanged(
                    f"Region {name} must be run again for backward, but its own backward pass has added to the .grad of a tensor of shape "
                    f"{tuple(leaf.shape)} that it then reads, and what was there before is lost. Set that .grad to None before the region."
                )
            if not _gradient_of(leaf).is_still(read):
                raise StateChanged(
                    f"Region {name} must be run again for backward, and reads the .grad of a tensor of shape {tuple(leaf.shape)}, which "
                    "has changed since its forward, so that its gradients would be wrong. Read it before the region, and pass a copy of it "
                    "(.clone()) as an argument."
                )


# --- known changes ----------------------------------------------------------------------------------------------------

KnownChanges = dict[Any, frozenset[int]]


class _ChangesByKind:
    """Indices of the tensors that calls are known to change: by module or code, then by kind of call."""

    def __init__(self) -> None:
        self._weak: weakref.WeakKeyDictionary[Any, KnownChanges] = weakref.WeakKeyDictionary()
        self._lasting: dict[Any, KnownChanges] = {}

    def of(self, key: Any) -> KnownChanges:
        try:
            known = self._weak.get(key)
            if known is None:
                known = self._weak[key] = {}
        except TypeError:  # no weak reference can be made
            known = self._lasting.setdefault(key if isinstance(key, _IMMORTAL) else type(key), {})
        return known


# Methods of C types are never freed; other objects without weak references are looked up by their type.
_IMMORTAL = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
CHANGES = _ChangesByKind()

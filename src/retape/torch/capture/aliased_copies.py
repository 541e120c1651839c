"""Copies of tensors that a region changes, which keep what aliased aliasing.

Two arguments may be views of one storage, or an argument may be a buffer too: a write through one is seen through the other. So
tensors that share a storage are copied together, and handed to a re-run over one new storage.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

import torch
from torch import Tensor

from retape.core.errors import RegionError
from retape.torch.capture.checksum import inner_tensors
from retape.torch.compat import internals


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
        self._copy = tensor.detach().clone()

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
        start = min(v.offset * v.dtype.itemsize for v in views) // 16 * 16
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
        base = None if len({view.same_as for view in views}) == 1 else self._base(needs_grad)
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

    def _base(self, needs_grad: bool) -> Tensor:
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
        twin = torch.empty_strided(view.size, view.stride, dtype=view.dtype, device=self._device)
        with torch.no_grad():
            twin.copy_(self._view(view))
        return twin.requires_grad_(True).clone() if needs_grad else twin


def _copied(watched: list[Tensor], numbers: list[int]) -> _Alone | _Group:
    if len(numbers) == 1:
        tensor = watched[numbers[0]]
        if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
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
        kept = object.__new__(Copies)
        kept._groups = [group for group in self._groups if not changed.isdisjoint(group.numbers)]
        kept.indices = frozenset(number for group in kept._groups for number in group.numbers)
        return kept

    def different(self, watched: list[Tensor], skip: Set[int] = frozenset()) -> set[int]:
        """Return the indices whose tensors have other bits now, of those that are not in `skip`."""
        return {n for group in self._groups for n in group.numbers if n not in skip and group.differs(n, watched[n])}

    def rebuild(self, needs_grad: dict[int, bool]) -> dict[int, Tensor]:
        """Return new tensors with the copied values, which alias as the originals did; call it with grad enabled.

        None of them is a leaf that requires gradients, because autograd refuses to change such a one in place.
        """
        made: dict[int, Tensor] = {}
        for group in self._groups:
            group.rebuild(made, needs_grad=any(needs_grad.get(number, False) for number in group.numbers))
        return made

    def sharing_with(self, indices: range) -> set[int]:
        """Return the indices of every tensor that shares its storage with one of `indices`."""
        if not indices:
            return set()
        return {n for group in self._groups if any(other in indices for other in group.numbers) for n in group.numbers}

    def on_the_cpu(self, watched: list[Tensor]) -> bool:
        """True if comparing them waits for no device."""
        return all(watched[index].is_cpu for index in self.indices)


def copyable(tensor: Tensor) -> bool:
    """True if a tensor has plain memory of its own to copy and compare."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_nested
        and not tensor.is_quantized
        # FSDP frees the memory of gathered parameters.
        and (tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0)
    )


def equal_bits(one: Tensor, other: Tensor) -> bool:
    """True if two tensors are equal, where NaN equals NaN."""
    if one.shape != other.shape or one.layout is not other.layout:
        return False
    if one.layout is not torch.strided:
        return all(map(equal_bits, inner_tensors(one), inner_tensors(other)))
    if torch.equal(one, other):
        return True
    return bool(((one == other) | (one.isnan() & other.isnan())).all())

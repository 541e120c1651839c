"""Copies of tensors that a region changes, which keep what aliased aliasing.

Two arguments may be views of one storage, or an argument may be a buffer too: a write through one is seen through the other. So
tensors that share a storage are copied together, and handed to a re-run over one new storage.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from retape.core.errors import RegionError
from retape.torch.capture.checksum import inner_tensors
from retape.torch.compat import internals


class _Shape(NamedTuple):
    """How one tensor lies in its storage."""

    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conjugated: bool
    negated: bool
    same_as: int  # the first index under which this very tensor was met


class _Group(NamedTuple):
    """Tensors of one storage, and a copy of that storage."""

    storage: torch.UntypedStorage
    device: torch.device
    members: tuple[_Shape, ...]

    @property
    def is_plain(self) -> bool:
        """Whether all of them see the same numbers: one dtype, nothing conjugated or negated on the fly."""
        return len({m.dtype for m in self.members}) == 1 and not any(m.conjugated or m.negated for m in self.members)


class Copies:
    """Copies of the tensors `watched[index]` for some indices."""

    __slots__ = ("_groups", "indices")

    def __init__(self, watched: list[Tensor], indices: Iterable[int]) -> None:
        by_storage: dict[int, list[int]] = {}
        for index in indices:
            by_storage.setdefault(watched[index].untyped_storage()._cdata, []).append(index)
        self._groups = [_copied(watched, members) for members in by_storage.values()]
        self.indices = frozenset(member.number for group in self._groups for member in group.members)

    def only(self, changed: set[int]) -> Copies:
        """These copies without those of storages that nothing was written to."""
        kept = object.__new__(Copies)
        kept._groups = [group for group in self._groups if any(member.number in changed for member in group.members)]
        kept.indices = frozenset(member.number for group in kept._groups for member in group.members)
        return kept

    def different(self, watched: list[Tensor]) -> set[int]:
        """The indices whose tensors have other bits now."""
        return {
            member.number
            for group in self._groups
            for member in group.members
            if not equal_bits(_lay(group.storage, group.device, member), watched[member.number])
        }

    def rebuild(self, needs_grad: dict[int, bool]) -> dict[int, Tensor]:
        """New tensors with the copied values, which alias as the originals did; to be called with grad enabled.

        None of them is a leaf that requires gradients, because autograd refuses to change such a one in place.
        """
        made: dict[int, Tensor] = {}
        for group in self._groups:
            wanted = any(needs_grad.get(member.number, False) for member in group.members)
            alone = len({member.same_as for member in group.members}) == 1
            base = None if alone else _base(group, wanted)
            for member in group.members:
                if member.same_as in made:
                    made[member.number] = made[member.same_as]
                elif base is None:
                    made[member.number] = _alone(group, member, wanted)
                else:
                    made[member.number] = base.as_strided(member.size, member.stride, member.offset)
        return made

    def sharing_with(self, indices: range) -> set[int]:
        """The indices of every tensor that shares its storage with one of `indices`."""
        return {
            member.number
            for group in self._groups
            if any(other.number in indices for other in group.members)
            for member in group.members
        }

    def on_the_cpu(self, watched: list[Tensor]) -> bool:
        """Whether comparing them waits for no device."""
        return all(watched[index].device.type == "cpu" for index in self.indices)


def copyable(tensor: Tensor) -> bool:
    """Whether a tensor has plain memory of its own to copy and compare."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_nested
        and not tensor.is_quantized
        and (
            tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0
        )  # FSDP frees the memory of gathered parameters
    )


def equal_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal where a number equals itself, NaN included."""
    if one.shape != other.shape or one.layout is not other.layout:
        return False
    if one.layout is not torch.strided:
        return all(map(equal_bits, inner_tensors(one), inner_tensors(other)))
    if torch.equal(one, other):
        return True
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _copied(watched: list[Tensor], indices: list[int]) -> _Group:
    first = watched[indices[0]]
    seen: dict[int, int] = {}
    members = tuple(
        _Shape(
            i, t.shape, t.stride(), int(t.storage_offset()), t.dtype, t.is_conj(), t.is_neg(), seen.setdefault(id(t), i)
        )
        for i, t in ((index, watched[index]) for index in indices)
    )
    return _over_their_span(first, members)


def _over_their_span(first: Tensor, members: tuple[_Shape, ...]) -> _Group:
    """Copy no more of a storage than the tensors cover: a batch may be a slice of a whole data set."""
    start = min(m.offset * m.dtype.itemsize for m in members) // 16 * 16
    stop = max((m.offset + _extent(m)) * m.dtype.itemsize for m in members)
    octets = torch.empty(0, dtype=torch.uint8, device=first.device)
    octets.set_(first.untyped_storage(), start, (max(stop - start, 0),), (1,))
    moved = tuple(m._replace(offset=m.offset - start // m.dtype.itemsize) for m in members)
    return _Group(octets.clone().untyped_storage(), first.device, moved)


def _extent(member: _Shape) -> int:
    """How many elements lie between the first and the last of a tensor."""
    if 0 in member.size:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(member.size, member.stride, strict=True))


def _lay(storage: torch.UntypedStorage, device: torch.device, member: _Shape) -> Tensor:
    """A tensor over a storage, lying there as the original did in its own."""
    tensor = torch.empty(0, dtype=member.dtype, device=device).set_(storage, member.offset, member.size, member.stride)
    if member.conjugated:
        tensor = tensor.conj()
    return internals.neg_view(tensor) if member.negated else tensor


def _base(group: _Group, needs_grad: bool) -> Tensor:
    """A flat tensor that several others are views of."""
    if not group.is_plain:
        raise RegionError(
            "A region changes tensors in place that share memory under different dtypes (a complex tensor and its real view, say). "
            "Give it a copy of one of them (.clone())."
        )
    dtype = group.members[0].dtype
    flat = torch.empty(0, dtype=dtype, device=group.device).set_(group.storage.clone())
    return flat.requires_grad_(True).clone() if needs_grad else flat


def _alone(group: _Group, member: _Shape, needs_grad: bool) -> Tensor:
    """A tensor that shares its storage with nobody: no view, as the original was none."""
    twin = torch.empty_strided(member.size, member.stride, dtype=member.dtype, device=group.device)
    with torch.no_grad():
        twin.copy_(_lay(group.storage, group.device, member))
    return twin.requires_grad_(True).clone() if needs_grad else twin

"""Copies of tensors that a region changes, which keep what aliased aliasing.

Two arguments may be views of one storage, or an argument may be a buffer too: a write through one is seen through the other. So
tensors that share a storage are copied together, and handed to a re-run over one new storage.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class _Shape(NamedTuple):
    """How one tensor lies in its storage."""

    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_root: bool
    same_as: int  # the first index under which this very tensor was met


class _Group(NamedTuple):
    """Tensors of one storage, and a copy of its contents as one flat tensor."""

    flat: Tensor
    members: tuple[_Shape, ...]


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
            if not equal_bits(_lay(group.flat, member), watched[member.number])
        }

    def values(self) -> dict[int, Tensor]:
        """The copies themselves."""
        return {member.number: _lay(group.flat, member) for group in self._groups for member in group.members}

    def rebuild(self, needs_grad: dict[int, bool]) -> dict[int, Tensor]:
        """New tensors with the copied values, which alias as the originals did; to be called with grad enabled.

        None of them is a leaf that requires gradients, because autograd refuses to change such a one in place.
        """
        made: dict[int, Tensor] = {}
        for group in self._groups:
            wanted = any(needs_grad.get(member.number, False) for member in group.members)
            flat = group.flat.clone() if not wanted else group.flat.detach().requires_grad_(True).clone()
            root = next((member for member in group.members if member.is_root), None)
            base = flat if root is None or len({member.same_as for member in group.members}) > 1 else None
            for member in group.members:
                if member.same_as in made:
                    made[member.number] = made[member.same_as]
                elif base is None:
                    made[member.number] = _alone(group.flat, member, wanted)
                else:
                    made[member.number] = flat.as_strided(member.size, member.stride, member.offset)
        return made

    def sharing_with(self, indices: range) -> set[int]:
        """The indices of every tensor that shares its storage with one of `indices`."""
        return {
            member.number
            for group in self._groups
            if any(other.number in indices for other in group.members)
            for member in group.members
        }

    @property
    def nbytes(self) -> int:
        return sum(group.flat.nbytes for group in self._groups)


def copyable(tensor: Tensor) -> bool:
    """Whether a tensor has plain memory of its own to copy and compare."""
    return tensor.layout is torch.strided and tensor.device.type != "meta" and not tensor.is_nested


def equal_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal where a number equals itself, NaN included."""
    if one.shape != other.shape:
        return False
    if torch.equal(one, other):
        return True
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _copied(watched: list[Tensor], indices: list[int]) -> _Group:
    first = watched[indices[0]]
    flat = torch.empty(0, dtype=first.dtype, device=first.device).set_(first.untyped_storage())
    seen: dict[int, int] = {}
    members = tuple(
        _Shape(i, t.shape, t.stride(), int(t.storage_offset()), t._base is None, seen.setdefault(id(t), i))
        for i, t in ((index, watched[index]) for index in indices)
    )
    return _Group(flat.clone(), members)


def _lay(flat: Tensor, member: _Shape) -> Tensor:
    return flat.as_strided(member.size, member.stride, member.offset)


def _alone(flat: Tensor, member: _Shape, needs_grad: bool) -> Tensor:
    """A tensor that shares its storage with nobody: no view, as the original was none."""
    twin = torch.empty_strided(member.size, member.stride, dtype=flat.dtype, device=flat.device)
    with torch.no_grad():
        twin.copy_(_lay(flat, member))
    return twin.requires_grad_(True).clone() if needs_grad else twin

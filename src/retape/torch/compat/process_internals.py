"""Private interfaces of CPython, of the C library and of process groups: threads, frames, heap and collectives.

As in `internals.py`, each is behind one small function and has a canary in `tests/compat/test_compat.py`.
"""

from __future__ import annotations

import copyreg
import ctypes
import functools
import inspect
import sys
import weakref
from types import FrameType
from typing import Any

import torch


def local_values(frame: FrameType) -> list[Any]:
    """Return the values of a frame's local variables without keeping any of them alive.

    Before Python 3.13 a frame keeps the dict that `f_locals` returns, and what is in it, until it is asked again or ends.
    """
    names = frame.f_locals
    values = list(names.values())
    is_copy = sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if is_copy and sys.getrefcount(names) <= _COPY_HOLDERS:  # else code keeps the result of locals()
        names.clear()
    return values


_COPY_HOLDERS = 3  # of a frame's dict: the frame, a variable and the call that counts


def referent(reference: Any) -> Any:
    """Return the object behind a weak reference or a weak proxy; None if it is gone, or hides itself."""
    try:
        # A proxy passes every attribute on, so that a method of its object is bound to the object itself.
        return reference() if isinstance(reference, weakref.ReferenceType) else reference.__reduce_ex__.__self__
    except (ReferenceError, AttributeError):
        return None


def is_only_thread() -> bool:
    """True if no other thread runs Python code, and may be inside PyTorch."""
    return len(sys._current_frames()) == 1


def heap_bytes() -> int | None:
    """Return the bytes in use on the C library's heap; None where CPU tensors are not on it."""
    return _heap_in_use() if _tensors_are_on_heap() else None


class _Mallinfo2(ctypes.Structure):
    _fields_ = tuple((f"number_{i}", ctypes.c_size_t) for i in range(10))  # hblkhd is the fifth, uordblks the eighth


def _heap_in_use() -> int:
    """Return the bytes in use in the heap and in mappings of their own; 0 for glibc before 2.33."""
    if _mallinfo2 is None:
        return 0
    found = _mallinfo2()
    return int(found.number_4 + found.number_7)


@functools.cache
def _tensors_are_on_heap() -> bool:
    """True if the heap grows by a tensor: not where another allocator replaces the C library's."""
    before = _heap_in_use()
    probe = torch.UntypedStorage(1 << 20)
    return bool(_heap_in_use() - before >= probe.nbytes())


_mallinfo2: Any = getattr(ctypes.CDLL(None), "mallinfo2", None)
if _mallinfo2 is not None:
    _mallinfo2.restype = _Mallinfo2


def collectives_started() -> tuple[Any, ...]:
    """Return the numbers of collectives, sends and receives that the backends of all groups have started.

    Empty without groups. Where two results differ, something was started in between. A backend that keeps no count never returns the
    same value twice. NCCL counts no single send or receive.
    """
    groups = sys.modules["torch.distributed.distributed_c10d"]._world.pg_map if _HAS_GROUPS else ()
    return tuple([_count_of(g._get_backend(kind)) for g in groups for kind in g._device_types]) if groups else ()


def _count_of(backend: Any) -> Any:
    try:
        return backend._get_sequence_number_for_group()
    except RuntimeError:
        return object()


_HAS_GROUPS = torch.distributed.is_available()


def reduced_as(original: type, reduced: Any) -> Any:
    """Return what `__reduce_ex__` gave for an object whose class was replaced, as for an object of its `original` class."""
    if isinstance(reduced, tuple) and len(reduced) >= 2 and reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
        # pickle would insist on the class of the object itself, and a loaded model must not need retape
        return (object.__new__, (original,), *reduced[2:])
    return reduced

"""Private interfaces of CPython, of the C library and of process groups: threads, frames, heap and collectives.

As in `internals.py`, each is behind one small function and has a canary in `tests/compat/test_compat.py`.
"""

from __future__ import annotations

import copyreg
import ctypes
import functools
import inspect
import os
import struct
import sys
import threading
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
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


def addresses(items: tuple[Any, ...]) -> bytes:
    """Return the addresses of a tuple's items: comparing them takes a third of the time of `is`, item by item."""
    return ctypes.string_at(id(items) + tuple.__basicsize__, len(items) * _ADDRESS.size)


def _packed(items: tuple[Any, ...]) -> bytes:
    return b"".join(map(_ADDRESS.pack, map(id, items)))


_ADDRESS = struct.Struct("P")
_SOME_ITEMS = (None, 1, "")
if sys.implementation.name != "cpython" or addresses(_SOME_ITEMS) != _packed(_SOME_ITEMS):
    addresses = _packed  # another layout of tuples


def is_only_thread() -> bool:
    """True if no other thread runs Python code, and may be inside PyTorch; threads without tensors do not count."""
    return not sys._current_frames().keys() - {threading.get_ident(), *_WITHOUT_TENSORS}


@contextmanager
def without_tensors() -> Iterator[None]:
    """Let this thread not count for `is_only_thread`: it touches no tensor."""
    own = threading.get_ident()
    _WITHOUT_TENSORS.add(own)
    try:
        yield
    finally:
        _WITHOUT_TENSORS.discard(own)


_WITHOUT_TENSORS: set[int] = set()


@functools.cache
def _machine() -> str:
    """Return a name of this machine since it was started, and of the numbers that its processes have here."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text().strip() if boot.exists() else uuid.getnode()} {_numbers_of_processes()}"


def _numbers_of_processes() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _process_start(number: int) -> str | None:
    """Return when a process of this machine was started, in the kernel's clock; None if it does not run any more."""
    try:
        # The name, in parentheses, may contain anything; after it come the state and, as the 20th field, the start.
        state, *fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else fields[18]


def own_process() -> tuple[str, int, str]:
    """Return what `has_ended` is asked with, on any machine: the machine, the number and the start of this process."""
    return _machine(), os.getpid(), _process_start(os.getpid()) or ""


def has_ended(process: tuple[str, int, str]) -> bool | None:
    """True if a process has ended; None if this machine does not know, because it runs on another one."""
    machine, number, start = process
    return _process_start(number) != start if start and machine == _machine() else None


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


def ranks_that_communicated(before: tuple[Any, ...], after: tuple[Any, ...]) -> frozenset[int] | None:
    """Return the ranks of all groups that started something between two results of `collectives_started`.

    None if that cannot be told, because groups were made in between.
    """
    groups = sys.modules["torch.distributed.distributed_c10d"]._world.pg_map if _HAS_GROUPS else ()
    owners = [group for group in groups for _ in group._device_types]
    if not len(before) == len(after) == len(owners):
        return None
    used = [group for group, one, other in zip(owners, before, after, strict=True) if one != other]
    return frozenset(rank for group in used for rank in torch.distributed.get_process_group_ranks(group))


def _count_of(backend: Any) -> Any:
    try:
        return backend._get_sequence_number_for_group()
    except RuntimeError:
        return object()


_HAS_GROUPS = torch.distributed.is_available()


def in_input_pass() -> bool:
    """True while a pipeline computes gradients of inputs alone, in any thread: a pass for the weights reads the same tensors later.

    Backward may run in a thread of its own, so the frames of all threads are looked through.
    """
    passes = sys.modules.get("torch.distributed.pipelining._backward")
    if passes is None:
        return False
    code = passes.stage_backward_input.__code__
    return any(_is_within(frame, code) for frame in sys._current_frames().values())


def _is_within(frame: FrameType | None, code: Any) -> bool:
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def default_store() -> Any:
    """Return the store by which the processes of the world found each other."""
    return torch.distributed.distributed_c10d._get_default_store()


def is_wrapper(module: torch.nn.Module) -> bool:
    """True if a module is DistributedDataParallel or FullyShardedDataParallel (FSDP1), which has a process group."""
    fsdp = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    sharded = getattr(fsdp, "FullyShardedDataParallel", ())
    return isinstance(module, (torch.nn.parallel.DistributedDataParallel, *([sharded] if sharded else [])))


def is_of_collective(error: BaseException) -> bool:
    """True if an exception comes from a collective that another rank did not join, or has left."""
    if isinstance(error, torch.distributed.DistBackendError if _HAS_GROUPS else ()):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS_OF_COLLECTIVES)


_SIGNS_OF_COLLECTIVES = ("/gloo/", "[Rank ", "pair closure", "Connection closed by peer", "NCCL")


def interrupt(members: tuple[int, ...]) -> None:
    """End what threads of this process wait for in collectives with these ranks; their groups cannot be used afterwards.

    Gloo has no abort in torch 2.13 (it does nothing). A receive that runs into its timeout closes the connection, and with it ends every
    operation that waits for that rank.
    """
    dist = torch.distributed
    for group in list(dist.distributed_c10d._world.pg_map):
        if len(set(members) & set(dist.get_process_group_ranks(group))) < 2:
            continue
        config = dist.get_backend_config(group)
        if "gloo" in config:
            _close_connections(group)
        if set(config.replace(":", ",").split(",")) & {"nccl", "xccl", "ucc"}:
            group.abort()


def _close_connections(group: Any) -> None:
    for peer in set(range(group.size())) - {group.rank()}:
        try:
            group.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError:  # the timeout, or the connection is closed already
            continue


_UNUSED_TAG = 1 << 20  # of sends that no program has


def reduced_as(original: type, reduced: Any) -> Any:
    """Return what `__reduce_ex__` gave for an object whose class was replaced, as for an object of its `original` class."""
    if isinstance(reduced, tuple) and len(reduced) >= 2 and reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
        # pickle would insist on the class of the object itself, and a loaded model must not need retape
        return (object.__new__, (original,), *reduced[2:])
    return reduced

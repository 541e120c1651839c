"""Files of tensors with a checksum: snapshots of loops, and slots that the host has no memory for.

A file is a magic line, the length of a header, the header (JSON: a description, and dtype and shape of each tensor), a checksum of
all of it, and the tensors' bytes. Reading executes nothing. A file appears under its name only when it is complete, and one that
does not match its checksum is damaged. Which files there are, and what an error means, is for the users of this module.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

_MAGIC = b"retape tensors 1\n"
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
}
_Kinds = list[tuple[str, list[int]]]  # dtype and shape of each tensor


class FileDamaged(Exception):
    """A file that is missing, cut off, or does not match its checksum."""


def can_be_stored(tensor: Tensor) -> bool:
    """True if a file can hold a tensor: strided, of a plain dtype."""
    return tensor.layout is torch.strided and not tensor.is_quantized and str(tensor.dtype)[6:] in _DTYPES


def byte_view(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor as uint8, sharing its memory."""
    count = tensor.numel() * tensor.element_size()
    start = int(tensor.storage_offset()) * tensor.element_size()
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), start, (count,), (1,))


def write_tensors(path: Path, about: dict[str, Any], tensors: Sequence[Tensor], *, durable: bool) -> None:
    """Write tensors to a file that appears only when it is complete; `durable` waits for the disk itself.

    An OSError leaves nothing behind.
    """
    plain = [tensor.detach().resolve_conj().resolve_neg().cpu().contiguous() for tensor in tensors]
    kinds = [(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in tensors]
    header = json.dumps({"about": about, "tensors": kinds}).encode()
    front = _MAGIC + struct.pack("<Q", len(header)) + header
    parts = [byte_view(tensor).numpy().data for tensor in plain if tensor.numel()]
    digest = _digest()
    for part in (front, *parts):
        digest.update(part)
    draft = path.with_suffix(".part")
    try:
        with draft.open("wb") as file:
            for part in (front, digest.digest(), *parts):
                file.write(part)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        draft.replace(path)
        if durable:
            _sync_folder(path.parent)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def read_tensors(path: Path) -> tuple[dict[str, Any], list[Tensor]]:
    """Return a file's description and its tensors, on the CPU; FileDamaged if it is missing or damaged."""
    return _read(path, lambda kinds: [torch.empty(shape, dtype=_DTYPES[name]) for name, shape in kinds])


def read_into(path: Path, places: Sequence[Tensor]) -> None:
    """Read the tensors of a file into contiguous CPU tensors of the same sizes; FileDamaged if it is missing or damaged."""
    _read(path, lambda kinds: list(places))


def _read(path: Path, places: Callable[[_Kinds], list[Tensor]]) -> tuple[dict[str, Any], list[Tensor]]:
    try:
        with path.open("rb") as file:
            return _read_open(path.name, file, os.fstat(file.fileno()).st_size, places)
    except OSError as error:
        raise FileDamaged(f"{path.name} cannot be read: {error.strerror}") from error


def _read_open(
    name: str, file: BinaryIO, size: int, places: Callable[[_Kinds], list[Tensor]]
) -> tuple[dict[str, Any], list[Tensor]]:
    start = len(_MAGIC) + 8
    front = file.read(start)
    if front[: len(_MAGIC)] != _MAGIC or len(front) < start:
        raise FileDamaged(f"{name} is not a file of tensors, or is truncated")
    length, digest = struct.unpack("<Q", front[len(_MAGIC) :])[0], _digest()
    left = size - start - length - digest.digest_size
    text = file.read(length) if left >= 0 else b""
    expected = file.read(digest.digest_size)
    digest.update(front + text)
    try:
        header = json.loads(text)
        kinds: _Kinds = header["tensors"]
        sizes = [torch.Size(shape).numel() * _DTYPES[kind].itemsize for kind, shape in kinds]
        found = places(kinds) if sum(sizes) == left else []
    except (ValueError, KeyError, TypeError, RuntimeError) as error:  # a header that was written to
        raise FileDamaged(f"{name} does not match its checksum") from error
    if [tensor.nbytes for tensor in found] != sizes:
        raise FileDamaged(f"{name} does not match its checksum: it has {max(0, left)} bytes of tensors")
    for tensor in found:
        if tensor.numel():
            memory = byte_view(tensor).numpy().data
            file.readinto(memory)  # type: ignore[attr-defined]  # BinaryIO has no readinto, and what `open` returns has
            digest.update(memory)
    if digest.digest() != expected:
        raise FileDamaged(f"{name} does not match its checksum")
    return header["about"], found


def _digest() -> Any:
    return hashlib.blake2b(digest_size=16)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

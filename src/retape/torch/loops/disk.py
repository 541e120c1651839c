"""Files of tensors with a checksum: the disk tier of loops, and what their journals are made of.

A file is a magic line, the length of a header, the header (JSON: what the file says of itself, and dtype and shape of each tensor), a
checksum of all of it, and the tensors' bytes. Nothing in it is executed when it is read. It appears under its name only when it is
complete, and what does not come to its checksum is lost, never used.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import struct
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from retape.core.errors import InvalidInput, RegionError
from retape.core.units import format_bytes
from retape.torch.loops.state import octets_of

_MAGIC = b"retape tensors 1\n"
_DIGEST = 16
_SUFFIX = ".tensors"
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
}


class SnapshotLost(Exception):
    """A file that is missing or does not come to its checksum; the state in it can be computed again."""


def write_file(path: Path, about: dict[str, Any], tensors: Sequence[Tensor], *, durable: bool) -> None:
    """Write tensors under a name that appears only when all of it is there; `durable` waits for the disk itself."""
    parts = [_bytes_of(tensor) for tensor in tensors]
    kinds = [(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in tensors]
    header = json.dumps({"about": about, "tensors": kinds}).encode()
    front = _MAGIC + struct.pack("<Q", len(header)) + header
    digest = hashlib.blake2b(front, digest_size=_DIGEST)
    for part in parts:
        digest.update(part)
    draft = path.with_suffix(".part")
    try:
        with draft.open("wb") as file:
            for part in (front, digest.digest(), *parts):
                write_bytes(file, part)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        draft.replace(path)
        if durable:
            _sync_folder(path.parent)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise cannot_write(path, error) from error


def write_bytes(file: BinaryIO, data: bytes) -> None:
    file.write(data)


def read_file(path: Path) -> tuple[dict[str, Any], list[Tensor]]:
    """What a file says of itself, and its tensors, on the CPU; SnapshotLost if any of it is not as it was written."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SnapshotLost(f"{path.name} cannot be read: {error.strerror}") from error
    start = len(_MAGIC) + 8
    if data[: len(_MAGIC)] != _MAGIC or len(data) < start:
        raise SnapshotLost(f"{path.name} is no file of tensors, or is cut off at its beginning")
    length = struct.unpack("<Q", data[len(_MAGIC) : start])[0]
    body = start + length + _DIGEST
    digest = hashlib.blake2b(data[: start + length], digest_size=_DIGEST)
    digest.update(memoryview(data)[body:])
    if len(data) < body or digest.digest() != data[start + length : body]:
        raise SnapshotLost(f"{path.name} does not come to its checksum")
    header = json.loads(data[start : start + length])
    tensors = []
    for name, shape in header["tensors"]:
        tensor = torch.empty(shape, dtype=_DTYPES[name])
        size = tensor.numel() * tensor.element_size()
        if size:
            octets_of(tensor).copy_(torch.frombuffer(bytearray(data[body : body + size]), dtype=torch.uint8))
        tensors.append(tensor)
        body += size
    return header["about"], tensors


def _bytes_of(tensor: Tensor) -> bytes:
    if tensor.layout is not torch.strided or tensor.is_quantized or str(tensor.dtype)[6:] not in _DTYPES:
        raise InvalidInput(
            f"A carry holds a tensor of layout {tensor.layout} and dtype {tensor.dtype}, which cannot be stored in a file. "
            "Keep its snapshots on the device, or carry a plain tensor."
        )
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return octets_of(plain).numpy().tobytes()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def cannot_write(path: Path, error: OSError) -> RegionError:
    """What to say when a file cannot be written."""
    room = ""
    if error.errno == errno.ENOSPC:
        free = shutil.disk_usage(path.parent).free
        room = f" {format_bytes(free)} are free there."
    return RegionError(
        f"A snapshot could not be written to {path}: {error.strerror}.{room} "
        "Give the loop another directory (resume=, or TMPDIR for a disk tier), fewer snapshots, or a tier in memory."
    )


class Scratch:
    """A folder of its own for the disk tier of one loop; it goes when the loop does."""

    def __init__(self) -> None:
        try:
            self.folder = Path(tempfile.mkdtemp(prefix="retape-"))
        except OSError as error:
            raise cannot_write(Path(tempfile.gettempdir()) / "retape", error) from error
        self._finalizer = weakref.finalize(self, shutil.rmtree, self.folder, True)

    def path(self, step: int) -> Path:
        return self.folder / f"{step}{_SUFFIX}"

    def write(self, step: int, tensors: Sequence[Tensor]) -> None:
        write_file(self.path(step), {"step": step}, tensors, durable=False)

    def read(self, step: int) -> list[Tensor]:
        about, tensors = read_file(self.path(step))
        if about.get("step") != step:
            raise SnapshotLost(f"{self.path(step).name} is the snapshot of step {about.get('step')}")
        return tensors

    def remove(self, step: int) -> None:
        self.path(step).unlink(missing_ok=True)

    def close(self) -> None:
        self._finalizer()

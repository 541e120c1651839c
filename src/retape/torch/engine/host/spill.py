"""Disk for moved slots: files in a folder of one fit, written and read by threads of their own.

A slot that goes to disk passes through host memory: it is copied there as one that stays, and its memory is free again once the file is
written. Back, the file is read when backward comes near, and checked. The folder is removed when the fit is, once its last slot is gone,
or when the process ends, also after an exception; one that a killed process has left is recognised by its lock, which died with it, and
removed by the next process of the same user on the same machine.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import shutil
import socket
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from retape.core.errors import InvalidInput, OffloadError
from retape.core.problem import Tier
from retape.core.units import format_bytes
from retape.torch.engine.host import tensor_files
from retape.torch.engine.host.copy_streams import TUNING, Event

_LOG = logging.getLogger("retape")
_MOVE_LESS = "another folder as `disk`, or a larger budget of the device so that less is moved."
_FULL = (errno.ENOSPC, errno.EDQUOT)
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


class SpillFile:
    """One moved storage in a file."""

    def __init__(self, folder: SpillFolder, path: Path, nbytes: int) -> None:
        self._folder, self._path, self.nbytes = folder, path, nbytes
        self._lock = threading.RLock()  # a destructor may run anywhere, also inside it
        self._discarded = self._finished = False
        self._written: Future[OffloadError | None] | None = None

    def start(self, event: Event, pieces: Sequence[Tensor], release: Callable[[], None]) -> None:
        """Start to write host memory, once `event` is done; `release` is called when it has been written, or need not be."""
        self._written = self._folder.writer.submit(self._write, event, pieces, release)
        self._folder.note_start(self)

    @property
    def is_written(self) -> bool:
        return self._written is not None and self._written.done()

    def wait(self) -> None:
        """Wait until it is written; raise what went wrong, unless it is not needed any more."""
        error = self._failure()
        if error is not None and not self._discarded:
            raise error

    def _failure(self) -> OffloadError | None:
        """Wait until it is written; return what went wrong, as a new error: one that was raised keeps the tensors of a step alive."""
        assert self._written is not None
        error = self._written.result()
        return error and OffloadError(str(error), wanted_bytes=self.nbytes, limit_bytes=error.limit_bytes)

    def _write(self, event: Event, pieces: Sequence[Tensor], release: Callable[[], None]) -> OffloadError | None:
        try:
            event.synchronize()
            return None if self._discarded else self._folder.attempted_write(self._path, pieces)
        finally:
            release()
            with self._lock:
                self._finished = True
                if self._discarded:
                    self._folder.forget(self._path, self.nbytes)

    def read(self, places: Sequence[Tensor]) -> Future[OffloadError | None]:
        """Start to read the file into host memory; the result is an error if it was not written, or is damaged."""
        return self._folder.reader.submit(self._read, places)

    def _read(self, places: Sequence[Tensor]) -> OffloadError | None:
        failure = self._failure()
        if failure is not None:
            return failure
        try:
            tensor_files.read_into(self._path, places)
        except tensor_files.FileDamaged as error:
            return OffloadError(
                f"{format_bytes(self.nbytes)} of moved slots cannot be read back from disk: {error}. Run the step again; if it happens "
                "again, give another folder as `disk`.",
                wanted_bytes=self.nbytes,
            )
        return None

    def discard(self) -> None:
        """Remove the file, now or when it has been written."""
        with self._lock:
            if self._discarded:
                return
            self._discarded = True
            if self._finished or self._written is None:
                self._folder.forget(self._path, self.nbytes)


class SpillFolder:
    """The folder of one fit below `root`, with at most `limit_bytes` of files and `staging_bytes` of host memory in transit."""

    def __init__(self, root: Path, limit_bytes: int, staging_bytes: int) -> None:
        self.root, self.limit_bytes, self.staging_bytes = root, limit_bytes, staging_bytes
        self.used_bytes = 0
        self.write = tensor_files.write_tensors
        self._numbers = itertools.count()
        self._unwritten: deque[SpillFile] = deque()
        self._counting = threading.RLock()
        self._closed = False
        try:
            remove_left_overs(root)
            self.path = Path(tempfile.mkdtemp(prefix=f"{_own_prefix()}{os.getpid()}-", dir=root))
            lock = (self.path / "lock").open("w")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InvalidInput(
                f"disk={str(root)!r} cannot be written to: {error.strerror}. Give a folder on a disk with room."
            ) from error
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="retape-spill-write")
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="retape-spill-read")
        self._remove = weakref.finalize(self, _remove_own, self.path, lock, os.getpid())

    def close(self) -> None:
        """Remove the folder and end the threads, now or when the last file is gone: slots that still live can be read until then."""
        with self._counting:
            self._closed = True
            self._end_if_unused()

    def _end_if_unused(self) -> None:
        if self._closed and not self.used_bytes and self._remove.alive:
            self._remove()
            # Threads end with their pools. `shutdown` has a lock that a destructor, which may be what comes here, must not wait for.
            del self.writer, self.reader

    # --- files --------------------------------------------------------------------------------------------------------

    def reserve(self, nbytes: int) -> SpillFile:
        """Return a file for `nbytes`, once as much host memory of earlier ones is free that these may be in transit too.

        Raise what went wrong with earlier files, and OffloadError if the budget of the disk is used up, or the folder was removed.
        """
        while self._unwritten:
            in_transit = sum(file.nbytes for file in self._unwritten)
            if not self._unwritten[0].is_written and in_transit + nbytes <= self.staging_bytes:
                break
            self._unwritten.popleft().wait()
        with self._counting:
            used = self.used_bytes
            self.used_bytes += nbytes  # from here on the folder stays
        if self._remove.alive and used + nbytes <= self.limit_bytes:
            return SpillFile(self, self.path / f"{next(self._numbers)}.tensors", nbytes)
        self._return(nbytes)
        if self._remove.alive:
            message = (
                f"No room on disk for {format_bytes(nbytes)} more of moved slots: {format_bytes(used)} of "
                f"{format_bytes(self.limit_bytes)} are used in {self.root}. Give fit() a larger `disk_budget`, {_MOVE_LESS}"
            )
        else:
            message = f"{format_bytes(nbytes)} of slots cannot be moved to {self.root}: this fit was removed. Fit the model again."
        raise OffloadError(message, wanted_bytes=nbytes, limit_bytes=self.limit_bytes)

    def note_start(self, file: SpillFile) -> None:
        """Note that the host memory of a file is in transit until it is written."""
        self._unwritten.append(file)

    def attempted_write(self, path: Path, pieces: Sequence[Tensor], *, durable: bool = False) -> OffloadError | None:
        """Write one file; return an error if the disk does not take it."""
        nbytes = sum(piece.numel() for piece in pieces)
        try:
            self.write(path, {}, pieces, durable=durable)
        except OSError as error:
            return OffloadError(
                f"{format_bytes(nbytes)} of moved slots could not be written to {path}: {error.strerror}. {self._remedy(error)}",
                wanted_bytes=nbytes,
                limit_bytes=self.limit_bytes,
            )
        return None

    def _remedy(self, error: OSError) -> str:
        """Return what helps against an error of a write."""
        if error.errno in _FULL:
            free = shutil.disk_usage(self.root).free
            return f"{format_bytes(free)} are free there. Free some, or give fit() {_MOVE_LESS}"
        if error.errno in _GONE:
            return f"{self.path} was removed or renamed during the fit. Put it back, or fit again."
        if error.errno in _FORBIDDEN:
            return "This process may not write there any more. Allow it, or give fit() another folder as `disk`."
        return "Give fit() another folder as `disk`."

    def forget(self, path: Path, nbytes: int) -> None:
        """Remove a file."""
        with suppress(OSError):  # a folder that is gone, or cannot be written to any more
            path.unlink()
        self._return(nbytes)

    def _return(self, nbytes: int) -> None:
        with self._counting:
            self.used_bytes -= nbytes
            self._end_if_unused()

    # --- bandwidth ----------------------------------------------------------------------------------------------------

    def tier(self) -> Tier:
        """Return the disk as a tier of the planner: capacity and measured bandwidth, of writes that reach the disk itself."""
        memory, path = torch.zeros(TUNING.probe_bytes, dtype=torch.uint8), self.path / "probe.tensors"
        seconds: list[tuple[float, float]] = []
        try:
            for _ in range(TUNING.probes):
                start = time.perf_counter()
                error = self.attempted_write(path, [memory], durable=True)
                out = max(1e-9, time.perf_counter() - start)
                if error is not None:
                    raise error
                _forget_cached(path)
                start = time.perf_counter()
                tensor_files.read_into(path, [memory])
                seconds.append((out, max(1e-9, time.perf_counter() - start)))
        finally:
            path.unlink(missing_ok=True)
        write, read = (min(column) for column in zip(*seconds, strict=True))
        return Tier(
            name="disk",
            capacity_bytes=self.limit_bytes,
            write_bytes_per_second=memory.numel() / write,
            read_bytes_per_second=memory.numel() / read,
        )


def _forget_cached(path: Path) -> None:
    """Let the kernel drop its copy of a file in memory, so that reading it reads the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


# --- folders of processes ---------------------------------------------------------------------------------------------


def _own_prefix() -> str:
    """Return how the names of folders of this user on this machine begin."""
    return f"retape-spill-{socket.gethostname()}-{os.getuid()}-"


def remove_left_overs(root: Path) -> list[Path]:
    """Remove folders below `root` that killed processes of this user on this machine have left; return them."""
    found = [folder for folder in sorted(root.glob(f"{_own_prefix()}*")) if _is_left_over(folder)]
    for folder in found:
        shutil.rmtree(folder, ignore_errors=True)
        _LOG.info("retape: removed %s, which a process that was killed had left.", folder)
    return found


def _is_left_over(folder: Path) -> bool:
    """True if no process has the lock of a folder: its owner holds it while it lives."""
    if folder.is_symlink() or not folder.is_dir() or folder.stat().st_uid != os.getuid():
        return False
    try:
        with (folder / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:  # its process is starting, or was killed then
        return time.time() - folder.stat().st_mtime > TUNING.starting_seconds
    except OSError:
        return False
    return True


def _remove_own(path: Path, lock: Any, owner: int) -> None:
    """Remove the folder of this process; a forked child leaves it to its parent."""
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)
    lock.close()


def spill_at(root: str | Path, disk_budget: int | None, staging_bytes: int) -> SpillFolder:
    """Return a new folder below `root`; raise InvalidInput for a budget that the disk cannot hold."""
    place = Path(root).expanduser().absolute()
    if not place.is_dir():
        raise InvalidInput(f"disk={str(root)!r} is not a folder. Give one on a disk with room.")
    free = shutil.disk_usage(place).free
    limit = int(TUNING.disk_share * free) if disk_budget is None else disk_budget
    if limit > free:
        raise InvalidInput(
            f"disk_budget is {format_bytes(limit)}, and {format_bytes(free)} are free in {place}. Give at most that, or another folder."
        )
    return SpillFolder(place, limit, staging_bytes)

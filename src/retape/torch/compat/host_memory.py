"""Host memory that this process may still take: of the machine, and of every control group (cgroup) around the process.

Linux reports the machine's in /proc/meminfo. A container or a batch system sets lower limits in the process's cgroup or in one above
it, in files of version 1 or 2. How much of it offload and budgets use is in `engine/host/copy_streams.py` and `measure/budgets.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class _CgroupVersion:
    """Files of a cgroup's memory: limits, bytes in use, and the field of memory.stat that has the page cache to reclaim first."""

    limits: tuple[str, ...]
    used: str
    reclaimable: str


_VERSION_1 = _CgroupVersion(
    limits=("memory.limit_in_bytes",), used="memory.usage_in_bytes", reclaimable="total_inactive_file"
)
_VERSION_2 = _CgroupVersion(limits=("memory.max", "memory.high"), used="memory.current", reclaimable="inactive_file")


def available_host_bytes(root: Path = _ROOT) -> int | None:
    """Return the bytes that this process may still take, or None where the machine does not report it.

    `root` is the folder that has `proc` and `sys`.
    """
    found = [_machine_bytes(root), *_cgroup_bytes(root)]
    return min((each for each in found if each is not None), default=None)


def _machine_bytes(root: Path) -> int | None:
    lines = _text(root / "proc/meminfo").splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return 1024 * int(fields["MemAvailable"].split()[0]) if "MemAvailable" in fields else None


def _cgroup_bytes(root: Path) -> Iterator[int | None]:
    """Yield what is left of each cgroup of this process and of those above it."""
    mounted = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield from _left_up_to(mounted / "memory", path, _VERSION_1)
        elif not controllers:
            yield from _left_up_to(mounted, path, _VERSION_2)


def _left_up_to(mount: Path, path: str, version: _CgroupVersion) -> Iterator[int | None]:
    """Yield what is left of a cgroup and of those above it; a container may see its own as the mounted one."""
    place = mount / path.lstrip("/")
    for folder in (place, *place.parents):
        if folder.is_relative_to(mount):
            yield _left(folder, version)


def _left(folder: Path, version: _CgroupVersion) -> int | None:
    """Return the bytes that a cgroup may still take, its page cache included; None if it has no limit."""
    limits = [int(text) for name in version.limits if (text := _text(folder / name).strip()).isdigit()]
    used = _text(folder / version.used).strip()
    if not limits or not used:
        return None
    fields = dict(line.split(maxsplit=1) for line in _text(folder / "memory.stat").splitlines())
    return max(0, min(limits) - int(used) + int(fields.get(version.reclaimable, 0)))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:  # another system, or a cgroup that is not visible from here
        return ""

"""`debug=True`: both runs of a region write down their ops, and an error shows where they part."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class OpLog(TorchDispatchMode):
    """Writes down every op with the shapes of its results."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __enter__(self) -> Any:
        self.lines.clear()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        shape = getattr(out, "shape", None)
        self.lines.append(f"{func}{'' if shape is None else f' -> {tuple(shape)}'}")
        return out


def debug_contexts() -> tuple[OpLog, OpLog]:
    """A log for the first run and one for the re-run."""
    return OpLog(), OpLog()


def difference(first: OpLog, again: OpLog) -> str:
    """What the two runs did, and where they part."""
    parts = [line for line in again.lines if "aten.detach.default" not in line]
    ours = [line for line in first.lines if "aten.detach.default" not in line]
    at = next((i for i, (a, b) in enumerate(zip(ours, parts, strict=False)) if a != b), min(len(ours), len(parts)))
    return (
        "You are seeing this error because you passed `debug=True` to checkpoint and tensors to be saved during the original "
        f"forward and differ from those saved during recomputation. The runs part at op {at}.\n"
        f"Operations executed during the original forward:\n{_numbered(ours)}\n"
        f"Operations executed during recomputation:\n{_numbered(parts)}\n"
    )


def _numbered(lines: list[str]) -> str:
    return "\n".join(f"({i} of {len(lines)}) {line}" for i, line in enumerate(lines, 1)) or "(none)"

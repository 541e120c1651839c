"""The settings of PyTorch's CUDA allocator, which are read and changed through private names.

Each is behind one small function and has a canary in `tests/compat/test_compat.py`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

import torch

log = logging.getLogger("retape")

_SETTING = "expandable_segments"


def use_expandable_segments(read: Callable[[], str] | None = None, write: Callable[[str], None] | None = None) -> bool:
    """Let the CUDA allocator extend its segments from now on; return False where it is off limits or not in use.

    With segments of fixed sizes, a training step near the full budget leaves holes that the next large tensor does not fit into: 10 to
    13 GiB of an H200's 140 in steps of an 8-billion-parameter model. A user's own choice (PYTORCH_ALLOC_CONF) is left alone. Other
    settings are repeated, because PyTorch resets those that are not named.
    """
    if read is None or write is None:
        if not _cuda_in_use():
            return False
        read, write = allocator_settings, set_allocator_settings
    settings = read() or ""
    if _SETTING in settings:
        return True
    write(",".join(filter(None, (settings, f"{_SETTING}:True"))))
    log.info(
        "PyTorch's CUDA allocator extends its segments from now on; %s:False in PYTORCH_ALLOC_CONF keeps it as it was.",
        _SETTING,
    )
    return True


def allocator_settings() -> str:
    """Return the settings in the syntax of PYTORCH_ALLOC_CONF."""
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if read is None:
        return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    return read() or ""


def set_allocator_settings(settings: str) -> None:
    """Replace the settings; those that are not named get their defaults."""
    write = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    write(settings)


def _cuda_in_use() -> bool:
    return sys.platform == "linux" and torch.cuda.is_initialized() and torch.cuda.get_allocator_backend() == "native"

"""Private names of PyTorch's modules, each with a canary in tests/compat/test_compat.py."""

from __future__ import annotations

from typing import Any

from torch.nn.modules import module


def global_forward_hooks() -> list[Any]:
    """The hooks that run before and after the forward of every module there is."""
    return [*module._global_forward_pre_hooks.values(), *module._global_forward_hooks.values()]

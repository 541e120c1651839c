"""Objects of retape's own that stand in the place of user code, and that a walk of what a call reads must not take for state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Opaque:
    """Base of objects of retape's own that a step or region calls and that keep their own record: none of it is the user's state."""

    __slots__ = ()


class CompiledCall(Opaque):
    """A call of a module in compiled form; `form` takes the module first."""

    __slots__ = ("__self__", "form")

    def __init__(self, module: nn.Module, form: Callable[..., Any]) -> None:
        self.__self__ = module
        self.form = form

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        # A re-run has autocast's cache off, and the compiler would take that for another function.
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            return self.form(self.__self__, *arguments, **keywords)
        finally:
            torch.set_autocast_cache_enabled(cached)

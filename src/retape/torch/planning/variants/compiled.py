"""Compiled forms of a model's blocks: the same block compiled several times, each time with another part of its tape saved.

PyTorch's partitioner decides what a compiled function saves, by one setting (`activation_memory_budget`). Each form is
compiled through a backend of its own with that setting patched inside: the same code compiled again through one backend
would silently be the first graph. Blocks alike in class and weights share a form. Which form a region takes is for a plan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn

from retape.core.errors import UnsupportedTransform
from retape.torch.capture.functions import CompiledCall
from retape.torch.capture.signature import Signature, weights_signature
from retape.torch.compat import compiler_internals, internals
from retape.torch.planning.attach import original_class
from retape.torch.planning.variants.tiled_form import Parts, running_in_tiles

WHOLE = 1.0  # the form that recomputes nothing but what fuses for free
SAVED_SHARES = (0.7, 0.6, 0.5, 0.4, 0.3, 0.22, 0.15, 0.08, 0.0)  # of what that form saves, for the others

_LOG = logging.getLogger("retape")
BACKEND: Callable[[float], Callable[..., Any]] = compiler_internals.inductor_saving


class CannotCompile(UnsupportedTransform):
    """The compiler refused a form, which is eager from now on; raised at its call, for the caller to begin it again."""


class Form:
    """One compiled function, for all blocks of one class whose weights are alike; in it, some parts may run in tiles."""

    def __init__(self, kind: type[nn.Module], share: float, tiles: int = 1, parts: Parts = ()) -> None:
        self.failed = False
        self._tiles, self._parts = tiles, parts
        self.compilations = 0
        self._name = kind.__name__
        backend = BACKEND(share)

        def counted(*arguments: Any, **keywords: Any) -> Any:
            self.compilations += 1
            return backend(*arguments, **keywords)

        self._run = torch.compile(_function(kind, share, tiles), backend=counted)

    def __call__(self, module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        try:
            with compiler_internals.many_compilations(), running_in_tiles(module, self._parts, self._tiles):
                return self._run(module, *arguments, **keywords)
        except compiler_internals.compiler_errors() as error:
            self.refuse(error)
            raise CannotCompile(
                f"{self._name} did not compile in the middle of a step. Run the step again: it stays eager from now on."
            ) from error

    def refuse(self, error: BaseException) -> None:
        """Stay eager from now on, and say so."""
        if not self.failed:
            self.failed = True
            reason = str(error).strip().splitlines() or [type(error).__name__]
            _LOG.warning("retape: %s does not compile and stays eager: %s", self._name, reason[0])


_FORMS: dict[tuple[type, Signature, float, int, Parts], Form] = {}  # of this process, like the compiler's own


def form_of(module: nn.Module, share: float, tiles: int = 1, parts: Parts = ()) -> Form:
    """The form of a block that saves this share, with these parts in tiles."""
    kind = original_class(type(module))
    key = (kind, weights_signature(module), share, tiles, parts)
    form = _FORMS.get(key)
    if form is None:
        form = _FORMS[key] = Form(kind, share, tiles, parts)
    return form


def in_form(
    module: nn.Module, plain_call: Callable[..., Any], share: float | None, tiles: int = 1, parts: Parts = ()
) -> Callable[..., Any]:
    """How to call a block: in a compiled form, or as it is (`share` is None, it did not compile, or the user compiled it already)."""
    if share is None or compiler_internals.is_compiled(module):
        return plain_call
    form = form_of(module, share, tiles, parts)
    return plain_call if form.failed else CompiledCall(module, form)


def refuse_graph_replays(regions: dict[str, nn.Module]) -> None:
    """Recorded CUDA graphs write their results to the same memory each time: a tape would be overwritten before it is read."""
    for name, module in regions.items():
        if compiler_internals.replays_cuda_graphs(module):
            raise UnsupportedTransform(
                f"Region {name} is compiled with CUDA graphs, which overwrite what a region holds or runs again. "
                'Compile it without mode="reduce-overhead" (or "max-autotune"), for instance with "max-autotune-no-cudagraphs".'
            )


def refuse_kept_graph() -> None:
    """In a backward pass of compiled blocks that would keep the graph: their tapes are given away as it goes."""
    if internals.graph_is_kept():
        raise UnsupportedTransform(
            "backward(retain_graph=True) or create_graph=True over a model fitted with compile=True: compiled blocks reuse the "
            "memory of their tapes during backward. Fit without compile=True, or run the forward again."
        )


def _function(kind: type[nn.Module], share: float, tiles: int) -> FunctionType:
    """A function that calls a block as its class does, with code of its own: the compiler caches by code, and only so often."""
    call = kind.__call__

    def run(module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        return call(module, *arguments, **keywords)

    code = run.__code__.replace(co_name=f"{kind.__name__}_saving_{share}_in_{tiles}".replace(".", "_"))
    return FunctionType(code, run.__globals__, code.co_name, run.__defaults__, run.__closure__)

"""The drop-in for torch.utils.checkpoint: the same signatures on the region engine.

`use_reentrant=True` gets the same engine, and `preserve_rng_state=False` changes nothing: a stream is kept only if the
region draws from it, and dropping it there is a wrong gradient.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import noop_context_fn

from retape.core.errors import InvalidInput
from retape.torch.compat import internals
from retape.torch.engine.debug import debug_contexts
from retape.torch.engine.entrance import run_call, run_region
from retape.torch.engine.policy import DROP_IN, Check, Inputs, Policy
from retape.torch.engine.region import Contexts
from retape.torch.engine.select import select_contexts

_METADATA = Check.METADATA
_is_compiling = torch.compiler.is_compiling
_FIRST = Policy(reuse_inputs=False)
_SEGMENT = Policy(inputs=Inputs.SEGMENT, reuse_inputs=False)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Callable[[], Contexts] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool = True,
    check: str | Check | None = None,
    **kwargs: Any,
) -> Any:
    """Call `function(*args, **kwargs)` and forget what autograd saves in it until backward asks.

    Takes what `torch.utils.checkpoint.checkpoint` takes; `check` is "off", "metadata" or "values".
    """
    if _is_compiling():
        _say_delegated()
        # Dynamo takes a context_fn only where one is written out, so the default is left out.
        if context_fn is not noop_context_fn:
            kwargs["context_fn"] = context_fn
        return internals.TORCH_CHECKPOINT(function, *args, use_reentrant=False, **kwargs)
    debug_setting, stop_setting = internals.checkpoint_settings()  # PyTorch's context managers win over its arguments
    debug = debug if debug_setting is None else debug_setting
    unusual = debug or context_fn is not noop_context_fn
    if use_reentrant and unusual:
        raise InvalidInput("Passing `context_fn` or `debug` is only supported when use_reentrant=False.")
    return run_call(
        function,
        args,
        kwargs,
        DROP_IN,
        _METADATA if check is None and determinism_check == "default" else _check_of(check, determinism_check),
        early_stop if stop_setting is None else stop_setting,
        _contexts_of(context_fn, debug) if unusual else None,
        None,
    )


@internals.at_trace_time
def _say_delegated() -> bool:
    """Say, while a caller is being compiled, that its regions are not retape's."""
    return _said()


@functools.cache
def _said() -> bool:
    logging.getLogger("retape").warning(
        "retape.checkpoint was called by code that torch.compile or torch.export is tracing. There it is PyTorch's own checkpoint "
        "operator: what retape sees again and checks (check=, buffers, random streams) is left to the compiler. Call "
        "retape.checkpoint outside, on the compiled function, to have it. This is said once."
    )
    return True


def checkpoint_sequential(
    functions: nn.Sequential | nn.ModuleList | Sequence[Callable[..., Any]],
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Run functions one after the other in `segments` segments, of which all but the last are forgotten until backward.

    Each function is a region of its own, linked to the one before: a segment holds its first input alone.
    """
    kwargs.pop("preserve_rng_state", None)
    if kwargs:
        raise InvalidInput(f"Unexpected keyword arguments: {', '.join(kwargs)}")
    steps: list[Any] = list(functions.children()) if isinstance(functions, nn.Sequential) else list(functions)
    if not isinstance(segments, int) or isinstance(segments, bool) or segments < 1:
        raise InvalidInput(
            f"segments={segments!r}; give a whole number >= 1, at most the number of functions ({len(steps)})."
        )
    size = len(steps) // segments
    managed = size * (segments - 1)
    for index, step in enumerate(steps):
        if index >= managed:
            input = step(input)
            continue
        starts_segment = index % size == 0
        input = run_region(step, input, policy=_FIRST if starts_segment else _SEGMENT)
    return input


def _check_of(check: str | Check | None, determinism_check: str) -> Check:
    if determinism_check not in ("default", "none"):
        raise InvalidInput(f"determinism_check should be one of ['default', 'none'], but got {determinism_check}")
    if check is None:
        return Check.METADATA if determinism_check == "default" else Check.OFF
    return Check.of(check)


def _contexts_of(context_fn: Callable[[], Contexts], debug: bool) -> Contexts | None:
    if debug and context_fn is not noop_context_fn:
        raise InvalidInput(
            "debug=True is incompatible with non-default context_fn; use check='values' to find what differs."
        )
    if debug:
        return debug_contexts()
    return None if context_fn is noop_context_fn else select_contexts(context_fn())

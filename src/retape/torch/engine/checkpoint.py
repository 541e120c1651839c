"""Entry points: `run_region`, which makes a call a region, and the drop-in for torch.utils.checkpoint on it.

`use_reentrant=True` gets the same engine, and `preserve_rng_state=False` changes nothing: the state of a random stream is kept only if
the region draws from it, and dropping it there would give a wrong gradient.
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
from retape.torch.capture.call import capture_call
from retape.torch.compat import internals
from retape.torch.engine.context import PROCESS, THREAD, RegionRequest, in_rerun, is_plain
from retape.torch.engine.messages import OpLog, refuse_cached_parametrizations, refuse_transforms
from retape.torch.engine.policy import DROP, DROP_IN, Check, Inputs, Policy
from retape.torch.engine.region import Region
from retape.torch.engine.rerun import Contexts
from retape.torch.engine.select import select_contexts

# Looked up with every region: a global of this module is found fastest.
_METADATA = Check.METADATA
_is_compiling, _is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
_in_odd_surroundings = internals.in_odd_surroundings
_FIRST = Policy(reuse_inputs=False)
_SEGMENT = Policy(inputs=Inputs.SEGMENT, reuse_inputs=False)


def run_region(
    function: Callable[..., Any],
    *arguments: Any,
    keywords: dict[str, Any] | None = None,
    policy: Policy = DROP,
    check: Check = Check.METADATA,
    early_stop: bool = True,
    done: Callable[[Region], None] | None = None,
) -> Any:
    """Call `function(*arguments, **keywords)` as a region; `done` is called with it when its first run is over."""
    return _run_call(function, arguments, keywords or {}, policy, check, early_stop, None, done)


def _run_call(  # noqa: PLR0917 - by position: passing keywords twice is a part of what a region costs
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    policy: Policy,
    check: Check,
    early_stop: bool,
    contexts: Contexts | None,
    done: Callable[[Region], None] | None,
) -> Any:
    if not _is_grad_enabled() or THREAD.plain or (PROCESS.plain and is_plain()):
        return function(*arguments, **keywords)
    odd = _in_odd_surroundings()
    if odd:
        refuse_transforms(function)
    call = capture_call(function, arguments, keywords)
    if odd:
        refuse_cached_parametrizations(call)
    if not call.only_parameters and call.is_lazy:
        return function(*arguments, **keywords)  # its first call gives it its shape; the next one is a region
    runner = THREAD.runner
    if runner is not None and contexts is None and not policy.moves and not in_rerun():
        answer = runner.run(RegionRequest(call, function, arguments, keywords, policy, check, early_stop, done))
        if answer is not NotImplemented:
            return answer
    region = Region(call, policy, check, early_stop, contexts)
    outputs = region.run(function, arguments, keywords)
    if done is not None:
        done(region)
    return outputs


# --- the drop-in ----------------------------------------------------------------------------------------------------


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
    """Call `function(*args, **kwargs)`, drop what autograd saves in it, and recompute that in backward.

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
    return _run_call(
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
    """Log, while a caller is being compiled, that its regions are not retape's."""
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
    """Run functions one after the other in `segments` segments, of which all but the last are recomputed in backward.

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
        return OpLog(), OpLog()
    return None if context_fn is noop_context_fn else select_contexts(context_fn())

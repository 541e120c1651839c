"""How a call becomes a region: whether it is one at all, of which kind, and its first run. What a region is, is in `region.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from retape.torch.capture.call import capture_call
from retape.torch.compat import internals
from retape.torch.engine.policy import DROP, Check, Policy
from retape.torch.engine.region import Contexts, Region
from retape.torch.engine.runs import PROCESS, THREAD, is_plain, recomputing
from retape.torch.engine.transforms import refuse_cached_parametrizations, refuse_transforms

# Asked for with every region: a name of the module's is the cheapest to find.
_new = object.__new__
_is_grad_enabled, _in_odd_surroundings = torch.is_grad_enabled, internals.in_odd_surroundings


def run_region(
    function: Callable[..., Any],
    *arguments: Any,
    keywords: dict[str, Any] | None = None,
    policy: Policy = DROP,
    check: Check = Check.METADATA,
    early_stop: bool = True,
    contexts: Contexts | None = None,
    done: Callable[[Region], None] | None = None,
) -> Any:
    """Call `function(*arguments, **keywords)` as a region; `done` is called with it when its first run is over."""
    return run_call(function, arguments, keywords or {}, policy, check, early_stop, contexts, done)


def run_call(  # noqa: PLR0917 - by position, see below
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    policy: Policy,
    check: Check,
    early_stop: bool,
    contexts: Contexts | None,
    done: Callable[[Region], None] | None,
) -> Any:
    """`run_region` for the drop-in, which has all of it at hand: spelling keywords out twice costs as much as a region's record."""
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
    if runner is not None and contexts is None and not policy.moves and not recomputing():
        return runner.run(
            call, function, arguments, keywords, policy=policy, check=check, early_stop=early_stop, done=done
        )
    region = _new(Region)
    region._begin(call, policy, check, early_stop, contexts)  # what `__init__` does, without spelling out keywords
    outputs = region.run(function, arguments, keywords)
    if done is not None:
        done(region)
    return outputs

"""The transforms around or inside a region that it refuses: torch.func and forward mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from retape.core.errors import UnsupportedTransform
from retape.torch.capture.call import Call, name_of
from retape.torch.compat import internals


def refuse_transforms(function: Callable[..., Any]) -> None:
    """A region under torch.func or forward mode could only fail, or be wrong, inside the backward pass: say so at the call."""
    transform = internals.functorch_transform()
    if transform is None and internals.forward_mode_active():
        transform = "forward-mode differentiation"
    if transform is not None:
        raise UnsupportedTransform(
            f"Region {name_of(function)} was called under {transform}; torch.func and forward mode don't yet support saved tensor "
            "hooks, which a region needs. Call the function itself there, or differentiate with torch.autograd."
        )


def refuse_cached_parametrizations(call: Call) -> None:
    """A re-run would not find what `parametrize.cached()` had cached for the first run."""
    if internals.parametrizations_cached() and any("parametrizations" in module._modules for module in call.modules):
        raise UnsupportedTransform(
            f"Region {name_of(call.function)} runs inside torch.nn.utils.parametrize.cached(), whose cache a re-run would not find. "
            "Leave cached() out around regions."
        )


def raise_explained(name: str, error: RuntimeError) -> NoReturn:
    """While an error of a region is handled: torch.func refuses hooks in its own words, without saying where; any other stays as it is."""
    if "support saved tensor hooks" not in str(error) or isinstance(error, UnsupportedTransform):
        raise  # noqa: PLE0704 - the one that is being handled
    raise UnsupportedTransform(
        f"Region {name} calls a torch.func transform, and those don't yet support saved tensor hooks, which a region needs. "
        "Call the transform outside the region, or use torch.autograd.grad inside it."
    ) from error

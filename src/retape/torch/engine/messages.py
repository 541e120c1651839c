"""Messages of a region: re-runs that differ, transforms that it refuses, and the op log of `debug=True`.

Errors of a re-run are also `torch.utils.checkpoint.CheckpointError`, and begin with its words, so that code written for PyTorch's
own checkpoint catches them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError

from retape.core.errors import RecomputeMismatch, RegionError, StateChanged, UnsupportedTransform
from retape.torch.capture.call import Call, name_of
from retape.torch.capture.unrepeatable import UsedUp
from retape.torch.compat import internals

_REMEDY = (
    "The function does not do the same thing twice: look for randomness from another library, for Python state that it changes, "
    "for a branch that depends on values. retape.keep() records a decision, and check='values' finds the first tensor that differs.\n"
    "If the function is compiled and its shapes vary, the re-run may have used another compiled graph:\n"
    "  - Use torch._dynamo.mark_dynamic() to explicitly mark varying dimensions\n"
    "  - Call torch._C._dynamo.eval_frame._set_lru_cache(False) to disable LRU cache"
)


# --- re-runs that differ from the forward ---------------------------------------------------------------------------


class RerunMismatch(RecomputeMismatch, CheckpointError):
    """A re-run saved other tensors than the forward did."""


def more_tensors(region: str, first: int, again: int) -> RerunMismatch:
    """Return the error for a re-run that saved at least `again` tensors, where the forward saved `first`."""
    return RerunMismatch(
        "torch.utils.checkpoint: trying to save more tensors during recomputation than during the original forward pass. "
        f"Region {region} saved {first} tensors at first and at least {again} when it was run again. {_REMEDY}"
    )


def fewer_tensors(region: str, first: int, missing: int) -> RerunMismatch:
    """Return the error for a re-run that did not save tensor number `missing`, where the forward saved `first` tensors."""
    return RerunMismatch(
        "torch.utils.checkpoint: A different number of tensors was saved during the original forward and recomputation. "
        f"Region {region} saved {first} tensors at first; when it was run again, number {missing} was missing. {_REMEDY}"
    )


def different_metadata(region: str, index: int, first: tuple[Any, ...], again: tuple[Any, ...]) -> RerunMismatch:
    """Return the error for a tensor that was saved with another shape, dtype or device in the re-run."""
    return RerunMismatch(
        "torch.utils.checkpoint: Recomputed values for the following tensors have different metadata than during the forward pass.\n"
        f"Region {region}, tensor at position {index}:\n"
        f"saved metadata: {_text(first)}\nrecomputed metadata: {_text(again)}\n{_REMEDY}"
    )


def different_values(region: str, index: int) -> RerunMismatch:
    """Return the error for a tensor that has another checksum in the re-run."""
    return RerunMismatch(
        f"Region {region} saved other values when it was run again: tensor {index} has the same shape but another checksum. {_REMEDY}"
    )


def cannot_repeat(region: str, used: UsedUp) -> RerunMismatch:
    """Return the error for a re-run of a function that has used up something which it would read again."""
    if used.is_cache:
        return RerunMismatch(
            f"Region {region} cannot be run again: in its forward {used.words}, a function with a cache, had no result for its arguments "
            "and drew random numbers. A re-run would find the result and draw nothing, so that later random numbers would be others. "
            "Call the function once before the region, or pass its result as an argument."
        )
    return RerunMismatch(
        f"Region {region} cannot be run again: its forward advanced the iterator {used.words}, which would give other values now. Read it "
        "outside the region and pass the value as an argument, or record it: retape.keep(next(iterator))."
    )


def _text(metadata: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(("shape", "dtype", "device"), metadata, strict=True))


# --- writes to held tensors, exceptions of user code ----------------------------------------------------------------


def wrote_to_held(region: str) -> StateChanged:
    """Return the error for an op that wrote to a held tensor in a re-run, although its schema declares no write."""
    return StateChanged(
        f"Region {region}: an op wrote to a tensor that was held for backward, though its schema says that it writes to nothing. "
        "Declare what it writes to (mutates_args of torch.library.custom_op). The gradients of this pass would be wrong: run the "
        "step again; from now on the region is run as a whole."
    )


def suppressed_exception(region: str) -> RegionError:
    """Return the error for a context of `context_fn` that suppressed an exception of the function."""
    return RegionError(
        f"Region {region}: context_fn suppressed an exception of the function, which leaves the region without a result. "
        "Let the exception through."
    )


# --- transforms -----------------------------------------------------------------------------------------------------


def refuse_transforms(function: Callable[..., Any]) -> None:
    """Raise if a region is called under torch.func or forward mode, where it could only fail later in backward."""
    transform = internals.functorch_transform()
    if transform is None and internals.forward_mode_active():
        transform = "forward-mode differentiation"
    if transform is not None:
        raise UnsupportedTransform(
            f"Region {name_of(function)} was called under {transform}; torch.func and forward mode don't yet support saved tensor "
            "hooks, which a region needs. Call the function itself there, or differentiate with torch.autograd."
        )


def refuse_cached_parametrizations(call: Call) -> None:
    """Raise inside `parametrize.cached()`: a re-run would not find what was cached for the first run."""
    if internals.parametrizations_cached() and any("parametrizations" in module._modules for module in call.modules):
        raise UnsupportedTransform(
            f"Region {call.name} runs inside torch.nn.utils.parametrize.cached(), whose cache a re-run would not find. "
            "Leave cached() out around regions."
        )


def raise_explained(region: str, error: RuntimeError) -> NoReturn:
    """Raise the error being handled; one of torch.func that refuses hooks becomes an error that names the region."""
    if "support saved tensor hooks" not in str(error) or isinstance(error, UnsupportedTransform):
        raise  # noqa: PLE0704 - the one that is being handled
    raise UnsupportedTransform(
        f"Region {region} calls a torch.func transform, and those don't yet support saved tensor hooks, which a region needs. "
        "Call the transform outside the region, or use torch.autograd.grad inside it."
    ) from error


# --- debug=True -----------------------------------------------------------------------------------------------------


class OpLog(TorchDispatchMode):
    """Records every op of a run with the shapes of its results."""

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


def with_op_logs(error: RerunMismatch, forward: Any, rerun: Any) -> RerunMismatch:
    """Return the error with the ops of both runs and the first op that differs, if both were logged."""
    if not isinstance(forward, OpLog) or not isinstance(rerun, OpLog):
        return error
    ours, theirs = _without_detach(forward.lines), _without_detach(rerun.lines)
    differing = (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    at = next(differing, min(len(ours), len(theirs)))
    return RerunMismatch(
        "You are seeing this error because you passed `debug=True` to checkpoint and tensors to be saved during the original "
        f"forward and differ from those saved during recomputation. The runs part at op {at}.\n"
        f"Operations executed during the original forward:\n{_numbered(ours)}\n"
        f"Operations executed during recomputation:\n{_numbered(theirs)}\n{error}"
    )


def _without_detach(lines: list[str]) -> list[str]:
    return [line for line in lines if "aten.detach.default" not in line]


def _numbered(lines: list[str]) -> str:
    return "\n".join(f"({i} of {len(lines)}) {line}" for i, line in enumerate(lines, 1)) or "(none)"

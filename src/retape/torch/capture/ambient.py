"""The settings around a call that a re-run must see again: autocast, flags, modes, context variables.

`capture` reads them, `RestoredAmbient` puts them back for a re-run, with the random streams (`rng.py`). What a function reads through
its arguments, closure and modules is in `call.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context as _copy_context
from typing import Any

import torch

from retape.torch.capture import rng
from retape.torch.capture.context_variables import Binding, Holder, LastBindings, bind, enter_collectors
from retape.torch.capture.host_access import TransparentMode
from retape.torch.compat import internals

# A name of torch's own is slow to find, and one of another module's slower than one of ours.
_is_grad_enabled, _set_grad_enabled = torch.is_grad_enabled, internals.set_grad_enabled
_count_function_modes = internals.count_function_modes
_CUDA_BUILT = internals.CUDA_BUILT
_LAST = LastBindings()
_rewind = rng.rewind


# What surrounds a call: PyTorch's settings; of each device whether autocast is on, and its dtype; torch-function modes; the
# current CUDA device; what context variables are bound to; whether some of it may be collected in.
Ambient = tuple[list[Any], tuple[bool, ...], tuple[Any, ...], tuple[Any, ...], int | None, tuple[Binding, ...], bool]


def capture() -> Ambient:
    """What surrounds the caller now."""
    modes = _user_modes() if _count_function_modes() else ()
    context = _copy_context()
    bound, collects = _LAST.look(context) if context else ((), False)
    if not _CUDA_BUILT:
        return _read_settings(), (_autocast("cpu"),), (_autocast_dtype("cpu"),), modes, None, bound, collects
    return (
        _read_settings(),
        (_autocast("cpu"), _autocast("cuda")),
        (_autocast_dtype("cpu"), _autocast_dtype("cuda")),
        modes,
        torch.cuda.current_device() if internals.cuda_initialized() else None,
        bound,
        collects,
    )


def _user_modes() -> tuple[Any, ...]:
    return tuple(mode for mode in internals.function_modes() if not isinstance(mode, TransparentMode))


_DEVICES = ("cpu", "cuda") if _CUDA_BUILT else ("cpu",)
_OFF = (False,) * len(_DEVICES)
_autocast, _autocast_dtype, _read_settings = (
    torch.is_autocast_enabled,
    torch.get_autocast_dtype,
    internals.read_settings,
)


class RestoredAmbient:
    """The settings and random streams of a first run, from construction until `leave`; then all is as it was found.

    Containers that context variables hold are put back too, unless it surrounds a `first_run`: what that collects stays.
    """

    __slots__ = ("_collectors", "_context", "_grad", "_settings", "_streams")

    def __init__(self, ambient: Ambient, draws: rng.Draws = rng.NONE_DRAWN, *, first_run: bool = False) -> None:
        now = capture()
        self._settings = now[0]
        self._grad = _is_grad_enabled()
        self._context: Any = None
        if now[:6] != ambient[:6] or now[1] != _OFF:  # an autocast is on
            self._context = _with_settings(ambient, now)
            self._context.__enter__()
        collects = not first_run and (now[6] or ambient[5])
        self._collectors: Iterable[Holder] = enter_collectors() if collects else ()
        self._streams = _rewind(draws)
        _set_grad_enabled(True)

    def __enter__(self) -> None:
        """Do nothing: it was entered when it was made."""

    def __exit__(self, *error: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Leave everything as it was found."""
        _set_grad_enabled(self._grad)
        _rewind(self._streams)
        for holder in self._collectors:
            holder.leave()
        if self._context is not None:
            self._context.__exit__(None, None, None)
        if (settings := _read_settings()) != self._settings:  # the stop came before the function had set them back
            _put_settings(settings, self._settings)


@contextmanager
def _with_settings(ambient: Ambient, now: Ambient) -> Iterator[None]:
    settings, enabled_then, dtypes, modes, cuda_device, bound, _ = ambient
    with ExitStack() as stack:
        bind(bound, stack)
        stack.callback(_put_settings, settings, now[0])
        _put_settings(now[0], settings)
        if cuda_device != now[4] and cuda_device is not None:
            stack.enter_context(torch.cuda.device(cuda_device))
        for mode in modes:  # `torch.set_default_device` is one of them
            if mode not in now[3]:
                stack.enter_context(mode)
        for kind, enabled, dtype in zip(_DEVICES, enabled_then, dtypes, strict=True):
            # Without the weight cache: a cast that lives in the cache belongs to another graph than the re-run's, and one
            # that the re-run left there would be found by code outside.
            if enabled or torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=False))
        yield


def _put_settings(present: list[Any], wanted: list[Any]) -> None:
    """Set what differs."""
    if present == wanted:
        return
    for (_, _, put), now, then in zip(internals.SETTINGS, present, wanted, strict=True):
        if now != then:
            put(then)

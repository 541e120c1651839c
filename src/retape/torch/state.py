"""Everything a re-run must see again beside its inputs: random streams, autocast, flags. One `capture`, one `replay`.

What a function reads through its arguments, closure and modules (tensors, training flags) is in `reads.py`.
A stream is kept only if the first run drew from it: `drawn` compares where it stood before and after. The tokens are the
streams' whole states, so comparing and restoring need no second copy.
"""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from retape.torch import _compat

Token = Any


class Stream(Protocol):
    """One source of random numbers: `peek` says where it stands, `seek` puts it there."""

    def peek(self) -> Token: ...
    def seek(self, token: Token) -> None: ...


class GeneratorStream:
    """A torch.Generator, of the CPU or of a device."""

    __slots__ = ("generator",)

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def peek(self) -> Token:
        return self.generator.get_state().numpy().tobytes()

    def seek(self, token: Token) -> None:
        self.generator.set_state(torch.frombuffer(bytearray(token), dtype=torch.uint8))


class PythonStream:
    """Python's `random`."""

    __slots__ = ()

    def peek(self) -> Token:
        words = _compat.python_random_bytes()
        return random.getstate() if words is None else (words, random._inst.gauss_next)  # type: ignore[attr-defined]

    def seek(self, token: Token) -> None:
        if isinstance(token[0], bytes):
            index, *words = struct.unpack(f"={len(token[0]) // 4}I", token[0])
            token = (3, (*words, index), token[1])
        random.setstate(token)


class NumpyStream:
    """numpy's global generator. Its full state is dear to copy, so one copy is shared until the generator moves.

    The legacy normal generator keeps a second number in hand, which it can give out without moving the state words:
    while it has one, words that stand still prove nothing, and the full state is read again.
    """

    __slots__ = ("_shared",)

    def __init__(self) -> None:
        self._shared: tuple[bytes, tuple[Any, ...]] | None = None

    def peek(self) -> Token:
        words = _compat.numpy_random_bytes()
        shared = self._shared
        if words is not None and shared is not None and shared[0] == words and not shared[1][3]:
            return shared[1][2:], words, shared[1]
        state = sys.modules["numpy.random"].get_state()
        words = words if words is not None else state[1].tobytes()
        self._shared = (words, state)
        return state[2:], words, state

    def seek(self, token: Token) -> None:
        sys.modules["numpy.random"].set_state(token[2])


_CPU = GeneratorStream(torch.default_generator)
_PYTHON = PythonStream()
_NUMPY = NumpyStream()


def _same(before: Token, after: Token) -> bool:
    # numpy's third entry is an array and has no plain truth value; the first two say it all.
    return bool(before[:2] == after[:2]) if isinstance(before, tuple) else bool(before == after)


Draws = tuple[tuple[Stream, Token], ...]


def streams(generators: tuple[torch.Generator, ...]) -> Draws:
    """Where every random stream stands that the caller could draw from."""
    found: list[Stream] = [_CPU, _PYTHON]
    if "numpy.random" in sys.modules:
        found.append(_NUMPY)
    found += [GeneratorStream(torch.cuda.default_generators[i]) for i in _compat.cuda_devices_in_use()]
    found += [GeneratorStream(generator) for generator in generators]
    return tuple((stream, stream.peek()) for stream in found)


def drawn(before: Draws) -> Draws:
    """Those of `before` that have moved since."""
    return tuple((stream, token) for stream, token in before if not _same(token, stream.peek()))


@contextmanager
def rewound(draws: Draws) -> Iterator[None]:
    """Put streams back to where they stood, and afterwards where they stand now."""
    now = [(stream, stream.peek()) for stream, _ in draws]
    try:
        for stream, token in draws:
            stream.seek(token)
        yield
    finally:
        for stream, token in now:
            stream.seek(token)


@dataclass(frozen=True, slots=True)
class Ambient:
    """What surrounds a call: PyTorch's settings, autocast for each device type, the default device, the current CUDA device."""

    settings: tuple[Any, ...]
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    default_device: torch.device | None
    cuda_device: int | None


def capture() -> Ambient:
    """What surrounds the caller now."""
    types = ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",)
    return Ambient(
        tuple([get() for _, get, _ in _compat.SETTINGS]),
        tuple([(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in types]),
        _compat.default_device(),
        torch.cuda.current_device() if len(types) > 1 else None,
    )


@contextmanager
def replay(ambient: Ambient, draws: Draws) -> Iterator[None]:
    """Surround a re-run with what surrounded the first run; afterwards all is as it was."""
    now = capture()
    with ExitStack() as stack:
        stack.enter_context(rewound(draws))
        stack.callback(_put_settings, ambient.settings, now.settings)
        _put_settings(now.settings, ambient.settings)
        if ambient.cuda_device is not None:
            stack.enter_context(torch.cuda.device(ambient.cuda_device))
        if ambient.default_device != now.default_device:
            stack.enter_context(ambient.default_device or torch.device("cpu"))
        for kind, enabled, dtype in ambient.autocast:
            # Without the weight cache: a cast that lives in the cache belongs to another graph than the re-run's, and one
            # that the re-run left there would be found by code outside.
            if enabled or torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=False))
        stack.enter_context(torch.enable_grad())
        yield


def _put_settings(present: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
    if present == wanted:
        return
    for (_, _, put), now, then in zip(_compat.SETTINGS, present, wanted, strict=True):
        if now != then:
            put(then)

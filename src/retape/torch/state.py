"""Everything a re-run must see again beside its inputs: random streams, autocast, flags. One `capture`, one `Replay`.

What a function reads through its arguments, closure and modules (tensors, training flags) is in `reads.py`.
A stream is kept only if the first run moved it: `drawn` compares where it stood before and after. torch's own are kept in any
case, in one copy that regions share until it moves. The tokens are the streams' whole states.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
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

    __slots__ = ("_last", "generator")

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self._last = b""

    def peek(self) -> Token:
        state = self.generator.get_state()  # on the CPU, whatever the generator's device
        token = ctypes.string_at(state.data_ptr(), state.numel())
        if token == self._last:  # regions that draw nothing share one copy
            return self._last
        self._last = token
        return token

    def seek(self, token: Token) -> None:
        self.generator.set_state(torch.frombuffer(bytearray(token), dtype=torch.uint8))


class ObjectStream:
    """A random.Random, or one of numpy's generator objects."""

    __slots__ = ("_get", "_put")

    def __init__(self, generator: Any) -> None:
        source = getattr(generator, "bit_generator", None)  # numpy's Generator
        if source is not None:
            self._get = lambda: _OtherState(source.state)
            self._put = lambda token: setattr(source, "state", token.state)
        elif hasattr(generator, "getstate"):
            self._get, self._put = generator.getstate, generator.setstate
        else:
            self._get = lambda: _OtherState(generator.get_state(legacy=False))
            self._put = lambda token: generator.set_state(token.state)

    def peek(self) -> Token:
        return self._get()

    def seek(self, token: Token) -> None:
        self._put(token)


class PythonStream:
    """Python's `random`. Its token is the raw state words and the spare normal number, or `getstate()` where those cannot be read."""

    __slots__ = ("_instance", "_words")

    def __init__(self) -> None:
        self._words = _compat.python_random_words()
        self._instance: Any = random._inst

    def peek(self) -> Token:
        return random.getstate() if self._words is None else (self._words.raw, self._instance.gauss_next)

    def seek(self, token: Token) -> None:
        if self._words is not None:
            index, *words = struct.unpack("=625I", token[0])
            token = (3, (*words, index), token[1])
        random.setstate(token)


class NumpyStream:
    """numpy's global generator: its state words, and the second number that its legacy normal generator keeps in hand."""

    __slots__ = ("_generator", "_spare", "_words")

    def __init__(self) -> None:
        self._generator: Any = None
        self._words: Any = None
        self._spare: Any = None

    def peek(self) -> Token:
        generator = _compat.numpy_generator()
        if generator is not self._generator:
            self._generator = generator
            self._words, self._spare = _compat.numpy_random_words(generator), _compat.numpy_spare_words()
        if self._words is None or self._spare is None:
            return _OtherState(sys.modules["numpy.random"].get_state(legacy=False))
        return self._words.raw, self._spare.raw

    def seek(self, token: Token) -> None:
        numpy_random = sys.modules["numpy.random"]
        if isinstance(token, _OtherState):
            numpy_random.set_state(token.state)
            return
        words = sys.modules["numpy"].frombuffer(token[0], dtype="uint32")
        has_spare, spare = struct.unpack("=ixxxxd", token[1])
        numpy_random.set_state(("MT19937", words[:624], int(words[624]), has_spare, spare))


class _OtherState:
    """The state of a bit generator that is not numpy's usual one, comparable by what it prints."""

    __slots__ = ("state",)

    def __init__(self, state: Any) -> None:
        self.state = state

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _OtherState) and repr(self.state) == repr(other.state)

    __hash__ = None  # type: ignore[assignment]


_CPU = GeneratorStream(torch.default_generator)
_PYTHON = PythonStream()
_NUMPY = NumpyStream()


# Random streams, and where each stood. A plain tuple: a region makes several, and a class costs more than what it holds.
Draws = tuple[tuple[Stream, ...], list[Token]]
NONE_DRAWN: Draws = ((), [])


def seek(draws: Draws) -> None:
    """Put streams where they stood."""
    for stream, token in zip(*draws, strict=True):
        stream.seek(token)


def streams(generators: Sequence[Any]) -> Draws:
    """Where every random stream stands that the caller could draw from; the first is the CPU's own."""
    found: tuple[Stream, ...] = _WITH_NUMPY if "numpy.random" in sys.modules else _WITHOUT_NUMPY
    devices = _compat.cuda_devices_in_use() if torch.cuda.is_initialized() else ()
    if devices or generators:
        others = [*[torch.cuda.default_generators[i] for i in devices], *generators]
        found = (*found, *[GeneratorStream(g) if isinstance(g, torch.Generator) else ObjectStream(g) for g in others])
    return found, [stream.peek() for stream in found]


_WITH_NUMPY = (_CPU, _PYTHON, _NUMPY)
_WITHOUT_NUMPY = (_CPU, _PYTHON)
_ONLY_CPU = (_CPU,)


def drawn(before: Draws) -> Draws:
    """Those of `before` that have moved since, and torch's own: `torch.random.fork_rng` draws and puts them back."""
    found, tokens = before
    if found is _WITH_NUMPY and _PYTHON.peek() == tokens[1] and _NUMPY.peek() == tokens[2]:
        return _ONLY_CPU, tokens[:1]
    kept = [i for i, stream in enumerate(found) if type(stream) is GeneratorStream or stream.peek() != tokens[i]]
    return tuple([found[i] for i in kept]), [tokens[i] for i in kept]


# What surrounds a call: PyTorch's settings, autocast for each device type, torch-function modes, the current CUDA device.
Ambient = tuple[list[Any], tuple[tuple[str, bool, torch.dtype], ...], tuple[Any, ...], int | None]


def capture() -> Ambient:
    """What surrounds the caller now."""
    settings = [get() for get in _GETTERS]
    modes = _compat.function_modes() if _compat.count_function_modes() else ()
    cpu = ("cpu", torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
    if not torch.cuda.is_initialized():
        return settings, (cpu,), modes, None
    cuda = ("cuda", torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"))
    return settings, (cpu, cuda), modes, torch.cuda.current_device()


_GETTERS = tuple(get for _, get, _ in _compat.SETTINGS)


class Replay:
    """Surrounds a re-run with what surrounded the first run; afterwards all is as it was."""

    __slots__ = ("_ambient", "_around", "_draws", "_grad", "_stood")

    def __init__(self, ambient: Ambient, draws: Draws) -> None:
        self._ambient = ambient
        self._draws = draws
        self._stood: list[Token] = []
        self._around: Any = None
        self._grad = True

    def __enter__(self) -> None:
        now = capture()
        self._grad = torch.is_grad_enabled()
        if now != self._ambient or now[1][0][1] or now[1][-1][1]:  # something is different, or autocast is on
            self._around = _as_then(self._ambient, now)
            self._around.__enter__()
        found, tokens = self._draws
        with _compat.unobserved():
            self._stood = [stream.peek() for stream in found]
            if self._stood != tokens:
                seek(self._draws)
        _compat.set_grad_enabled(True)

    def __exit__(self, *error: Any) -> None:
        _compat.set_grad_enabled(self._grad)
        found = self._draws[0]
        with _compat.unobserved():
            if [stream.peek() for stream in found] != self._stood:
                seek((found, self._stood))
        if self._around is not None:
            self._around.__exit__(*error)


@contextmanager
def _as_then(ambient: Ambient, now: Ambient) -> Iterator[None]:
    settings, autocast, modes, cuda_device = ambient
    with ExitStack() as stack:
        stack.callback(_put_settings, settings, now[0])
        _put_settings(now[0], settings)
        if cuda_device != now[3] and cuda_device is not None:
            stack.enter_context(torch.cuda.device(cuda_device))
        for mode in modes:  # `torch.set_default_device` is one of them
            if mode not in now[2]:
                stack.enter_context(mode)
        for kind, enabled, dtype in autocast:
            # Without the weight cache: a cast that lives in the cache belongs to another graph than the re-run's, and one
            # that the re-run left there would be found by code outside.
            if enabled or torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=False))
        yield


def _put_settings(present: list[Any], wanted: list[Any]) -> None:
    if present == wanted:
        return
    for (_, _, put), now, then in zip(_compat.SETTINGS, present, wanted, strict=True):
        if now != then:
            put(then)

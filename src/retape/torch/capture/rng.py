"""Random streams: where each one is before a call, and which ones the call has moved.

Streams are the CPU's and each used device's torch generator, Python's `random`, numpy's global generator, and generator objects that
a call can reach. `capture` returns all of them with their positions, `drawn` those that a call moved, and `seek` puts them back.
torch's generators are always kept, in one copy that regions share until it moves. A position is the stream's whole state.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from retape.torch.compat import internals

Token = Any
_CUDA_BUILT = internals.CUDA_BUILT


class Stream:
    """One source of random numbers: `peek` returns its position, `is_at` compares it, `seek` puts it there."""

    __slots__ = ()

    def peek(self) -> Token:
        raise NotImplementedError

    def is_at(self, token: Token) -> bool:
        return bool(self.peek() == token)

    def seek(self, token: Token) -> None:
        raise NotImplementedError


class GeneratorStream(Stream):
    """A torch.Generator of the CPU or of a device. Its token is the state as bytes."""

    __slots__ = ("_last", "generator", "position", "views")

    def __init__(self, generator: torch.Generator, position: Callable[[], Any] | None = None) -> None:
        """`position` returns a value that differs once a device's generator has moved; without it, its whole state is compared."""
        self.generator = generator
        words = internals.generator_words(generator)
        # Of the CPU's memory, where that can be read: they differ once it has moved.
        self.views: tuple[memoryview, ...] = () if words is None else (_part(words[0], 0), memoryview(words[1]))
        self.position = internals.generator_position(generator) if position is None else position
        # What `_look` returned when the state was last read, and that state.
        self._last: tuple[Any, bytes] = (None, b"")

    def _look(self) -> Any:
        """Return a value that differs once the generator has moved, or None if only its state tells."""
        if self.views:
            return _join(self.views)
        return None if self.position is None else self.position()

    def peek(self) -> Token:
        last, seen = self._last, self._look()
        if seen is not None and last[0] == seen:  # regions that draw nothing share one copy
            return last[1]
        state = self.generator.get_state()  # on the CPU, whatever the generator's device
        token = bytes(internals.memory_of(state))
        if token == last[1]:
            token = last[1]
        if seen == self._look():  # no other thread has drawn in between
            self._last = (seen, token)
        return token

    def is_at(self, token: Token) -> bool:
        last, seen = self._last, self._look()
        return last[0] == seen if seen is not None and last[1] is token else super().is_at(token)

    def seek(self, token: Token) -> None:
        self.generator.set_state(torch.frombuffer(bytearray(token), dtype=torch.uint8))


# The first words of a Mersenne twister and its index tell its position; its whole state is copied only when it has moved.
_GLIMPSE_BYTES = 96


_join = b"".join


def _part(words: Any, start: int, size: int = _GLIMPSE_BYTES) -> memoryview:
    """Return a view of some bytes of another view."""
    return memoryview((ctypes.c_char * size).from_buffer(words, start))


class ObjectStream(Stream):
    """A random.Random, or one of numpy's generator objects, or the bit generator of one."""

    __slots__ = ("_get", "_put")

    def __init__(self, generator: Any) -> None:
        source = getattr(generator, "bit_generator", generator)  # of numpy's Generator, or itself
        if hasattr(source, "state"):
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


class PythonStream(Stream):
    """Python's `random`. Its token is the raw state words and the spare normal number, or `getstate()` where those cannot be read."""

    __slots__ = ("_last", "_words", "instance", "views")

    def __init__(self) -> None:
        self._words = internals.python_random_words()
        # The index comes first.
        self.views: tuple[memoryview, ...] = () if self._words is None else (_part(self._words, 0),)
        self.instance: Any = random._inst
        self._last: tuple[bytes, Any] = (b"", None)

    def peek(self) -> Token:
        if self._words is None:
            return random.getstate()
        last, spare = self._last, self.instance.gauss_next
        if spare is last[1] and last[0].startswith(bytes(self.views[0])):
            return last
        self._last = last = (self._words.raw, spare)
        return last

    def seek(self, token: Token) -> None:
        if self._words is not None:
            index, *words = struct.unpack("=625I", token[0])
            token = (3, (*words, index), token[1])
        random.setstate(token)


class NumpyStream(Stream):
    """numpy's global generator: its state words, and the spare number of its legacy normal generator."""

    __slots__ = ("_generator", "_last", "_words", "current", "views")

    def __init__(self) -> None:
        self.current: Any = None
        self.views: tuple[
            memoryview, ...
        ] = ()  # of the first words, the index and the spare number, where they can be read
        self._generator: Any = None
        self._words: Any = None
        self._last: tuple[bytes, bytes] = (b"", b"")

    def _find_words(self, generator: Any) -> None:
        self.current = getattr(sys.modules["numpy.random"], "get_bit_generator", None)  # numpy 1.24 and later have it
        self._generator = generator
        self._words, spare = internals.numpy_random_words(generator), internals.numpy_spare_words()
        self.views = ()
        if self._words is not None and spare is not None:
            self.views = (_part(self._words, 0), _part(self._words, 624 * 4, 4), memoryview(spare))
        self._last = (b"", b"")

    def peek(self) -> Token:
        generator = self.current() if self.current is not None else internals.numpy_generator()
        if generator is not self._generator:
            self._find_words(generator)
        if not self.views:
            return _OtherState(sys.modules["numpy.random"].get_state(legacy=False))
        first, index, spare = self.views
        last = self._last
        if last[1] == bytes(spare) and last[0].startswith(bytes(first)) and last[0].endswith(bytes(index)):
            return last
        self._last = last = (self._words.raw, bytes(spare))
        return last

    def seek(self, token: Token) -> None:
        numpy_random = sys.modules["numpy.random"]
        if isinstance(token, _OtherState):
            numpy_random.set_state(token.state)
            return
        words = sys.modules["numpy"].frombuffer(token[0], dtype="uint32")
        has_spare, spare = struct.unpack("=ixxxxd", token[1])
        numpy_random.set_state(("MT19937", words[:624], int(words[624]), has_spare, spare))


class _OtherState:
    """The state of a bit generator other than MT19937, compared by its repr."""

    __slots__ = ("state",)

    def __init__(self, state: Any) -> None:
        self.state = state

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _OtherState) and repr(self.state) == repr(other.state)

    __hash__ = None  # type: ignore[assignment]


_CPU = GeneratorStream(torch.default_generator)
_PYTHON = PythonStream()
_NUMPY = NumpyStream()


# Random streams and their positions. A plain tuple: a region makes three, and creating an object of a class takes longer.
Draws = tuple[tuple[Stream, ...], list[Token]]
NONE_DRAWN: Draws = ((), [])


def moved(draws: Draws) -> bool:
    """True if one of the streams is not where it was."""
    return not all(stream.is_at(token) for stream, token in zip(*draws, strict=True))


def drawn_by_python(draws: Draws) -> bool:
    """True if a stream outside torch is among these: random numbers may decide what Python does, which no op shows."""
    return any(not isinstance(stream, GeneratorStream) for stream in draws[0])


def seek(draws: Draws) -> None:
    """Put streams at these positions, if they have moved."""
    for stream, token in zip(*draws, strict=True):
        if not stream.is_at(token):
            with internals.unobserved():
                stream.seek(token)


def rewind(draws: Draws) -> Draws:
    """Put streams at these positions; return the positions they had, for another `rewind`."""
    if draws[0] is _SHARED.of_torch and not moved(draws):
        return draws
    before = draws[0], peek(draws[0])
    seek(draws)
    return before


def peek(found: tuple[Stream, ...]) -> list[Token]:
    """Return the positions of streams."""
    if found is _SHARED.of_torch:
        return [stream.peek() for stream in found]
    with internals.unobserved():
        return [stream.peek() for stream in found]


def capture(generators: Sequence[Any]) -> Draws:
    """Return every stream that the caller could draw from, with its position; the first is the CPU's.

    Those of the process are in `SharedPositions`; `generators` are those that the call reaches.
    """
    devices = internals.cuda_devices_in_use() if _CUDA_BUILT and internals.cuda_initialized() else ()
    if devices != _SHARED.devices:
        _SHARED.use(devices, [GeneratorStream(torch.cuda.default_generators[number]) for number in devices])
    if "numpy.random" not in sys.modules:
        found: tuple[Stream, ...] = (_CPU, _PYTHON, *_SHARED.of_torch[1:])
    elif generators:
        found = _SHARED.streams
    else:
        last = _SHARED.last
        return last[1] if last[0] is not None and last[0] == _SHARED.look() else _SHARED.record()
    more = [GeneratorStream(g) if isinstance(g, torch.Generator) else ObjectStream(g) for g in generators]
    found = (*found, *more)
    return found, peek(found)


class SharedPositions:
    """The streams of the process, compared at once: regions that draw nothing share one record of positions."""

    __slots__ = ("devices", "last", "of_torch", "positions", "streams", "views")

    def __init__(self) -> None:
        self.use((), [])

    def use(self, devices: tuple[int, ...], streams: Sequence[GeneratorStream]) -> None:
        """Include the streams of these CUDA devices."""
        self.devices = devices
        self.streams: tuple[Stream, ...] = (_CPU, _PYTHON, _NUMPY, *streams)
        self.of_torch: tuple[GeneratorStream, ...] = (_CPU, *streams)
        self.positions = [stream.position for stream in streams if stream.position is not None]
        self.views: tuple[memoryview, ...] = ()
        # What `look` returned last (None before the first time), the positions of all streams, and those of torch's.
        self.last: tuple[tuple[Any, ...] | None, Draws, Draws] = (None, NONE_DRAWN, NONE_DRAWN)

    def look(self) -> tuple[Any, ...]:
        """Return a value that differs once one of them has moved."""
        seen = (_join(self.views), _PYTHON.instance.gauss_next, _NUMPY.current())
        return (*seen, *[position() for position in self.positions]) if self.positions else seen

    def record(self) -> Draws:
        draws: Draws = self.streams, [stream.peek() for stream in self.streams]
        self.last = (None, NONE_DRAWN, NONE_DRAWN)  # its views may be invalid by now
        can_be_seen = _CPU.views and _PYTHON.views and _NUMPY.views and _NUMPY.current is not None
        if can_be_seen and len(self.positions) == len(self.devices):
            self.views = (*_CPU.views, *_PYTHON.views, *_NUMPY.views)
            seen = self.look()
            if draws[1] == [stream.peek() for stream in self.streams]:  # no other thread has drawn in between
                self.last = (seen, draws, self.without_others(draws[1]))
        return draws

    def without_others(self, tokens: list[Token]) -> Draws:
        """Return torch's streams and their positions, of those of all streams."""
        return self.of_torch, [tokens[0], *tokens[3:]]


_SHARED = SharedPositions()


def drawn(before: Draws) -> Draws:
    """Return the streams of `before` that have moved, and torch's: `torch.random.fork_rng` draws and puts them back."""
    last = _SHARED.last
    if last[0] is not None and before is last[1] and last[0] == _SHARED.look():
        return last[2]
    found, tokens = before
    if found is _SHARED.streams and _PYTHON.peek() == tokens[1] and _NUMPY.peek() == tokens[2]:
        return _SHARED.without_others(tokens)
    kept = [i for i, stream in enumerate(found) if type(stream) is GeneratorStream or stream.peek() != tokens[i]]
    return tuple([found[i] for i in kept]), [tokens[i] for i in kept]

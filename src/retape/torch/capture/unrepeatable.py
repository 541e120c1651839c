"""Iterators that a call advances, and caches that it fills with random numbers: a re-run would read something else.

Neither can be restored. The walk of a call notes the position of each one that it meets; after the call, `used_up` tells which the call
has moved. Not here: iterators of users' classes, whose fields are restored as those of any object; files, and iterators of C extensions.
"""

from __future__ import annotations

import functools
import gc
import itertools
import operator
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

_MODULES = frozenset({"builtins", "itertools", "_collections", "collections"})  # where a deque's is differs by release
_MADE_AT_RUN_TIME = 1 << 9  # Py_TPFLAGS_HEAPTYPE: by `exec`, which claims to be built in
CACHED = type(functools.lru_cache(lambda: None))
# Iterators whose position only their `__reduce__` tells.
_TOLD_BY_REDUCE = tuple(map(type, (iter([]), reversed([]), iter(range(1 << 70)), itertools.tee(())[0])))
_SHORT = 16  # items of the tuples in which iterators keep others and their last result
# Names that only code which draws has; `dropout` or `normal` are settings as often.
_DRAWING = frozenset(
    {
        *(
            "rand",
            "randn",
            "randint",
            "randperm",
            "rand_like",
            "randn_like",
            "randint_like",
            "bernoulli",
            "multinomial",
        ),
        *("random_", "normal_", "uniform_", "bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_"),
        *("trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_", "orthogonal_"),
        *("gumbel_softmax", "rsample", "standard_normal", "randbytes", "manual_seed"),
    }
)


@functools.lru_cache(maxsize=4096)
def is_iterator(kind: type) -> bool:
    """True for classes of iterators that Python itself has: generators, `itertools`, those of lists, dicts and ranges."""
    own = kind.__module__ in _MODULES and hasattr(kind, "__next__")
    return own and not (kind.__module__ == "builtins" and kind.__flags__ & _MADE_AT_RUN_TIME)


class WatchedIterator:
    """An iterator, and its position before a call."""

    __slots__ = ("_position", "iterator")

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator
        self._position = position(iterator)

    @property
    def inner(self) -> list[Any]:
        """The iterators from which it reads, and functions that it calls."""
        found = _referents(self.iterator)
        if type(self.iterator) is types.GeneratorType:
            return [each for each in found if hasattr(type(each), "__next__")]
        return [each for each in found if hasattr(type(each), "__next__") or isinstance(each, _CALLED)]

    def has_moved(self) -> bool:
        now = position(self.iterator)
        return len(now) != len(self._position) or not all(map(_is_same, now, self._position))


_CALLED = (types.FunctionType, types.MethodType, functools.partial)


class WatchedCache:
    """A function with a cache (`functools.lru_cache`) that may draw random numbers, and its misses before a call."""

    __slots__ = ("_misses", "function")

    def __init__(self, function: Any) -> None:
        self.function = function
        self._misses = function.cache_info().misses

    def has_missed(self) -> bool:
        return bool(self.function.cache_info().misses != self._misses)


def may_draw(names: Iterable[str]) -> bool:
    """True if code that mentions these names may draw random numbers."""
    return not _DRAWING.isdisjoint(names)


# --- positions --------------------------------------------------------------------------------------------------------


def position(iterator: Any) -> list[Any]:
    """Return what differs once an iterator has been advanced; objects in it are compared by identity."""
    kind: Any = type(iterator)
    if kind is types.GeneratorType:
        return _position_of_generator(iterator)
    if kind is itertools.count:
        return [repr(iterator)]
    if kind in _TOLD_BY_REDUCE:
        return [part for group in _reduced(iterator)[1:] for part in (group if isinstance(group, tuple) else (group,))]
    if kind is itertools.cycle:
        return _position_of_cycle(iterator)
    return [operator.length_hint(iterator, -1), *_referents(iterator)]


def _position_of_generator(generator: Any) -> list[Any]:
    """Return the instruction where it waits, with its variables and the iterators of its loops."""
    if generator.gi_running:  # it makes the call itself
        return []
    frame = generator.gi_frame
    return [None if frame is None else frame.f_lasti, *_referents(generator)]


def _position_of_cycle(cycle: Any) -> list[Any]:
    """Return the position of the iterator behind it, which after the first pass is one over what was saved."""
    reduced = _reduced(cycle)
    if len(reduced) < 3:  # Python 3.14 and later do not tell
        return _referents(cycle)
    return [*position(reduced[1][0]), len(reduced[2][0])]


def _reduced(iterator: Any) -> tuple[Any, ...]:
    """Return what pickling asks for; for `itertools` Python 3.12 warns that it will not be told later."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return tuple(iterator.__reduce__())
        except TypeError:
            return ()


def _referents(iterator: Any) -> list[Any]:
    """Return the objects that an iterator refers to, with the items of short tuples."""
    found: list[Any] = []
    referents = gc.get_referents(iterator)
    for each in [*referents, *_variables_of(iterator)]:
        if type(each) is tuple and len(each) <= _SHORT:
            found.extend(each)
        elif type(each) is not types.FrameType:
            found.append(each)
    return found


def _variables_of(iterator: Any) -> list[Any]:
    """Return what the frame of a generator refers to, which before Python 3.11 is not told by the generator."""
    frame = getattr(iterator, "gi_frame", None)
    return [] if frame is None else [each for each in gc.get_referents(frame) if type(each) is not dict]


def _is_same(now: Any, then: Any) -> bool:
    return now is then or (type(now) is type(then) and type(now) in (int, str, range) and now == then)


# --- after a call -----------------------------------------------------------------------------------------------------


class UsedUp(NamedTuple):
    """An iterator or a cache that a call has used up, in words; `is_cache` if it is a function with a cache."""

    words: str
    is_cache: bool


Watched: TypeAlias = "Sequence[WatchedIterator | WatchedCache]"
Spaces: TypeAlias = "Callable[[], Iterator[dict[Any, Any]]]"


def used_up(watched: Watched, spaces: Spaces, *, drew: bool, kept: bool) -> UsedUp | None:
    """Return what a call, which has just returned, has used up; values of iterators that it `kept` are read again.

    `spaces` returns the dicts in which names for iterators are looked up.
    """
    for each in watched:
        if isinstance(each, WatchedCache):
            if drew and each.has_missed():
                return UsedUp(getattr(each.function, "__qualname__", "a function"), True)
        elif not kept and each.has_moved():
            return UsedUp(_words_for(each.iterator, watched, spaces), False)
    return None


def _words_for(iterator: Any, watched: Watched, spaces: Spaces) -> str:
    """Return the name of a variable or field that has an iterator, or one around it, and what that is."""
    around = [iterator]
    for each in reversed(watched):  # in the order of the walk, which meets the outer ones first
        if isinstance(each, WatchedIterator) and any(inner is around[-1] for inner in each.inner):
            around.append(each.iterator)
    for each in around:
        for space in spaces():
            for name, value in list(space.items()):
                if value is each and isinstance(name, str):
                    return f"{name!r} ({_kind_of(each)})"
    return f"({_kind_of(around[-1])})"


def _kind_of(iterator: Any) -> str:
    kind = type(iterator).__qualname__
    return f"{kind} {iterator.__qualname__!r}" if kind == "generator" else kind

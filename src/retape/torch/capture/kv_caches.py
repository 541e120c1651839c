"""Key-value caches that Hugging Face models build even in training, where nobody reads them: regions get none.

Transformers' own checkpointing leaves every cache out. Here only a cache is left out that is empty when it reaches a region and
that the caller did not give to the model. One that holds something (a chunk before this one, a trained prefix, whoever made it) is
a part of the computation: it stays, and a re-run sees it as it was. A cache that was left out and is given to a model again would
be read as an empty one: that is an error.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from retape.core.errors import RegionError
from retape.torch.capture.containers import ATOMS, DictHolder, tracked

_NAMES = ("past_key_values", "past_key_value", "layer_past")  # of keywords whose cache may be None instead
_MOST_DEPTH = 6  # a cache for decoders beside encoders, its part, that one's layers, a layer, its tensors


def is_cache(value: Any) -> bool:
    """Whether this is a cache object of Hugging Face's, told by its class without importing it."""
    kind: type = type(value)
    return _is_cache_class(kind)


@lru_cache(maxsize=1024)
def _is_cache_class(kind: type) -> bool:
    return any(base.__name__ == "Cache" and base.__module__.startswith("transformers") for base in kind.__mro__)


def is_empty(cache: Any) -> bool:
    """Whether a cache holds no numbers yet: nothing depends on it, and only its filling would be missed."""
    return not any(tensor.numel() for tensor in _tensors_in(cache, 0))


def _tensors_in(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    if depth >= _MOST_DEPTH or isinstance(value, type):
        return
    fields = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    for part in value if isinstance(value, (list, tuple)) else fields.values():
        yield from _tensors_in(part, depth + 1)


class _Thread(threading.local):
    given: tuple[weakref.ref[Any], ...] = ()


_THREAD = _Thread()
# Caches that were left out, by identity: the caches, and the modules that did not get them.
_LEFT_OUT: dict[int, tuple[weakref.ref[Any], set[int]]] = {}


def caches_in(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> list[Any]:
    """The caches among the arguments of a call."""
    return [value for value in (*arguments, *keywords.values()) if is_cache(value)]


def note_given(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """A model is called with these: caches among them are the caller's, and stay even if they are empty."""
    given = caches_in(arguments, keywords)
    for cache in given:
        if id(cache) in _LEFT_OUT:
            raise _comes_back(cache)
    _THREAD.given = tuple(weakref.ref(cache) for cache in given)


def _leave_out(cache: Any, module: nn.Module) -> None:
    """Note that a module does not get this cache, for as long as the cache lives."""
    number = id(cache)
    if number not in _LEFT_OUT:
        _LEFT_OUT[number] = (weakref.ref(cache, lambda _: _LEFT_OUT.pop(number, None)), set())
    _LEFT_OUT[number][1].add(id(module))


def _refuse_again(cache: Any, module: nn.Module) -> None:
    """An error where a module did not get the same cache before.

    A model that makes a cache for itself makes another one in each forward. In one that comes again, what came before is missing.
    """
    if id(cache) in _LEFT_OUT and id(module) in _LEFT_OUT[id(cache)][1]:
        raise _comes_back(cache)


def _comes_back(cache: Any) -> RegionError:
    return RegionError(
        f"This {type(cache).__name__} was left out of an earlier forward in training: regions do not fill a key-value cache that a "
        "model made for itself, because a re-run would fill it twice. Now a forward is to read it. Make the cache yourself and give "
        "it to the model itself, from the first call on (past_key_values=DynamicCache(config=model.config)): such a cache is kept by "
        "retape.fit and retape.adaptive. Or pass use_cache=False."
    )


def _is_left_out(value: Any) -> bool:
    if not is_cache(value) or not is_empty(value):
        return False
    given = [reference() for reference in _THREAD.given]
    # A model may put the caller's into one of its own, for decoders beside encoders.
    return not any(one is each for each in given for one in (value, *vars(value).values()) if each is not None)


def without_cache(
    module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """The arguments of a block in training without an empty cache of the model's own, and whether there was one."""
    if not module.training:
        return arguments, keywords, False
    for cache in caches_in(arguments, keywords):
        _refuse_again(cache, module)
    may_go = (*arguments, *(keywords[name] for name in _NAMES if name in keywords))
    dropped = {id(value): value for value in may_go if _is_left_out(value)}
    if not dropped:
        return arguments, keywords, False
    for cache in dropped.values():
        _leave_out(cache, module)
    keywords = {key: None if id(value) in dropped and key in _NAMES else value for key, value in keywords.items()}
    if keywords.get("use_cache"):
        keywords["use_cache"] = False
    return tuple(None if id(value) in dropped else value for value in arguments), keywords, True


# --- a cache that stays: what it counts ------------------------------------------------------------------------------


class CacheFields(DictHolder):
    """The fields of a cache or of one of its layers: plain values are as they were too, and not only tensors.

    Elsewhere plain values are the user's own. Those of a cache (its length, whether it is filled) belong to its tensors: a re-run
    must see them as they were, and must not count twice.
    """

    __slots__ = ()

    def __init__(self, container: dict[Any, Any]) -> None:
        super().__init__(container)
        self.then = {key: tracked(v) if isinstance(v, Tensor) else v for key, v in container.items() if _counts(v)}

    def enter(self) -> None:
        super().enter()
        for key in [key for key, value in self.container.items() if _counts(value) and key not in self.then]:
            del self.container[key]

    def leave(self) -> None:
        """Everything is again what it was before the re-run, in the same order."""
        kept, self._kept = self._kept, None
        if kept is not None:
            self.container.clear()
            self.container.update(kept)


def _counts(value: Any) -> bool:
    return type(value) in ATOMS or isinstance(value, Tensor)


def as_cache(holders: list[Any]) -> list[Any]:
    """The holders of what a walk met behind a cache, with its dicts taken as the cache's own."""
    return [CacheFields(holder.container) if type(holder) is DictHolder else holder for holder in holders]


# --- Transformers' own switch leaves every cache out: a hook for the models that carry it ----------------------------


def refuse_cache(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """A forward pre-hook: an error where Transformers would drop a cache that holds something."""
    if not (module.training and torch.is_grad_enabled()):
        return
    for cache in caches_in(arguments, keywords):
        _refuse_again(cache, module)
        if not is_empty(cache):
            raise RegionError(
                f"{type(module).__name__} was given a {type(cache).__name__} that holds keys and values (a trained prefix, a chunk "
                "before this one), and under gradient checkpointing Transformers leaves it out: loss and gradients would be wrong. "
                "Use retape.fit or retape.adaptive instead of this switch: both keep it."
            )
        _leave_out(cache, module)

"""Key-value caches that Hugging Face models build even in training, where nothing reads them: regions get none.

Transformers' own checkpointing leaves every cache out. Here a cache is left out only if it is empty when it reaches a region and
the caller did not give it to the model. A cache with contents (an earlier chunk, a trained prefix) is part of the computation: it
stays, and a re-run sees it as it was. A cache that was left out and is given to a model again would be read as empty: an error.
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
from retape.torch.model_libraries import RegionArguments

_NAMES = ("past_key_values", "past_key_value", "layer_past")  # keywords whose cache may be replaced by None
_MAX_DEPTH = 6  # from an encoder-decoder cache to its tensors: cache, part, list of layers, layer, list, tensor
_NOTE = "no key-value cache is built in training, because a re-run would fill it twice"


@lru_cache(maxsize=1024)
def is_cache_class(kind: type) -> bool:
    """True if this class is a cache of Transformers, recognised by name so that nothing is imported."""
    return any(base.__name__ == "Cache" and base.__module__.startswith("transformers") for base in kind.__mro__)


def is_empty(cache: Any) -> bool:
    """True if a cache holds no numbers yet, so that no result depends on it."""
    return not any(tensor.numel() for tensor in _tensors_in(cache, 0))


def _tensors_in(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    if depth >= _MAX_DEPTH or isinstance(value, type):
        return
    fields = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    for part in value if isinstance(value, (list, tuple)) else fields.values():
        yield from _tensors_in(part, depth + 1)


def _caches_in(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> list[Any]:
    values = (*arguments, *keywords.values())
    return [value for value, kind in zip(values, map(type, values), strict=True) if is_cache_class(kind)]


class _GivenCaches(threading.local):
    caches: tuple[weakref.ref[Any], ...] = ()  # caches that the caller gave to the model that runs now


class CacheUse:
    """Caches that callers gave to models, and caches that were left out of regions, with the modules that did not get them."""

    def __init__(self) -> None:
        self._current = _GivenCaches()
        self._left_out: dict[int, tuple[weakref.ref[Any], set[int]]] = {}

    def begin_forward(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Note that a model is called with these: caches among them are the caller's, and stay even if they are empty."""
        given = _caches_in(arguments, keywords)
        for cache in given:
            if id(cache) in self._left_out:
                raise _read_after_left_out(cache)
        self._current.caches = tuple(weakref.ref(cache) for cache in given)

    def left_out(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> RegionArguments:
        """Return the arguments of a layer in training without an empty cache of the model's own."""
        caches = _caches_in(arguments, keywords) if module.training else []
        for cache in caches:
            self.refuse_again(cache, module)
        may_go = {id(value) for value in (*arguments, *(keywords.get(name) for name in _NAMES))} if caches else ()
        dropped = {id(cache): cache for cache in caches if id(cache) in may_go and self._is_left_out(cache)}
        if not dropped:
            return RegionArguments(arguments, keywords)
        for cache in dropped.values():
            self.leave_out(cache, module)
        keywords = {key: None if id(value) in dropped and key in _NAMES else value for key, value in keywords.items()}
        if keywords.get("use_cache"):
            keywords["use_cache"] = False
        return RegionArguments(tuple(None if id(value) in dropped else value for value in arguments), keywords, _NOTE)

    def _is_left_out(self, cache: Any) -> bool:
        """True if a cache is empty and not the caller's; an encoder-decoder model puts the caller's into one of its own."""
        if not is_empty(cache):
            return False
        given = [reference() for reference in self._current.caches]
        return not any(one is each for each in given for one in (cache, *vars(cache).values()) if each is not None)

    def leave_out(self, cache: Any, module: nn.Module) -> None:
        """Note that a module does not get this cache, for as long as the cache lives."""
        number = id(cache)
        if number not in self._left_out:
            self._left_out[number] = (weakref.ref(cache, lambda _: self._left_out.pop(number, None)), set())
        self._left_out[number][1].add(id(module))

    def refuse_again(self, cache: Any, module: nn.Module) -> None:
        """Raise `RegionError` if this module did not get the same cache before.

        A model that makes a cache for itself makes a new one in each forward. One that comes again lacks the earlier contents.
        """
        if id(cache) in self._left_out and id(module) in self._left_out[id(cache)][1]:
            raise _read_after_left_out(cache)


def _read_after_left_out(cache: Any) -> RegionError:
    return RegionError(
        f"This {type(cache).__name__} was left out of an earlier forward in training: regions do not fill a key-value cache that a "
        "model made for itself, because a re-run would fill it twice. Now a forward is to read it. Make the cache yourself and give "
        "it to the model itself, from the first call on (past_key_values=DynamicCache(config=model.config)): such a cache is kept by "
        "retape.fit and retape.adaptive. Or pass use_cache=False."
    )


CACHES = CacheUse()


def refuse_cache(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Raise `RegionError` where Transformers' own switch would drop a cache with contents; a forward pre-hook."""
    if not (module.training and torch.is_grad_enabled()):
        return
    for cache in _caches_in(arguments, keywords):
        CACHES.refuse_again(cache, module)
        if not is_empty(cache):
            raise RegionError(
                f"{type(module).__name__} was given a {type(cache).__name__} that holds keys and values (a trained prefix, a chunk "
                "before this one), and under gradient checkpointing Transformers leaves it out: loss and gradients would be wrong. "
                "Use retape.fit or retape.adaptive instead of this switch: both keep it."
            )
        CACHES.leave_out(cache, module)

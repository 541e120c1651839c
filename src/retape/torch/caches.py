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
from typing import Any

import torch
from torch import Tensor, nn

from retape.core.errors import RegionError

_NAMES = ("past_key_values", "past_key_value", "layer_past")
_MOST_DEPTH = 6  # a cache for decoders beside encoders, its part, that one's layers, a layer, its tensors


def is_cache(value: Any) -> bool:
    """Whether this is a cache object of Hugging Face's, told by its class without importing it."""
    return any(base.__name__ == "Cache" and base.__module__.startswith("transformers") for base in type(value).__mro__)


def is_empty(cache: Any) -> bool:
    """Whether a cache holds no numbers yet: nothing depends on it, and only its filling would be missed."""
    return not any(tensor.numel() for tensor in _tensors_in(cache, 0))


def _tensors_in(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth < _MOST_DEPTH and not isinstance(value, type):
        parts = value.values() if isinstance(value, dict) else value
        if not isinstance(value, (dict, list, tuple)):
            parts = getattr(value, "__dict__", {}).values()
        for part in parts:
            yield from _tensors_in(part, depth + 1)


class _Thread(threading.local):
    given: tuple[weakref.ref[Any], ...] = ()


_THREAD = _Thread()
# Caches that were left out, by identity: the caches, and the modules that did not get them.
_LEFT_OUT: dict[int, tuple[weakref.ref[Any], set[int]]] = {}
_RETURNED = 0  # in place of a module, which is never at address 0: a forward is over, and returned the cache


def caches_in(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> list[Any]:
    """The caches among the arguments of a call."""
    return [value for value in (*arguments, *keywords.values()) if is_cache(value)]


def note_given(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """A model is called with these: caches among them are the caller's, and stay even if they are empty."""
    given = caches_in(arguments, keywords)
    for cache in given:
        if _was_left_out(cache):
            raise _comes_back(cache)
    _THREAD.given = tuple(weakref.ref(cache) for cache in given)


def _was_left_out(cache: Any) -> bool:
    return id(cache) in _LEFT_OUT and is_empty(cache)


def _leave_out(cache: Any, module: nn.Module) -> None:
    """Note that a module does not get this empty cache; an error where it did not get the same one before.

    A model that makes a cache for itself makes another one in each forward. One that comes again holds what came before.
    """
    modules = _kept_from(cache)
    if not modules.isdisjoint((id(module), _RETURNED)):
        raise _comes_back(cache)
    modules.add(id(module))


def _kept_from(cache: Any) -> set[int]:
    """The modules that did not get this cache; noted for as long as it lives."""
    number = id(cache)
    if number not in _LEFT_OUT:
        _LEFT_OUT[number] = (weakref.ref(cache, lambda _: _LEFT_OUT.pop(number, None)), set())
    return _LEFT_OUT[number][1]


def _comes_back(cache: Any) -> RegionError:
    return RegionError(
        f"This {type(cache).__name__} was left empty by an earlier forward in training: regions do not fill a key-value cache that a "
        "model made for itself, because a re-run would fill it twice. Now a forward is to read it. Make the cache yourself and give "
        "it to the model that was fitted, from the first call on (past_key_values=DynamicCache(config=model.config)): such a cache "
        "is kept by fit and adaptive. Or pass use_cache=False."
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
    found = [name for name in _NAMES if _is_left_out(keywords.get(name))]
    positions = [i for i, value in enumerate(arguments) if _is_left_out(value)]
    if not found and not positions:
        return arguments, keywords, False
    dropped = (*(keywords[name] for name in found), *(arguments[i] for i in positions))
    for cache in {id(each): each for each in dropped}.values():
        _leave_out(cache, module)
    keywords = {**keywords, **dict.fromkeys(found)}
    if keywords.get("use_cache"):
        keywords["use_cache"] = False
    return tuple(None if i in positions else value for i, value in enumerate(arguments)), keywords, True


# --- Transformers' own switch leaves every cache out: hooks for the models that carry it -----------------------------


def refuse_cache(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """A forward pre-hook: an error where Transformers would drop a cache that holds something."""
    if not (module.training and torch.is_grad_enabled()):
        return
    for cache in caches_in(arguments, keywords):
        if not is_empty(cache):
            raise RegionError(
                f"{type(module).__name__} was given a {type(cache).__name__} that holds keys and values (a trained prefix, a chunk "
                "before this one), and under gradient checkpointing Transformers leaves it out: loss and gradients would be wrong. "
                "Use retape.fit or retape.adaptive instead of this switch: both keep it."
            )
        _leave_out(cache, module)


def note_left_out(module: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
    """A forward hook: what a model returns as its cache was left out, if it is empty."""
    cache = getattr(output, "past_key_values", None)
    if module.training and torch.is_grad_enabled() and is_cache(cache) and is_empty(cache):
        _kept_from(cache).add(_RETURNED)

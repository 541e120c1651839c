"""Key-value caches that Hugging Face models build even in training, where nobody reads them: blocks get none.

Their own checkpointing leaves them out too. A cache that the caller gave to the model (a chunk before this one, a trained prefix)
is a part of the computation: it stays, and a re-run sees it as it was.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from torch import nn

_NAMES = ("past_key_values", "past_key_value", "layer_past")


def is_cache(value: Any) -> bool:
    """Whether this is a cache object of Hugging Face's, told by its class without importing it."""
    return any(base.__name__ == "Cache" and base.__module__.startswith("transformers") for base in type(value).__mro__)


class _Thread(threading.local):
    given: tuple[weakref.ref[Any], ...] = ()


_THREAD = _Thread()


def note_given(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """A model is called with these: caches among them are the caller's."""
    _THREAD.given = tuple(weakref.ref(value) for value in (*arguments, *keywords.values()) if is_cache(value))


def _is_left_out(value: Any) -> bool:
    if not is_cache(value):
        return False
    given = [reference() for reference in _THREAD.given]
    # A model may put the caller's into one of its own, for decoders beside encoders.
    return not any(one is each for each in given for one in (value, *vars(value).values()) if each is not None)


def without_cache(
    module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """The arguments of a block in training without a cache of the model's own, and whether there was one."""
    if not module.training:
        return arguments, keywords, False
    found = [name for name in _NAMES if _is_left_out(keywords.get(name))]
    positions = [i for i, value in enumerate(arguments) if _is_left_out(value)]
    if not found and not positions:
        return arguments, keywords, False
    keywords = {**keywords, **dict.fromkeys(found)}
    if keywords.get("use_cache"):
        keywords["use_cache"] = False
    return tuple(None if i in positions else value for i, value in enumerate(arguments)), keywords, True

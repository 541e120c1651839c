"""Key-value caches that Hugging Face models build even in training, where nobody reads them: blocks get none.

A cache with something in it was given by the caller (a chunk before this one, a trained prefix) and is a part of the computation:
it stays, and a re-run sees it as it was.
"""

from __future__ import annotations

from typing import Any

from torch import nn

_NAMES = ("past_key_values", "past_key_value", "layer_past")


def is_cache(value: Any) -> bool:
    """Whether this is a cache object of Hugging Face's, told by its class without importing it."""
    return any(base.__name__ == "Cache" and base.__module__.startswith("transformers") for base in type(value).__mro__)


def _is_left_out(value: Any) -> bool:
    return is_cache(value) and int(value.get_seq_length()) == 0


def without_cache(
    module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """The arguments of a block in training without an empty cache, and whether there was one."""
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

"""The former place of names that scripts from before the packages import; they are in `engine/context.py`."""

from retape.torch.engine.context import is_plain, keep, plain, recomputing

__all__ = ["is_plain", "keep", "plain", "recomputing"]

"""The former place of names that scripts from before the packages import; they live in `engine/runs.py`."""

from retape.torch.engine.context import is_plain, keep, plain, recomputing

__all__ = ["is_plain", "keep", "plain", "recomputing"]

"""Channel: values of Python in the store of a process group, which every rank reads at any time, also beside a collective.

A store does not wait for the other ranks as a collective does, and it stays usable when a collective has failed.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from retape.torch.distributed.tuning import DistributedTuning


class StoreLost(Exception):
    """The store does not answer any more: the process that hosts it is gone."""


class Channel:
    """Pickled values under keys of one session. Nothing here blocks, except `wait`, which looks again and again."""

    def __init__(self, store: Any, session: str, tuning: DistributedTuning) -> None:
        self._root, self._session, self._tuning = store, session, tuning
        self._store = dist.PrefixStore(f"retape/{session}", store)  # type: ignore[attr-defined]  # exported, and documented

    def clone(self) -> Channel:
        """Return the same channel with a connection of its own, for another thread."""
        return Channel(self._root.clone(), self._session, self._tuning)

    def within(self, session: str) -> Channel:
        return Channel(self._root, f"{self._session}/{session}", self._tuning)

    def put(self, key: str, value: Any) -> None:
        self._try(self._store.set, key, pickle.dumps(value))

    def peek(self, key: str) -> Any:
        """Return the value under a key; None if there is none."""
        if not self._try(self._store.check, [key]):
            return None
        return pickle.loads(self._try(self._store.get, key))

    def put_first(self, key: str, value: Any) -> Any:
        """Put a value unless there is one already; return the one that is there."""
        return pickle.loads(self._try(self._store.compare_set, key, "", pickle.dumps(value)))

    def drop(self, *keys: str) -> None:
        for key in keys:
            self._try(self._store.delete_key, key)

    def wait(
        self, keys: Sequence[str], *, seconds: float | None = None, look: Callable[[], None] = lambda: None
    ) -> bool:
        """Wait until all keys are there; False after `seconds`. `look` runs between, and may raise."""
        end = None if seconds is None else time.monotonic() + seconds
        pause = self._tuning.shortest_poll_seconds
        while not self._try(self._store.check, list(keys)):
            look()
            if end is not None and time.monotonic() > end:
                return False
            time.sleep(pause)
            pause = min(2 * pause, self._tuning.longest_poll_seconds)
        return True

    def _try(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except RuntimeError as error:  # a DistError, or what the operating system says of a file
            raise StoreLost(str(error).splitlines()[0]) from error

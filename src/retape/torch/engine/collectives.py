"""Collectives inside a region: their results held for the re-run, or run again and waited for (Rule 9).

Seen are functional collectives, which tensor-parallel modules (DTensor) use: they return new tensors and change none. A region that
is re-run in part holds the results of all that come before its last slot, so that its re-run communicates with nobody: whatever one
rank then decides alone (another recipe, a whole re-run) pairs with no collective of another. A region that is re-run as a whole
repeats them, as every rank with the same plan does, and waits for each at once: a re-run stops early, and a collective that nobody
waits for keeps its memory.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from retape.core.errors import RecomputeMismatch, StateChanged
from retape.torch.capture.mutation import version_of
from retape.torch.compat import collective_internals, compiler_internals, internals


class HeldCollectives:
    """Results of the first `count` collectives of one forward, in order, with their versions."""

    __slots__ = ("count", "entries", "name")

    def __init__(self, name: str, count: int) -> None:
        self.name, self.count = name, count
        self.entries: list[tuple[Any, Any, list[Any]]] = []

    def add(self, func: Any, out: Any) -> None:
        held = pytree.tree_map_only(Tensor, internals.detach_below_autograd, out)
        self.entries.append((func, held, _versions(held)))

    def answer(self, number: int, func: Any) -> Any:
        """Return the result of collective `number`; raise if the re-run starts another one, or the result was written to."""
        known, held, versions = self.entries[number] if number < len(self.entries) else (None, None, [])
        if known is not func:
            raise RecomputeMismatch(
                f"Region {self.name} starts {func} in its re-run, where its forward started {known or 'no collective'}. Make it do the "
                "same twice; retape.keep() records a decision."
            )
        if _versions(held) != versions:
            raise StateChanged(
                f"Region {self.name} changed the result of {func} in place, and holds it for its re-run. Change a copy of it instead."
            )
        return pytree.tree_map_only(Tensor, internals.detach_below_autograd, held)


def _versions(held: Any) -> list[Any]:
    return [version_of(leaf) for leaf in pytree.tree_leaves(held) if isinstance(leaf, Tensor)]


class HoldingCollectives(compiler_internals.LightMode):
    """The mode of a first run: holds what collectives return."""

    def __init__(self, held: HeldCollectives) -> None:
        super().__init__()
        self._held = held

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if collective_internals.has_wrappers(types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if collective_internals.is_collective(func) and len(self._held.entries) < self._held.count:
            self._held.add(func, out)
        return out


class RepeatedCollectives(compiler_internals.LightMode):
    """The mode of a re-run: collectives are answered from held results, or run and waited for."""

    def __init__(self, held: HeldCollectives | None) -> None:
        super().__init__()
        self._held, self._next = held, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if collective_internals.has_wrappers(types):
            return NotImplemented
        if not collective_internals.is_collective(func):
            return func(*args, **(kwargs or {}))
        number, self._next = self._next, self._next + 1
        if self._held is None or number >= self._held.count:
            return collective_internals.waited_for(func(*args, **(kwargs or {})))
        return self._held.answer(number, func)

"""The same step in its other compiled forms, profiled once for each set of regions. What a form is, is in `compiled.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from retape.core.errors import RetapeError
from retape.torch.planning.profile_intervals import Profiled
from retape.torch.planning.variants.compiled import SAVED_SHARES
from retape.torch.planning.variants.tiled_form import PartsInTiles
from retape.torch.planning.variants.tiling import WORTH

TILED_SHARES = (0.15,)  # of the forms that are worth having with their parts in tiles too
TILES = (2, 4)


class Profiling(Protocol):
    """Profiles a step in one form."""

    def __call__(self, saved_share: float | None, tiled: PartsInTiles | None = None) -> Profiled: ...


@dataclass(slots=True)
class FormProfiles:
    """How the loss is computed is not theirs, so they stay as they are when that changes."""

    _forms: dict[tuple[str, ...], list[Profiled]] = field(default_factory=dict)
    _eager: dict[tuple[str, ...], Profiled] = field(default_factory=dict)
    _tiled: dict[tuple[str, ...], list[Profiled]] = field(default_factory=dict)

    def all(
        self, names: tuple[str, ...], whole: Profiled, profiled: Profiling, *, few: bool, tiles: bool
    ) -> tuple[list[Profiled], Profiled | None]:
        """Those that save less than `whole`; of `few` regions' the one that saves least. With `tiles` also those with parts in tiles,
        and the step without a compiler, which says which parts may be.
        """
        others = self._others(names, whole, profiled, few=few)
        eager = self._without_compiler(names, whole, profiled) if tiles else None
        return [*others, *(self._in_tiles(names, whole, profiled, eager) if eager and not few else ())], eager

    def _others(self, names: tuple[str, ...], whole: Profiled, profiled: Profiling, *, few: bool) -> list[Profiled]:
        """What one before them saves is left out."""
        if names not in self._forms:
            found = [whole]
            for share in SAVED_SHARES[-1:] if few else SAVED_SHARES:
                form = profiled(share)
                if form.calls_like(whole) and not any(form.runs_like(other) for other in found):
                    found.append(form)
            self._forms[names] = found[1:]
        return self._forms[names]

    def _without_compiler(self, names: tuple[str, ...], whole: Profiled, profiled: Profiling) -> Profiled | None:
        if names not in self._eager:
            self._eager[names] = profiled(None)
        return self._eager[names] if self._eager[names].calls_like(whole) else None

    def _in_tiles(
        self, names: tuple[str, ...], whole: Profiled, profiled: Profiling, eager: Profiled
    ) -> list[Profiled]:
        """Those parts run in tiles that were found, in the `eager` step, to treat rows independently."""
        if names not in self._tiled:
            parts = eager.rowwise_parts()
            shares = TILED_SHARES if parts else ()
            self._tiled[names] = [form for share in shares for form in _tiled(share, parts, whole, profiled)]
        return self._tiled[names]


def _tiled(share: float, parts: dict[str, tuple[str, ...]], whole: Profiled, profiled: Profiling) -> list[Profiled]:
    """One form in more and more tiles, as long as that makes its backward stand lower."""
    found: list[Profiled] = []
    for tiles in TILES:
        try:
            form = profiled(share, PartsInTiles(tiles, parts))
        except RetapeError:  # it runs out of memory, or a part does not take these slices
            break
        if not form.calls_like(whole) or not form.runs_in_tiles:
            break
        if found and form.highest_backward_bytes > WORTH * found[-1].highest_backward_bytes:
            break
        found.append(form)
    return found

"""Profiles of one step in the compiled variants of its regions, each made when it is first asked for.

What a variant is, is in `region_variants.py`; steps are run by `step_trials.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from retape.core.errors import RetapeError
from retape.torch.planning.region_variants import PartsInTiles

if TYPE_CHECKING:
    from retape.torch.planning.profiles.intervals import Profiled
    from retape.torch.planning.tuning import PlanningTuning

Profiling = Callable[..., "Profiled"]  # profiles a step with a saved share, and optionally with parts in tiles


@dataclass(slots=True)
class VariantProfiles:
    """Profiles of the same step in its compiled variants, by the names of the regions. They do not depend on how the loss is computed."""

    tuning: PlanningTuning
    _variants: dict[tuple[str, ...], list[Profiled]] = field(default_factory=dict)
    _tried: dict[tuple[str, ...], int] = field(default_factory=dict)  # how many of the shares have been profiled
    _eager: dict[tuple[str, ...], Profiled] = field(default_factory=dict)
    _tiled: dict[tuple[str, ...], list[Profiled]] = field(default_factory=dict)

    def with_another(
        self, names: tuple[str, ...], whole: Profiled, profiled: Profiling, *, few: bool
    ) -> list[Profiled] | None:
        """Return the variants that save less than `whole`, with the next one; None if there is no other.

        With `few` the only one is the one that saves least.
        """
        shares = self.tuning.saved_shares
        shares = (min(shares, default=0.0),) if few and shares else shares
        found = self._variants.setdefault(names, [])
        for share in shares[self._tried.get(names, 0) :]:
            self._tried[names] = self._tried.get(names, 0) + 1
            variant = profiled(share)
            if variant.calls_like(whole) and not any(variant.runs_like(other) for other in (whole, *found)):
                found.append(variant)
                return list(found)
        return None

    def known(self, names: tuple[str, ...]) -> list[Profiled]:
        """Return the variants that were profiled so far."""
        return list(self._variants.get(names, ()))

    def in_tiles(
        self, names: tuple[str, ...], whole: Profiled, profiled: Profiling, *, few: bool
    ) -> tuple[list[Profiled], Profiled | None]:
        """Return all variants that save less than `whole`, those with parts in tiles too, and the eager step, which finds the parts."""
        while self.with_another(names, whole, profiled, few=few) is not None:
            pass
        eager = self._without_compiler(names, whole, profiled)
        return [
            *self.known(names),
            *(self._in_tiles(names, whole, profiled, eager) if eager and not few else ()),
        ], eager

    def _without_compiler(self, names: tuple[str, ...], whole: Profiled, profiled: Profiling) -> Profiled | None:
        if names not in self._eager:
            self._eager[names] = profiled(None)
        return self._eager[names] if self._eager[names].calls_like(whole) else None

    def _in_tiles(
        self, names: tuple[str, ...], whole: Profiled, profiled: Profiling, eager: Profiled
    ) -> list[Profiled]:
        """Return variants in which the parts run in tiles that treat rows independently in the `eager` step."""
        if names not in self._tiled:
            parts = eager.rowwise_parts()
            shares = self.tuning.tiled_shares if parts else ()
            self._tiled[names] = [each for share in shares for each in self._more_tiles(share, parts, whole, profiled)]
        return self._tiled[names]

    def _more_tiles(
        self, share: float, parts: dict[str, tuple[str, ...]], whole: Profiled, profiled: Profiling
    ) -> list[Profiled]:
        """Return one variant in more and more tiles, while that lowers the peak of its backward."""
        found: list[Profiled] = []
        for tiles in self.tuning.variant_tiles:
            try:
                variant = profiled(share, PartsInTiles(tiles, parts))
            except RetapeError:  # it runs out of memory, or a part does not take these slices
                break
            if not variant.calls_like(whole) or not variant.runs_in_tiles:
                break
            limit = self.tuning.tile_gain * found[-1].highest_backward_bytes if found else None
            if limit is not None and variant.highest_backward_bytes > limit:
                break
            found.append(variant)
        return found

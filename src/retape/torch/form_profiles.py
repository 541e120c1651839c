"""The same step in its other compiled forms, profiled once for each set of regions. What a form is, is in `compiled.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from retape.torch.compiled import SAVED_SHARES
from retape.torch.readings import Profiled

Profiling = Callable[[float | None], Profiled]


@dataclass(slots=True)
class FormProfiles:
    """How the loss is computed is not theirs, so they stay as they are when that changes."""

    _forms: dict[tuple[str, ...], list[Profiled]] = field(default_factory=dict)
    _eager: dict[tuple[str, ...], Profiled] = field(default_factory=dict)

    def others(self, names: Iterable[str], whole: Profiled, profiled: Profiling, *, few: bool) -> list[Profiled]:
        """Those that save less than `whole`; of `few` the one that saves least. What one before them saves is left out."""
        key = tuple(names)
        if key not in self._forms:
            found = [whole]
            for share in SAVED_SHARES[-1:] if few else SAVED_SHARES:
                form = profiled(share)
                if form.calls_like(whole) and not any(form.runs_like(other) for other in found):
                    found.append(form)
            self._forms[key] = found[1:]
        return self._forms[key]

    def eager(self, names: Iterable[str], whole: Profiled, profiled: Profiling) -> Profiled | None:
        """The step as it is without a compiler, in which parts of regions can be run in tiles."""
        key = tuple(names)
        if key not in self._eager:
            self._eager[key] = profiled(None)
        return self._eager[key] if self._eager[key].calls_like(whole) else None

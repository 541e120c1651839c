"""Which options a plan may use."""

from __future__ import annotations

from enum import Enum

from retape.core.errors import InvalidInput


class OptionSet(Enum):
    """EXACT: keep, select, recompute, offload; gradients bit for bit. ALL adds tiles and the fused loss, which sum in another order."""

    EXACT = "exact"
    ALL = "all"

    @classmethod
    def of(cls, value: OptionSet | str) -> OptionSet:
        try:
            return cls(value)
        except ValueError:
            raise InvalidInput(f"options={value!r} is not known; give retape.EXACT or retape.ALL.") from None


EXACT = OptionSet.EXACT
ALL = OptionSet.ALL

"""Segments of a chain that are alike share one row of every table: 48 equal blocks make 48 rows, not 1,176."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from retape.core.solvers.costs import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """`row[start, stop]` of every segment, and one segment of each row, the short ones first."""

    row: npt.NDArray[np.int32]
    segments: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, kinds: Ints, *, most_rows: int) -> Intervals | None:
        """Group the segments of a chain by the kinds of their stages; None where that makes more than `most_rows`."""
        length = len(kinds)
        if length > most_rows:
            return None
        row = np.full((length + 1, length + 1), -1, dtype=np.int32)
        segments: list[tuple[int, int]] = []
        names = np.zeros(length, dtype=np.int64)
        for size in range(1, length + 1):
            starts = length - size + 1
            pairs = names[:starts] * (length + 1) + kinds[size - 1 :]
            _, example, names = np.unique(pairs, return_index=True, return_inverse=True)
            row[np.arange(starts), np.arange(starts) + size] = len(segments) + names
            if len(segments) + len(example) > most_rows:
                return None
            segments += [(int(start), int(start) + size) for start in example]
        return cls(row=row, segments=tuple(segments))

    @property
    def work(self) -> int:
        """The number of cuts that a dynamic program over all rows tries."""
        return sum(stop - start for start, stop in self.segments)

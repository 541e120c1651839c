"""Equal segments of a chain share one row of every table: 48 equal blocks make 48 rows, not 1,176.

No schedule uses a segment that contains a pinned stage and ends before the chain does, so such segments have no row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from retape.core.solvers.costs import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """`row[start, stop]` of every segment, and one segment of each row, the short ones first.

    `work` is the number of cuts that a dynamic program over all rows tries.
    """

    row: npt.NDArray[np.int32]
    segments: tuple[tuple[int, int], ...]
    work: int

    @classmethod
    def of(cls, kinds: Ints, *, most_rows: int, reach: Ints | None = None) -> Intervals | None:
        """Group the segments of a chain by the kinds of their stages; return None for more than `most_rows` rows.

        `reach` is that of `ChainCosts`; None if no stage is pinned.
        """
        length = len(kinds)
        reach = np.full(length, length) if reach is None else reach
        if length > most_rows:
            return None
        row = np.full((length + 1, length + 1), -1, dtype=np.int32)
        segments: list[tuple[int, int]] = []
        names = np.zeros(length, dtype=np.int64)
        longest = int((reach - np.arange(length)).max())
        for size in range(1, longest + 1):
            starts = length - size + 1
            pairs = names[:starts] * (length + 1) + kinds[size - 1 :]
            _, example, names = np.unique(pairs, return_index=True, return_inverse=True)
            order = np.argsort(example)  # rows in the order of the chain
            example, names = example[order], np.argsort(order)[names]
            # Equal segments contain the same pinned stages; none equals one that reaches the end.
            met = (example + size <= reach[example]) | (example + size == length)
            numbers = np.where(met, len(segments) + np.cumsum(met) - 1, -1)
            row[np.arange(starts), np.arange(starts) + size] = numbers[names]
            if len(segments) + int(met.sum()) > most_rows:
                return None
            segments += [(int(start), int(start) + size) for start in example[met]]
        for start in range(length - longest - 1, -1, -1):  # longer than every run of stages without a pinned one
            row[start, length] = len(segments)
            segments.append((start, length))
        if len(segments) > most_rows:
            return None
        work = sum(min(stop, int(reach[start]) + 1) - start for start, stop in segments)
        return cls(row=row, segments=tuple(segments), work=work)

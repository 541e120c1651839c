"""Does a function treat rows independently? Asked by running it on other rows, again whenever what it depends on has changed.

The first slice is run again with all rows replaced by copies of its first, and by copies of its last: that row must come out as
before, to rounding. Copies are rows that the function has seen, so it cannot object to them. Then on half of the rows, which
shows functions that look at a row's position or at the number of rows. Nothing outside notices: random streams and buffers are
those of the first run, and are put back.

When it has to be asked again is in `row_guard.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from retape.core.errors import RegionError
from retape.torch.capture.mutation import equal_bits
from retape.torch.engine import context
from retape.torch.engine.inputs import Link, Made, SavedInNode
from retape.torch.engine.region import Region
from retape.torch.engine.slots import SlotOwner
from retape.torch.slicing.row_guard import Reading, known_of

# How far kernels may round apart, as a share of the largest number.
_ROUNDING_OF_FLOAT64, _ROUNDING_OF_FLOAT32, _ROUNDING_OF_TF32, _ROUNDING_OF_16_BIT = 1e-10, 2e-5, 5e-3, 3e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Slicing:
    """`count` rows along `dim` in at most `tiles` slices, whose lengths differ by one at most."""

    count: int
    tiles: int
    dim: int

    def parts(self) -> Iterator[tuple[int, int]]:
        """Start and length of each slice."""
        pieces = max(1, min(self.tiles, self.count))
        length, longer = divmod(self.count, pieces)
        start = 0
        for index in range(pieces):
            size = length + (index < longer)
            yield start, size
            start += size


class SavedRows:
    """The rows of all slices, saved through autograd nodes before the first slice runs.

    Hooks around the call see them once, and before anything else of it: a re-run of the region that the call is a part of can
    stop there, without running any slice.
    """

    def __init__(self, rows: list[Tensor]) -> None:
        self._nodes = SavedInNode(rows)
        self._places = {id(row): place for place, row in enumerate(rows)}

    def part(self, rows: list[Tensor], dim: int, start: int, length: int) -> SavedPart:
        """Those rows, by what they are slices of, from `start` on."""
        return SavedPart(self._nodes, [self._places[id(row)] for row in rows], (dim, start, length))


class SavedPart:
    """The inputs of one slice, of rows that are saved as a whole."""

    holds_here = False

    def __init__(self, nodes: SavedInNode, places: list[int], where: tuple[int, int, int]) -> None:
        self._nodes, self._places, self._where = nodes, places, where

    def present(self) -> list[Tensor | None]:
        return [None] * len(self._places)

    @property
    def links(self) -> list[Link]:
        return []

    def load(self, region: SlotOwner, skip: frozenset[int], made: Made) -> list[Tensor]:
        whole = self._nodes.load(region, frozenset(), made)
        return [whole[place].narrow(*self._where) for place in self._places]

    def hold_again(self, region: SlotOwner, made: Made) -> None:
        """Nothing was made again: the nodes have them."""


class _Question(context.RegionRun):
    """A run that only asks: what it is told to keep is not recorded."""

    def keep(self, value: Any) -> Any:
        return value


def _ask(region: Region, tensors: list[Tensor], *, decided: bool = False) -> list[Any]:
    """Return what a region's function returns for other tensors; `decided`: as `retape.keep` decided at first."""
    run = context.RegionRun if decided else _Question
    try:
        return region.run_on(tensors, run=run(region, rerun=True), pack=_forget, unpack=_remember)
    except _TakesGradients:
        return region.run_on(tensors, run=run(region, rerun=True), pack=_identity, unpack=_identity)


def _identity(tensor: Tensor) -> Tensor:
    return tensor


class _TakesGradients(BaseException):
    """The function that is asked takes gradients itself; what it catches itself must not be this."""


def _forget(tensor: Tensor) -> None:
    """An answer has no backward pass: what that would need need not be there."""


def _remember(nothing: None) -> Tensor:
    raise _TakesGradients


# --- the check ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The tensors among a call's arguments, and at which places the slices of `rows` stand among them."""

    tensors: list[Tensor]
    places: list[int]
    rows: list[Tensor]


def assert_rowwise(
    region: Region, given: Arguments, outputs: list[Any], slicing: Slicing, reading: Reading, *, may_draw: bool
) -> None:
    """Raise if the function of the first slice mixes rows, unless it has been asked with the same reading before."""
    known = known_of(region.snapshot.kind[0])
    if known.has(reading):
        return
    if region.snapshot.drew and not may_draw:
        raise RegionError(
            f"{region.name} draws random numbers, and did not when the plan was made: in tiles it would draw others than on all of its "
            "rows. Fit the model as it is now, or leave out options=retape.ALL."
        )
    known.note_change(reading, region.name)
    probe = _Probe(region, given, slicing)
    length = next(slicing.parts())[1]
    if length < 2:  # one row cannot mix; two can
        length = min(2, slicing.count)
        outputs = probe.run(probe.first(length))
    if length < 2 or not probe.keeps_ends(length, outputs):
        return
    if not region.snapshot.drew and not region.kept:
        probe.assert_any_length(length, outputs)
    known.add(reading)


class _Probe:
    """The questions to one region."""

    def __init__(self, region: Region, given: Arguments, slicing: Slicing) -> None:
        self._region = region
        self._tensors = [tensor.detach() for tensor in given.tensors]
        self._places = given.places
        self._rows = [row.detach() for row in given.rows]
        self._dim = slicing.dim

    def first(self, length: int, start: int = 0) -> list[Tensor]:
        return [row.narrow(self._dim, start, length) for row in self._rows]

    def run(self, rows: list[Tensor], *, decided: bool = False) -> list[Any]:
        tensors = list(self._tensors)
        for place, row in zip(self._places, rows, strict=True):
            tensors[place] = row
        return _ask(self._region, tensors, decided=decided)

    def keeps_ends(self, length: int, outputs: list[Any]) -> bool:
        """Whether the first and the last row were asked about; raises if another row changes what becomes of them."""
        asked = False
        for kept in (0, length - 1):
            rows = self.first(length)
            others = [_copies_of(row, kept, self._dim) for row in rows]
            if all(map(equal_bits, rows, others)):
                others = [_moved(row, kept, self._dim) for row in rows]
            if all(map(equal_bits, rows, others)):
                continue  # whole numbers that are all the same: nothing to be learned
            asked = True
            # A function that does not do the same thing twice may have told `retape.keep` what decides.
            if not self._keeps(others, outputs, kept) and not (
                self._region.kept and self._keeps(others, outputs, kept, decided=True)
            ):
                raise RegionError(
                    f"{self._region.name} does not treat rows independently: with other rows around it, row {kept} along dim={self._dim} "
                    "comes out otherwise. Tiles would be wrong. Tile what is row-wise in it, or recompute it (retape.checkpoint)."
                )
        return asked

    def _keeps(self, others: list[Tensor], outputs: list[Any], kept: int, *, decided: bool = False) -> bool:
        """Whether one row comes out as it did, to the bit or to rounding: kernels may group rows by what is in them."""
        try:
            answer = self.run(others, decided=decided)
        except Exception as error:
            raise RegionError(
                f"{self._region.name} could not be asked whether it treats rows independently: on {len(others[0])} copies of one of its "
                f"own rows it raised {type(error).__name__}. Tile a function that takes any rows, or recompute it (retape.checkpoint)."
            ) from error
        pairs = [
            (a, b) for a, b in zip(outputs, answer, strict=False) if isinstance(a, Tensor) and isinstance(b, Tensor)
        ]
        return all(
            not bool(self._far(_row(a.detach(), kept, self._dim), _row(b, kept, self._dim)).any()) for a, b in pairs
        )

    def assert_any_length(self, length: int, outputs: list[Any]) -> None:
        """Raise if the second half of the rows by itself comes out otherwise than behind the first."""
        start = length // 2
        try:
            answer = self.run(self.first(length - start, start))
        except Exception:  # it takes this many rows and no other: then no slice of other length gives a wrong number
            return
        for whole, half in zip(outputs, answer, strict=False):
            if not isinstance(whole, Tensor) or not whole.is_floating_point():
                continue
            behind = whole.detach().narrow(self._dim, start, length - start)
            if behind.shape != half.shape or self._many_far(behind, half):
                raise RegionError(
                    f"{self._region.name} does not treat rows independently: of {length} rows along dim={self._dim}, the last "
                    f"{length - start} come out otherwise when they are given alone. It looks at a row's position, or at their "
                    "number. Tiles would be wrong. Tile what is row-wise in it, or recompute it (retape.checkpoint)."
                )

    def _many_far(self, one: Tensor, other: Tensor) -> bool:
        """Whether more than a quarter of the rows differ; in a single one rounding may have tipped a decision."""
        far = self._far(one, other).movedim(self._dim, 0).flatten(1).any(1)
        return bool(far.double().mean() > 0.25)

    def _far(self, one: Tensor, other: Tensor) -> Tensor:
        """Which numbers differ by more than rounding."""
        if one.shape != other.shape:
            return torch.ones_like(one, dtype=torch.bool)
        if not one.is_floating_point():
            return one != other
        tolerance = self._tolerance(one)
        largest = one.nan_to_num(0.0, 0.0, 0.0).abs().max() if one.numel() else 0.0
        near = ((one - other).abs() <= tolerance * largest) | (one == other) | (one.isnan() & other.isnan())
        return ~near

    def _tolerance(self, output: Tensor) -> float:
        sizes = [t.dtype.itemsize for t in (output, *self._tensors) if t.is_floating_point()]
        if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))) or min(sizes) <= 2:
            return _ROUNDING_OF_16_BIT
        if min(sizes) == 8:
            return _ROUNDING_OF_FLOAT64
        return _ROUNDING_OF_FLOAT32 if torch.get_float32_matmul_precision() == "highest" else _ROUNDING_OF_TF32


def _row(tensor: Tensor, index: int, dim: int) -> Tensor:
    """One row; all of a tensor that has none, which is refused elsewhere."""
    return tensor.narrow(dim, index, 1) if tensor.dim() and tensor.shape[dim] > index else tensor


def _copies_of(rows: Tensor, kept: int, dim: int) -> Tensor:
    return rows.narrow(dim, kept, 1).expand_as(rows).clone()


def _moved(rows: Tensor, kept: int, dim: int) -> Tensor:
    """Other numbers in every row but one; whole numbers may be indices, and stay."""
    if not rows.is_floating_point():
        return rows
    moved = rows * 0.5 + 1.0
    moved.narrow(dim, kept, 1).copy_(rows.narrow(dim, kept, 1))
    return moved

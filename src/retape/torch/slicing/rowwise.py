"""The check that a function treats rows independently, repeated whenever something that the function depends on has changed.

The first slice is run again with all rows replaced by copies of its first, and by copies of its last: that row must come out as
before, to rounding. Copies are rows that the function has seen, so it cannot reject them. Then half of the rows are run alone, which
shows functions that depend on a row's position or on the number of rows. Nothing outside changes: random streams and buffers are
those of the first run, and are restored. Last, the rows of the first slice must come out as before among half as many more, as a
function may ask for the number of rows: all rows at once could be what does not fit in memory.

Everything that a function depends on is read before each call (`Reading`); a reading with which the function has passed the check
needs no other one. The walk itself is in `capture/settings.py`.
"""

from __future__ import annotations

import logging
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from retape.core.errors import RegionError
from retape.torch.capture.mutation import equal_bits
from retape.torch.capture.settings import Walk, ambient, path_text
from retape.torch.compat import internals
from retape.torch.engine import context
from retape.torch.engine.inputs import Link, Made, SavedInNode
from retape.torch.engine.region import Region
from retape.torch.engine.slots import SlotOwner

_LOG = logging.getLogger("retape")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicingTuning:
    """Thresholds of the slicing package."""

    # How far kernels may round differently, as a share of the largest number: they may group rows by their values.
    float64_tolerance: float = 1e-10
    float32_tolerance: float = 2e-5
    tf32_tolerance: float = 5e-3
    half_tolerance: float = 3e-2  # bfloat16, float16, autocast
    max_differing_rows: float = 0.25  # share of rows: in a single one rounding may have changed a decision
    max_readings: int = 1024  # of one function that have passed; the oldest are forgotten, and would be checked again
    checks_before_warning: int = 3  # calls one after the other, each of which had to be checked
    cuda_chunk_bytes: int = 512 * 2**20  # buffers of a chunk of logits: large enough for full matrix-product speed
    cpu_chunk_bytes: int = 64 * 2**20
    bytes_per_logit: int = 10  # two buffers of float32, and the slope in 16 bits


TUNING = SlicingTuning()


@dataclass(frozen=True, slots=True, kw_only=True)
class Slicing:
    """`count` rows along `dim` in at most `tiles` slices, whose lengths differ by one at most."""

    count: int
    tiles: int
    dim: int

    def parts(self) -> Iterator[tuple[int, int]]:
        """Return start and length of each slice."""
        pieces = max(1, min(self.tiles, self.count))
        length, longer = divmod(self.count, pieces)
        start = 0
        for index in range(pieces):
            size = length + (index < longer)
            yield start, size
            start += size


class SavedRows:
    """The rows of all slices, saved through autograd nodes before the first slice runs.

    Hooks around the call see them once, before anything else of it: a re-run of the region around the call can stop there, without
    running any slice.
    """

    def __init__(self, rows: list[Tensor]) -> None:
        self._nodes = SavedInNode(rows)
        self._places = {id(row): place for place, row in enumerate(rows)}
        self._loaded: list[Tensor] | None = None

    def part(self, rows: list[Tensor], dim: int, start: int, length: int) -> SavedPart:
        """Return `length` of each of those rows from `start` on."""
        return SavedPart(self, [self._places[id(row)] for row in rows], (dim, start, length))

    def load(self, region: SlotOwner, made: Made) -> list[Tensor]:
        """Return the rows."""
        return self._nodes.load(region, frozenset(), made) if self._loaded is None else self._loaded

    @contextmanager
    def loaded(self, region: SlotOwner) -> Iterator[None]:
        """Load the rows for all slices: for each of them, it would be a re-run of the region around the call.

        Outside the backward passes of slices: at the end of one, what the re-run refilled for other ops would be freed.
        """
        self._loaded = self._nodes.load(region, frozenset(), {})
        try:
            yield
        finally:
            self._loaded = None


class SavedPart:
    """The inputs of one slice, of rows that are saved as a whole: an `InputSource`."""

    holds_here = False

    def __init__(self, rows: SavedRows, places: list[int], where: tuple[int, int, int]) -> None:
        self._rows, self._places, self._where = rows, places, where

    def present(self) -> list[Tensor | None]:
        return [None] * len(self._places)

    @property
    def links(self) -> list[Link]:
        return []

    def load(self, region: SlotOwner, skip: frozenset[int], made: Made) -> list[Tensor]:
        whole = self._rows.load(region, made)
        return [whole[place].narrow(*self._where) for place in self._places]

    def hold_again(self, region: SlotOwner, made: Made) -> None:
        """Do nothing: the nodes have them."""


# --- running a region's function on other rows ----------------------------------------------------------------------


class _Probe(context.RegionRun):
    """A run that records nothing that it is told to keep."""

    def keep(self, value: Any) -> Any:
        return value


def _run_on(region: Region, tensors: list[Tensor], *, decided: bool = False) -> list[Any]:
    """Return what a region's function returns for other tensors; `decided`: with what `retape.keep` recorded at first."""
    run = context.RegionRun if decided else _Probe
    try:
        return region.run_on(tensors, run=run(region, rerun=True), pack=_drop, unpack=_fail)
    except _TakesGradients:
        return region.run_on(tensors, run=run(region, rerun=True), pack=_identity, unpack=_identity)


def _identity(tensor: Tensor) -> Tensor:
    return tensor


class _TakesGradients(BaseException):
    """The function takes gradients itself. Not an Exception, so that the function cannot catch it."""


def _drop(tensor: Tensor) -> None:
    """Save nothing: there is no backward pass."""


def _fail(nothing: None) -> Tensor:
    raise _TakesGradients


# --- the check ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The tensors among a call's arguments, and the places of the slices of `rows` among them."""

    tensors: list[Tensor]
    places: list[int]
    rows: list[Tensor]


def assert_rowwise(
    region: Region, given: Arguments, outputs: list[Any], slicing: Slicing, reading: Reading, *, may_draw: bool
) -> None:
    """Raise if the function of the first slice mixes rows, unless it has passed the check with the same reading before."""
    known = CHECKED.of(region.snapshot.kind[0])
    if known.has(reading):
        return
    if region.snapshot.drew and not may_draw:
        raise RegionError(
            f"{region.name} draws random numbers, and did not when the plan was made: in tiles it would draw others than on all of its "
            "rows. Fit the model as it is now, or leave out options=retape.ALL."
        )
    known.note_change(reading, region.name)
    with internals.unobserved():
        if _passes(_RowCheck(region, given, slicing), region, outputs, slicing):
            known.add(reading)


def _passes(check: _RowCheck, region: Region, outputs: list[Any], slicing: Slicing) -> bool:
    """True if the check passed; False if nothing could be checked. Raise if it failed."""
    length = next(slicing.parts())[1]
    if length < 2:  # one row cannot mix; two can
        length = min(2, slicing.count)
        outputs = check.run(check.first(length))
    if length < 2 or not check.keeps_ends(length, outputs):
        return False
    if not region.snapshot.drew and not region.kept:
        check.assert_any_length(length, outputs)
        check.assert_same_among_more(length, outputs, min(length + length // 2, slicing.count))
    return True


class _RowCheck:
    """Runs of one region's function on other rows."""

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
        return _run_on(self._region, tensors, decided=decided)

    def keeps_ends(self, length: int, outputs: list[Any]) -> bool:
        """Raise if other rows change the first or the last row's result; return False if no other rows could be made."""
        checked = False
        for kept in (0, length - 1):
            rows = self.first(length)
            others = [_copies_of(row, kept, self._dim) for row in rows]
            if all(map(equal_bits, rows, others)):
                others = [_shifted_rows(row, kept, self._dim) for row in rows]
            if all(map(equal_bits, rows, others)):
                continue  # integers that are all the same: the check would show nothing
            checked = True
            # A function that does not do the same thing twice may have given its decisions to `retape.keep`.
            if not self._keeps(others, outputs, kept) and not (
                self._region.kept and self._keeps(others, outputs, kept, decided=True)
            ):
                raise RegionError(
                    f"{self._region.name} does not treat rows independently: with other rows around it, row {kept} along dim={self._dim} "
                    "comes out differently. Tiles would be wrong. Tile what is row-wise in it, or recompute it (retape.checkpoint)."
                )
        return checked

    def _keeps(self, others: list[Tensor], outputs: list[Any], kept: int, *, decided: bool = False) -> bool:
        """True if one row comes out as before, to rounding."""
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
            not bool(self._differs(_row(a.detach(), kept, self._dim), _row(b, kept, self._dim)).any()) for a, b in pairs
        )

    def assert_any_length(self, length: int, outputs: list[Any]) -> None:
        """Raise if the second half of the rows by itself comes out differently than behind the first."""
        start = length // 2
        try:
            answer = self.run(self.first(length - start, start))
        except Exception:  # it takes this many rows and no other: then no slice of another length gives a wrong number
            return
        for whole, half in zip(outputs, answer, strict=False):
            if not isinstance(whole, Tensor) or not whole.is_floating_point():
                continue
            behind = whole.detach().narrow(self._dim, start, length - start)
            if behind.shape != half.shape or self._many_rows_differ(behind, half):
                raise RegionError(
                    f"{self._region.name} does not treat rows independently: of {length} rows along dim={self._dim}, the last "
                    f"{length - start} come out differently when they are given alone. It looks at a row's position, or at their "
                    "number. Tiles would be wrong. Tile what is row-wise in it, or recompute it (retape.checkpoint)."
                )

    def assert_same_among_more(self, length: int, outputs: list[Any], more: int) -> None:
        """Raise if the rows come out differently among more rows, of which nothing is saved: as much memory as for a slice."""
        if more == length:
            return
        try:
            answer = self.run(self.first(more))
        except Exception:  # it takes no more rows, so plainly it would fail
            return
        for alone, among in zip(outputs, answer, strict=False):
            if not isinstance(alone, Tensor) or not alone.is_floating_point():
                continue
            if among.shape[self._dim] != more or self._many_rows_differ(
                alone.detach(), among.narrow(self._dim, 0, length)
            ):
                raise RegionError(
                    f"{self._region.name} does not treat rows independently: of {more} rows along dim={self._dim}, the first {length} "
                    "come out differently when they are given alone. It looks at the number of rows. Tiles would be wrong. Tile what is "
                    "row-wise in it, or recompute it (retape.checkpoint)."
                )

    def _many_rows_differ(self, one: Tensor, other: Tensor) -> bool:
        differing = self._differs(one, other).movedim(self._dim, 0).unsqueeze(-1).flatten(1).any(1)
        return bool(differing.double().mean() > TUNING.max_differing_rows)

    def _differs(self, one: Tensor, other: Tensor) -> Tensor:
        """Return which numbers differ by more than rounding."""
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
            return TUNING.half_tolerance
        if min(sizes) == 8:
            return TUNING.float64_tolerance
        full_precision = torch.get_float32_matmul_precision() == "highest"
        return TUNING.float32_tolerance if full_precision else TUNING.tf32_tolerance


def _row(tensor: Tensor, index: int, dim: int) -> Tensor:
    """Return one row; all of a tensor that has none, which is refused elsewhere."""
    return tensor.narrow(dim, index, 1) if tensor.dim() and tensor.shape[dim] > index else tensor


def _copies_of(rows: Tensor, kept: int, dim: int) -> Tensor:
    return rows.narrow(dim, kept, 1).expand_as(rows).clone()


def _shifted_rows(rows: Tensor, kept: int, dim: int) -> Tensor:
    """Return other numbers in every row but one; integers may be indices, and are not changed."""
    if not rows.is_floating_point():
        return rows
    shifted = rows * 0.5 + 1.0
    shifted.narrow(dim, kept, 1).copy_(rows.narrow(dim, kept, 1))
    return shifted


# --- readings: when a function has to be checked again --------------------------------------------------------------


class _Identity:
    """An object as a token: equal to itself alone. It is not kept alive, and another object in its memory is not equal."""

    __slots__ = ("_id", "_reference")

    def __init__(self, value: Any) -> None:
        self._id = id(value)
        try:
            self._reference: Callable[[], Any] = weakref.ref(value)
        except TypeError:  # no weak reference can be made, so it is held
            self._reference = lambda: value

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Identity) or self._id != other._id:
            return False
        mine = self._reference()
        return mine is not None and mine is other._reference()


class Reading(Walk):
    """Everything that a callable depends on now. Equal readings: nothing has changed but values of tensors."""

    def __init__(self, roots: dict[str, Any], arguments: Iterable[Any] = ()) -> None:
        super().__init__()
        for index, value in enumerate(arguments):
            token = self.shape(value) if isinstance(value, Tensor) else self.atom(value)
            self._note((None, f"argument {index}"), token)
        self.arguments = tuple(self.tokens)
        for name, value in ambient().items():
            self._note((None, name), value)
        self._note((None, "the gradient mode"), torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        self.enter(roots)
        self.key = tuple(self.tokens)

    def difference(self, other: Reading) -> str:
        """Return the first place where two readings differ, in words."""
        pairs = zip(self.paths, self.tokens, other.tokens, strict=False)
        return next((path_text(path) for path, mine, its in pairs if mine != its), "what it reaches")

    def atom(self, value: Any) -> Any:
        return (type(value), repr(value) if type(value) in (float, complex, slice) else value)

    @staticmethod
    def shape(value: Tensor) -> Any:
        return (type(value), value.shape, value.dtype, value.device)

    def tensor(self, value: Tensor) -> Any:
        # An activation is another one in every call; so are its values, as are those of weights.
        return (self.shape(value), None if value.grad_fn is not None else _Identity(value))

    def code(self, value: types.CodeType) -> Any:
        return _Identity(value)

    def thing(self, value: Any) -> Any:
        return _Identity(value)

    def again(self, first: int) -> Any:
        return ("again", first)


def read_settings(function: Callable[..., Any], given: list[Any], dim: int) -> Reading | None:
    """Return what a function depends on before its first slice; None where there is nothing to check.

    A re-run is a call that was checked when it first ran, and tensors without values show nothing.
    """
    if context.in_rerun() or any(internals.is_fake(value) for value in given if isinstance(value, Tensor)):
        return None
    return Reading({"": function}, [*given, dim])


class _PassedReadings:
    """The readings of one function with which it has passed the check."""

    def __init__(self, warned: set[str]) -> None:
        self._passed: dict[Any, None] = {}  # in the order of their last use
        self._last: Reading | None = None
        self._new_in_a_row = 0
        self._warned = warned

    def has(self, reading: Reading) -> bool:
        if reading.key not in self._passed:
            return False
        self._passed[reading.key] = self._passed.pop(reading.key)
        self._last, self._new_in_a_row = reading, 0
        return True

    def add(self, reading: Reading) -> None:
        self._passed[reading.key] = None
        while len(self._passed) > TUNING.max_readings:
            del self._passed[next(iter(self._passed))]

    def note_change(self, reading: Reading, name: str) -> None:
        """Warn once that a function is checked in every call, and name what changes from call to call.

        Rows of another length are checked once for each length, which is no reason to warn.
        """
        self._new_in_a_row += self._last is None or reading.arguments == self._last.arguments
        often = self._new_in_a_row == TUNING.checks_before_warning
        if often and self._last is not None and name not in self._warned:
            self._warned.add(name)
            _LOG.warning(
                "retape: %s is checked for independent rows in every call, which takes the time of about three slices more: "
                "%s differs from call to call. What only counts can be kept in a tensor that is written in place.",
                name,
                reading.difference(self._last),
            )
        self._last = reading


class CheckedFunctions:
    """The passed readings of every module, function or code."""

    _C_FUNCTIONS = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)

    def __init__(self) -> None:
        self._weak: weakref.WeakKeyDictionary[Any, _PassedReadings] = weakref.WeakKeyDictionary()
        self._lasting: dict[Any, _PassedReadings] = {}  # of methods and functions of C types, which are never freed
        self._warned: set[str] = set()

    def of(self, key: Any) -> _PassedReadings:
        try:
            return self._weak.setdefault(key, _PassedReadings(self._warned))
        except TypeError:  # no weak reference can be made
            passed = _PassedReadings(self._warned)
            return self._lasting.setdefault(key, passed) if isinstance(key, self._C_FUNCTIONS) else passed


CHECKED = CheckedFunctions()

"""A row-wise function run in slices, forward and backward, so that its internals are never whole in memory: `tile`.

Each slice is a region that drops everything (`engine/region.py`), so its re-run sees the state of its first run: random streams,
buffers, autocast. All slices are behind one autograd node. Its backward pass takes their gradients one after the other, and adds up
those of weights itself, in slice order, in float32 for 16-bit weights.

The check that the function treats rows independently is in `rowwise.py`; a loss over rows is in `linear_cross_entropy.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import local
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils import _pytree as pytree

from retape.core.errors import InvalidInput, RegionError, UnsupportedTransform
from retape.torch.capture.call import Call, capture_call, name_of
from retape.torch.compat import compiler_internals, internals
from retape.torch.engine.context import is_plain
from retape.torch.engine.messages import refuse_transforms
from retape.torch.engine.policy import Policy
from retape.torch.engine.region import Region
from retape.torch.slicing.linear_layers import Linear, Scale, SliceGraph, wide
from retape.torch.slicing.rowwise import Arguments, SavedPart, SavedRows, Slicing, assert_rowwise, read_settings

_SLICE = Policy(linkable=False)
_Whole = tuple[SavedRows, tuple[Any, ...], int, int]  # all rows, and start and length of a slice of them
_PLAIN_VALUES = (type(None), bool, int, float, complex, str)


def tile(fn: Callable[..., Any], *rows: Any, tiles: int, dim: int = 0) -> Any:
    """Call `fn(*rows)` in `tiles` slices along `dim`, so that what autograd saves in it is never whole in memory.

    `fn` must treat rows independently, which is checked on first use and whenever something that it depends on has changed. It may
    return a tensor or containers of tensors, each with the rows along `dim`. Numbers, strings and None are passed on unchanged.
    """
    return call_in_tiles(fn, rows, tiles=tiles, dim=dim, may_draw=True)


def call_in_tiles(fn: Callable[..., Any], rows: tuple[Any, ...], *, tiles: int, dim: int, may_draw: bool) -> Any:
    """`tile`, which may also refuse a function that draws random numbers."""
    if torch.compiler.is_compiling():
        return torch.compiler.disable(call_in_tiles)(fn, rows, tiles=tiles, dim=dim, may_draw=may_draw)
    slicing = _slicing(fn, rows, tiles, dim)
    if is_plain() or slicing.count == 0:
        return fn(*rows)
    refuse_transforms(fn)
    if capture_call(fn, rows, {}).is_lazy:
        return fn(*rows)  # its first call gives it its shape
    with _no_autocast_cache():
        return _Forward(fn, rows, slicing, may_draw=may_draw).run()


def _slicing(fn: Callable[..., Any], rows: tuple[Any, ...], tiles: int, dim: int) -> Slicing:
    if type(tiles) is not int or tiles < 1:
        raise InvalidInput(f"tiles={tiles!r}; give a whole number >= 1.")
    if not callable(fn):
        raise InvalidInput(f"tile() got a {type(fn).__name__} as its function; give the function first, then its rows.")
    lengths: dict[int, int] = {}
    for index, row in enumerate(rows):
        if isinstance(row, Tensor):
            if not -row.dim() <= dim < row.dim():
                raise InvalidInput(
                    f"Argument {index} of {name_of(fn)} has shape {tuple(row.shape)}, and no dim={dim} to slice along. Give a dim that "
                    "every sliced tensor has."
                )
            lengths[index] = row.shape[dim]
        elif not isinstance(row, _PLAIN_VALUES):
            raise InvalidInput(
                f"Argument {index} of {name_of(fn)} is a {type(row).__name__}; give tensors, each as an argument of its own (numbers, "
                "strings and None are passed on unchanged). Other values belong into the function's closure."
            )
    if not lengths:
        raise InvalidInput(f"{name_of(fn)} was given no tensor to slice; give one with the rows along dim={dim}.")
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{length} in argument {index}" for index, length in lengths.items())
        raise InvalidInput(
            f"The rows of {name_of(fn)} along dim={dim} are of different number: {said}. Give as many in each."
        )
    return Slicing(count=next(iter(lengths.values())), tiles=tiles, dim=dim)


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Switch autocast's weight cache off: a cast in it belongs to the graph of one slice, or to none of them."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


# --- forward --------------------------------------------------------------------------------------------------------


class _Forward:
    """Runs the slices one after the other, and joins their outputs."""

    def __init__(self, fn: Callable[..., Any], rows: tuple[Any, ...], slicing: Slicing, *, may_draw: bool) -> None:
        self._fn = fn
        self._may_draw = may_draw
        self._rows = rows
        self._slicing = slicing
        self._grad = torch.is_grad_enabled()
        self._outputs: list[Any] = []
        self._structure: Any = None

    def run(self) -> Any:
        tiled = TiledCall(self._fn, self._slicing)
        saved = tiled.saved = self._saved_rows()
        for start, length in self._slicing.parts():
            given = self._sliced(start, length)
            if start == 0:
                reading = read_settings(self._fn, given, self._slicing.dim)
            if not self._grad and start:
                values, structure = pytree.tree_flatten(self._fn(*given))
            else:
                needs_grad = [self._needs_grad(row) for row in self._rows]
                whole = None if saved is None else (saved, self._rows, start, length)
                piece = _Slice(self._fn, given, needs_grad, tiled, whole)
                values, structure = piece.run()
            self._take(values, structure, start, length)
            if start == 0 and reading is not None:
                about = piece.region, piece.arguments(self._rows), values, self._slicing
                assert_rowwise(*about, reading, may_draw=self._may_draw)
            if self._grad:
                piece.record_edges(values, tiled)
        return pytree.tree_unflatten(self._joined(tiled), self._structure)

    def _saved_rows(self) -> SavedRows | None:
        """Save the rows as a whole inside another region, whose hooks see them once, before the first slice."""
        if not self._grad or internals.top_hooks(True) is None:
            return None
        return SavedRows(_each_once([row for row in self._rows if isinstance(row, Tensor)]))

    def _needs_grad(self, row: Any) -> bool:
        return self._grad and isinstance(row, Tensor) and row.requires_grad

    def _sliced(self, start: int, length: int) -> list[Any]:
        """Return slices without history; a tensor that is given twice is one slice, because code tests `q is k`."""
        made = {
            id(row): row.detach().narrow(self._slicing.dim, start, length)
            for row in self._rows
            if isinstance(row, Tensor)
        }
        return [made.get(id(row), row) for row in self._rows]

    def _take(self, values: list[Any], structure: Any, start: int, length: int) -> None:
        if start == 0:
            self._structure = structure
            self._outputs = [self._room(value, length) for value in values]
        elif structure != self._structure:
            raise RegionError(
                f"{name_of(self._fn)} returned {structure} for one slice of rows and {self._structure} for another; a tiled function "
                "must return the same containers for every slice."
            )
        for index, value in enumerate(values):
            room = self._outputs[index]
            if isinstance(value, Tensor) and isinstance(room, Tensor):
                self._check_shape(value, length)
                room.narrow(self._slicing.dim, start, length).copy_(value.detach())
            elif value is not room and value != room:
                raise RegionError(
                    f"{name_of(self._fn)} returned {value!r} for one slice of rows and {room!r} for another; what a tiled function "
                    "returns beside tensors must be the same for every slice."
                )

    def _room(self, value: Any, length: int) -> Any:
        """Return memory for an output of all rows."""
        if not isinstance(value, Tensor):
            return value
        self._check_shape(value, length)
        shape = list(value.shape)
        shape[self._slicing.dim] = self._slicing.count
        return torch.empty(shape, dtype=value.dtype, device=value.device)

    def _check_shape(self, value: Tensor, length: int) -> None:
        dim = self._slicing.dim
        if not -value.dim() <= dim < value.dim() or value.shape[dim] != length:
            raise RegionError(
                f"{name_of(self._fn)} made a tensor of shape {tuple(value.shape)} out of {length} rows along dim={dim}; a tiled function "
                "must return its rows along the same dim. Sum over rows outside, or use retape.linear_cross_entropy for a loss."
            )

    def _joined(self, tiled: TiledCall) -> list[Any]:
        """Return the outputs behind one node, whose backward pass runs those of the slices."""
        tensors = [value for value in self._outputs if isinstance(value, Tensor)]
        differentiable = [any(piece.edges[i] is not None for piece in tiled.slices) for i in range(len(tensors))]
        if not any(differentiable):
            return self._outputs
        inputs = _each_once([row for row in self._rows if self._needs_grad(row)])
        related = internals.computed_from_another(tiled.taken)
        if related is not None:
            raise RegionError(
                f"{tiled.name} uses a tensor of its closure that was computed elsewhere, and also one that it was computed from "
                f"({related}). Gradients of the two cannot be separated. Compute it inside the function."
            )
        # The node saves the slices: autograd frees them with the graph, and not if the graph is retained.
        with saved_tensors_hooks(lambda _: tiled, _unpack_tiled):
            joined = iter(_JoinSlices.apply(tensors, differentiable, *inputs, *tiled.shared.values()))
        return [next(joined) if isinstance(value, Tensor) else value for value in self._outputs]


class TiledCall:
    """All slices of one call, until their backward pass, and the tensors whose gradients they share."""

    def __init__(self, fn: Callable[..., Any], slicing: Slicing) -> None:
        self.name = name_of(fn)
        self.slicing = slicing
        self.saved: SavedRows | None = None
        self.slices: list[_Slice] = []
        self.shared: dict[int, Tensor] = {}  # weights and other tensors that slices use and that need gradients
        self.anchor = torch.empty((0,), requires_grad=torch.is_grad_enabled())
        # Nodes of the slices have higher sequence numbers than this one, all others lower ones.
        marker = self.anchor.view(0).grad_fn
        self.first_node = 0 if marker is None else internals.sequence_number(marker)

    @property
    def taken(self) -> list[Tensor]:
        """The shared tensors whose gradients autograd makes in some slice."""
        return [tensor for key, tensor in self.shared.items() if any(key not in piece.apart for piece in self.slices)]


class _Slice:
    """One slice: a region, and the edges of its graph at which gradients go in and come out."""

    def __init__(
        self, fn: Callable[..., Any], given: list[Any], needs_grad: list[bool], tiled: TiledCall, whole: _Whole | None
    ) -> None:
        self._fn = fn
        self._given = _with_entries(given, needs_grad, tiled.anchor)
        entered = [value for value, needed in zip(self._given, needs_grad, strict=True) if needed]
        self.entries = [get_gradient_edge(value) for value in _each_once(entered)]
        self.edges: list[GradientEdge | None] = []
        self.linears: list[Linear | Scale] = []
        self.apart: frozenset[int] = frozenset()  # the ids of the tensors of these, whose gradients are not autograd's
        call = capture_call(fn, tuple(self._given), {})
        self._tensors = list(call.tensors)
        self._outside = _with_history(call, self._given)
        saved = None if whole is None else self._part_of(*whole, tiled.slicing.dim)
        self.region = Region(call, _SLICE, inputs=saved)

    def _part_of(self, saved: SavedRows, rows: tuple[Any, ...], start: int, length: int, dim: int) -> SavedPart | None:
        """Return its inputs as a part of rows that are saved whole; None if it has other inputs besides."""
        made = {id(value): row for value, row in zip(self._given, rows, strict=True) if isinstance(row, Tensor)}
        if not all(id(tensor) in made for tensor in self._tensors):
            return None
        return saved.part([made[id(tensor)] for tensor in self._tensors], dim, start, length)

    def run(self) -> tuple[list[Any], Any]:
        """Run it for the first time; return the leaves of what the function returns, and their structure."""
        found = self.region.run(self._fn, tuple(self._given), {})
        if self.region.snapshot.changes_arguments:
            raise RegionError(
                f"{self.region.name} changes its rows in place, which reaches beyond its slice. Change a copy of them (.clone())."
            )
        return pytree.tree_flatten(found)

    def arguments(self, rows: tuple[Any, ...]) -> Arguments:
        """Return the region's arguments, to check its function on other rows."""
        slices = {id(value) for value in self._given}
        return Arguments(
            tensors=self._tensors,
            places=[place for place, tensor in enumerate(self._tensors) if id(tensor) in slices],
            rows=[row for row in rows if isinstance(row, Tensor)],
        )

    def record_edges(self, values: list[Any], tiled: TiledCall) -> None:
        """Record the edges at which gradients enter, and find in the graph the tensors that need gradients."""
        self.edges = [
            get_gradient_edge(value) if value.requires_grad else None for value in values if isinstance(value, Tensor)
        ]
        graph = SliceGraph(
            [edge for edge in self.edges if edge is not None],
            {(edge.node, edge.output_nr): tensor for edge, tensor in self._outside},
            {edge.node for edge in self.entries},
            tiled.first_node,
            tiled.name,
        )
        tiled.shared.update({id(tensor): tensor for tensor in graph.tensors})
        self.linears = graph.linears()
        self.apart = frozenset(id(tensor) for linear in self.linears for tensor in linear.tensors)
        self._given, self._tensors, self._outside = [], [], []
        tiled.slices.append(self)

    def gradients(self, upstream: Sequence[Tensor | None], inputs: list[GradientEdge]) -> Sequence[Tensor | None]:
        """Return the gradients at `inputs` for those at the outputs."""
        pairs = [(edge, g) for edge, g in zip(self.edges, upstream, strict=True) if edge is not None and g is not None]
        if not pairs or not inputs:
            return [None] * len(inputs)
        outputs, gradients = zip(*pairs, strict=True)
        keep = internals.graph_is_kept()  # a compiled function refuses to keep it, and a consumed slice can be freed
        return torch.autograd.grad(outputs, inputs, gradients, retain_graph=keep, allow_unused=True)


def _with_entries(given: list[Any], needs_grad: list[bool], anchor: Tensor) -> list[Any]:
    """Return the rows, those that need gradients each behind a node. A leaf would hold the row as long as the graph lives."""
    made = {id(v): _SliceEntry.apply(anchor, [v]) for v, needed in zip(given, needs_grad, strict=True) if needed}
    return [made[id(v)] if needed else v for v, needed in zip(given, needs_grad, strict=True)]


def _each_once(tensors: list[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


class _SliceEntry(torch.autograd.Function):
    """The end of a slice's graph, at which gradients of rows are taken."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, row: list[Tensor]) -> Tensor:
        return row[0].view_as(row[0])

    @staticmethod
    @compiler_internals.left_alone
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("gradients of a slice are taken at its entry")


def _with_history(call: Call, given: list[Any]) -> list[tuple[GradientEdge, Tensor]]:
    """Return tensors of the closure that were computed from others, with their edge in the graph outside."""
    rows = {id(value) for value in given}
    found = [*call.tensors, *call.extras, *call.state]
    return [(get_gradient_edge(t), t) for t in found if t.grad_fn is not None and id(t) not in rows]


# --- backward -------------------------------------------------------------------------------------------------------


class _Unpacked(local):
    tiled: TiledCall | None = None


_UNPACKED = _Unpacked()


@compiler_internals.left_alone
def _unpack_tiled(tiled: TiledCall) -> Tensor:
    _UNPACKED.tiled = tiled
    return tiled.anchor.detach()


class _JoinSlices(torch.autograd.Function):
    """One node for all slices. It saves one empty tensor, for which the hooks around it keep the `TiledCall`."""

    @staticmethod
    def forward(ctx: Any, tensors: list[Tensor], differentiable: list[bool], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(torch.empty(0))
        ctx.mark_non_differentiable(*[t for t, needed in zip(tensors, differentiable, strict=True) if not needed])
        return tuple(tensors)

    @staticmethod
    @compiler_internals.left_alone
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        tiled, _UNPACKED.tiled = _UNPACKED.tiled, None
        assert tiled is not None
        if torch.is_grad_enabled():
            raise UnsupportedTransform(
                f"{tiled.name} in tiles was asked for gradients that can be differentiated again (create_graph=True); its slices are run "
                "again without that. Call the function itself, or retape.checkpoint, for second derivatives."
            )
        totals, dim = _Totals(tiled), tiled.slicing.dim
        with ExitStack() as stack:
            if tiled.saved is not None:
                stack.enter_context(tiled.saved.loaded(tiled.slices[0].region))
            for tensor in tiled.shared.values():
                stack.enter_context(_quiet(tensor))
            for piece, (start, length) in zip(tiled.slices, tiled.slicing.parts(), strict=True):
                parts = [None if g is None else g.narrow(dim, start, length) for g in upstream]
                totals.take(piece, start, parts)
        return (None, None, *totals.gradients())


class _Totals:
    """The gradients of all rows and of shared tensors, while slices add to them in order."""

    def __init__(self, tiled: TiledCall) -> None:
        self._tiled = tiled
        self._rows: list[Tensor | None] = [None] * len(tiled.slices[0].entries)
        self._shared: dict[int, Tensor] = {}

    def gradients(self) -> list[Tensor | None]:
        shared = [(self._shared.get(id(tensor)), tensor.dtype) for tensor in self._tiled.shared.values()]
        return self._rows + [None if total is None else total.to(dtype) for total, dtype in shared]

    def take(self, piece: _Slice, start: int, upstream: list[Tensor | None]) -> None:
        """Add the gradients of one slice."""
        others = [tensor for key, tensor in self._tiled.shared.items() if key not in piece.apart]
        hooks = [linear.watch(self._total_of) for linear in piece.linears]
        try:
            found = piece.gradients(upstream, [*piece.entries, *map(get_gradient_edge, others)])
        finally:
            for hook in hooks:
                hook.remove()
        for index, gradient in enumerate(found[: len(self._rows)]):
            if gradient is not None:
                self._put(index, gradient, start)
        for tensor, gradient in zip(others, found[len(self._rows) :], strict=True):
            if gradient is not None:
                self._add(tensor, gradient)

    def _put(self, index: int, part: Tensor, start: int) -> None:
        dim, whole = self._tiled.slicing.dim, self._rows[index]
        if whole is None:
            shape = list(part.shape)
            shape[dim] = self._tiled.slicing.count
            whole = self._rows[index] = part.new_zeros(shape)
        whole.narrow(dim, start, part.shape[dim]).copy_(part)

    def _add(self, tensor: Tensor, gradient: Tensor) -> None:
        if gradient.layout is torch.strided:
            self._total_of(tensor).add_(gradient)
        else:
            before = self._shared.get(id(tensor))
            self._shared[id(tensor)] = gradient if before is None else before + gradient

    def _total_of(self, tensor: Tensor) -> Tensor:
        """Return the sum of a shared tensor's gradients: float32 for 16-bit tensors, float64 for small float32 ones."""
        total = self._shared.get(id(tensor))
        if total is None:
            dtype = wide(tensor.dtype)
            if dtype is torch.float32 and tensor.dim() < 2 and tensor.device.type in ("cpu", "cuda"):
                dtype = torch.float64
            total = self._shared[id(tensor)] = torch.zeros_like(tensor, dtype=dtype)
        return total


@contextmanager
def _quiet(tensor: Tensor) -> Iterator[None]:
    """Keep a tensor's hooks from running on each slice's part: they are for its whole gradient, once."""
    hooks = tensor._backward_hooks
    kept, retained = dict(hooks or {}), tensor.retains_grad
    gradient = tensor.grad if retained else None
    if hooks:
        hooks.clear()
    if retained:
        tensor.grad = None  # where each slice would add its part
    try:
        yield
    finally:
        if hooks is not None:
            hooks.update(kept)
        if retained:
            tensor.grad = gradient

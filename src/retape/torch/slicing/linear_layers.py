"""Products with the weights of linear layers, and the linear layers of one slice's autograd graph.

Matrix products of 16-bit operands are summed in float32, and never through a float32 copy of the whole weight: `logits = rows @
weight.T`, the gradient of rows, and `add_product`, by which gradients of weights add up.

In every slice autograd makes the whole gradient of a linear layer's weight, and rounds it to 16 bits for 16-bit weights. The operands
of that gradient are at the layer's node, so they are multiplied onto the sum instead (`Linear.watch`): one pass less over the weight's
gradient, and for 16-bit weights a sum in float32. The same for 16-bit vectors that rows are multiplied with, as in norms (`Scale`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from retape.core.errors import RegionError
from retape.torch.compat import internals

HALVES = frozenset({torch.bfloat16, torch.float16})


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of `dtype` are summed."""
    return torch.float32 if dtype in HALVES else dtype


class Products(Protocol):
    """The products of one weight; `rows` and `weight` have one dtype, the results have `wide` of it."""

    slope_dtype: torch.dtype  # in which the two products of the backward pass take a slope

    def logits(self, rows: Tensor) -> Tensor: ...
    def rows_gradient(self, slope: Tensor) -> Tensor: ...


def products_of(weight: Tensor) -> Products:
    """Return how to multiply with a weight: directly, on tensor cores that sum in float32, or slab by slab in float32."""
    if weight.dtype not in HALVES:
        return _DirectProducts(weight)
    return _TensorCoreProducts(weight) if weight.device.type == "cuda" else _SlabProducts(weight)


class _DirectProducts:
    """Operands of float32 or float64."""

    __slots__ = ("_weight", "slope_dtype")

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self.slope_dtype = weight.dtype

    def logits(self, rows: Tensor) -> Tensor:
        return rows @ self._weight.T

    def rows_gradient(self, slope: Tensor) -> Tensor:
        return slope @ self._weight


class _SlabProducts:
    """16-bit operands where no kernel sums them in float32: one slab of the weight at a time is converted to float32."""

    __slots__ = ("_weight", "slope_dtype")

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self.slope_dtype = torch.float32

    def logits(self, rows: Tensor) -> Tensor:
        rows = rows.float()
        out = rows.new_empty(len(rows), len(self._weight))
        for part in _slabs(self._weight):
            out[:, part] = rows @ self._weight[part].float().T
        return out

    def rows_gradient(self, slope: Tensor) -> Tensor:
        out = slope.new_zeros(len(slope), self._weight.shape[1])
        for part in _slabs(self._weight):
            out.addmm_(slope[:, part], self._weight[part].float())
        return out


class _TensorCoreProducts:
    """16-bit operands on CUDA, whose kernels sum in float32."""

    __slots__ = ("_weight", "slope_dtype")

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self.slope_dtype = weight.dtype

    def logits(self, rows: Tensor) -> Tensor:
        return torch.mm(rows, self._weight.T, out_dtype=torch.float32)

    def rows_gradient(self, slope: Tensor) -> Tensor:
        return torch.mm(slope, self._weight, out_dtype=torch.float32)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left.T @ right` to `total`, summed in `total`'s dtype: the gradient of a weight."""
    if left.dtype == total.dtype:
        total.addmm_(left.T, right)
    elif left.device.type != "cuda":
        total.addmm_(left.T.to(total.dtype), right.to(total.dtype))
    elif _adds_in_place(left.dtype):
        torch.addmm(total, left.T, right, out_dtype=total.dtype, out=total)
    else:
        for part in _slabs(total):
            total[part] += torch.mm(left[:, part].T, right, out_dtype=total.dtype)


def add_sum(total: Tensor, rows: Tensor) -> None:
    """Add `rows.sum(0)` to `total`, summed in `total`'s dtype."""
    total += rows.sum(0, dtype=total.dtype)


@cache
def _adds_in_place(dtype: torch.dtype) -> bool:
    """True if `addmm` of 16-bit operands adds to a float32 sum; earlier releases took a sum of the operands' dtype only."""
    one = torch.ones(16, 16, dtype=dtype, device="cuda")
    total = torch.full((16, 16), 2.0**-12, device="cuda")  # lost where the sum is 16-bit in between
    try:
        torch.addmm(total, one, one, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return bool((total == 16 + 2.0**-12).all())


def _slabs(matrix: Tensor, slab_bytes: int = 32 * 2**20) -> Iterator[slice]:
    """Return slices of a matrix's rows that take at most `slab_bytes` in float32."""
    step = max(1, slab_bytes // max(1, 4 * matrix.shape[1]))
    for start in range(0, len(matrix), step):
        yield slice(start, start + step)


# --- linear layers in a slice's graph -------------------------------------------------------------------------------

Place = tuple[Node, int]  # one output of a node
_PLAIN = (Tensor, nn.Parameter)


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A product with a weight, `rows @ weight` or (`transposed`) `rows @ weight.T`, and perhaps its bias."""

    node: Node
    weight: Tensor
    transposed: bool
    bias: Tensor | None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def watch(self, total_of: Callable[[Tensor], Tensor]) -> Any:
        """Add the gradients of weight and bias to their totals in the backward pass; return the hook's handle."""

        def passing(gradients: tuple[Tensor | None, ...]) -> None:
            gradient = gradients[0]
            if gradient is None:
                return
            rows = internals.linear_rows(self.node)
            first, second = (gradient, rows) if self.transposed else (rows, gradient)
            add_product(total_of(self.weight), first, second)
            if self.bias is not None:
                add_sum(total_of(self.bias), gradient)

        return self.node.register_prehook(passing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A product of rows with a 16-bit vector, element by element, of which the vector is factor number `index`."""

    node: Node
    weight: Tensor
    index: int

    @property
    def tensors(self) -> list[Tensor]:
        return [self.weight]

    def watch(self, total_of: Callable[[Tensor], Tensor]) -> Any:
        """Add the gradient of the vector to its total in the backward pass; return the hook's handle."""

        def passing(gradients: tuple[Tensor | None, ...]) -> None:
            gradient = gradients[0]
            if gradient is not None:
                product = gradient.float() * internals.other_factor(self.node, self.index)
                add_sum(total_of(self.weight), product.reshape(-1, product.shape[-1]))

        return self.node.register_prehook(passing)


class SliceGraph:
    """The autograd nodes of one slice, found from its outputs; raises if they lead to an unknown tensor that needs a gradient."""

    def __init__(
        self, starts: Iterable[GradientEdge], known: dict[Place, Tensor], entries: set[Node], first_node: int, name: str
    ) -> None:
        self._known = known
        self._entries = entries
        self._parents: dict[Place, list[Node]] = {}  # the nodes that pass gradients on to a place
        self._found: dict[int, Tensor] = {}
        pending: list[Place] = [(edge.node, edge.output_nr) for edge in starts]
        self._starts = set(pending)
        seen = set[Node]()
        while pending:
            place = pending.pop()
            node, tensor = place[0], self._tensor_at(place)
            if tensor is not None:
                self._found[id(tensor)] = tensor
            elif node not in seen and node not in entries:
                seen.add(node)
                if internals.sequence_number(node) < first_node:
                    raise _unknown(name, node)
                for after in self._after(node):
                    self._parents.setdefault(after, []).append(node)
                    pending.append(after)
        self._nodes = seen

    def _tensor_at(self, place: Place) -> Tensor | None:
        found = self._known.get(place)
        return getattr(place[0], "variable", None) if found is None else found

    @staticmethod
    def _after(node: Node) -> list[Place]:
        return [(after, index) for after, index in node.next_functions if after is not None]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors from outside that need gradients of this slice."""
        return list(self._found.values())

    def linears(self) -> list[Linear | Scale]:
        """Return linear layers and scales that gradients of the rows pass through, whose weight is used once in the slice."""
        passed = self._leading_to_entries()
        found: list[Linear | Scale] = []
        for node in self._nodes:
            if node in passed:
                found += self._linear(node)
                found += self._scale(node)
        return found

    def _scale(self, node: Node) -> list[Scale]:
        for index, place in enumerate(internals.factor_places(node) or ()):
            weight = self._sole_leaf(place)
            if weight is not None and weight.dtype in HALVES and weight.dim() == 1 and len(weight) > 1:
                return [Scale(node=node, weight=weight, index=index)]
        return []

    def _leading_to_entries(self) -> set[Node]:
        users: dict[Node, list[Node]] = {}
        for (node, _), parents in self._parents.items():
            users.setdefault(node, []).extend(parents)
        found, pending = set(self._entries), list(self._entries)
        while pending:
            for parent in users.get(pending.pop(), ()):
                if parent not in found:
                    found.add(parent)
                    pending.append(parent)
        return found

    def _linear(self, node: Node) -> list[Linear]:
        places = internals.linear_places(node)
        if places is None:
            return []
        at_weight, at_bias = places
        transposed = (
            at_weight is not None
            and at_weight[0].name() == "TBackward0"
            and at_weight not in self._known  # that is another tensor, with a gradient of its own
            and self._has_one_user(at_weight)
        )
        if transposed and at_weight is not None:
            at_weight = self._after(at_weight[0])[0]
        weight = self._sole_leaf(at_weight)
        if weight is None or weight.dim() != 2:
            return []
        bias = self._sole_leaf(at_bias)
        if bias is not None and bias.shape != (weight.shape[:1] if transposed else weight.shape[1:]):
            bias = None  # it was broadcast over the columns; autograd sums it
        return [Linear(node=node, weight=weight, transposed=transposed, bias=bias)]

    def _has_one_user(self, place: Place) -> bool:
        return len(self._parents.get(place, ())) == 1 and place not in self._starts

    def _sole_leaf(self, place: Place | None) -> Tensor | None:
        """Return the parameter at a place, if one node alone uses it."""
        if place is None or place in self._known or not self._has_one_user(place):
            return None
        tensor = getattr(place[0], "variable", None)
        return tensor if tensor is not None and type(tensor) in _PLAIN and tensor.is_floating_point() else None


def _unknown(name: str, node: Node) -> RegionError:
    return RegionError(
        f"{name} uses a tensor that needs a gradient ({node.name()}) and that was found neither among its rows nor in its closure, "
        "its modules or its defaults. Give it as rows, or let the function close over it."
    )

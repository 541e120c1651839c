"""What the autograd graph of one slice says: which tensors from outside it leads to, and where its linear layers are.

Linear layers are of interest because autograd makes the whole gradient of their weight in every slice, and rounds it to 16 bit for
16-bit weights. The operands of that gradient pass by the layer's node, so they can be multiplied onto the sum instead
(`Linear.watch`): one pass less over the weight's gradient, and for 16-bit weights a sum in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from retape.core.errors import RegionError
from retape.torch.compat import internals
from retape.torch.slicing.products import add_product, add_sum

Place = tuple[Node, int]  # one output of a node
_PLAIN = (Tensor, nn.Parameter)


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A product with a weight, `rows @ weight` or (`turned`) `rows @ weight.T`, and perhaps its bias."""

    node: Node
    weight: Tensor
    turned: bool
    bias: Tensor | None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def watch(self, total_of: Callable[[Tensor], Tensor]) -> Any:
        """Add the gradients of weight and bias to their totals when the backward pass comes by; returns the hook's handle."""

        def passing(gradients: tuple[Tensor | None, ...]) -> None:
            gradient = gradients[0]
            if gradient is None:
                return
            rows = internals.linear_rows(self.node)
            first, second = (gradient, rows) if self.turned else (rows, gradient)
            add_product(total_of(self.weight), first, second)
            if self.bias is not None:
                add_sum(total_of(self.bias), gradient)

        return self.node.register_prehook(passing)


class SliceGraph:
    """The nodes that were made in a slice, found from its outputs; raises where they lead to a tensor that nobody knows."""

    def __init__(
        self, starts: Iterable[GradientEdge], known: dict[Place, Tensor], entries: set[Node], first_node: int, name: str
    ) -> None:
        self._known = known
        self._entries = entries
        self._parents: dict[Place, list[Node]] = {}  # who passes gradients on to a place
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

    def linears(self) -> list[Linear]:
        """Linear layers that gradients of the rows pass through, and whose weight nobody else in the slice uses."""
        passed = self._leading_to_entries()
        return [found for node in self._nodes if node in passed for found in self._linear(node)]

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
        turned = (
            at_weight is not None
            and at_weight[0].name() == "TBackward0"
            and at_weight not in self._known  # which is another tensor, with a gradient of its own
            and self._has_one_user(at_weight)
        )
        if turned and at_weight is not None:
            at_weight = self._after(at_weight[0])[0]
        weight = self._sole_leaf(at_weight)
        if weight is None or weight.dim() != 2:
            return []
        bias = self._sole_leaf(at_bias)
        if bias is not None and bias.shape != (weight.shape[:1] if turned else weight.shape[1:]):
            bias = None  # one that was spread over the columns; autograd sums it
        return [Linear(node=node, weight=weight, turned=turned, bias=bias)]

    def _has_one_user(self, place: Place) -> bool:
        return len(self._parents.get(place, ())) == 1 and place not in self._starts

    def _sole_leaf(self, place: Place | None) -> Tensor | None:
        """The parameter at a place, if one node alone uses it."""
        if place is None or place in self._known or not self._has_one_user(place):
            return None
        tensor = getattr(place[0], "variable", None)
        return tensor if tensor is not None and type(tensor) in _PLAIN and tensor.is_floating_point() else None


def _unknown(name: str, node: Node) -> RegionError:
    return RegionError(
        f"{name} uses a tensor that needs a gradient ({node.name()}) and that was found neither among its rows nor in its closure, "
        "its modules or its defaults. Give it as rows, or let the function close over it."
    )

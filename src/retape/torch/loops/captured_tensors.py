"""Tensors outside a step that its graph reaches: parameters, and tensors with history that the step reads from its closure.

The graph of every step is walked once, in the forward, so that no tensor that needs a gradient is missed. A closure's tensor with a
history must be known in advance (found by walking closures and modules, or given as `params`); an unknown one is an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from retape.core.errors import InvalidInput, RegionError
from retape.torch.compat import internals

if TYPE_CHECKING:
    from retape.torch.loops.step import TapedSteps


class CapturedTensors:
    """The tensors outside the loop that its steps have used so far, in order of first use."""

    def __init__(self, name: str, candidates: Iterable[Tensor]) -> None:
        self._name = name
        self.tensors: list[Tensor] = []
        self._ids: set[int] = set()
        self._walked_leaves: set[Any] = (
            set()
        )  # nodes of recorded leaves; a leaf keeps its node while that is referenced
        self._candidates = list(candidates)
        self._closed = False
        self._checked = 0  # the number of tensors whose histories are checked
        self._edges: dict[tuple[Any, int], Tensor] = {}
        for tensor in self._candidates:
            if tensor.grad_fn is not None:
                self._edges.setdefault((tensor.grad_fn, tensor.output_nr), tensor)

    def close(self) -> None:
        """Record all candidates now; another tensor found later is an error."""
        for tensor in self._candidates:
            if tensor.requires_grad:
                self._record(tensor)
        self._closed = True

    def walk(self, tape: TapedSteps, since: int) -> None:
        """Record what a graph begun at sequence number `since` reaches, apart from the leaves of its own carry and xs."""
        own = set(map(id, chain(tape.carry_in, *[step.xs for step in tape.steps])))
        edges: list[tuple[Any, int]] = []
        for root in chain(tape.carry_out, *[step.ys for step in tape.steps]):
            if not isinstance(root, Tensor) or not root.requires_grad:
                continue
            if root.grad_fn is not None:
                edges.append((root.grad_fn, root.output_nr))
            elif id(root) not in own:
                self._record(root)
        if self._edges:
            self._walk_edges(edges, own, since)
            if len(self.tensors) > self._checked:
                self._check_histories()
        else:
            self._walk_nodes([node for node, _ in edges], own, since)

    def _walk_nodes(self, nodes: list[Any], own: set[int], since: int) -> None:
        """Walk where no candidate has a history, so that the output by which a node is reached makes no difference."""
        accumulate, made_at, known = internals.LEAF_NODE, internals.sequence_number, self._walked_leaves
        seen = {None, *nodes}  # None: an edge that leads nowhere
        for node in nodes:  # grows during the walk
            if made_at(node) < since and not _made_elsewhere(node, own):
                raise self._unknown(node)
            for following, _ in node.next_functions:
                if following in known or following in seen:
                    continue
                seen.add(following)
                if type(following) is not accumulate:
                    nodes.append(following)
                elif id(following.variable) not in own:
                    self._record(following.variable)
                    known.add(following)

    def _walk_edges(self, stack: list[tuple[Any, int]], own: set[int], since: int) -> None:
        edges, seen, made_at = self._edges, set[Any](), internals.sequence_number
        while stack:
            edge = stack.pop()
            node = edge[0]
            if node in seen or node is None:
                continue
            if type(node) is internals.LEAF_NODE:
                if id(node.variable) not in own:
                    self._record(node.variable)
            elif edge in edges:
                self._record(edges[edge])
                continue  # the node is not marked as seen: another of its outputs may be unknown
            else:
                if made_at(node) < since and not _made_elsewhere(node, own):
                    raise self._unknown(node)
                stack.extend(node.next_functions)
            seen.add(node)

    def finish(self) -> None:
        """Release the graph nodes, after the last walk."""
        self._walked_leaves.clear()

    def _check_histories(self) -> None:
        """Raise RegionError if one tensor was computed from another."""
        self._checked = len(self.tensors)
        related = internals.computed_from_another(self.tensors)
        if related is not None:
            also = ", or could (with resume= all that it reaches counts)," if self._closed else ""
            raise RegionError(
                f"{self._name}: the step reads{also} a tensor that was computed before the loop, and also one that it was computed from "
                f"({related}). Gradients of the two cannot be separated. Put the computed one into the carry (of odeint: into y0), or "
                "compute it in the step."
            )

    def _unknown(self, node: Any) -> RegionError:
        return RegionError(
            f"{self._name}: the step reads a tensor that needs a gradient and has a history (made by {node.name()}), "
            "and that was found neither in its closure nor in its modules; or it keeps a result of an earlier step outside its carry. "
            "Put it into the carry, give it as params=[...], or detach it."
        )

    def _record(self, tensor: Tensor) -> None:
        if id(tensor) in self._ids:
            return
        if self._closed:
            raise RegionError(
                f"{self._name}: the step uses a parameter of shape {tuple(tensor.shape)} that was found neither in its closure nor "
                "in its modules, so that a resumed run could not identify it. Give it as params=[...]."
            )
        self._ids.add(id(tensor))
        self.tensors.append(tensor)


def _made_elsewhere(node: Any, own: set[int]) -> bool:
    """True if the current step may have made a node in another thread, which numbers its nodes separately (CUDA backward).

    Such a graph leads to the leaves of the step, or to leaves only (the transpose of a weight). The latter may also be the history
    of a tensor from outside; gradients then pass through it as in plain PyTorch, which itself refuses a second pass.
    """
    stack, seen, leaves = [node], {node}, []
    while stack:
        for following, _ in stack.pop().next_functions:
            if following is None or following in seen:
                continue
            seen.add(following)
            if type(following) is internals.LEAF_NODE:
                leaves.append(following.variable)
            stack.append(following)
    return any(id(leaf) in own for leaf in leaves) or (torch.cuda.is_initialized() and bool(leaves))


def tensors_of_params(params: Any) -> list[Tensor]:
    """Return the tensors that `params` names: a module's parameters, one tensor, or an iterable of those."""
    if params is None:
        return []
    if isinstance(params, nn.Module):
        return list(params.parameters())
    if isinstance(params, Tensor):
        return [params]
    if isinstance(params, (str, bytes)) or not isinstance(params, Iterable):
        raise InvalidInput(
            f"params holds a {type(params).__name__}; give tensors that the step uses, a module, or an iterable of those."
        )
    items = params.values() if isinstance(params, dict) else params
    return [tensor for item in items for tensor in tensors_of_params(item)]

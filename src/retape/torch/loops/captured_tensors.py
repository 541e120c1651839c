"""Which tensors outside a step its graph reaches: parameters, and tensors with a history that the step reads from its closure.

The graph of every step is walked once, in the forward, so that no tensor that needs a gradient is missed. A closure's tensor
with a history must be known beforehand (found by walking closures and modules, or given as `params`); one that is not is an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from retape.core.errors import InvalidInput, RegionError
from retape.torch.compat import internals
from retape.torch.engine.graph_ancestry import LEAF_NODE, computed_from_another
from retape.torch.loops.tape import Tape


class Reached:
    """The tensors outside the loop that its steps have used so far, in the order they were met."""

    def __init__(self, name: str, candidates: Iterable[Tensor]) -> None:
        self._name = name
        self._edges: dict[tuple[Any, int], Tensor] = {}
        self.tensors: list[Tensor] = []
        self._indices: dict[int, int] = {}
        self._known: set[Any] = set()  # nodes of leaves that were noted; while they are held, a leaf keeps its node
        self._candidates = list(candidates)
        self._closed = False
        self._checked = 0  # so many of them
        for tensor in self._candidates:
            if tensor.grad_fn is not None:
                self._edges.setdefault((tensor.grad_fn, tensor.output_nr), tensor)

    def close(self) -> None:
        """From now on nothing is added: all tensors that were found beforehand count, and another one is an error."""
        for tensor in self._candidates:
            if tensor.requires_grad:
                self._note(tensor)
        self._closed = True

    def walk(self, tape: Tape, since: int) -> None:
        """Note what a graph that was begun at sequence number `since` reaches, beside its own leaves.

        This runs once a step, over every node of its graph: plain code, no calls where none are needed.
        """
        own = tape.own_leaves()
        edges: list[tuple[Any, int]] = []
        for root in tape.roots():
            if root.grad_fn is not None:
                edges.append((root.grad_fn, root.output_nr))
            elif id(root) not in own:
                self._note(root)
        if self._edges:
            self._walk_edges(edges, own, since)
            if len(self.tensors) > self._checked:
                self._check_histories()
        else:
            self._walk_nodes([node for node, _ in edges], own, since)

    def _walk_nodes(self, nodes: list[Any], own: set[int], since: int) -> None:
        """Where no tensor with a history is known, by which of its outputs a node is reached makes no difference."""
        accumulate, made_at, known = LEAF_NODE, internals.sequence_number, self._known
        seen = {None, *nodes}  # None: where an edge leads nowhere
        for node in nodes:  # which grow on the way
            if made_at(node) < since and not _made_elsewhere(node, own):
                raise self._unknown(node)
            for following, _ in node.next_functions:
                if following in known or following in seen:
                    continue
                seen.add(following)
                if type(following) is not accumulate:
                    nodes.append(following)
                elif id(following.variable) not in own:
                    self._note(following.variable)
                    known.add(following)

    def _walk_edges(self, stack: list[tuple[Any, int]], own: set[int], since: int) -> None:
        edges, seen, made_at = self._edges, set[Any](), internals.sequence_number
        while stack:
            edge = stack.pop()
            node = edge[0]
            if node in seen or node is None:
                continue
            if type(node) is LEAF_NODE:  # a leaf stands behind it
                leaf = node.variable
                if id(leaf) not in own and id(leaf) not in self._indices:
                    self._note(leaf)
            elif edge in edges:
                self._note(edges[edge])
                continue  # another output of this node may be one that is not known
            else:
                if made_at(node) < since and not _made_elsewhere(node, own):
                    raise self._unknown(node)
                stack.extend(node.next_functions)
            seen.add(node)

    def settle(self) -> None:
        """The last graph has been walked."""
        self._known.clear()

    def _check_histories(self) -> None:
        """None of the tensors may come from another; asked when a step has used one for the first time."""
        self._checked = len(self.tensors)
        related = computed_from_another(self.tensors)
        if related is not None:
            also = ", or could (with resume= all that it reaches counts)," if self._closed else ""
            raise RegionError(
                f"{self._name}: the step reads{also} a tensor that was computed before the loop, and also one that it was computed from "
                f"({related}). Gradients of the two cannot be told apart. Put the computed one into the carry (of odeint: into y0), or "
                "compute it in the step."
            )

    def _unknown(self, node: Any) -> RegionError:
        return RegionError(
            f"{self._name}: the step reads a tensor that needs a gradient and has a history (made by {node.name()}), "
            "and that was found neither in its closure nor in its modules; or it keeps a result of an earlier step outside its carry. "
            "Put it into the carry, give it as params=[...], or detach it."
        )

    def _note(self, tensor: Tensor) -> None:
        if id(tensor) not in self._indices:
            if self._closed:
                raise RegionError(
                    f"{self._name}: the step uses a parameter of shape {tuple(tensor.shape)} that was found neither in its closure nor "
                    "in its modules, so that a run that is resumed could not tell which one it is. Give it as params=[...]."
                )
            self._indices[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)


def _made_elsewhere(node: Any, own: set[int]) -> bool:
    """Whether the step at hand may have made a node in another thread, which counts for itself: on a GPU, a gradient of its own.

    Such a graph leads to the leaves of the step, or to nothing but leaves (the transpose of a weight). The latter may also be the
    history of a tensor from outside; gradients go through it then as PyTorch has it, which refuses a second time itself.
    """
    leaves = _leaves(node)
    return any(id(leaf) in own for leaf in leaves) or (torch.cuda.is_initialized() and bool(leaves))


def _leaves(node: Any) -> list[Tensor]:
    """The leaves that a graph reaches."""
    stack, seen, found = [node], {node}, []
    while stack:
        for following, _ in stack.pop().next_functions:
            if following is None or following in seen:
                continue
            seen.add(following)
            if type(following) is LEAF_NODE:
                found.append(following.variable)
            stack.append(following)
    return found


def tensors_of_params(params: Any) -> list[Tensor]:
    """The tensors that `params` names: a module's parameters, one tensor, or any iterable of those."""
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

"""Search of the autograd graph for tensors of a set that were computed from one another.

Where gradients are taken at all tensors of a set, autograd adds the gradient of the one to that of the other it was computed from.
Code that passes both on would count it twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def _leaf_node() -> type:
    """Return the type of the nodes of leaves, in whatever mode this module is first imported."""
    with torch.inference_mode(False), torch.enable_grad():
        node: Any = torch.zeros(1, requires_grad=True).view(1).grad_fn
        return type(node.next_functions[0][0])


LEAF_NODE: Any = _leaf_node()


def computed_from_another(tensors: Iterable[Tensor]) -> str | None:
    """Describe a tensor among these from which another one of them was computed; None if there is none."""
    every = list(tensors)
    if len(every) < 2:
        return None
    leaves = {id(tensor) for tensor in every if tensor.grad_fn is None}
    made: set[tuple[Any, int]] = {(tensor.grad_fn, tensor.output_nr) for tensor in every if tensor.grad_fn is not None}
    stack = [edge for node, _ in made for edge in node.next_functions]
    seen: set[Any] = set()
    while stack:
        edge = stack.pop()
        node = edge[0]
        if node is None or edge in seen:
            continue
        seen.add(edge)
        if edge in made:
            return f"a result of {node.name()}"
        if type(node) is LEAF_NODE and id(node.variable) in leaves:
            return f"a parameter of shape {tuple(node.variable.shape)}"
        stack.extend(node.next_functions)
    return None

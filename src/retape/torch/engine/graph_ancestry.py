"""Whether of some tensors one was computed from another: asked where gradients are taken at all of them together.

Autograd passes the gradient of the one on to the other, beside what the other is due itself. Whoever then hands both on would hand it on
twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def _leaf_node() -> type:
    """The type of the nodes that stand for leaves, whatever mode this module is first imported in."""
    with torch.inference_mode(False), torch.enable_grad():
        node: Any = torch.zeros(1, requires_grad=True).view(1).grad_fn
        return type(node.next_functions[0][0])


LEAF_NODE: Any = _leaf_node()


def computed_from_another(tensors: Iterable[Tensor]) -> str | None:
    """In words, a tensor among these that another one of them was computed from; None if there is none."""
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

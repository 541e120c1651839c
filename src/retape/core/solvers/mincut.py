"""The fewest bytes to hold in a graph when some ops may not be run again: a minimum cut.

After the partitioner of Chen, Moreau, Jiang et al. (TVM, PyTorch's AOTAutograd): what a banned op makes flows to what backward
reads through the ops that may be run again, and every such path must be cut by holding a tensor on it (Ford and
Fulkerson's max-flow min-cut). Optimal in bytes for the given bans; it does not weigh seconds, `graph.py` does. Near
O(V E^2) at worst, milliseconds for a transformer block. Capacities are 32-bit: sums beyond 2^30 are rounded up to
a coarser unit, which costs at most that unit per tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import product

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from retape.core.problem import Graph

_MOST_FLOW = 1 << 30


def least_held(graph: Graph, banned: Collection[str] = ()) -> tuple[str, ...]:
    """The tensors to hold, fewest bytes in all, if the `banned` ops (by name) are never run again."""
    edges = _Edges(graph)
    for op in graph.ops:
        if op.recomputable and op.name not in banned:
            edges.add_all((edges.after(a), edges.before(b)) for a, b in product(op.inputs, op.outputs))
        else:
            edges.add_all((edges.source, edges.before(name)) for name in op.outputs)
    edges.add_all((edges.after(name), edges.sink) for name in dict.fromkeys(graph.saved))
    reached = edges.reached_after_flow()
    names = [tensor.name for tensor in graph.tensors]
    return tuple(n for n in names if edges.before(n) in reached and edges.after(n) not in reached)


class _Edges:
    """The network: each tensor is an edge of its own bytes, each dependence an edge that cannot be cut."""

    source, sink = 0, 1

    def __init__(self, graph: Graph) -> None:
        self._index = {tensor.name: 2 + 2 * i for i, tensor in enumerate(graph.tensors)}
        total = sum(tensor.bytes for tensor in graph.tensors)
        unit = -(-total // _MOST_FLOW) or 1
        self._uncut = total // unit + len(graph.tensors) + 1
        self._capacity = {(self.before(t.name), self.after(t.name)): -(-t.bytes // unit) for t in graph.tensors}

    def before(self, name: str) -> int:
        return self._index[name]

    def after(self, name: str) -> int:
        return self._index[name] + 1

    def add_all(self, pairs: Iterable[tuple[int, int]]) -> None:
        self._capacity.update(dict.fromkeys(pairs, self._uncut))

    def reached_after_flow(self) -> set[int]:
        """What the source still reaches when the flow is greatest: the near side of the cut."""
        if not self._capacity:
            return {self.source}
        size = 2 + 2 * len(self._index)
        rows, columns = np.array(list(self._capacity)).T
        values = np.array(list(self._capacity.values()), dtype=np.int32)
        network = csr_matrix((values, (rows, columns)), shape=(size, size))
        residual = network - maximum_flow(network, self.source, self.sink).flow
        residual.data[residual.data < 0] = 0
        residual.eliminate_zeros()
        order = breadth_first_order(residual, self.source, directed=True, return_predecessors=False)
        return {int(node) for node in order}

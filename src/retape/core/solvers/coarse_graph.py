"""Large op graphs: consecutive ops joined into groups, so that the exact program of `graph.py` stays small.

A group is run again as a whole, and the tensors of a group that can be held are held together. That is a smaller class of holdings:
each answer is feasible for the whole graph, but the best one may be missed. Ops that take a large share of the seconds, or that make
a tensor with a large share of the bytes, stay alone, so what is lost is among the small ones. Linear in the graph's size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from retape.core.problem import Graph, GraphTensor, Op


@dataclass(frozen=True, slots=True, kw_only=True)
class CoarseGraph:
    """A graph of groups, and the tensors of the whole graph that each of its tensors represents."""

    graph: Graph
    members: Mapping[str, tuple[str, ...]]

    def expand(self, held: Iterable[str]) -> tuple[str, ...]:
        """Return the tensors of the whole graph that are held."""
        return tuple(name for bundle in held for name in self.members[bundle])


def coarsen_graph(graph: Graph, most_ops: int, capacity_bytes: int) -> CoarseGraph:
    """Join ops until at most `most_ops` are left; a tensor of more than `capacity_bytes` is never held."""
    if len(graph.ops) <= most_ops:
        return CoarseGraph(graph=graph, members={tensor.name: (tensor.name,) for tensor in graph.tensors})
    large = _large_ops(graph, max(1, (most_ops - 1) // 4), capacity_bytes)
    return _Grouping(graph, _groups(graph, large, most_ops), large, capacity_bytes).coarse()


def _large_ops(graph: Graph, parts: int, capacity_bytes: int) -> frozenset[str]:
    """Return the ops (by name) above 1/`parts` of the seconds or of the bytes that can be held, and those that may not run again."""
    sizes = {tensor.name: tensor.bytes for tensor in graph.tensors if tensor.bytes <= capacity_bytes}
    made = {op.name: sum(sizes.get(name, 0) for name in op.outputs) for op in graph.ops}
    seconds, total = sum(op.seconds for op in graph.ops) / parts, sum(made.values()) / parts
    return frozenset(
        op.name for op in graph.ops if not op.recomputable or op.seconds > seconds or made[op.name] > total
    )


def _groups(graph: Graph, large: frozenset[str], most_ops: int) -> list[list[Op]]:
    """Return the ops in order: large ones alone, and the runs of others between them in pieces of equal length."""
    runs: list[list[Op]] = []
    alone = True
    for op in graph.ops:
        if alone or op.name in large:
            runs.append([])
        runs[-1].append(op)
        alone = op.name in large
    few = [run for run in runs if run[0].name not in large]
    room = max(1, most_ops - len(runs))
    length = -(-sum(map(len, few)) // room)
    return [run[start : start + length] for run in runs for start in range(0, len(run), length)]


class _Grouping:
    """The tensors that each group makes for others, in bundles: those that can be held, and those that cannot."""

    def __init__(self, graph: Graph, groups: list[list[Op]], large: frozenset[str], capacity_bytes: int) -> None:
        self._graph, self._groups, self._large, self._capacity = graph, groups, large, capacity_bytes
        self._sizes = {tensor.name: tensor.bytes for tensor in graph.tensors}
        self._saved = frozenset(graph.saved)
        self._bundle_of = {name: name for name in graph.inputs}
        self._members: dict[str, list[str]] = defaultdict(list)
        for name in graph.inputs:
            self._members[name].append(name)

    def coarse(self) -> CoarseGraph:
        group_of = {name: i for i, group in enumerate(self._groups) for op in group for name in op.outputs}
        read = {
            name
            for i, group in enumerate(self._groups)
            for op in group
            for name in op.inputs
            if group_of.get(name) != i
        }
        ops = [self._joined(number, group, read) for number, group in enumerate(self._groups)]
        members = {bundle: tuple(names) for bundle, names in self._members.items()}
        sizes = {bundle: sum(map(self._sizes.__getitem__, names)) for bundle, names in members.items()}
        graph = Graph(
            ops=tuple(op for op in ops if op.outputs),
            tensors=tuple(GraphTensor(name=bundle, bytes=size) for bundle, size in sizes.items()),
            inputs=self._graph.inputs,
            saved=tuple(dict.fromkeys(self._bundle_of[name] for name in self._graph.saved)),
            name=self._graph.name,
        )
        return CoarseGraph(graph=graph, members=members)

    def _joined(self, number: int, group: list[Op], read: set[str]) -> Op:
        """Return a group as one op; what only the group itself reads is not named any more."""
        own = {name for op in group for name in op.outputs}
        inputs = dict.fromkeys(self._bundle_of[name] for op in group for name in op.inputs if name not in own)
        outputs: dict[str, None] = {}
        for op in group:
            for name in op.outputs:
                if name in read or name in self._saved:
                    bundle = name if op.name in self._large else f"group {number}, {self._holdable(name)}"
                    self._bundle_of[name] = bundle
                    self._members[bundle].append(name)
                    outputs[bundle] = None
        return Op(
            name=f"{number} {group[-1].name}",
            seconds=sum(op.seconds for op in group),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            recomputable=all(op.recomputable for op in group),
        )

    def _holdable(self, name: str) -> str:
        return "held together" if self._sizes[name] <= self._capacity else "never held"

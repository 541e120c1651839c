"""The ways to treat one kind of region: keep, select, offload, recompute, with what each holds, moves and re-runs.

Select is solved on the region's op graph (`core/solvers/graph.py`), from the floor to everything; the recipe that the engine
would follow then says what a re-run really costs. The bytes of what is held are exact; how high a forward stands that
holds them is played through on the trace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from retape.core.problem import Graph, GraphTensor, Op
from retape.core.solvers.graph import GraphPlanner
from retape.torch.engine.recipe_mode import Step
from retape.torch.engine.select import plan_recipe
from retape.torch.engine.trace import RegionTrace, TracedOp

SMALL_PARTS = 64  # a storage that is less than one of so many parts of a tape is not worth a copy
MOST_OPS = 600  # of a region whose graph is still solved exactly
_ANSWERED = (Step.ANSWER, Step.BECOME)
_DATA_DEPENDENT = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """Hold these slots, and move those to the host. `held_bytes` come on top of the region's output; a re-run does `share` of the ops'
    seconds.

    `forward_bytes` is how high a forward stands above its start while nothing has been moved yet, the output included;
    `rerun_bytes` the same of the re-run, what is held and what is back included.
    """

    held: frozenset[int]
    held_bytes: int
    share: float
    ops_left: int
    forward_bytes: int
    rerun_bytes: int
    moved: frozenset[int] = field(default_factory=frozenset)
    moved_bytes: int = 0


def is_steady(trace: RegionTrace | None) -> bool:
    """Whether a region does the same for every batch of one shape, so that its slots can be named by number."""
    if trace is None or trace.opaque:
        return trace is not None and trace.compiled
    return not any(tag in op.op.tags for op in trace.ops for tag in _DATA_DEPENDENT)


def tape_storages(trace: RegionTrace) -> dict[int, int]:
    """The storages that a tape holds beyond inputs, weights and the output, with their bytes."""
    made = {storage for op in trace.ops for storage in op.makes}
    return {s: trace.storage_bytes[s] for s in trace.slots if s in made and s not in trace.outputs}


def treat(trace: RegionTrace, held_storages: frozenset[int], moved_storages: frozenset[int] = frozenset()) -> Treatment:
    """What holding and moving these storages comes to."""
    there = held_storages | moved_storages
    free = set(range(len(trace.storage_bytes))) - tape_storages(trace).keys()
    held = frozenset(i for i, s in enumerate(trace.slots) if s in held_storages or (there and s in free))
    moved = frozenset(i for i, s in enumerate(trace.slots) if s in moved_storages)
    recipe = plan_recipe(trace, held | moved) if there else None
    steps = recipe.steps if recipe is not None else (Step.RUN,) * len(trace.ops)
    stop, whole = last_missing(trace, held | moved), last_missing(trace, frozenset())
    if recipe is not None:  # a re-run goes on until it has seen again what it was answered with
        stop = max(stop, *(trace.saved_at[slot] for slot in recipe.checked), 0)
    total = sum(op.seconds for op in trace.ops[:whole]) or 1.0
    run = sum(op.seconds for op, step in zip(trace.ops[:stop], steps, strict=False) if step is Step.RUN)
    return Treatment(
        held=held,
        held_bytes=sum(trace.storage_bytes[storage] for storage in held_storages),
        share=run / total,
        ops_left=stop if recipe is not None else 0,
        forward_bytes=forward_bytes(trace, there),
        rerun_bytes=rerun_bytes(trace, there, steps, stop),
        moved=moved,
        moved_bytes=sum(trace.storage_bytes[storage] for storage in moved_storages),
    )


def select_treatments(trace: RegionTrace | None) -> tuple[Treatment, ...]:
    """Ways to hold a part of the tape, none of them dominated; empty where the region cannot be steered op by op."""
    if trace is None or trace.compiled or not is_steady(trace) or not tape_storages(trace):
        return ()
    graph, names = _graph_of(trace)
    if len(graph.ops) > MOST_OPS:
        return ()
    found = {_storages(holding.held, names) for holding in GraphPlanner(graph).holdings()}
    ways = sorted((treat(trace, held) for held in found if held), key=lambda way: (way.held_bytes, way.share))
    whole = sum(tape_storages(trace).values())
    kept: list[Treatment] = []
    for way in ways:
        if way.held_bytes < whole and (not kept or way.share < kept[-1].share):
            kept.append(way)
    return tuple(kept)


def offload_treatments(
    trace: RegionTrace | None, selections: tuple[Treatment, ...], targets: Iterable[int]
) -> tuple[Treatment, ...]:
    """Ways to move about as many bytes as each of `targets`: of the whole tape, and of what each selection would hold.

    The largest storages go first: they take the fewest copies. What is small stays.
    """
    if trace is None or not is_steady(trace):
        return ()
    tape = tape_storages(trace)
    least = sum(tape.values()) // SMALL_PARTS
    wholes = [
        frozenset(tape),
        *(frozenset(tape.keys() & {trace.slots[slot] for slot in way.held}) for way in selections),
    ]
    found: dict[tuple[frozenset[int], frozenset[int]], None] = {}
    for whole in wholes:
        large = sorted((s for s in whole if tape[s] > least), key=lambda storage: (-tape[storage], storage))
        for target in targets:
            moved = _up_to(target, large, tape)
            if moved:
                found[whole - moved, moved] = None
    return tuple(treat(trace, held, moved) for held, moved in found)


def _up_to(target: int, storages: list[int], sizes: dict[int, int]) -> frozenset[int]:
    """The first of the storages that fit into `target` bytes together."""
    chosen, total = [], 0
    for storage in storages:
        if total + sizes[storage] <= target:
            chosen.append(storage)
            total += sizes[storage]
    return frozenset(chosen)


def _storages(held: tuple[str, ...], names: dict[str, int]) -> frozenset[int]:
    return frozenset(names[name] for name in held if name in names)


def _graph_of(trace: RegionTrace) -> tuple[Graph, dict[str, int]]:
    """The region's ops on storages, and which of the tensors are storages to hold.

    Each write to a storage makes a tensor of its own, except where nobody sees what was there before: then the op that makes it
    and the writes are one op.
    """
    return _GraphMaker(trace).graph()


class _GraphMaker:
    def __init__(self, trace: RegionTrace) -> None:
        self._trace = trace
        self._tape = tape_storages(trace)
        self._too_much = sum(self._tape.values()) + 1  # what can only be made again
        self._settled = trace.settled()
        self._made = {storage for op in trace.ops for storage in op.makes}
        self._rewritten = {storage for op in trace.ops for storage in op.writes} - self._settled
        self._version: dict[int, int] = defaultdict(int)
        self._sizes: dict[str, int] = {}

    def _name(self, storage: int) -> str:
        text = f"{storage}.{self._version[storage]}"
        holdable = storage in self._tape and storage not in self._rewritten
        size = self._tape[storage] if holdable else self._too_much if storage in self._made else 0
        self._sizes.setdefault(text, size)
        return text

    def graph(self) -> tuple[Graph, dict[str, int]]:
        trace = self._trace
        inputs = {self._name(s) for s in range(len(trace.storage_bytes)) if s not in self._made}
        ops = [self._op(number, group) for number, group in enumerate(self._groups())]
        saved = tuple(dict.fromkeys(self._name(storage) for storage in trace.slots))
        graph = Graph(
            ops=tuple(ops),
            tensors=tuple(GraphTensor(name=text, bytes=size) for text, size in self._sizes.items()),
            inputs=tuple(sorted(inputs)),
            saved=saved,
        )
        return graph, {f"{storage}.0": storage for storage in self._tape}

    def _groups(self) -> list[list[TracedOp]]:
        """The ops that compute something; writes to settled storages belong with the op before the last of them."""
        pending: dict[int, list[TracedOp]] = {}
        last = {s: i for i, op in enumerate(self._trace.ops) for s in op.writes if s in self._settled}
        groups: list[list[TracedOp]] = []
        for number, op in enumerate(self._trace.ops):
            if op.is_view or not (op.makes or op.writes):
                continue
            touched = [s for s in dict.fromkeys((*op.makes, *op.writes)) if s in self._settled]
            group = [*(pending.pop(touched[0], []) if touched else []), op]
            if touched and number < last[touched[0]]:
                pending[touched[0]] = group
            else:
                groups.append(group)
        return groups

    def _op(self, number: int, group: list[TracedOp]) -> Op:
        reads: dict[str, None] = {}
        outputs: dict[str, None] = {}
        for op in group:
            own = {s for each in group for s in each.makes}
            if not op.uninitialised:
                reads.update(dict.fromkeys(self._name(s) for s in op.reads if s not in own))
            for storage in op.writes:
                if storage not in self._settled:
                    self._version[storage] += 1
            outputs.update(dict.fromkeys(self._name(s) for s in (*op.makes, *op.writes)))
        seconds = sum(op.seconds for op in group)
        return Op(name=f"{number} {group[-1].op}", seconds=seconds, inputs=tuple(reads), outputs=tuple(outputs))


def forward_bytes(trace: RegionTrace, held_storages: frozenset[int]) -> int:
    """How high a forward stands above its start when it holds these storages: its temporaries live as long as they did."""
    return _highest(trace, held_storages | trace.outputs, (Step.RUN,) * len(trace.ops), len(trace.ops))


def rerun_bytes(trace: RegionTrace, held_storages: frozenset[int], steps: tuple[Step, ...], stop: int) -> int:
    """How high a re-run of the first `stop` ops stands above the region's start: what was held, and what it refills or makes."""
    held = sum(trace.storage_bytes[storage] for storage in held_storages)
    refilled = frozenset(storage for storage in trace.slots if storage not in held_storages)
    return held + _highest(trace, refilled, steps, stop)


def _highest(trace: RegionTrace, kept: frozenset[int], steps: tuple[Step, ...], stop: int) -> int:
    """The most that ops make and that lives at once; `kept` lives to the end. What is answered makes nothing, what is skipped a blank."""
    gone: dict[int, int] = defaultdict(int)
    live = peak = 0
    for number, (op, step) in enumerate(zip(trace.ops[:stop], steps, strict=False)):
        live -= gone.pop(number, 0)
        for storage in () if step in _ANSWERED else op.makes:
            live += trace.storage_bytes[storage]
            if storage not in kept:
                gone[trace.died[storage]] += trace.storage_bytes[storage]
        peak = max(peak, live)
    return peak


def rerun_share(trace: RegionTrace) -> float:
    """The share of a forward's seconds that a re-run of everything takes: it stops after the last slot."""
    total = sum(op.seconds for op in trace.ops)
    return sum(op.seconds for op in trace.ops[: last_missing(trace, frozenset())]) / total if total else 1.0


def last_missing(trace: RegionTrace, held: frozenset[int]) -> int:
    """After how many ops the last slot that is not held has been refilled, and a re-run stops."""
    return max((at for slot, at in enumerate(trace.saved_at) if slot not in held), default=0)

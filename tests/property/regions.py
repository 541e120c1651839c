"""Random regions: a specification drawn from a seed, the module that executes it, and the ways to run a part as a region.

A specification is a tree of frozen values. `SpecBlock` executes one; for a child it calls `ways.call`, which runs
it plainly or as a region, as the session says. Nothing here compares; that is in `cases.py`.
"""

from __future__ import annotations

import random
from collections import UserDict, namedtuple
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

import torch
from torch import nn

from . import function_ops, layout_ops, module_ops, number_ops, ways  # noqa: F401 - the first four fill WIDE
from .ops import ALIASING, OPS, PARTS, ROWS, WIDE, WIDTH

Pair = namedtuple("Pair", "first rest")


@dataclass
class Bundle:
    values: list
    note: str = "n"


class Style(Enum):
    """How tensors travel into a region and out of it."""

    POSITIONAL = "positional"
    LIST = "list"
    DICT = "dict"
    KEYWORD = "keyword"
    BUNDLE = "dataclass"
    PAIR = "namedtuple"
    CLOSURE = "closure"
    USER_DICT = "UserDict"


STYLES = tuple(style for style in Style if style is not Style.USER_DICT)
GIVES = (Style.POSITIONAL, Style.LIST, Style.DICT, Style.BUNDLE, Style.PAIR)


@dataclass(frozen=True)
class Op:
    """One op, the numbers of its operands, and the number that chooses its variant or child."""

    name: str
    operands: tuple[int, ...]
    number: int = 0


@dataclass(frozen=True)
class Spec:
    """A block: `inputs` values come in, each op appends one (a child, as many as it returns), `outputs` go out."""

    inputs: int
    ops: tuple[Op, ...]
    outputs: tuple[int, ...]
    children: tuple[Spec, ...] = ()
    takes: Style = Style.POSITIONAL
    gives: Style = Style.POSITIONAL
    copies: bool = False
    way: ways.Way | None = None
    autocast: bool = False
    shares: bool = False

    def names(self):
        return {op.name for op in self.ops}.union(*[child.names() for child in self.children])


# --- drawing one -----------------------------------------------------------------------------------------------

LEAF_OPS = tuple(sorted(set(OPS) - {"same", "copy", "inplace_operand"}))
WIDE_OPS = tuple(sorted(WIDE))
_EVERY_OP = {**OPS, **WIDE}


def draw(rng: random.Random, depth: int = 0, pool: tuple[str, ...] = LEAF_OPS) -> Spec:
    """A random block of the ops in `pool`; the outermost one (depth 0) is no region itself."""
    inputs = rng.randint(1, 3)
    copies = depth > 0 and rng.random() < 0.15
    ops, children, fresh = [], [], set(range(inputs)) if copies else set()
    count = inputs
    for _ in range(rng.randint(2, 5) if depth == 0 else rng.randint(1, 7)):
        if depth < 3 and rng.random() < (0.75 if depth == 0 else 0.18):
            child = draw_child(rng, depth, pool)
            operands = tuple(rng.randrange(count) for _ in range(child.inputs))
            if rng.random() < 0.6:  # a chain, which links can follow
                operands = (count - 1, *operands[1:])
            if not child.copies:
                fresh -= set(operands)
            ops.append(Op("child", operands, len(children)))
            children.append(child)
            count += len(child.outputs)
            continue
        ops.append(_draw_op(rng, count, fresh, pool))
        if ops[-1].name in ALIASING:
            fresh.discard(ops[-1].operands[0])
        else:
            fresh.add(count)
        count += 1
    picks = [count - 1, *[rng.randrange(inputs, count) for _ in range(rng.choice((0, 0, 1, 2)))]]
    return Spec(inputs, tuple(ops), tuple(dict.fromkeys(picks)), tuple(children), copies=copies)


def _draw_op(rng, count, fresh, pool):
    last = count - 1
    if fresh and rng.random() < 0.08:
        return Op("inplace_operand", (rng.choice(sorted(fresh)),), rng.randrange(12))
    name = rng.choice(pool) if rng.random() < 0.95 else "same"
    arity = _EVERY_OP[name].__code__.co_argcount - 2
    first = last if rng.random() < 0.6 else rng.randrange(count)
    variants = 12 if name in OPS else 60
    return Op(name, (first, *[rng.randrange(count) for _ in range(arity - 1)]), rng.randrange(variants))


def draw_child(rng: random.Random, depth: int, pool: tuple[str, ...] = LEAF_OPS) -> Spec:
    """A random block that is a region inside one of `depth`."""
    child = draw(rng, depth + 1, pool)
    return replace(
        child,
        takes=rng.choice(STYLES) if rng.random() < 0.5 else Style.POSITIONAL,
        gives=rng.choice(GIVES) if rng.random() < 0.4 else Style.POSITIONAL,
        way=ways.draw(rng) if rng.random() < 0.92 else None,
        autocast=rng.random() < 0.12,
        shares=rng.random() < 0.2,
    )


# --- executing one ---------------------------------------------------------------------------------------------


class SpecBlock(nn.Module):
    """Executes a specification; holds the parameters, buffers and generator that its ops use."""

    def __init__(self, spec: Spec, rng: random.Random, shared: nn.Linear) -> None:
        super().__init__()
        self.spec = spec
        self.children_blocks = nn.ModuleList(SpecBlock(child, rng, shared) for child in spec.children)
        self.linear = shared if spec.shares else nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.conv = nn.Conv1d(ROWS, ROWS, 3, padding=1)
        self.norm = nn.LayerNorm(WIDTH)
        self.batch_norm = nn.BatchNorm1d(ROWS)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("average", torch.ones(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(ROWS))
        self.register_buffer("var", torch.ones(ROWS))
        self.last = torch.zeros(())
        self.past, self.notes, self.calls, self.side = [], {}, 0, None
        self.generator = torch.Generator(torch.get_default_device())
        # Only its own: a region of which some op may be `rrelu` is not re-run in part.
        self.functions = {op.name: _EVERY_OP[op.name] for op in spec.ops if op.name != "child"}
        for op in spec.ops:
            self._add_parts(PARTS.get(op.name, {}))
        for module in (self.linear, self.wide, self.conv):
            if rng.random() < 0.25:
                module.requires_grad_(False)  # frozen, as under LoRA

    def _add_parts(self, parts):
        for name, make in parts.items():
            if not hasattr(self, name):
                part = make()
                setattr(self, name, part) if isinstance(part, nn.Module) else self.register_buffer(name, part)

    def forward(self, values):
        values = list(values)
        for op in self.spec.ops:
            if op.name == "child":
                values += self._child(op, values)
            else:
                out = self.functions[op.name](self, op.number, *[values[i] for i in op.operands])
                values.append(out.float() if out.dtype != torch.float32 else out)
        return [values[i] for i in self.spec.outputs]

    def _child(self, op, values):
        block = self.children_blocks[op.number]
        taken = [values[i] for i in op.operands]
        if block.spec.copies:
            taken = [value * 1 for value in taken]
        with torch.autocast("cpu", torch.bfloat16, enabled=block.spec.autocast):
            return tensors_in(block.spec.gives, ways.call(block.spec.way, block, *call_of(block, taken)))


def call_of(block, taken):
    """The function to call, its arguments and its keywords, in the style that the child takes them."""
    gives = block.spec.gives
    takes = block.spec.takes
    if takes is Style.POSITIONAL:
        return partial(_from_positional, block, gives), tuple(taken), {}
    if takes is Style.KEYWORD:
        names = {f"t{i}": value for i, value in enumerate(taken[1:])}
        return lambda first, **rest: give(gives, block([first, *rest.values()])), (taken[0],), names
    if takes is Style.CLOSURE:
        rest = taken[1:]
        return lambda first: give(gives, block([first, *rest])), (taken[0],), {}
    kinds = {
        Style.LIST: lambda: [taken[0], [taken[1:]]],
        Style.DICT: lambda: {"a": taken[0], "rest": tuple(taken[1:])},
        Style.BUNDLE: lambda: Bundle(taken),
        Style.PAIR: lambda: Pair(taken[0], taken[1:]),
        Style.USER_DICT: lambda: UserDict(a=taken[0], rest=taken[1:]),
    }
    return lambda packed, flag=True: give(gives, block(tensors_in(takes, packed))), (kinds[takes](),), {"flag": False}


def _from_positional(block, gives, *taken):
    return give(gives, block(taken))


def give(style, values):
    if style is Style.POSITIONAL:
        return values[0] if len(values) == 1 else tuple(values)
    kinds = {
        Style.LIST: lambda: [values[0], [values[1:]]],
        Style.DICT: lambda: {"a": values[0], "rest": tuple(values[1:]), "flag": None},
        Style.BUNDLE: lambda: Bundle(values),
        Style.PAIR: lambda: Pair(values[0], values[1:]),
        Style.USER_DICT: lambda: UserDict(a=values[0], rest=values[1:]),
    }
    return kinds[style]()


def tensors_in(style, packed):
    if isinstance(packed, torch.Tensor):
        return [packed]
    if style is Style.LIST:
        return [packed[0], *packed[1][0]]
    if style in (Style.DICT, Style.USER_DICT):
        return [packed["a"], *packed["rest"]]
    if style is Style.BUNDLE:
        return packed.values
    return [packed.first, *packed.rest] if style is Style.PAIR else list(packed)


# --- printing and shrinking one ----------------------------------------------------------------------------------


def text(spec: Spec, name: str = "root", indent: str = "") -> str:
    """The block as lines, without the ops that do nothing."""
    notes = [] if spec.way is None else [str(spec.way)]
    notes += [f"takes {spec.takes.value}, gives {spec.gives.value}"] if name != "root" else []
    notes += [word for word in ("copies", "autocast", "shares") if getattr(spec, word)]
    lines = [f"{indent}{name}({spec.inputs} inputs) -> {list(spec.outputs)}  # {'; '.join(notes)}"]
    count = spec.inputs
    for op in spec.ops:
        if op.name == "copy":
            lines.append(f"{indent}  v{count} = copy of v{op.operands[0]}")
        elif op.name == "child":
            child = spec.children[op.number]
            lines.append(text(child, f"v{count}.. = region{list(op.operands)}", indent + "  "))
            count += len(child.outputs) - 1
        else:
            lines.append(f"{indent}  v{count} = {op.name}{list(op.operands)} variant {op.number}")
        count += 1
    return "\n".join(lines)


def smaller(spec: Spec):
    """Specifications that are one step simpler: an op does nothing, a child is no region, a style is the plain one."""
    for index, op in enumerate(spec.ops):
        if op.name == "child" and len(spec.children[op.number].outputs) == 1:
            yield replace(spec, ops=(*spec.ops[:index], Op("copy", op.operands[:1]), *spec.ops[index + 1 :]))
    yield from (replace(spec, outputs=spec.outputs[:1]) for _ in spec.outputs[1:2] if spec.way is None)
    for index, op in enumerate(spec.ops):
        if op.name not in ("same", "copy", "child"):
            ops = (*spec.ops[:index], Op("copy", op.operands[:1]), *spec.ops[index + 1 :])
            yield replace(spec, ops=ops)
    used = {op.number for op in spec.ops if op.name == "child"}
    for index, child in enumerate(spec.children):
        if index not in used:
            continue
        for simpler in (*_plainer(child), *smaller(child)):
            yield replace(spec, children=(*spec.children[:index], simpler, *spec.children[index + 1 :]))


def _plainer(child: Spec):
    if child.way is not None:
        yield replace(child, way=None)
        yield from (replace(child, way=way) for way in child.way.plainer())
    for change in ({"takes": Style.POSITIONAL}, {"gives": Style.POSITIONAL}, {"autocast": False}):
        changed = replace(child, **change)
        if changed != child:
            yield changed

"""One case of the fuzzer: a random model, a random step, and the comparison of its managed run with plain autograd.

Everything that a case does is drawn from its seed. `failure(case)` says what differs, `shrunk(case)` finds a smaller case
that fails too, and `describe(case)` prints it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import torch

from retape.core.errors import StateChanged

from . import ways
from .ops import SHAPE
from .regions import Spec, SpecBlock, draw, smaller, text
from .subjects import Refused, blocks_of, differences, seed_streams, strict
from .ways import Kind, Mode


class Backward(Enum):
    """How gradients are asked for."""

    ONCE = "once"
    RETAIN = "twice, the graph retained"
    APART = "each output on its own"
    DOUBLE = "twice differentiated"
    PARTIAL = "only of some inputs"


@dataclass(frozen=True)
class Case:
    """A seed and what was drawn from it."""

    seed: int
    spec: Spec
    backward: Backward = Backward.ONCE
    forwards: int = 1
    used: int = 1
    leaves: bool = False
    frozen_inputs: bool = False
    eval_between: bool = False


def case_of(seed: int) -> Case:
    rng = random.Random(seed)
    spec = draw(rng)
    backward = rng.choice((Backward.ONCE, Backward.ONCE, Backward.ONCE, *Backward))
    if backward is not Backward.ONCE:
        spec = without_selective(spec)  # torch's contexts hold for one backward pass
    return Case(
        seed=seed,
        spec=spec,
        backward=backward,
        forwards=rng.choice((1, 1, 1, 2)),
        used=rng.randint(1, len(spec.outputs)),
        leaves=rng.random() < 0.3,
        frozen_inputs=rng.random() < 0.15,
        eval_between=rng.random() < 0.2,
    )


def without_selective(spec: Spec) -> Spec:
    way = spec.way
    if way is not None and way.kind is Kind.SELECTIVE:
        way = replace(way, kind=Kind.POLICY)
    return replace(spec, way=way, children=tuple(without_selective(child) for child in spec.children))


# --- running one ---------------------------------------------------------------------------------------------------


class _Model:
    """The block of a case with its inputs; `rewind` puts all of it back to the start."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(case.seed)
        rng = random.Random(case.seed)
        self.case = case
        self.block = SpecBlock(case.spec, rng, torch.nn.Linear(SHAPE[2], SHAPE[2]))
        self.inputs = [torch.randn(SHAPE).requires_grad_(not case.frozen_inputs) for _ in range(case.spec.inputs)]
        self.start = [(buffer, buffer.clone()) for buffer in self.block.buffers()]

    def rewind(self) -> None:
        for buffer, value in self.start:
            buffer.copy_(value)
        self.block.train(self.case.seed % 7 != 0)
        self.block.zero_grad(set_to_none=True)
        for value in self.inputs:
            value.grad = None
        for number, block in enumerate(blocks_of(self.block)):
            block.generator.manual_seed(self.case.seed + number)
            block.last = torch.zeros(())
        seed_streams(self.case.seed)

    def forward(self) -> list[torch.Tensor]:
        given = self.inputs if self.case.leaves else [value * 1 for value in self.inputs]
        return self.block(given)[: self.case.used]

    def sources(self) -> list[torch.Tensor]:
        return [t for t in (*self.inputs, *self.block.parameters()) if t.requires_grad]


def results(case: Case, model: _Model, mode: Mode, recipes: dict | None = None) -> dict:
    """Everything that a step leaves behind."""
    model.rewind()
    with ways.session(mode, recipes):
        outputs = [model.forward() for _ in range(case.forwards)]
        torch.rand(3), random.random(), np.random.rand()
        if case.eval_between:
            model.block.eval()
        losses = [(out * out.detach().cos()).sum() for group in outputs for out in group]
        losses = [loss for loss in losses if loss.requires_grad]
        found = {f"loss {i}": loss.detach().clone() for i, loss in enumerate(losses)}
        if losses:
            found |= _differentiate(case, model, losses)
    found |= {f"gradient of input {i}": value.grad for i, value in enumerate(model.inputs)}
    found |= {f"gradient of {name}": value.grad for name, value in model.block.named_parameters()}
    found |= {f"buffer {name}": value.clone() for name, value in model.block.named_buffers()}
    for number, block in enumerate(blocks_of(model.block)):
        found[f"generator {number}"] = block.generator.get_state()
        found[f"last {number}"] = block.last
    return found | {
        "torch stream": torch.get_rng_state(),
        "python stream": random.getstate(),
        "numpy stream": [part.tobytes() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
    }


def _differentiate(case, model, losses):
    sources = model.sources()
    if case.backward is Backward.APART:
        for loss in reversed(losses):
            loss.backward(retain_graph=True)
        return {}
    total = sum(losses)
    if case.backward is Backward.DOUBLE:
        first = torch.autograd.grad(total, sources, create_graph=True, allow_unused=True)
        norm = sum((g * g).sum() for g in first if g is not None)
        second = torch.autograd.grad(norm, sources, allow_unused=True) if norm.requires_grad else ()
        return {f"derivative {i}": g for i, g in enumerate((*first, *second))}
    if case.backward is Backward.PARTIAL:
        some = random.Random(case.seed).sample(sources, 1 + len(sources) // 4)
        found = torch.autograd.grad(total, some, allow_unused=True, retain_graph=True)
        total.backward(inputs=some)
        return {f"derivative {i}": g for i, g in enumerate(found)}
    if case.backward is Backward.RETAIN:
        total.backward(retain_graph=True)
    total.backward()
    return {}


def failure(case: Case) -> str | None:
    """What differs between plain autograd and the managed run; None where nothing does. Refused if plain raises."""
    with strict():
        model = _Model(case)
        try:
            plain = results(case, model, Mode.PLAIN)
        except (RuntimeError, ValueError, IndexError, NotImplementedError) as error:
            raise Refused(str(error)) from error
        try:
            recipes = _recipes(case, model)
            managed = results(case, model, Mode.MANAGED, recipes)
        except StateChanged as error:
            if "cached during selective" in str(
                error
            ):  # a policy held what is changed in place later; torch refuses too
                raise Refused(str(error)) from error
            return f"{type(error).__name__}: {error}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    different = differences(plain, managed)
    return f"{len(different)} differ: {', '.join(different[:6])}" if different else None


def _recipes(case, model):
    """The recipes of the planned regions, made from an earlier step as fitting makes them."""
    model.rewind()
    with ways.session(Mode.TRACE) as session:
        model.forward()
        session.plan()
        return session.recipes


# --- reporting one ---------------------------------------------------------------------------------------------------


def shrunk(case: Case, most: int = 400) -> Case:
    """A smaller case that fails in the same manner, found greedily."""
    tries = 0
    manner = _manner(case)
    progress = True
    while progress and tries < most:
        progress = False
        for simpler in _simpler(case):
            tries += 1
            if _manner(simpler) == manner:
                case, progress = simpler, True
                break
            if tries >= most:
                break
    return case


def _simpler(case):
    for change in ({"backward": Backward.ONCE}, {"forwards": 1}, {"eval_between": False}, {"leaves": True}):
        if replace(case, **change) != case:
            yield replace(case, **change)
    yield from (replace(case, spec=spec) for spec in smaller(case.spec))


def _manner(case) -> str:
    try:
        what = failure(case) or "none"
    except Refused:
        return "refused"
    return "differs" if what[0].isdigit() else what.split(":")[0]


def describe(case: Case) -> str:
    facts = [f"backward {case.backward.value}", f"{case.forwards} forwards", f"{case.used} outputs used"]
    facts += [word for word in ("leaves", "frozen_inputs", "eval_between") if getattr(case, word)]
    return f"seed {case.seed}: {', '.join(facts)}\n{text(case.spec)}"

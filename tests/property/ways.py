"""The ways to run a part of a random model as a region, and the session that says whether regions are on.

A planned select needs the trace of an earlier step: a session of kind TRACE makes it, one of kind MANAGED uses it.
"""

from __future__ import annotations

import random
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import retape
from retape.torch.capture.call import capture_call
from retape.torch.engine.checkpoint import run_region
from retape.torch.engine.policy import Check, Inputs, Policy, Proof, ProofState
from retape.torch.engine.region import Region
from retape.torch.engine.select import plan_recipe


class Kind(Enum):
    """Which engine call a region goes through."""

    CHECKPOINT = "checkpoint"
    POLICY = "policy"
    PLANNED = "planned"
    SELECTIVE = "selective"
    SEQUENTIAL = "sequential"


@dataclass(frozen=True)
class Way:
    """How one region runs; `share` of its slots (or ops, for SELECTIVE) are held, drawn from `seed`."""

    kind: Kind = Kind.CHECKPOINT
    check: str = "metadata"
    early_stop: bool = True
    inputs: Inputs = Inputs.HOLD
    reuse_inputs: bool = True
    share: float = 0.0
    seed: int = 0

    def chooses(self, name: object) -> bool:
        return zlib.crc32(f"{self.seed} {name}".encode()) % 1000 < 1000 * self.share

    @property
    def held(self) -> frozenset[int]:
        return frozenset(i for i in range(200) if self.chooses(i))

    def plainer(self):
        for change in (
            {"kind": Kind.CHECKPOINT, "share": 0.0, "inputs": Inputs.HOLD, "reuse_inputs": True},
            {"inputs": Inputs.HOLD},
            {"check": "metadata"},
            {"early_stop": True},
            {"share": 0.0},
        ):
            changed = replace(self, **change)
            if changed != self:
                yield changed

    def __str__(self) -> str:
        policy = f" held {sorted(self.held)[:8]}..., {self.inputs.value}" if self.share else f" {self.inputs.value}"
        extra = "" if self.reuse_inputs else ", inputs not reused"
        return f"{self.kind.value}{policy}{extra} check={self.check} early_stop={self.early_stop} seed={self.seed}"


def draw(rng: random.Random) -> Way:
    kind = rng.choice((Kind.CHECKPOINT, Kind.POLICY, Kind.POLICY, Kind.PLANNED, Kind.PLANNED, *list(Kind)[3:]))
    return Way(
        kind=kind,
        check=rng.choice(("off", "metadata", "metadata", "values")),
        early_stop=rng.random() < 0.8,
        inputs=rng.choice(list(Inputs)) if kind in (Kind.POLICY, Kind.PLANNED) else Inputs.HOLD,
        reuse_inputs=rng.random() < 0.5,
        share=rng.choice((0.0, 0.2, 0.5, 0.8, 1.0)) if kind is not Kind.CHECKPOINT else 0.0,
        seed=rng.randrange(10**6),
    )


# --- the session -------------------------------------------------------------------------------------------------


class Mode(Enum):
    PLAIN = "plain"
    TRACE = "trace"
    MANAGED = "managed"


@dataclass
class Session:
    """Whether regions are on, the regions that were traced, the recipes made from them, and how many of those there are."""

    mode: Mode
    recipes: dict = field(default_factory=dict)
    traced: list = field(default_factory=list)

    def plan(self) -> None:
        """Make a recipe of every region that ran, after the forward and before the backward."""
        for block, way, region in self.traced:
            if block not in self.recipes:
                self.recipes[block] = plan_recipe(region.trace(), way.held)
        self.traced.clear()


_CURRENT: list[Session] = []


@contextmanager
def session(mode: Mode, recipes: dict | None = None):
    _CURRENT.append(Session(mode, recipes or {}))
    try:
        yield _CURRENT[-1]
    finally:
        _CURRENT.pop()


def call(way: Way | None, block: nn.Module, function, arguments, keywords):
    """Run `function` as the session wants it."""
    current = _CURRENT[-1]
    if way is None or current.mode is Mode.PLAIN:
        return function(*arguments, **keywords)
    if way.kind is Kind.SELECTIVE and current.mode is Mode.TRACE:
        way = Way()  # torch's contexts allow one re-run; tracing a region inside makes several
    return _CALLS[way.kind](way, block, function, arguments, keywords)


def _checkpoint(way, block, function, arguments, keywords):
    options = {"check": way.check, "early_stop": way.early_stop, "use_reentrant": False}
    return retape.checkpoint(function, *arguments, **options, **keywords)


def _policy(way, block, function, arguments, keywords, recipe=None):
    held = way.held if way.share < 1 else frozenset()
    policy = Policy(
        hold_all=way.share == 1,
        held=held,
        inputs=way.inputs,
        reuse_inputs=way.reuse_inputs,
        recipe=recipe,
        proof=Proof(ProofState.TRIAL),
    )
    check = Check.of(way.check)
    return run_region(function, *arguments, keywords=keywords, policy=policy, check=check, early_stop=way.early_stop)


def _planned(way, block, function, arguments, keywords):
    current = _CURRENT[-1]
    if current.mode is Mode.MANAGED:
        recipe = current.recipes.get(block) if way.share < 1 else None
        return _policy(way, block, function, arguments, keywords, recipe)
    if not torch.is_grad_enabled():
        return function(*arguments, **keywords)
    region = Region(capture_call(function, arguments, keywords))
    out = region.run(function, arguments, keywords)
    if not retape.recomputing():
        current.traced.append((block, way, region))
    return out


def _selective(way, block, function, arguments, keywords):
    def policy(context, func, *args, **kwargs):
        if way.seed % 3 == 0:
            return way.chooses(func)
        return CheckpointPolicy.MUST_SAVE if way.chooses(func) else CheckpointPolicy.PREFER_RECOMPUTE

    def context_fn():
        return create_selective_checkpoint_contexts(policy, allow_cache_entry_mutation=False)

    return retape.checkpoint(function, *arguments, use_reentrant=False, context_fn=context_fn, **keywords)


def _sequential(way, block, function, arguments, keywords):
    """The block behind a few steps, of which the last segment is not managed."""

    def first(packed):
        return function(*packed[0], **packed[1])

    steps = [first, _same, _same, _same]
    return retape.checkpoint_sequential(steps, 1 + way.seed % 4, (arguments, keywords))


def _same(value):
    return value


_CALLS = {
    Kind.CHECKPOINT: _checkpoint,
    Kind.POLICY: _policy,
    Kind.PLANNED: _planned,
    Kind.SELECTIVE: _selective,
    Kind.SEQUENTIAL: _sequential,
}

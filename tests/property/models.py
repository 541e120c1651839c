"""The fuzzer over whole models: random blocks under `fit`, the saved plan under `apply`, and `adaptive`, each beside a plain twin.

Compared after every step: loss, gradients and whether `.grad` is the same object, weights, buffers, attributes and random streams; after
`fit` that nothing of the model has changed, after `remove` that nothing of retape is left. All is drawn from the case's seed.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

import retape
from retape.core.assignment import Assignment, Choice
from retape.core.errors import BudgetTooSmall, RetapeError
from retape.core.fit_record import FitRecord
from retape.core.problem import OptionKind
from retape.torch.measure.baseline_memory import device_of
from retape.torch.measure.memory_meter import track_memory
from retape.torch.planning.attach import is_attached

from .cases import without_selective
from .ops import ROWS, WIDTH
from .regions import LEAF_OPS, STYLES, WIDE_OPS, Spec, SpecBlock, Style, draw, give, tensors_in, text
from .selections import GIVES
from .subjects import (
    PLAIN_ERRORS,
    blocks_of,
    differences,
    left_by,
    refuse_leftovers,
    rewind_attributes,
    running,
    seed_streams,
    strict,
)
from .ways import Mode

STEPS, FORCED = 3, 2
TAKES = tuple(style for style in (*STYLES, Style.USER_DICT) if style not in (Style.KEYWORD, Style.CLOSURE))


@dataclass(frozen=True)
class ModelCase:
    """A seed and what was drawn from it: the blocks, the batch, the budget as a share of the plain activations."""

    seed: int
    specs: tuple[Spec, ...]
    batch: int
    share: float
    training: bool
    frozen: int
    channels_last: tuple[bool, ...]
    accumulates: bool
    zeroes: bool
    check: str


def model_case(seed: int) -> ModelCase:
    rng = random.Random(seed)
    pool = (*LEAF_OPS, *WIDE_OPS)
    kinds = [_block(rng, pool) for _ in range(rng.choice((1, 1, 2)))]
    count = rng.randint(2, 6)
    specs = [_renumbered(rng.choice(kinds), rng) for _ in range(count)]
    return ModelCase(
        seed=seed,
        specs=tuple(specs),
        batch=rng.choice((32, 64, 128)),
        share=rng.choice((0.2, 0.4, 0.55, 0.7, 0.85, 0.95)),
        training=rng.random() < 0.9,
        frozen=rng.choice((0, 0, 0, 3)),
        channels_last=tuple(rng.random() < 0.2 for _ in specs),
        accumulates=rng.random() < 0.2,
        zeroes=rng.random() < 0.2,
        check=rng.choice(("metadata", "metadata", "off")),
    )


def _block(rng: random.Random, pool: tuple[str, ...]) -> Spec:
    spec = without_selective(draw(rng, 3 if rng.random() < 0.75 else 2, pool))
    takes = rng.choice(TAKES) if rng.random() < 0.3 else Style.POSITIONAL
    gives = rng.choice((*GIVES, Style.USER_DICT)) if rng.random() < 0.3 else Style.POSITIONAL
    return replace(spec, copies=True, takes=takes, gives=gives)


def _renumbered(spec: Spec, rng: random.Random) -> Spec:
    """Mostly the same block; sometimes one whose ops are set differently."""
    if rng.random() < 0.7:
        return spec
    ops = [
        replace(op, number=rng.randrange(60)) if rng.random() < 0.3 and op.name != "child" else op for op in spec.ops
    ]
    return replace(spec, ops=tuple(ops))


def describe(case: ModelCase) -> str:
    head = f"batch {case.batch}, share {case.share}, training {case.training}, frozen {case.frozen}, check {case.check}"
    flags = f"channels_last {case.channels_last}, accumulates {case.accumulates}, zeroes {case.zeroes}"
    return f"model case {case.seed}: {head}, {flags}\n" + "\n".join(
        text(spec, f"block {i}") for i, spec in enumerate(case.specs)
    )


# --- the model ---------------------------------------------------------------------------------------------------------


class Layer(SpecBlock):
    """A block that is called with its values packed in the style of its specification, and packs what it returns."""

    def forward(self, packed):
        return give(self.spec.gives, super().forward(tensors_in(self.spec.takes, packed)))


class SpecModel(nn.Module):
    """Layers in a row; each takes what the one before gave. Returns the loss."""

    def __init__(self, case: ModelCase) -> None:
        super().__init__()
        rng, shared = random.Random(case.seed), nn.Linear(WIDTH, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(spec, rng, shared) for spec in case.specs)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        values = [self.first(x)]
        for layer in self.layers:
            spec = layer.spec
            taken = [values[i % len(values)] * 1 for i in range(spec.inputs)]
            got = tensors_in(spec.gives, layer(give(spec.takes, taken)))
            values = [(value + values[0]).tanh() for value in got]
        total = sum(self.last(value).square().mean() for value in values)
        sides = [layer.side for layer in blocks_of(self) if layer.side is not None]
        return total + sum(side.square().mean() for side in sides)


def build_model(case: ModelCase) -> SpecModel:
    seed_streams(case.seed)
    model = SpecModel(case)
    for number, parameter in enumerate(model.parameters()):
        if case.frozen and number % case.frozen == 0:
            parameter.requires_grad_(False)
    for layer, last in zip(model.layers, case.channels_last, strict=True):
        if last:
            layer.to(memory_format=torch.channels_last)
    rewind_attributes(model, case.seed)
    return model.train(case.training)


def batch_of(case: ModelCase, number: int = 0, rows: int | None = None) -> torch.Tensor:
    generator = torch.Generator(torch.get_default_device()).manual_seed(case.seed * 7 + number)
    return torch.randn(rows or case.batch, ROWS, WIDTH, generator=generator)


def model_steps(
    case: ModelCase, model: SpecModel, *, mode: Mode = Mode.PLAIN, sizes: tuple[int, ...] = (), count: int = STEPS
):
    """Yield what each step leaves behind, `.grad`s by identity too; in a MANAGED session regions inside blocks are regions."""
    seed_streams(case.seed + 5)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad] or [torch.zeros(1)], lr=0.05)
    for number in range(count):
        batch = batch_of(case, number, sizes[number % len(sizes)] if sizes else None)
        before = {name: parameter.grad for name, parameter in model.named_parameters()}
        with running(mode):
            loss = model(batch)
            if loss.requires_grad:
                loss.backward()
        found = {"loss": loss.detach().clone()} | left_by(model, [])
        found |= {
            f"identity of {name}": value.grad is before[name] and value.grad is not None
            for name, value in model.named_parameters()
        }
        refuse_leftovers()
        yield found
        optimizer.step()
        if not case.accumulates:
            optimizer.zero_grad(set_to_none=not case.zeroes)
        for block in blocks_of(model):
            block.side = None


def footprint(model: nn.Module) -> dict:
    """What attaching could leave behind: classes, hooks and attributes of every module and parameter."""
    found = {}
    for name, module in model.named_modules():
        # By name: a parametrized module has a class of its own.
        found[f"class of {name}"] = ([kind.__qualname__ for kind in type(module).__mro__], is_attached(module))
        found[f"attributes of {name}"] = sorted(module.__dict__)
        hooks = [key for key in module.__dict__ if key.endswith("_hooks")]
        found[f"hooks of {name}"] = {key: len(module.__dict__[key]) for key in hooks}
    for name, parameter in model.named_parameters():
        found[f"hooks of {name}"] = len(parameter._backward_hooks or ()) + len(
            getattr(parameter, "_post_accumulate_grad_hooks", None) or ()
        )
        found[f"attributes of {name}"] = sorted(parameter.__dict__)
    return found


# --- one case --------------------------------------------------------------------------------------------------------


@dataclass
class ModelTally:
    """What came of the models of one case or of many."""

    runs: Counter = field(default_factory=Counter)  # fits, applies, adaptive runs that were equal
    refused: Counter = field(default_factory=Counter)
    skipped: Counter = field(default_factory=Counter)
    ops: Counter = field(default_factory=Counter)
    options: Counter = field(default_factory=Counter)  # of the regions of the plans
    failures: list[str] = field(default_factory=list)

    def add(self, other: ModelTally) -> None:
        for mine, its in zip(self.counters(), other.counters(), strict=True):
            mine.update(its)
        self.failures += other.failures

    def counters(self) -> tuple[Counter, ...]:
        return self.runs, self.refused, self.skipped, self.ops, self.options


def _forced(record: FitRecord, rng: random.Random) -> FitRecord:
    """The same plan with other choices: tiny tensors are never worth a select to the planner, and recipes must be tried."""

    def other(number: int, choice: Choice) -> Choice:
        kind = rng.choice((OptionKind.SELECT, OptionKind.SELECT, OptionKind.RECOMPUTE, OptionKind.KEEP))
        share = rng.choice((0.3, 0.6, 0.9))
        held = tuple(slot for slot in range(choice.slots) if rng.random() < share) if kind is OptionKind.SELECT else ()
        drops = number > 0 and kind is not OptionKind.KEEP and rng.random() < 0.25
        return replace(choice, option=kind, held=held, drop_input=drops, passing=(), moved=(), moved_inputs=())

    choices = tuple(other(number, choice) for number, choice in enumerate(record.assignment.choices))
    return replace(record, assignment=Assignment(choices=choices))


class ModelFuzzer:
    """Runs one case under each of `kinds`: "fit" (its saved plan and forced ones under `apply`) and "adaptive"."""

    def __init__(self, case: ModelCase, *, kinds: tuple[str, ...] = ("fit", "adaptive"), forced: int = FORCED) -> None:
        self._case, self._kinds, self._plans = case, kinds, forced
        self.tally = ModelTally()

    def run(self) -> ModelTally:
        with strict():
            wanted = self._plain()
            if wanted is not None:
                self.tally.ops.update(name for spec in self._case.specs for name in spec.names())
                for kind in self._kinds:
                    self._guarded(kind, {"fit": self._fit, "adaptive": self._adaptive}[kind], wanted)
        return self.tally

    def _plain(self) -> list[dict] | None:
        try:
            return list(model_steps(self._case, build_model(self._case)))
        except PLAIN_ERRORS as error:
            self.tally.skipped[type(error).__name__] += 1
            return None

    def _guarded(self, kind: str, function, wanted: list[dict]) -> None:
        """Run; a RetapeError is a refusal, anything else a failure."""
        try:
            function(wanted)
        except RetapeError as error:
            self.tally.refused[f"{kind}: {type(error).__name__}: {str(error)[:60]}"] += 1
        except Exception as error:
            self._fail(kind, f"raw {type(error).__name__}: {str(error)[:300]}")

    def _fit(self, wanted: list[dict]) -> None:
        model = build_model(self._case)
        before, shape = left_by(model, []), footprint(model)
        made = self._fitted(model)
        self._same("fit changed the model", before, left_by(model, []))
        self.tally.options.update(choice.option.name for choice in made.record.assignment.choices)
        self._follow("fit", model, wanted)
        made.remove()
        self._same("fit left something", shape, footprint(model))
        self._apply("apply", made, wanted, shape)
        for number in range(self._plans):
            self._apply("forced", _forced(made.record, random.Random(self._case.seed + number)), wanted, shape)

    def _fitted(self, model: SpecModel):
        case = self._case
        options = {"step": lambda model, batch: model(batch), "check": case.check, "progress": False}
        with running(Mode.MANAGED):
            try:
                return retape.fit(model, batch_of(case), budget=case.share, **options)
            except BudgetTooSmall as error:
                self._same_streams_after_refusal(model)
                return retape.fit(model, batch_of(case), budget=int(error.floor_bytes * 1.02) + 1, **options)

    def _same_streams_after_refusal(self, model: SpecModel) -> None:
        fresh = build_model(self._case)
        self._same("a refused fit left something", footprint(fresh), footprint(model))
        self._same("a refused fit changed the model", left_by(fresh, []), left_by(model, []))

    def _apply(self, kind: str, plan, wanted: list[dict], shape: dict) -> None:
        """Put a plan on a fresh model, that of a fit through a file."""
        model = build_model(self._case)
        with tempfile.TemporaryDirectory() as folder:
            if kind == "apply":
                plan.save(Path(folder) / "plan.json")
                plan = Path(folder) / "plan.json"
            applied = retape.apply(model, plan, check=self._case.check)
        self._follow(kind, model, wanted)
        applied.remove()
        self._same(f"{kind} left something", shape, footprint(model))

    def _adaptive(self, wanted: list[dict]) -> None:
        """Several steps, of other sizes too, under a share of what a plain step takes."""
        case, rng = self._case, random.Random(self._case.seed)
        sizes = tuple(rng.choice((case.batch, case.batch, case.batch // 2, case.batch * 2)) for _ in range(3))
        twin = build_model(case)
        with track_memory(device_of(twin)) as scale:
            wanted = list(model_steps(case, twin, sizes=sizes, count=5))
        whole = max(reading.peak_bytes for reading in scale.readings)
        try:
            self._live(case.share * whole, wanted, sizes)
        except BudgetTooSmall:
            self.tally.refused["adaptive: BudgetTooSmall, tried again with more"] += 1
            self._live(1.3 * whole, wanted, sizes)

    def _live(self, budget: float, wanted: list[dict], sizes: tuple[int, ...]) -> None:
        model = build_model(self._case)
        shape = footprint(model)
        live = retape.adaptive(model, budget=retape.Budget.activations(max(1, int(budget))))
        try:
            self._follow("adaptive", model, wanted, sizes=sizes, count=5)
        finally:
            live.remove()
            self._same("adaptive left something", shape, footprint(model))

    def _follow(self, kind: str, model: SpecModel, wanted: list[dict], **how) -> None:
        for number, (one, other) in enumerate(
            zip(wanted, model_steps(self._case, model, mode=Mode.MANAGED, **how), strict=True)
        ):
            wrong = differences(one, other)
            if wrong and any(map(differences, wanted, model_steps(self._case, build_model(self._case), **how))):
                self.tally.skipped["plain autograd does not repeat itself"] += 1
                return
            if wrong:
                self._fail(kind, f"step {number}: {len(wrong)} differ: {', '.join(wrong[:5])}")
                return
        self.tally.runs[kind] += 1

    def _same(self, what: str, wanted: dict, got: dict) -> None:
        wrong = differences(wanted, got)
        if wrong:
            self._fail("state", f"{what}: {', '.join(wrong[:5])}")

    def _fail(self, kind: str, what: str) -> None:
        self.tally.failures.append(
            f"--- FAILED {kind}: {what}\n{describe(self._case)}\npython -m benchmarks.fuzz models --case {self._case.seed}"
        )


def run_model_case(seed: int, **options) -> ModelTally:
    return ModelFuzzer(model_case(seed), **options).run()

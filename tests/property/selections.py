"""The fuzzer over selections: a random block, every selection that the planner offers for its trace and random ones beside them.

Each is tried on the block itself and, with the recipe of its trace, on other settings of the same block. A recipe is trusted at once
(TRIAL), so that a wrong one shows, or proven first (PENDING). All is drawn from the case's seed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from retape.core.errors import RetapeError
from retape.torch.engine.policy import Check, Policy, Proof, ProofState
from retape.torch.engine.recipe_mode import Recipe
from retape.torch.engine.select import plan_recipe
from retape.torch.engine.trace import RegionTrace
from retape.torch.planning.region_options import is_steady, partial_rerun, select_reruns, tape_storages
from support import late_copies
from support.hosts import copies_through

from .cases import without_selective
from .regions import LEAF_OPS, STYLES, WIDE_OPS, Spec, Style, draw_child, smaller, text
from .subjects import PLAIN_ERRORS, LeftBehind, Setting, Subject, differences, draw_setting, strict

RANDOM_SETS, OTHER_SETTINGS = 9, 3
GIVES = tuple(style for style in STYLES if style not in (Style.KEYWORD, Style.CLOSURE))


@dataclass(frozen=True)
class Selection:
    """Slots to hold and slots to move to the host, and whether the recipe is trusted without a proof."""

    origin: str
    held: frozenset[int]
    moved: frozenset[int] = frozenset()
    trial: bool = True
    reuse_inputs: bool = True
    check: Check = Check.METADATA

    def policy(self, recipe: Recipe | None) -> Policy:
        proof = Proof(ProofState.TRIAL if self.trial else ProofState.PENDING)
        return Policy(held=self.held, moved=self.moved, recipe=recipe, proof=proof, reuse_inputs=self.reuse_inputs)


@dataclass
class Tally:
    """What came of the selections of one case or of many."""

    selections: Counter = field(default_factory=Counter)  # by origin
    refused: Counter = field(default_factory=Counter)  # by error class
    skipped: Counter = field(default_factory=Counter)  # what plain PyTorch refuses
    ops: Counter = field(default_factory=Counter)
    recipes: Counter = field(default_factory=Counter)  # what became of them
    failures: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        for mine, its in zip(self.counters(), other.counters(), strict=True):
            mine.update(its)
        self.failures += other.failures

    def counters(self) -> tuple[Counter, ...]:
        return self.selections, self.refused, self.skipped, self.ops, self.recipes


@dataclass(frozen=True)
class SelectionCase:
    """A seed, and the block and setting that were drawn from it."""

    seed: int
    spec: Spec
    setting: Setting


def selection_case(seed: int) -> SelectionCase:
    rng = random.Random(seed)
    pool = WIDE_OPS if rng.random() < 0.7 else (*LEAF_OPS, *WIDE_OPS)
    spec = without_selective(replace(draw_child(rng, 1, pool), way=None))
    if rng.random() < 0.1:
        spec = replace(spec, gives=Style.USER_DICT)
    return SelectionCase(seed, spec, draw_setting(rng))


def describe(case: SelectionCase) -> str:
    return f"selection case {case.seed}: {case.setting}\n{text(case.spec)}"


# --- the selections of one trace ------------------------------------------------------------------------------------


def selections(trace: RegionTrace, rng: random.Random) -> Iterator[Selection]:
    """What the planner offers, sets of storages as offload makes them, and any sets of slots."""
    for treatment in select_reruns(trace):
        yield _varied(rng, "planned", treatment.held)
    if is_steady(trace) and tape_storages(trace):
        yield from _offloads(trace, rng)
    count = len(trace.slots)
    origin = "random" if is_steady(trace) or trace.opaque else "unsteady"  # which a plan never selects from
    for _ in range(1 if trace.opaque else RANDOM_SETS):  # of an opaque one nothing is skipped, whatever is held
        share = rng.choice((0.15, 0.4, 0.8))
        yield _varied(rng, origin, frozenset(slot for slot in range(count) if rng.random() < share))


def _offloads(trace: RegionTrace, rng: random.Random) -> Iterator[Selection]:
    tape = sorted(tape_storages(trace))
    for _ in range(3):
        there = [storage for storage in tape if rng.random() < rng.choice((0.3, 0.6, 1.0))]
        moved = frozenset(storage for storage in there if rng.random() < 0.5)
        way = partial_rerun(trace, frozenset(there) - moved, moved)
        yield replace(_varied(rng, "moved" if way.moved else "treated", way.held), moved=way.moved)


def _varied(rng: random.Random, origin: str, held: frozenset[int]) -> Selection:
    return Selection(
        origin,
        held,
        trial=rng.random() < 0.6,
        reuse_inputs=rng.random() < 0.5,
        check=rng.choice((Check.METADATA, Check.METADATA, Check.OFF)),
    )


def other_settings(case: SelectionCase, rng: random.Random) -> Iterator[tuple[Spec, Setting]]:
    """The same class of block, set up differently: other numbers of its ops, or another setting."""
    for _ in range(OTHER_SETTINGS):
        if rng.random() < 0.5:
            index = rng.randrange(len(case.spec.ops))
            op = case.spec.ops[index]
            if op.name == "child":
                continue
            changed = replace(op, number=rng.randrange(60))
            yield replace(case.spec, ops=(*case.spec.ops[:index], changed, *case.spec.ops[index + 1 :])), case.setting
        else:
            yield case.spec, _another(case.setting, rng)


def _another(setting: Setting, rng: random.Random) -> Setting:
    name = rng.choice(("batch", "layout", "training", "frozen", "channels_last", "hooked"))
    drawn = draw_setting(rng)
    value = getattr(drawn, name)
    if name in ("training", "channels_last", "hooked"):
        value = not getattr(setting, name)
    return replace(setting, **{name: value})


# --- running them ---------------------------------------------------------------------------------------------------


class SelectionFuzzer:
    """Runs the selections of one case. `damage`, for the test of the fuzzer itself, spoils every recipe."""

    def __init__(self, case: SelectionCase, damage=None) -> None:
        self._case, self._damage = case, damage
        self._rng = random.Random(case.seed ^ 0x5E1EC7)
        self.tally = Tally()

    def run(self) -> Tally:
        lanes = late_copies.LateLanes(seed=self._case.seed)
        with strict(), copies_through(lanes):
            self._run()
        if lanes.faults:
            self._fail("lanes", lanes.faults[0])
        return self.tally

    def _run(self) -> None:
        tally, case = self.tally, self._case
        subject = Subject(case.seed, case.spec, case.setting)
        wanted = self._plain(subject)
        if wanted is None:
            return
        tally.ops.update(case.spec.names())
        if not self._compare(subject, wanted, Selection("recompute", frozenset()), None):
            return
        try:
            trace = subject.traced()
        except RetapeError as error:
            tally.refused[f"trace: {type(error).__name__}"] += 1
            return
        except PLAIN_ERRORS as error:  # another batch, for which plain PyTorch refuses the program: a singular matrix
            tally.skipped[f"trace: {type(error).__name__}"] += 1
            return
        offered = list(selections(trace, self._rng))
        for selection in offered:
            self._compare(subject, wanted, selection, self._recipe(trace, selection))
        self._carry(trace, offered)

    def _carry(self, trace: RegionTrace, offered: list[Selection]) -> None:
        """Take the recipes to other settings of the same class: equal there too, or noticed."""
        with_recipe = [(s, recipe) for s in offered if (recipe := self._recipe(trace, s)) is not None]
        for spec, setting in other_settings(self._case, self._rng) if with_recipe else ():
            other = Subject(self._case.seed, spec, setting)
            wanted = self._plain(other)
            if wanted is None:
                continue
            for selection, recipe in self._rng.sample(with_recipe, min(2, len(with_recipe))):
                what = f"carried to {_what_changed(self._case, spec, setting)}"
                self._compare(other, wanted, replace(selection, origin=f"carried {selection.origin}"), recipe, what)

    def _recipe(self, trace: RegionTrace, selection: Selection) -> Recipe | None:
        recipe = plan_recipe(trace, selection.held | selection.moved)
        return recipe if self._damage is None or recipe is None else self._damage(recipe)

    def _plain(self, subject: Subject) -> dict | None:
        """What plain autograd leaves behind; None where it refuses the program."""
        try:
            return subject.step()
        except PLAIN_ERRORS as error:
            self.tally.skipped[type(error).__name__] += 1
            return None

    def _compare(
        self, subject: Subject, wanted: dict, selection: Selection, recipe: Recipe | None, note: str = ""
    ) -> bool:
        """Run one selection, twice where its recipe is proven first; False where it was refused."""
        if subject.lies and selection.trial:  # not to be trusted unproven
            selection = replace(selection, trial=False)
        policy = selection.policy(recipe)
        try:
            for _ in range(1 if selection.trial else 2):
                wrong = differences(wanted, subject.step(policy, selection.check))
                if wrong and differences(wanted, subject.step()):
                    self.tally.skipped["plain autograd does not repeat itself"] += 1
                    return False
                if wrong:
                    self._fail(f"{selection} {note}", f"{len(wrong)} differ: {', '.join(wrong[:5])}")
                    return True
        except RetapeError as error:
            self.tally.refused[f"{selection.origin}: {type(error).__name__}"] += 1
            return False
        except (Exception, LeftBehind) as error:
            self._fail(f"{selection} {note}", f"raw {type(error).__name__}: {str(error)[:300]}")
            return selection.origin != "recompute"
        self.tally.selections[selection.origin] += 1
        standing = "none" if recipe is None else policy.proof.state.value
        self.tally.recipes[f"{selection.origin}: {standing}"] += 1
        return True

    def _fail(self, where: str, what: str) -> None:
        self.tally.failures.append(
            f"--- FAILED {what}\n{where}\n{describe(self._case)}\n"
            f"python -m benchmarks.fuzz selections --case {self._case.seed}"
        )


def _what_changed(case: SelectionCase, spec: Spec, setting: Setting) -> str:
    if spec != case.spec:
        pairs = zip(case.spec.ops, spec.ops, strict=True)
        return next(f"{new.name} variant {new.number} for {old.number}" for old, new in pairs if old != new)
    return str(setting)


def run_selection_case(seed: int) -> Tally:
    return SelectionFuzzer(selection_case(seed)).run()


# --- shrinking one ------------------------------------------------------------------------------------------------------


def shrunk(case: SelectionCase, most: int = 200) -> SelectionCase:
    """A smaller case that fails in the same manner, found greedily."""
    manners, tries, progress = manner(case), 0, True
    while progress and tries < most:
        progress = False
        for simpler in _simpler(case):
            tries += 1
            if manner(simpler) & manners:
                case, progress = simpler, True
                break
            if tries >= most:
                break
    return case


def manner(case: SelectionCase) -> set[str]:
    """In which ways a case fails, without the details."""
    found = [failure.removeprefix("--- FAILED ").splitlines()[0] for failure in SelectionFuzzer(case).run().failures]
    return {"differs" if what[0].isdigit() else what[:40] for what in found}


def _simpler(case: SelectionCase) -> Iterator[SelectionCase]:
    for name, value in vars(Setting()).items():
        if getattr(case.setting, name) != value:
            yield replace(case, setting=replace(case.setting, **{name: value}))
    for name in ("takes", "gives"):
        if getattr(case.spec, name) is not Style.POSITIONAL:
            yield replace(case, spec=replace(case.spec, **{name: Style.POSITIONAL}))
    for spec in smaller(case.spec):
        yield replace(case, spec=spec)

"""A model on several devices: each is solved by itself, inside its own budget. Here the second device is only pretended.

What is really spread is in tests/gpu/test_fit_devices.py.
"""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import retape
from retape.core.fit_record import FitRecord
from retape.core.machine import simulate
from retape.core.problem import Budget, OptionKind
from retape.core.solve import held_bytes, solve
from retape.errors import BudgetTooSmall, InvalidInput
from retape.torch.measure.baseline_memory import devices_of, fixed_bytes
from retape.torch.measure.budgets import budgets_of
from retape.torch.measure.memory_meter import MemoryReading, track_memory
from retape.torch.planning import plan_search
from retape.torch.planning.chain_builder import build_chain
from retape.torch.planning.discover import find_regions
from retape.torch.planning.instruments import FitInstruments, Overheads, Stopwatch, home_of
from retape.torch.planning.profiles.intervals import StepBytes
from retape.torch.planning.profiles.step_profiles import StepProfiles
from retape.torch.planning.step_trials import StepTrials
from support.blocks import MlpBlock, square
from support.trials import fit_with

CPU, OTHER = torch.device("cpu"), torch.device("meta")
BLOCKS, BORDER = 6, 3


def blocks_and_rows():
    torch.manual_seed(0)
    return nn.Sequential(*(MlpBlock() for _ in range(BLOCKS))), torch.randn(128, 32)


def home(name, module):
    """The later blocks live elsewhere."""
    return OTHER if int(name.split(".")[0]) >= BORDER else CPU


class Weightless:
    """A scale that notes the marks and never moves."""

    def __init__(self):
        self.readings, self.timeline = [], []

    def mark(self, label):
        self.readings.append(MemoryReading(label=label, live_bytes=0, peak_bytes=0))


@contextmanager
def track_cpu(device):
    """Track the CPU's memory; the other device weighs nothing."""
    if device == OTHER:
        scale = Weightless()
        scale.mark("start")
        yield scale
        scale.mark("end")
    else:
        with track_memory(device) as tracker:
            yield tracker


PRETENDED = FitInstruments(
    track_memory=track_cpu,
    home_of=home,
    fixed_bytes=lambda *args: 0 if args[-1] == OTHER else fixed_bytes(*args),
    devices_of=lambda model, budget: (CPU, OTHER),
)
fit = partial(fit_with, step=square, instruments=PRETENDED)


# --- one chain per device ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def profiled():
    """A profile whose calls are said to be on two devices, and a step that was weighed on the CPU."""
    model, batch = blocks_and_rows()
    trials = StepTrials(model, batch, Budget.of(0.5), step=square, instruments=PRETENDED)
    with trials.sandboxed():
        profiled = StepProfiles(trials).profiled(find_regions(model))
    return replace(profiled, others={})


def chain_of(profiled, device, step=None):
    weighed = replace(profiled, step=step or profiled.step)
    return build_chain(weighed, fixed_bytes=1000, overheads=Overheads(), device=device)


def regions_of(chain):
    """The names of the regions of a chain, and whether each is pinned."""
    pairs = zip(chain.chain.stages, chain.stages, strict=True)
    return {region.choice.name: stage.pinned for stage, region in pairs if region.choice is not None}


def test_regions_of_other_devices_are_pinned(profiled):
    for device, own in ((CPU, range(BORDER)), (OTHER, range(BORDER, BLOCKS))):
        found = regions_of(chain_of(profiled, device))
        assert found == {str(number): number not in own for number in range(BLOCKS)}


def test_where_nothing_was_weighed_other_regions_weigh_nothing(profiled):
    modelled = chain_of(profiled, OTHER, step=StepBytes())
    stages = {stage.name: stage for stage in modelled.chain.stages}
    for number in range(BLOCKS):
        assert stages[str(number)].pinned == (number < BORDER)
        assert (stages[str(number)].tape_bytes == 0) == (number < BORDER)


def test_no_segment_reaches_over_a_border(profiled):
    """Also at the floor, where all that can be dropped is."""
    calls = profiled.profile.calls
    whole = [None] * BLOCKS
    for device in (CPU, OTHER):
        chain = chain_of(profiled, device)
        floor = retape.core.frontier(chain.chain).floor_bytes
        plan = solve(chain.chain, floor)
        assert simulate(chain.chain, plan.actions()).peak_bytes <= floor
        for number, (choice, call) in enumerate(zip(chain.assignment(plan).choices, calls, strict=True)):
            if call.device == device:
                whole[number] = choice
            else:
                assert choice.option is OptionKind.KEEP
    assert [choice.name for choice in whole] == [str(number) for number in range(BLOCKS)]
    # The last of a device goes backward at once: to keep it takes no more than to run it again.
    dropped = [choice for number, choice in enumerate(whole) if number + 1 not in (BORDER, BLOCKS)]
    assert all(choice.option is not OptionKind.KEEP for choice in dropped)
    for number, choice in enumerate(whole):
        assert not (choice.drop_input and number in (0, BORDER))
        own = range(BORDER) if number < BORDER else range(BORDER, BLOCKS)
        assert {passing.region for passing in choice.passing} <= set(own)


def test_a_chain_of_one_device_is_as_before(profiled):
    for call in profiled.profile.calls:
        assert call.device == home(call.name, None)
    assert not any(regions_of(build_chain(profiled, fixed_bytes=0, overheads=Overheads())).values())


# --- budgets -------------------------------------------------------------------------------------------------------------


def test_one_number_of_bytes_is_refused():
    with pytest.raises(InvalidInput, match=r"several devices \(cpu, meta\).*budget=\{'cpu': '8GiB', 'meta': '8GiB'\}"):
        budgets_of(Budget.of("4GiB"), (CPU, OTHER))
    with pytest.raises(InvalidInput, match="Give each its own"):
        budgets_of(Budget.activations("4GiB"), (CPU, OTHER))


def test_what_each_device_is_given():
    asked = Budget.of({"cpu": "4GiB", "cuda": 0.5, "cuda:1": Budget.activations("1GiB")}, in_flight=3)
    devices = (CPU, torch.device("cuda:0"), torch.device("cuda:1"))
    found = budgets_of(asked, devices)
    assert found[CPU] == Budget.of("4GiB", in_flight=3)
    assert found[devices[1]] == Budget.of(0.5, in_flight=3)
    assert found[devices[2]] == Budget.activations("1GiB", in_flight=3)
    assert set(budgets_of(Budget.of(0.3), devices).values()) == {Budget.of(0.3)}
    with pytest.raises(InvalidInput, match=r"names cpu only. Give it bytes for 'cuda:0'"):
        budgets_of(Budget.of({"cpu": 0.5}), devices)


def test_devices_of_a_model():
    model, _ = blocks_and_rows()
    assert devices_of(model) == (CPU,)
    assert devices_of(model, Budget.of({"cpu": 0.5, "cuda:0": 0.5})) == (CPU,)


def test_a_region_lives_on_one_device():
    model, _ = blocks_and_rows()
    assert home_of("0", model[0]) == CPU
    model[0].up.to("meta")
    with pytest.raises(InvalidInput, match=r"Region '0' has weights on cpu, meta.*Name its parts in regions="):
        home_of("0", model[0])
    assert home_of("act", nn.GELU()) is None


# --- all of it -----------------------------------------------------------------------------------------------------------


def test_each_device_has_its_plan(tmp_path):
    model, batch = blocks_and_rows()
    made = fit(model, batch, budget=0.5)
    record = made.record
    assert [(each.device, each.regions) for each in record.devices] == [("cpu", (0, 1, 2)), ("meta", (3, 4, 5))]
    assert all(each.measured.peak_bytes <= each.budget_bytes for each in record.devices)
    options = [choice.option for choice in record.assignment.choices]
    assert any(option is not OptionKind.KEEP for option in options[BORDER:])
    assert retape.verify(model, batch, step=square).equal
    assert made.promised.seconds == pytest.approx(
        record.plain_seconds + sum(each.extra_seconds for each in record.devices)
    )

    text = made.explain()
    head = text.split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in head if line.split() and line.split()[0] in ("cpu", "meta")] == ["cpu", "meta"]

    made.report(tmp_path / "first.html")
    made.report(tmp_path / "other.html", device="meta")
    made.plot(tmp_path / "other.svg", device="meta")
    assert (tmp_path / "other.html").read_text() != (tmp_path / "first.html").read_text()
    with pytest.raises(InvalidInput, match="has no device 'cuda:7'; it is for cpu, meta"):
        made.report(tmp_path / "third.html", device="cuda:7")
    assert "<pre>" in made._repr_html_()
    assert made.largest_batch() >= 128

    made.save(tmp_path / "plan.json")
    made.remove()
    assert FitRecord.from_json((tmp_path / "plan.json").read_text()) == record
    applied = retape.apply(model, tmp_path / "plan.json")
    assert retape.verify(model, batch, step=square).equal
    applied.remove()


def test_everything_is_kept_where_all_is_asked_for():
    model, batch = blocks_and_rows()
    made = fit(model, batch, budget={"cpu": 1.0, "meta": 1.0})
    assert made.record.assignment.keeps_everything
    assert all(each.measured.peak_bytes <= each.budget_bytes for each in made.record.devices)


def test_more_microbatches_in_flight_leave_less_for_each():
    model, batch = blocks_and_rows()
    one = fit(model, batch, budget=Budget.of({"cpu": 0.9, "meta": 0.9}))
    one.remove()
    two = fit(model, batch, budget=Budget.of({"cpu": 0.9, "meta": 0.9}, in_flight=2))
    two.remove()
    for alone, shared in zip(one.record.devices, two.record.devices, strict=True):
        fixed = alone.measured.base_bytes
        others = held_bytes(shared.chain, shared.plan)  # one runs, the other holds what its forward left
        assert shared.budget_bytes + others == pytest.approx(alone.budget_bytes, rel=0.02)
        assert alone.budget_bytes - fixed <= 2 * (shared.budget_bytes - fixed)


def test_what_the_first_step_leaves_behind_is_fixed():
    """As the workspaces of a GPU's libraries: they come with the first step, and stay."""
    model, batch = blocks_and_rows()
    bare = fit(model, batch, budget=1.0)
    seen = iter([0, 0, 5000, 7000])
    made = fit(model, batch, budget=1.0, instruments=replace(PRETENDED, allocated_bytes=lambda device: next(seen)))
    more = [
        a.measured.base_bytes - b.measured.base_bytes
        for a, b in zip(made.record.devices, bare.record.devices, strict=True)
    ]
    assert more == [5000, 7000]


def test_compiled_blocks_are_for_one_device():
    model, batch = blocks_and_rows()
    with pytest.raises(InvalidInput, match=r"compile=True plans for one device.*several \(cpu, meta\)"):
        fit(model, batch, budget=0.5, compile=True)


def test_too_small_names_the_device():
    model, batch = blocks_and_rows()
    classes = [type(module) for module in model.modules()]
    with pytest.raises(BudgetTooSmall, match=r"On cpu: No plan fits in 97.66 KiB; the smallest budget") as alone:
        fit(model, batch, budget={"cpu": 100_000, "meta": 1.0})
    with pytest.raises(BudgetTooSmall, match=r"On cpu: No plan fits in .* with 2 microbatches in flight") as shared:
        fit(model, batch, budget=Budget.of({"cpu": 100_000, "meta": 1.0}, in_flight=2))
    assert shared.value.floor_bytes > alone.value.floor_bytes > 100_000
    assert [type(module) for module in model.modules()] == classes


def measuring(change):
    """Trials whose measured peaks are changed."""

    class Trials(StepTrials):
        def measured(self, regions, executor):
            return [replace(each, peak_bytes=change(each.peak_bytes)) for each in super().measured(regions, executor)]

    return Trials


def test_a_peak_above_the_budget_is_an_error():
    """A device that always shows more than it promised."""
    model, batch = blocks_and_rows()
    with pytest.raises(BudgetTooSmall, match=r"No plan was measured to stay inside .* on cpu: the last one peaked at"):
        fit(
            model,
            batch,
            budget={"cpu": "20MiB", "meta": "2GiB"},
            tuning={"most_corrections": 1},
            trials=measuring(lambda _: 10**9),
        )


def test_the_same_plans_with_a_better_promise_are_taken(monkeypatch):
    """A step that weighs more than was promised, and is still inside, for plans are few: the promise is what was learned."""
    model, batch = blocks_and_rows()
    without_select = lambda *a, **k: build_chain(*a, **k).without(OptionKind.SELECT)  # noqa: E731
    monkeypatch.setattr(plan_search, "build_chain", without_select)
    made = fit(model, batch, budget=0.6, trials=measuring(lambda peak: int(1.1 * peak)))
    first = made.record.devices[0]
    assert first.plan.promised_peak_bytes == pytest.approx(first.measured.peak_bytes, rel=0.02)
    made.remove()


def test_a_region_on_a_device_without_a_budget():
    model, batch = blocks_and_rows()
    elsewhere = replace(PRETENDED, home_of=lambda name, module: torch.device("xpu") if name == "5" else CPU)
    with pytest.raises(
        InvalidInput, match=r"Region '5' lives on xpu, where nothing is trained.*Give it bytes for 'xpu'"
    ):
        fit(model, batch, budget=0.5, instruments=elsewhere)


def test_a_stopwatch_for_several_devices():
    watch = Stopwatch((CPU, CPU))
    for label in ("start", "end"):
        watch.mark(label)
    (start, zero), (end, seconds) = watch.read()
    assert (start, end, zero) == ("start", "end", 0.0)
    assert seconds >= 0.0

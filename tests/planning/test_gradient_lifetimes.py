"""Steps that begin without gradients have their room in the forward; steps that accumulate have a plan of their own."""

import copy
import gc
import logging
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import retape
from retape.core.fit_record import FitRecord
from retape.core.problem import OptionKind
from retape.errors import BudgetTooSmall, InvalidInput
from retape.torch.measure.baseline_memory import optimizer_step_bytes
from retape.torch.measure.memory_meter import track_memory
from support.blocks import MlpBlock
from support.comparing import Notes, seed
from support.trials import NO_TURNS, fit_by_ops, fit_with

CPU = torch.device("cpu")


class WideChain(nn.Module):
    """Blocks whose weights take as much room as their activations."""

    def __init__(self, width=64, count=6):
        super().__init__()
        self.blocks = nn.Sequential(*(MlpBlock(width) for _ in range(count)))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        return self.head(self.blocks(x)).square().mean()


def chain_and_rows():
    seed()
    return WideChain(), torch.randn(128, 64)


def weight_bytes(model):
    return sum(parameter.nbytes for parameter in model.parameters())


def step_peak(model, batch, step=lambda model, batch: model(batch)):
    """The peak of a step, with weights, present gradients and the batch."""
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    before = weight_bytes(model) + batch.nbytes + gradients
    with track_memory(CPU) as tracker:
        step(model, batch).backward()
    return before + max(reading.peak_bytes for reading in tracker.readings)


def plain_peak():
    model, batch = chain_and_rows()
    model(batch).backward()
    model.zero_grad()
    return step_peak(model, batch)


def budget_at(share):
    """A budget in bytes: weights and a share of what a plain step that begins without gradients adds to them."""
    model, batch = chain_and_rows()
    fixed = weight_bytes(model) + batch.nbytes
    return int(fixed + share * (plain_peak() - fixed))


def assert_same_gradients(model, other):
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(one.grad, two.grad) for one, two in pairs)


@pytest.mark.parametrize("share", [0.9, 0.75])
def test_both_kinds_of_steps_use_the_budget_and_stay_inside(share):
    model, batch = chain_and_rows()
    plain = copy.deepcopy(model)
    limit = budget_at(share)
    made = fit_by_ops(model, batch, budget=limit, tuning=NO_TURNS)
    assert made.record.accumulating is not None
    assert made.record.accumulating.measured_peak_bytes <= limit
    peaks = []
    for _ in range(4):
        peaks.append(step_peak(model, batch))
        plain(batch).backward()
        assert_same_gradients(model, plain)
    assert all(peak <= limit for peak in peaks)
    assert min(peaks) >= 0.93 * limit
    model.zero_grad()
    assert step_peak(model, batch) == pytest.approx(made.measured.peak_bytes, rel=0.01)
    made.remove()


def test_a_step_that_begins_without_gradients_recomputes_less():
    limit = budget_at(0.8)
    runs = []
    for kept in (False, True):
        model, batch = chain_and_rows()
        if kept:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        made = fit_by_ops(model, batch, budget=limit, tuning=NO_TURNS)
        assert kept == (made.record.accumulating is None)
        runs.append(made.promised.seconds)
        made.remove()
    assert runs[0] < runs[1]


def test_the_executor_looks_at_the_gradients_at_the_start_of_each_step():
    model, batch = chain_and_rows()
    made = fit_by_ops(model, batch, budget=budget_at(0.8), tuning=NO_TURNS)
    counts = []
    for begin in ("fresh", "accumulate", "accumulate", "fresh"):
        if begin == "fresh":
            model.zero_grad()
        before = made.regions_run
        model(batch).backward()
        counts.append(made.regions_run - before)
    assert counts[0] == counts[3] < counts[1] == counts[2]
    made.remove()


class WithUnused(WideChain):
    """Returns the loss after an output that no backward starts from, as a tuple or in an object of its own."""

    def __init__(self, wrapped):
        super().__init__()
        self.aux, self.wrapped = nn.Linear(64, 1), wrapped

    def forward(self, x):
        parts = self.aux(x[:1]), super().forward(x)
        return SimpleNamespace(loss=parts[1]) if self.wrapped else parts


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_step_is_seen_whichever_output_its_backward_starts_from(wrapped):
    seed()
    model, batch = WithUnused(wrapped), torch.randn(128, 64)

    def step(model, batch):
        found = model(batch)
        return found.loss if wrapped else found[1]

    limit = budget_at(0.8) + model.aux.weight.nbytes
    made = fit_by_ops(model, batch, budget=limit, step=step, tuning=NO_TURNS)
    assert made.record.accumulating is not None
    for _ in range(3):
        assert step_peak(model, batch, step) <= limit
    made.remove()


def test_weights_that_are_replaced_are_looked_at():
    model, batch = chain_and_rows()
    limit = budget_at(0.8)
    made = fit_by_ops(model, batch, budget=limit, tuning=NO_TURNS)
    before = weakref.ref(model.head.weight)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    gc.collect()
    assert before() is None
    for _ in range(3):
        assert step_peak(model, batch) <= limit
    made.remove()


class Convolutions(nn.Module):
    """Blocks whose backward needs other temporaries in a step that accumulates than in one that does not."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)
        sizes = ((1, 32), (32, 8), (8, 64), (64, 4))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in sizes
        )

    def forward(self, x):
        x = self.first(x).view(-1, 1, 8, 8)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("limit", [877_500, 880_500, 882_000])
def test_a_plan_for_both_kinds_of_steps_is_measured_in_both(limit):
    seed()
    model, batch = Convolutions(), torch.randn(8, 64)
    made = fit_by_ops(model, batch, budget=limit, tuning=NO_TURNS)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    for _ in range(3):
        assert step_peak(model, batch) + buffers <= limit
    made.remove()


def test_parts_that_are_called_directly_follow_the_plan():
    model, batch = chain_and_rows()

    def step(model, batch):
        return model.head(model.blocks(batch)).square().mean()

    made = fit_by_ops(model, batch, budget=budget_at(0.9), step=step, tuning=NO_TURNS)
    planned = sum(choice.option is not OptionKind.KEEP for choice in made.record.assignment.choices)
    assert 0 < planned < 6
    for _ in range(2):
        before = made.regions_run
        step(model, batch).backward()
        assert made.regions_run - before == planned
        model.zero_grad()
    made.remove()


def test_a_saved_fit_has_both_plans(tmp_path):
    model, batch = chain_and_rows()
    made = fit_by_ops(model, batch, budget=budget_at(0.8), tuning=NO_TURNS)
    made.save(tmp_path / "fit.json")
    made.remove()
    assert FitRecord.load(tmp_path / "fit.json") == made.record
    other, _ = chain_and_rows()
    plain = copy.deepcopy(other)
    applied = retape.apply(other, tmp_path / "fit.json")
    for _ in range(2):
        assert step_peak(other, batch) <= made.record.budget_bytes
        plain(batch).backward()
        assert_same_gradients(other, plain)
    applied.remove()


def test_a_step_that_accumulates_without_a_plan_is_said_once(caplog):
    model, batch = chain_and_rows()
    with pytest.raises(BudgetTooSmall) as error:
        fit_by_ops(model, batch, budget=weight_bytes(model) + batch.nbytes + 1)
    made = fit_by_ops(model, batch, budget=int(1.02 * error.value.floor_bytes), tuning=NO_TURNS)
    later = made.record.accumulating
    assert later is not None
    assert not later.fits
    with caplog.at_level(logging.WARNING, logger="retape"):
        for _ in range(3):
            model(batch).backward()
    assert caplog.text.count("for which no plan fits") == 1
    made.remove()


def test_a_share_of_the_activations_is_one_of_both_kinds_of_steps():
    model, batch = chain_and_rows()
    made = fit_by_ops(model, batch, budget=0.5, tuning=NO_TURNS)
    assert made.record.accumulating is None
    model.zero_grad()
    for _ in range(2):
        assert step_peak(model, batch) <= made.record.budget_bytes
    made.remove()


# --- the optimizer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=["foreach", "loop", "fused"]
)
def test_the_temporary_bytes_of_an_optimizer_are_those_of_its_step(settings):
    model, _ = chain_and_rows()
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    expected = optimizer_step_bytes(optimizer, CPU)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with track_memory(CPU) as tracker:
        optimizer.step()
    measured = max(reading.peak_bytes for reading in tracker.readings)
    assert abs(measured - expected) <= 0.02 * weight_bytes(model)


def test_a_budget_below_the_optimizer_step_is_refused():
    model, batch = chain_and_rows()
    optimizer = torch.optim.AdamW(model.parameters())
    fixed = 4 * weight_bytes(model) + batch.nbytes
    with pytest.raises(BudgetTooSmall, match=r"optimizer\.step\(\) needs .* fused=True"):
        retape.fit(model, batch, budget=fixed + 1, optimizer=optimizer, progress=False)


class Drawing(torch.optim.SGD):
    """An optimizer whose step draws a number."""

    def step(self, closure=None):
        torch.rand(1)
        return super().step(closure)


def test_the_trial_step_of_an_optimizer_draws_from_no_stream():
    model, batch = chain_and_rows()
    optimizer = Drawing(model.parameters(), lr=0.1, momentum=0.9)
    before = torch.get_rng_state()
    fit_by_ops(model, batch, budget="1GiB", optimizer=optimizer, tuning=NO_TURNS).remove()
    assert torch.equal(torch.get_rng_state(), before)


def test_several_optimizers_are_refused_with_a_message():
    model, batch = chain_and_rows()
    with pytest.raises(InvalidInput, match=r"got a list as its optimizer"):
        retape.fit(model, batch, budget="1GiB", optimizer=[torch.optim.SGD(model.parameters())], progress=False)


# --- out of memory inside a fit ---------------------------------------------------------------------------------------


def test_a_fit_that_ran_out_of_memory_keeps_nothing_of_that_step():
    seed()
    model = nn.Sequential(*(MlpBlock(32) for _ in range(4)))
    seen = Notes()
    whole = model[2].forward

    def forward(x):
        out = whole(x)
        if seen(weakref.ref(out)) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return out

    class Failing(MlpBlock):
        def forward(self, x):
            return forward(x)

    model[2].__class__ = Failing
    gc.disable()
    try:
        made = fit_with(model, torch.randn(64, 32), budget=0.6, step=lambda m, b: m(b).square().mean(), tuning=NO_TURNS)
        assert len(seen.all) > 1
        assert seen.all[0]() is None
        made.remove()
    finally:
        gc.enable()

"""What may happen to a model that is being fitted, or is: interruptions, copies, hooks, threads, swaps. Never a wrong number."""

import copy
import pickle
import random
import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import retape
from retape.core.problem import OptionKind
from retape.errors import InvalidInput
from support.blocks import MlpBlock, Stack, mean_square
from support.comparing import Notes, assert_equal, loss_and_gradients, seed
from support.fits import fit, model_of, regions_run, tightest, trained


def numbers(count):
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(5))


BATCH = numbers(64)
dropping_block = partial(MlpBlock, 16, norm=False, dropout=0.1)


def blocks_in_a_row(block=dropping_block, count=4):
    seed(1)
    return Stack((block() for _ in range(count)), mean_square).train()


@pytest.fixture
def pair():
    """A fitted model and its plain twin."""
    model = blocks_in_a_row()
    plain = copy.deepcopy(model)
    made = tightest(model, BATCH, 0.5)
    assert not made.record.assignment.keeps_everything
    yield model, plain, made
    made.remove()


def seeded_step(model, batch=BATCH, number=2):
    seed(number)
    return loss_and_gradients(model, lambda: model(batch), number=number)


# --- interruptions --------------------------------------------------------------------------------------------------------


class Bomb:
    """A step that raises in its n-th call, after the forward or in the backward."""

    def __init__(self, error, at, late):
        self.error, self.at, self.late = error, at, late
        self.notes = Notes()  # which the fit does not put back

    def __call__(self, model, batch):
        call = self.notes()
        loss = model(batch)
        if call == self.at:
            if not self.late:
                raise self.error
            loss.register_hook(self.explode)
        return loss

    def explode(self, gradient):
        raise self.error


@pytest.mark.parametrize("late", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("at", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("error", [KeyError("mine"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_an_interruption_leaves_the_model_as_it_was(error, at, late):
    model = blocks_in_a_row()
    plain = copy.deepcopy(model)
    model.blocks[0].up.weight.grad = torch.ones_like(model.blocks[0].up.weight)
    seed(4)
    stream = torch.get_rng_state()
    bomb = Bomb(error, at, late)
    with pytest.raises(type(error)):
        fit(model, BATCH, budget=0.6, step=bomb)
    assert len(bomb.notes.all) == at
    assert torch.equal(stream, torch.get_rng_state())
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert model.blocks[0].up.weight.grad.eq(1).all()
    assert model.blocks[1].up.weight.grad is None
    assert_equal(seeded_step(model), seeded_step(plain))
    tightest(model, BATCH, 0.6).remove()  # nothing is left that would hinder another fit


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # a profiler of PyTorch 2.11 says so
def test_a_profiler_that_runs_already_is_refused():
    model = blocks_in_a_row()
    with torch.profiler.profile(), pytest.raises(InvalidInput, match="profiler"):
        fit(model, BATCH, budget=0.6)
    assert all(p.grad is None for p in model.parameters())
    assert [type(m) for m in model.modules()] == [type(m) for m in blocks_in_a_row().modules()]


# --- again, twice, elsewhere -----------------------------------------------------------------------------------------------


def test_remove_twice_and_fit_again(pair):
    model, plain, made = pair
    made.remove()
    made.remove()
    again = tightest(model, BATCH, 0.6)
    made.remove()  # the old one has nothing to do with the new one
    assert not again.record.assignment.keeps_everything
    before = regions_run(again)
    managed = seeded_step(model)
    assert regions_run(again) > before
    again.remove()
    assert_equal(managed, seeded_step(plain))


def test_a_copy_of_a_fitted_model_can_be_fitted_and_applied_to(pair):
    model, plain, made = pair
    copied = copy.deepcopy(model)
    assert [type(m) for m in copied.modules()] == [type(m) for m in plain.modules()]
    applied = retape.apply(copied, made)
    assert_equal(seeded_step(copied), seeded_step(plain))
    assert regions_run(applied) > 0
    applied.remove()
    own = tightest(copied, BATCH, 0.6)
    assert_equal(seeded_step(copied), seeded_step(model))
    own.remove()
    assert_equal(seeded_step(model), seeded_step(plain))


def test_apply_to_a_fitted_model_is_refused(pair):
    model, plain, made = pair
    with pytest.raises(InvalidInput, match="managed by a fit already"):
        retape.apply(model, made)
    assert_equal(seeded_step(model), seeded_step(plain))


def test_a_pickled_fit_has_the_record_and_a_plain_model(pair):
    model, plain, made = pair
    loaded = pickle.loads(pickle.dumps(made))
    assert loaded.record == pickle.loads(pickle.dumps(made.record)) == made.record
    assert [type(m) for m in model_of(loaded).modules()] == [type(m) for m in plain.modules()]
    loaded.remove()
    assert_equal(seeded_step(model_of(loaded)), seeded_step(plain))
    assert_equal(seeded_step(model), seeded_step(plain))


def test_a_fit_is_pickled_after_steps_that_held_a_part_of_a_region(pair):
    """A fit that holds a part of a region has recorded its ops, and an op cannot be pickled."""
    model, plain, made = pair
    made.remove()
    choices = made.record.assignment.choices
    held = tuple(replace(choice, option=OptionKind.SELECT, held=(0,)) for choice in choices)
    applied = retape.apply(model, replace(made.record, assignment=replace(made.record.assignment, choices=held)))
    assert_equal(seeded_step(model), seeded_step(plain))
    loaded = pickle.loads(pickle.dumps(applied))
    assert loaded.record == applied.record
    assert_equal(seeded_step(model_of(loaded)), seeded_step(plain))
    applied.remove()


def test_weights_loaded_while_fitted(pair):
    model, plain, _ = pair
    other = Stack(dropping_block() for _ in range(4)).state_dict()
    model.load_state_dict(other)
    plain.load_state_dict(other)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert_equal(seeded_step(model), seeded_step(plain))
    model.load_state_dict(copy.deepcopy(other), assign=True)
    assert_equal(seeded_step(model), seeded_step(plain))


def test_five_clipped_steps(pair):
    model, plain, _ = pair
    run = partial(trained, batch=BATCH, steps=5, clip=True)
    assert_equal(run(model), run(plain))


def test_weights_changed_between_forward_and_backward(pair):
    model, _, _ = pair
    loss = model(BATCH)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|Change it after backward"):
        loss.backward()


def test_a_retained_graph_and_a_second_derivative(pair):
    model, plain, _ = pair

    def twice(model):
        seed(2)
        model.zero_grad()
        x = BATCH.clone().requires_grad_()
        loss = model(x)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        first.square().sum().backward()
        return x.grad, {name: p.grad for name, p in model.named_parameters()}

    assert_equal(twice(model), twice(plain))


@pytest.mark.filterwarnings("ignore:Region .* runs in evaluation mode:UserWarning")
def test_training_in_several_threads(pair):
    """Each with a copy of the batch of its own; gradients accumulate, so they are asked for one by one."""
    model, plain, _ = pair
    model.eval(), plain.eval()  # one stream of random numbers is shared by all threads
    found = {}

    def work(number):
        x = numbers(16 + number).requires_grad_()
        for _ in range(3):
            found[number] = torch.autograd.grad(model(x), [x, *model.parameters()])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(3):
        x = numbers(16 + number).requires_grad_()
        assert_equal(found[number], torch.autograd.grad(plain(x), [x, *plain.parameters()]))


# --- hooks ------------------------------------------------------------------------------------------------------------------


def _doubled(parameter):
    parameter.grad.mul_(2)


def hooked(model):
    """Hooks of every kind on every block, that change what passes through them."""
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, args: (args[0] * 1.01,))
        block.register_forward_hook(lambda module, args, output: output * 0.99)
        block.register_full_backward_pre_hook(lambda module, gradient: (gradient[0] * 1.02,))
        block.register_full_backward_hook(lambda module, taken, given: (taken[0] * 0.97,))
        block.up.register_full_backward_hook(lambda module, taken, given: (taken[0] * 1.5,))
        block.up.weight.register_hook(lambda gradient: gradient * 0.5)
        block.down.weight.register_post_accumulate_grad_hook(_doubled)
    return model


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks(when):
    batch = BATCH.clone().requires_grad_()  # a full backward hook wants to see a gradient of its input
    model, plain = blocks_in_a_row(), hooked(blocks_in_a_row())
    if when == "before":
        hooked(model)
    made = tightest(model, batch, 0.5)
    assert not made.record.assignment.keeps_everything
    if when == "after":
        hooked(model)
    assert_equal(seeded_step(model, batch), seeded_step(plain, batch))
    assert_equal(seeded_step(model, batch), seeded_step(plain, batch))
    made.remove()
    assert_equal(seeded_step(model, batch), seeded_step(plain, batch))


class WrittenView(nn.Module):
    """A block that returns a view and then writes to what it is a view of; a hook on such a view can end the process."""

    def __init__(self):
        super().__init__()
        self.inner = dropping_block()

    def forward(self, x):
        whole = self.inner(x)
        view = whole[:, :]
        whole.mul_(0.5)
        return view


def test_outputs_that_are_views_of_what_was_written_to():
    model = blocks_in_a_row(WrittenView)
    want = seeded_step(copy.deepcopy(model))
    made = tightest(model, BATCH, 0.5)
    assert_equal(seeded_step(model), want)
    made.remove()
    with retape.adaptive(model, budget="1GiB"):
        assert_equal(seeded_step(model), want)


# --- budgets ------------------------------------------------------------------------------------------------------------------


def test_spellings_of_one_budget():
    model = blocks_in_a_row()
    whole = fit(model, BATCH, budget=1.0)
    peak = whole.measured.peak_bytes
    spelled = (peak, int(np.int64(peak)), f" {peak} B ", f"{peak}B", retape.Budget.of(peak), {"cpu": peak})
    for budget in spelled:
        made = fit(model, BATCH, budget=budget)
        assert made.record.budget_bytes == peak
        assert made.measured.peak_bytes <= peak
        made.remove()


@pytest.mark.parametrize(
    "budget", [0, -1, -0.5, 1.5, True, None, "", "much", "-3GiB", [1], float("inf"), {}, np.int64(10**6)]
)
def test_invalid_budgets_are_refused(budget):
    model = blocks_in_a_row()
    with pytest.raises(InvalidInput):
        fit(model, BATCH, budget=budget)
    assert all(p.grad is None for p in model.parameters())


# --- what is not the same in every step ----------------------------------------------------------------------------------------


class Swapping(nn.Module):
    """The same ops in every step, on other operands: which of two branches goes where is drawn by Python, or alternates."""

    def __init__(self, by_chance):
        super().__init__()
        self.up, self.down, self.other = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 64)
        self.by_chance, self.calls = by_chance, 0

    def forward(self, x):
        first, second = F.gelu(self.up(x)), torch.tanh(self.other(x)).exp()
        self.calls += 1
        if random.random() < 0.5 if self.by_chance else self.calls % 2:
            first, second = second, first
        return x + self.down(first.sin() * second.cos() * first)


@pytest.mark.parametrize("by_chance", [True, False], ids=["by chance", "in turn"])
def test_branches_that_are_swapped(by_chance):
    model = blocks_in_a_row(partial(Swapping, by_chance))
    plain = copy.deepcopy(model)
    for budget in (0.85, 0.7, 0.5, 0.4):
        for number, block in enumerate((*model.blocks, *plain.blocks)):
            block.calls = number % len(plain.blocks)
        made = tightest(model, BATCH, budget)
        assert not made.record.assignment.keeps_everything
        for number, block in enumerate((*model.blocks, *plain.blocks)):
            block.calls = number % len(plain.blocks)
        for number in range(4):
            assert_equal(seeded_step(model, number=number), seeded_step(plain, number=number))
        made.remove()


def test_fewer_but_longer_rows_than_were_profiled_are_warned_of():
    """Attention costs the square of a row's length: a batch with as many numbers can need many times the memory."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(16, 48)

        def forward(self, x):
            query, key, value = self.project(x).chunk(3, -1)
            return x + torch.softmax(query @ key.transpose(1, 2), -1) @ value

    torch.manual_seed(0)
    model = Stack((Attention() for _ in range(4)), mean_square)
    fitted = fit(model, torch.randn(16, 16, 16), budget=0.6)
    model(torch.randn(16, 16, 16)).backward()
    with pytest.warns(
        UserWarning, match=r"was given a tensor of shape \(1, 256, 16\), and one of shape \(16, 16, 16\)"
    ):
        model(torch.randn(1, 256, 16)).backward()
    fitted.remove()

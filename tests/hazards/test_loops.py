"""Wrong adjoints that others have shipped: state outside the carry of a loop, read, written or changed at the wrong time."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn

from retape import scan
from retape.errors import InvalidInput, RecomputeMismatch, RegionError, StateChanged
from support.comparing import Notes, equal
from support.loops import DTYPE, assert_as_plain, loss_and_gradients, normal, unrolled

STEPS = 17


def compare(make, *, block=1, snapshots=3):
    """`make()` gives a step, its tensors, and what to look at afterwards; all equal to the plain loop, and untouched by backward."""
    found = []
    xs, start = normal(STEPS, 3, 4), normal(3, 4, grad=True)
    for loop in (unrolled, lambda *a: scan(*a, snapshots=snapshots, block=block)):
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        step, tensors, look = make()
        result = loop(step, start, xs)
        before = look()
        streams = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
        grads = loss_and_gradients(lambda: result, [*tensors, start], seed=2)  # noqa: B023 - called at once
        torch.manual_seed(2)
        assert str(look()) == str(before)
        found.append((grads, str(before), str(streams)))
    assert equal(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]


def loop_index_in_a_variable():
    table, index = normal(STEPS, 4, grad=True), 0

    def step(h, x):
        nonlocal index
        h = torch.tanh(h * table[index] + x)
        index += 1
        return h, h

    return step, [table], lambda: index


def loop_index_in_a_list():
    table, index = normal(STEPS, 4, grad=True), [0]

    def step(h, x):
        h = torch.tanh(h * table[index[0]] + x)
        index[0] += 1
        return h, h

    return step, [table], lambda: index


def loop_index_in_a_dict():
    table, state = normal(STEPS, 4, grad=True), {"index": 0}

    def step(h, x):
        h = torch.tanh(h * table[state["index"]] + x)
        state["index"] += 1
        return h, h

    return step, [table], lambda: state


class Counting(nn.Module):
    """Counts its calls, keeps a moving average that it reads, and remembers its last input under a name that is new."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(normal(4))
        self.register_buffer("average", torch.zeros(4, dtype=DTYPE))
        self.calls = 0

    def forward(self, h, x):
        self.calls += 1
        with torch.no_grad():
            self.average.mul_(0.9).add_(h.mean(0))
        before = getattr(self, "before", 0.0)
        self.before = h.detach()
        h = torch.tanh(h * self.weight + x + self.average + 0.1 * before) * (1 + self.calls / 50)
        return h, h


def hidden_module_state():
    module = Counting()
    return module, [module.weight], lambda: (module.calls, module.average, module.before)


def batch_norm_and_dropout():
    module = nn.Sequential(nn.Linear(4, 4, dtype=DTYPE), nn.BatchNorm1d(4, dtype=DTYPE), nn.Dropout(0.3), nn.Tanh())

    def step(h, x):
        h = module(h + x)
        return h, h

    return step, list(module.parameters()), lambda: list(module.buffers())


def captured_array_written_to():
    weight, array = normal(4, grad=True), torch.zeros(4, dtype=DTYPE)

    def step(h, x):
        array[0] += 1
        array[1:].mul_(0.5).add_(h.detach().mean())
        h = torch.tanh(h * weight + x * array)
        return h, h

    return step, [weight], lambda: array


def captured_array_first_written_to_by_a_later_step():
    weight, array, calls = normal(4, grad=True), torch.zeros(4, dtype=DTYPE), [0]

    def step(h, x):
        calls[0] += 1
        if calls[0] > 8:
            array.add_(h.detach().mean(0))
        h = torch.tanh(h * weight + x + array)
        return h, h

    return step, [weight], lambda: (array, calls)


def views_of_one_array():
    weight, array = normal(4, grad=True), torch.zeros(8, dtype=DTYPE)
    half = array[4:]

    def step(h, x):
        array.add_(h.detach().mean())
        h = torch.tanh(h * weight + x + half)
        return h, h

    return step, [weight], lambda: (array, half)


def state_many_steps_back_in_the_carry():
    weight = normal(4, grad=True)

    def step(h, x):
        ring = torch.stack([h, h * 0.5, x])
        h = torch.tanh(ring[0] * weight + ring[1].roll(1, -1) + x)
        return h, h

    return step, [weight], lambda: None


def detached_states_in_a_list():
    weight, seen = normal(4, grad=True), [torch.zeros(3, 4, dtype=DTYPE)]

    def step(h, x):
        h = torch.tanh(h * weight + x + seen[max(0, len(seen) - 5)])
        seen.append(h.detach())
        return h, h

    return step, [weight], lambda: len(seen)


def variable_bound_anew():
    weight, last = normal(4, grad=True), torch.zeros(3, 4, dtype=DTYPE)

    def step(h, x):
        nonlocal last
        h = torch.tanh(h * weight + x + 0.5 * last)
        last = h.detach()
        return h, h

    return step, [weight], lambda: last


def random_numbers_of_every_kind():
    weight, own, other = normal(4, grad=True), torch.Generator().manual_seed(5), np.random.default_rng(4)

    def step(h, x):
        factor = random.random() + np.random.rand() + torch.rand((), generator=own, dtype=DTYPE) + other.random()
        h = torch.tanh(torch.nn.functional.dropout(h * weight, 0.2) * factor + x)
        return h, h

    return step, [weight], lambda: (own.get_state(), other.bit_generator.state)


CASES = (
    loop_index_in_a_variable,
    loop_index_in_a_list,
    loop_index_in_a_dict,
    hidden_module_state,
    batch_norm_and_dropout,
    captured_array_written_to,
    captured_array_first_written_to_by_a_later_step,
    views_of_one_array,
    state_many_steps_back_in_the_carry,
    detached_states_in_a_list,
    variable_bound_anew,
    random_numbers_of_every_kind,
)


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_state_outside_the_carry(case, block):
    compare(case, block=block)


class Elsewhere:
    """Counts in an attribute of its class."""

    calls = 0

    @classmethod
    def next(cls):
        cls.calls += 1
        return cls.calls


@pytest.mark.parametrize("snapshots", [1, 3, 30])
def test_a_number_in_a_class_that_a_helper_counts_in(snapshots):
    weight, start, xs = normal(4, grad=True), normal(4), normal(STEPS, 4)

    def step(h, x):
        h = torch.tanh(h * weight * Elsewhere.next() / 20 + x)
        return h, h

    Elsewhere.calls = 0
    plain = loss_and_gradients(lambda: unrolled(step, start, xs), [weight])
    Elsewhere.calls = 0
    result = scan(step, start, xs, snapshots=snapshots, block=1)
    assert equal(plain, loss_and_gradients(lambda: result, [weight]))
    assert Elsewhere.calls == STEPS


@pytest.mark.parametrize("snapshots", [1, 3, 30])
def test_state_that_no_walk_reaches_is_noticed(snapshots):
    weight, calls = normal(4, grad=True), Notes()

    def step(h, x):
        h = torch.tanh(h * weight * calls() / 20 + x)
        return h, h

    h, _ = scan(step, normal(4), normal(STEPS, 4), snapshots=snapshots, block=1)
    with pytest.raises(RecomputeMismatch, match=r"running the steps before step \d+ again gave another state"):
        h.sum().backward()


def test_long_log_in_a_list():
    weight, log = normal(4, grad=True), list(range(250))

    def step(h, x):
        log.append(len(log))
        h = torch.tanh(h * weight + x * log[-1] / 100)
        return h, h

    xs, start = normal(30, 4), normal(4)
    plain = loss_and_gradients(lambda: unrolled(step, start, xs), [weight])
    del log[250:]
    result = scan(step, start, xs, snapshots=3, block=1)
    assert len(log) == 280
    assert equal(plain, loss_and_gradients(lambda: result, [weight]))
    assert log == list(range(280))


def test_results_of_earlier_steps_kept_outside_the_carry():
    weight, seen = normal(4, grad=True), []
    start = normal(4)

    def step(h, _):
        h = torch.tanh(h * weight + (seen[-1] if seen else 0))
        seen.append(h)
        return h, None

    with pytest.raises(RegionError, match="keeps a tensor with a history in a list that it reaches"):
        scan(step, start, length=5)


def test_module_that_keeps_its_last_output():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(normal(4))
            self.last = torch.zeros(4, dtype=DTYPE)

        def forward(self, h, x):
            self.last = torch.tanh(h * self.weight + self.last)
            return self.last, None

    with pytest.raises(RegionError, match="keeps a tensor with a history in 'last' of a module"):
        scan(Keeps(), normal(4), length=5)


def test_iterator_in_a_closure():
    numbers = itertools.count()
    with pytest.raises(InvalidInput, match="reads an iterator"):
        scan(lambda h, _: (h * next(numbers), None), normal(4, grad=True), length=5)


def test_parameter_that_the_step_changes_itself():
    weight = normal(4, grad=True)

    def step(h, _):
        with torch.no_grad():
            weight.mul_(0.9)
        return torch.tanh(h * weight), None

    with pytest.raises(
        StateChanged, match="step 0 changed its variable 'weight' in place, whose value before the loop is lost"
    ):
        scan(step, normal(4), length=5)


def test_tensor_in_a_list_that_is_overwritten_after_it_was_kept():
    weight, seen = normal(4, grad=True), []
    start = normal(4)

    def step(h, _):
        h = torch.tanh(h * weight + (seen[-1] if seen else 0))
        seen.append(h.detach().clone())
        if len(seen) > 1:
            seen[-2].zero_()
        return h, None

    h, _ = scan(step, start, length=9, snapshots=3, block=1)
    with pytest.raises(StateChanged, match="has been changed in place since a step put it there"):
        h.sum().backward()


def test_parameter_changed_between_two_evaluations():
    weight = normal(4, grad=True)
    xs, start = normal(9, 4), normal(4)

    def step(h, x):
        h = torch.tanh(h * weight + x)
        return h, h

    def looped():
        return scan(step, start, xs, snapshots=2)

    first = loss_and_gradients(looped, [weight])
    with torch.no_grad():
        weight.add_(1)
    second = loss_and_gradients(looped, [weight])
    assert equal(second, loss_and_gradients(lambda: unrolled(step, start, xs), [weight]))
    assert not equal(first, second)


def test_variable_bound_anew_after_the_loop():
    factor, weight = 2.0, normal(4, grad=True)
    xs, start = normal(9, 4), normal(4)

    def step(h, x):
        h = torch.tanh(h * weight * factor + x)
        return h, h

    plain = loss_and_gradients(lambda: unrolled(step, start, xs), [weight])
    kept = weight
    result = scan(step, start, xs, snapshots=2)
    factor, weight = 3.0, normal(4)
    assert equal(plain, loss_and_gradients(lambda: result, [kept]))
    assert factor == 3.0
    assert weight is not kept


def test_training_flag_switched_after_the_loop():
    module = nn.Dropout(0.5)
    weight = normal(4, grad=True)
    xs, start = normal(9, 4), normal(4)

    def step(h, x):
        h = torch.tanh(module(h * weight) + x)
        return h, h

    torch.manual_seed(4)
    plain = loss_and_gradients(lambda: unrolled(step, start, xs), [weight], seed=4)
    torch.manual_seed(4)
    result = scan(step, start, xs, snapshots=2)
    module.eval()
    assert equal(plain[1:], loss_and_gradients(lambda: result, [weight])[1:])
    assert not module.training


def test_two_loops_over_one_module_before_one_backward():
    def run(loop):
        torch.manual_seed(3)
        module = Counting()
        first = loop(module, start, xs)
        second = loop(module, start * 2, xs)
        return [
            *loss_and_gradients(lambda: (first, second), [module.weight]),
            module.average,
            torch.tensor(module.calls),
        ]

    xs, start = normal(7, 3, 4), normal(3, 4)
    # Each loop hands over its sum at once, so the order of addition is another.
    for ours, plain in zip(run(lambda *a: scan(*a, snapshots=2)), run(unrolled), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-13, atol=1e-13)


def test_taylor_of_hidden_state_at_two_points():
    weight = normal(4, grad=True)
    xs, start = normal(9, 4), normal(4, grad=True)

    def run(loop):
        index = 0

        def step(h, x):
            nonlocal index
            index += 1
            h = torch.tanh(h * weight * index / 5 + x)
            return h, h

        return loop(step, start, xs)

    assert_as_plain(lambda: run(unrolled), lambda: run(lambda *a: scan(*a, snapshots=2)), [weight, start])


@pytest.mark.parametrize("history", [False, True])
def test_hooks_that_steps_register_on_a_tensor_outside_run_once_per_step(history):
    weight = normal(4, grad=True)
    xs, start = normal(9, 4), normal(4, grad=True)

    def run(loop):
        used = weight.sin() if history else weight.detach().requires_grad_()

        def step(h, x):
            used.register_hook(lambda gradient: gradient * 1.1)
            h = torch.tanh(h * used + x)
            return h, h

        end, rows = loop(step, start, xs)
        return torch.autograd.grad((end.sum() + rows.sum()), [weight if history else used, start])

    assert equal(run(lambda *a: scan(*a, snapshots=2)), run(unrolled))

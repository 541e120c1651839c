"""Updates inside backward: bit for bit those of the ordinary step, few gradients at once, and errors for loops that need them all."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import retape
from engine.test_optimizer_states import OPTIMIZERS, are_equal, groups_of, model_of
from retape.errors import InvalidInput
from retape.torch.engine.host.optimizer_states import HostStates
from retape.torch.engine.optimizer.in_backward import ConsumedGradient, StepInBackward
from support.memory import step_peak_bytes

ONE = 16 * 16 * 4  # bytes of the gradient of one weight of `model_of`


def stepping(model, optimizer, *, on_host=False, bucket_bytes=ONE):
    states = HostStates(optimizer, bucket_bytes=3000) if on_host else None
    return StepInBackward(optimizer, list(model.parameters()), states=states, bucket_bytes=bucket_bytes)


def plain_step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def trained(kind, settings, way, *, steps=5, loop=plain_step, make=model_of):
    """A model and its optimizer after some steps; `way` is None for the ordinary step, else where the states are."""
    model = make()
    optimizer = kind(groups_of(model) if make is model_of else model.parameters(), lr=0.01, **settings)
    if way is not None:
        stepping(model, optimizer, on_host=way == "host")
    torch.manual_seed(1)
    for _ in range(steps):
        loop(model, optimizer, torch.randn(8, 16))
    return model, optimizer


@pytest.mark.parametrize("way", ["device", "host"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_the_same_bit_for_bit(name, way):
    kind, settings = OPTIMIZERS[name]
    assert are_equal(trained(kind, settings, None), trained(kind, settings, way))


@pytest.mark.parametrize("bucket_bytes", [1, ONE, 10**9])
def test_how_many_gradients_there_are_at_once(bucket_bytes):
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    one = 64 * 64 * 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    plain = copy.deepcopy(model)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, foreach=False)
    stepping(model, optimizer, bucket_bytes=bucket_bytes)
    x = torch.randn(2, 64)
    peaks = [step_peak_bytes(lambda m=m: m(x).sum().backward()) for m in (model, plain)]
    small = bucket_bytes < 10**9
    assert peaks[1] >= 8 * one
    assert peaks[0] < (3 * one if small else 9 * one)
    assert sum(isinstance(p.grad, ConsumedGradient) for p in model.parameters()) == (8 if small else 0)
    for each in (optimizer, plain_optimizer):
        each.step()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


class Tied(nn.Module):
    """A weight that is used twice: its gradient is complete at its first use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Linear(16, 16, bias=False)
        self.middle = nn.Linear(16, 16)

    def forward(self, x):
        return self.table(self.middle(self.table(x)).tanh())


class Regions(nn.Module):
    """Blocks that are recomputed, with a scale at their end whose gradient is complete before the re-run begins."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.shifts = nn.ParameterList(nn.Parameter(torch.randn(16)) for _ in range(3))

    def forward(self, x):
        for block, shift in zip(self.blocks, self.shifts, strict=True):
            x = retape.checkpoint(lambda v, block=block, shift=shift: block(v.sin()).tanh() + shift, x)
        return x


@pytest.mark.parametrize("way", ["device", "host"])
@pytest.mark.parametrize("make", [Tied, Regions])
def test_a_weight_is_updated_when_its_last_reader_is_done(make, way):
    kind, settings = torch.optim.AdamW, {"foreach": False}
    assert are_equal(trained(kind, settings, None, make=make), trained(kind, settings, way, make=make))


def test_weights_of_regions_are_updated_in_backward_and_not_only_in_the_step():
    model = Regions()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepping(model, optimizer, bucket_bytes=1)
    model(torch.randn(4, 16)).sum().backward()
    left = [p for p in model.parameters() if not isinstance(p.grad, ConsumedGradient)]
    assert len(left) <= 3  # of the first block: nothing follows it


def test_learning_rate_schedulers_and_closures():
    def loop(model, optimizer, x):
        def closure():
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > 0
        schedules[id(optimizer)].step()

    def one(way):
        model = model_of()
        optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
        if way:
            stepping(model, optimizer)
        schedules[id(optimizer)] = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        torch.manual_seed(1)
        for _ in range(5):
            loop(model, optimizer, torch.randn(8, 16))
        return model, optimizer

    schedules = {}
    assert are_equal(one(False), one(True))


def test_weights_that_it_does_not_have_are_left_to_the_step():
    def one(way):
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if way:
            StepInBackward(optimizer, list(model[:3].parameters()), bucket_bytes=1)
        for _ in range(3):
            plain_step(model, optimizer, torch.ones(2, 16))
        return model, optimizer

    assert are_equal(one(False), one(True))


def test_removed_it_leaves_the_ordinary_step():
    def one(way):
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        made = stepping(model, optimizer) if way else None
        plain_step(model, optimizer, torch.ones(2, 16))
        if made is not None:
            made.remove()
        plain_step(model, optimizer, torch.ones(2, 16))
        return model, optimizer

    found = one(True)
    assert are_equal(one(False), found)
    assert all(p.grad is not None for p in found[0].parameters())


def test_a_model_that_is_dropped_is_freed():
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    stepping(model, optimizer, on_host=True, bucket_bytes=1)
    plain_step(model, optimizer, torch.ones(2, 16))
    weight = weakref.ref(next(model.parameters()))
    del model, optimizer
    gc.collect()
    assert weight() is None


def test_removed_it_leaves_no_used_gradients():
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    made = stepping(model, optimizer, bucket_bytes=1)
    plain_step(model, optimizer, torch.ones(2, 16))
    assert any(isinstance(p.grad, ConsumedGradient) for p in model.parameters())
    made.remove()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("fused", [False, True])
def test_a_weight_that_is_read_after_its_update_is_an_error_for_every_kernel(fused):
    weight = nn.Parameter(torch.randn(16, 16))
    optimizer = torch.optim.AdamW([weight], lr=0.01, fused=fused, foreach=False)
    StepInBackward(optimizer, [weight], bucket_bytes=1)
    x = torch.randn(4, 16, requires_grad=True)
    early = nn.functional.linear(x, weight.detach())  # its backward reads the weight last
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        nn.functional.linear(early, weight).sum().backward()


def test_sparse_gradients():
    def one(way):
        torch.manual_seed(0)
        model = nn.Embedding(32, 8, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if way:
            stepping(model, optimizer, bucket_bytes=1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.tensor([1, 5, 1])).square().sum().backward()
            optimizer.step()
        return model.weight

    assert torch.equal(one(False), one(True))


# --- loops that need gradients ----------------------------------------------------------------------------------------


def clip(model, optimizer):
    model(torch.ones(2, 16)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def scale(model, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.ones(2, 16)).sum()).backward()
    scaler.step(optimizer)


def accumulate(model, optimizer):
    for _ in range(2):
        model(torch.ones(2, 16)).sum().backward()


def forget_to_zero(model, optimizer):
    for _ in range(2):
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()


def skip_a_step(model, optimizer):
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 16)).sum().backward()


def zero_in_place(model, optimizer):
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def zero_too_early(model, optimizer):
    model(torch.ones(2, 16)).sum().backward()
    optimizer.zero_grad()
    optimizer.step()


def step_twice(model, optimizer):
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    optimizer.step()


def change_the_rate(model, optimizer):
    model(torch.ones(2, 16)).sum().backward()
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()


def change_the_betas(model, optimizer):
    model(torch.ones(2, 16)).sum().backward()
    optimizer.param_groups[0]["betas"] = (0.5, 0.9)
    optimizer.step()


def replace_the_rate(model, optimizer):
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    model(torch.ones(2, 16)).sum().backward()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.2)
    optimizer.step()


def replace_gradients(model, optimizer):
    model(torch.ones(2, 16)).sum().backward()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


def decay_by_hand(model, optimizer):
    model(torch.ones(2, 16)).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    optimizer.step()


def add_a_hook(model, optimizer):
    optimizer.register_step_pre_hook(lambda *_: None)
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()


def twice_differentiable(model, optimizer):
    model(torch.ones(2, 16)).sum().backward(create_graph=True)


READS = r"reads a gradient .* that was used for an update in backward .*continue from the last saved state"


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize(
    ("loop", "message"),
    [
        (clip, READS),
        (scale, READS),
        (accumulate, READS),
        (forget_to_zero, READS),
        (zero_in_place, READS),
        (step_twice, READS),
        (zero_too_early, r"Gradients were removed \(zero_grad\) or replaced between backward and optimizer.step"),
        (replace_gradients, r"or replaced between backward and optimizer.step"),
        (decay_by_hand, r"Weights were written to between backward and optimizer.step"),
        (change_the_betas, r"Settings of the optimizer .* were changed between backward and optimizer.step"),
        (replace_the_rate, r"Settings of the optimizer .* were changed between backward and optimizer.step"),
        (skip_a_step, r"was updated in an earlier backward .* optimizer.step\(\) was not called"),
        (change_the_rate, r"Settings of the optimizer .* were changed between backward and optimizer.step"),
        (add_a_hook, r"A hook of optimizer.step\(\) was registered after the fit"),
        (twice_differentiable, r"create_graph=True"),
    ],
)
def test_loops_that_are_refused(loop, message):
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    stepping(model, optimizer, bucket_bytes=1)
    with pytest.raises(InvalidInput, match=message):
        loop(model, optimizer)


def load_states(optimizer, saved):
    optimizer.load_state_dict(saved)


def clear_states(optimizer, saved):
    optimizer.state.clear()


def replace_all_states(optimizer, saved):
    optimizer.state = type(optimizer.state)(dict)


def reset_momentum(optimizer, saved):
    for state in optimizer.state.values():
        state["exp_avg"].zero_()


def replace_momentum(optimizer, saved):
    for state in optimizer.state.values():
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])


def add_to_states(optimizer, saved):
    for state in optimizer.state.values():
        state["mine"] = 1


STATE_CHANGES = (load_states, clear_states, replace_all_states, reset_momentum, replace_momentum, add_to_states)


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("change", STATE_CHANGES)
def test_states_that_change_between_backward_and_step_are_refused(change, on_host):
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    stepping(model, optimizer, bucket_bytes=1, on_host=on_host)
    x = torch.randn(8, 16)
    plain_step(model, optimizer, x)
    saved = copy.deepcopy(optimizer.state_dict())
    plain_step(model, optimizer, x)
    load_states(optimizer, saved)  # after a step it may change
    plain_step(model, optimizer, x)

    def loop():
        model(x).square().mean().backward()
        change(optimizer, saved)
        optimizer.step()

    optimizer.zero_grad()
    with pytest.raises(InvalidInput, match=r"between backward and optimizer.step\(\), and weights were updated with"):
        loop()


def test_states_may_be_loaded_in_mid_step_after_it_was_removed():
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    inside = stepping(model, optimizer, bucket_bytes=1)
    saved = copy.deepcopy(optimizer.state_dict())
    model(torch.ones(2, 16)).sum().backward()
    with pytest.raises(InvalidInput, match=r"load_state_dict\(\) was called .* call remove\(\) of the fit first"):
        optimizer.load_state_dict(saved)
    inside.remove()
    optimizer.load_state_dict(saved)


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_step_that_was_kept_from_before_is_no_change_of_states(momentum, on_host):
    def one(way):
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
        step = optimizer.step
        if way:
            stepping(model, optimizer, bucket_bytes=1, on_host=on_host)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 16)).square().mean().backward()
            step()
        return model, optimizer

    assert are_equal(one(False), one(True))


class ReadsLater(nn.Module):
    """A weight whose first use gives it no gradient: it would be updated before that use is reversed."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.weight = nn.Parameter(torch.randn(16))

    def forward(self, x):
        return self.first(x) * self.weight.detach() * 2 + self.weight


def test_a_weight_that_is_read_later_is_an_error_of_autograd():
    model = ReadsLater()
    stepping(model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_bytes=1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.randn(4, 16)).sum().backward()


def test_what_is_refused_at_once():
    model = model_of()
    with pytest.raises(InvalidInput, match=r"LBFGS cannot update weights in backward.*Leave OPTIMIZER_IN_BACKWARD out"):
        stepping(model, torch.optim.LBFGS(model.parameters()))
    model(torch.randn(4, 16)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())

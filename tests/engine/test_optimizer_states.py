"""Optimizer states on the host: the same updates bit for bit, in buckets, with hooks, schedulers, scalers and saved states as before."""

import copy
import io

import pytest
import torch
from torch import nn

from retape.errors import InvalidInput, OffloadError
from retape.torch.engine.host.copy_streams import BlockingCopies, HostPool
from retape.torch.engine.host.optimizer_states import HostStates
from support.memory import step_peak_bytes

CPU = torch.device("cpu")
OPTIMIZERS = {
    "AdamW for-loop": (torch.optim.AdamW, {"foreach": False}),
    "AdamW foreach": (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "Adam foreach": (torch.optim.Adam, {"foreach": True, "weight_decay": 0.1}),
    "Adam fused": (torch.optim.Adam, {"fused": True}),
    "SGD for-loop": (torch.optim.SGD, {"foreach": False, "momentum": 0.9, "nesterov": True}),
    "SGD foreach": (torch.optim.SGD, {"foreach": True, "momentum": 0.9}),
    "SGD fused": (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
    "SGD without states": (torch.optim.SGD, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Rprop": (torch.optim.Rprop, {}),
}
BUCKET = 3000  # bytes: one or two of the layers below


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))


def groups_of(model):
    layers = list(model)
    return [
        {"params": [p for layer in layers[:4] for p in layer.parameters()]},
        {"params": [p for layer in layers[4:] for p in layer.parameters()], "lr": 0.003},
    ]


def after_steps(kind, settings, *, moved, steps=5, after=lambda model, optimizer: None, loop=None):
    """A model and its optimizer after some steps, with the states on the host or not."""
    model = model_of()
    optimizer = kind(groups_of(model), lr=0.01, **settings)
    states = HostStates(optimizer, bucket_bytes=BUCKET) if moved else None
    torch.manual_seed(1)
    for _ in range(steps):
        x = torch.randn(8, 16)
        (loop or plain_step)(model, optimizer, x)
        after(model, optimizer)
    return model, optimizer, states


def plain_step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def are_equal(one, other):
    """True if weights and states of two trainings are the same bit for bit."""
    (model, optimizer, *_), (its_model, its_optimizer, *_) = one, other
    pairs = list(zip(model.parameters(), its_model.parameters(), strict=True))
    if not all(torch.equal(mine, its) for mine, its in pairs):
        return False
    for mine, its in pairs:
        state, its_state = optimizer.state.get(mine, {}), its_optimizer.state.get(its, {})
        if state.keys() != its_state.keys():
            return False
        for name, value in state.items():
            same = torch.equal(value, its_state[name]) if isinstance(value, torch.Tensor) else value == its_state[name]
            if not same:
                return False
    return True


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_the_same_bit_for_bit(name):
    kind, settings = OPTIMIZERS[name]
    plain, moved = (after_steps(kind, settings, moved=way) for way in (False, True))
    assert are_equal(plain, moved)
    moved[2].remove()
    assert are_equal(plain, moved)
    assert "step" not in vars(moved[1])
    for model, optimizer, _ in (plain, moved):
        plain_step(model, optimizer, torch.ones(2, 16))
    assert are_equal(plain, moved)


def test_a_step_has_a_few_buckets_on_the_device_and_takes_no_host_memory_again():
    pool = HostPool(pinned=False, limit_bytes=2**30)
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(24)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    one = 2 * 128 * 128 * 4
    HostStates(optimizer, bucket_bytes=one, streams=BlockingCopies(CPU, pool))
    model(torch.randn(2, 128)).sum().backward()
    optimizer.step()
    taken = pool.allocations
    assert taken == 2 * 24
    assert pool.allocated_bytes == 24 * one
    peak = step_peak_bytes(optimizer.step)
    assert 2 * one <= peak < 3.2 * one
    assert pool.allocations == taken


def test_the_host_memory_of_states_that_are_gone_is_free_again():
    pool = HostPool(pinned=False, limit_bytes=2**20)
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    states = HostStates(optimizer, streams=BlockingCopies(CPU, pool))
    plain_step(model, optimizer, torch.ones(2, 16))
    assert pool.allocated_bytes == states.host_bytes == 2 * sum(p.nbytes for p in model.parameters())
    states.remove()
    assert pool.allocated_bytes == states.host_bytes == 0


def test_a_host_that_is_full_leaves_the_states_where_they_are():
    pool = HostPool(pinned=False, limit_bytes=4096)
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    HostStates(optimizer, bucket_bytes=BUCKET, streams=BlockingCopies(CPU, pool))
    model(torch.ones(2, 16)).sum().backward()
    with pytest.raises(OffloadError, match=r"No host memory for .* more of moved tensors"):
        optimizer.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [12]
    assert all(value.isfinite().all() for state in optimizer.state.values() for value in state.values())


def test_hooks_run_once_and_see_all_parameters():
    seen = []

    def after(model, optimizer):
        if len(seen) == 0:
            optimizer.register_step_pre_hook(
                lambda o, *_: seen.append(("pre", sum(len(g["params"]) for g in o.param_groups)))
            )
            optimizer.register_step_post_hook(
                lambda o, *_: seen.append(("post", sum(len(g["params"]) for g in o.param_groups)))
            )

    after_steps(torch.optim.AdamW, {}, moved=True, steps=2, after=after)
    assert seen == [("pre", 12), ("post", 12)]


def test_a_closure_runs_once():
    calls = []

    def loop(model, optimizer, x):
        def closure():
            calls.append(1)
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > 0

    plain = after_steps(torch.optim.AdamW, {}, moved=False, loop=loop)
    moved = after_steps(torch.optim.AdamW, {}, moved=True, loop=loop)
    assert len(calls) == 10
    assert are_equal(plain, moved)


@pytest.mark.parametrize("first", [True, False])
def test_learning_rate_schedulers(first, recwarn):
    def one(moved):
        model = model_of()
        optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
        states = HostStates(optimizer, bucket_bytes=BUCKET) if moved and not first else None
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        states = HostStates(optimizer, bucket_bytes=BUCKET) if moved and first else states
        for _ in range(5):
            plain_step(model, optimizer, torch.ones(2, 16))
            schedule.step()
        if states is not None:
            states.remove()
            plain_step(model, optimizer, torch.ones(2, 16))
            schedule.step()
        else:
            plain_step(model, optimizer, torch.ones(2, 16))
        return model, optimizer

    assert are_equal(one(False), one(True))
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message) or "overridden" in str(w.message)]


@pytest.mark.parametrize("settings", [{"fused": True}, {"foreach": False}])
def test_gradient_scaling_and_a_skipped_step(settings):
    def one(moved):
        model = model_of()
        optimizer = torch.optim.AdamW(groups_of(model), lr=0.01, **settings)
        if moved:
            HostStates(optimizer, bucket_bytes=BUCKET)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for number in range(5):
            optimizer.zero_grad()
            x = torch.full((2, 16), float("inf") if number == 2 else 1.0)
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        return model, optimizer

    plain, moved = one(False), one(True)
    assert are_equal(plain, moved)


def test_states_are_saved_and_loaded_as_before():
    plain, moved = (after_steps(torch.optim.AdamW, {}, moved=way) for way in (False, True))
    file = io.BytesIO()
    torch.save(moved[1].state_dict(), file)
    assert file.tell() < 2 * 2 * sum(p.nbytes for p in moved[0].parameters())  # two states, and the headers of the file
    file.seek(0)
    saved = torch.load(file)
    for model, optimizer, _ in (plain, moved):
        plain_step(model, optimizer, torch.ones(2, 16))
        optimizer.load_state_dict(copy.deepcopy(saved))
        plain_step(model, optimizer, torch.ones(2, 16))
    assert are_equal(plain, moved)
    moved[1].load_state_dict(plain[1].state_dict())
    assert are_equal(plain, moved)


def test_a_group_that_is_added_later_and_a_parameter_without_a_gradient():
    def one(moved):
        model = model_of()
        optimizer = torch.optim.AdamW(list(model[:2].parameters()), lr=0.01)
        if moved:
            HostStates(optimizer, bucket_bytes=BUCKET)
        plain_step(model, optimizer, torch.ones(2, 16))
        optimizer.add_param_group({"params": list(model[2:].parameters()), "lr": 0.1})
        plain_step(model, optimizer, torch.ones(2, 16))
        model[0].weight.grad = None
        optimizer.step()
        return model, optimizer

    assert are_equal(one(False), one(True))


def test_a_step_that_was_taken_before_finds_all_states_on_the_device():
    def one(moved):
        model = model_of()
        optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
        kept = optimizer.step  # as a wrapper keeps it
        if moved:
            HostStates(optimizer, bucket_bytes=BUCKET)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 16)).sum().backward()
            kept()
        plain_step(model, optimizer, torch.ones(2, 16))
        return model, optimizer

    assert are_equal(one(False), one(True))


class GroupSteps(torch.optim.SGD):
    updates_each_parameter = True  # which is not so

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


class Clipped(torch.optim.AdamW):
    """Clips by the norm of all gradients: a part of the parameters alone would get another update."""

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.01)
        return super().step(closure)


class Renamed(torch.optim.AdamW):
    pass


def test_a_subclass_with_the_step_of_its_parent():
    HostStates(Renamed(model_of().parameters())).remove()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Clipped, "Clipped cannot wait on the host: the step of Clipped is not known.*updates_each_parameter"),
        (torch.optim.LBFGS, "LBFGS cannot wait on the host: the step of LBFGS is not known"),
        (lambda p: torch.optim.AdamW(p, differentiable=True), "differentiable=True"),
    ],
)
def test_optimizers_that_are_refused(make, message):
    with pytest.raises(InvalidInput, match=message):
        HostStates(make(list(model_of().parameters())))


def test_an_optimizer_that_counts_steps_in_its_groups_is_refused_when_it_steps():
    model = model_of()
    optimizer = GroupSteps(model.parameters(), lr=0.1)
    HostStates(optimizer, bucket_bytes=BUCKET)
    model(torch.ones(2, 16)).sum().backward()
    with pytest.raises(InvalidInput, match="changes its parameter groups"):
        optimizer.step()

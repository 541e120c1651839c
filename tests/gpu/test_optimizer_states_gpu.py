"""Optimizer states on the host of a GPU: the same updates bit for bit, few bytes on the device, and states to read after each step."""

import gc

import pytest
import torch
from torch import nn

import retape
from retape.torch.engine.host.optimizer_states import HostStates

DEVICE = torch.device("cuda", 0)
KERNELS = [{"fused": True}, {"foreach": True}, {"foreach": False}]


def mlps(count=8, width=1024, dtype=torch.bfloat16):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(count)]
    return nn.Sequential(*layers).to(DEVICE, dtype)


def loss_of(model, rows):
    return model(rows).float().square().mean()


def states_on_host(model, optimizer):
    return HostStates(optimizer, bucket_bytes=6 * 2**20)


def after_each_step(settings, manage=lambda model, optimizer: None, *, steps=5, kind=torch.optim.AdamW):
    """Weights and states after each step of a managed optimizer, as the host reads them at once."""
    model = mlps()
    optimizer = kind(model.parameters(), lr=1e-3, **settings)
    manage(model, optimizer)
    torch.manual_seed(1)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, torch.randn(64, 1024, device=DEVICE, dtype=torch.bfloat16)).backward()
        optimizer.step()
        states = [value for p in model.parameters() for value in optimizer.state[p].values()]
        found += [value.detach().cpu().clone() for value in (*model.parameters(), *states)]
    return found


@pytest.mark.parametrize("settings", KERNELS, ids=["fused", "foreach", "for-loop"])
def test_updates_are_the_same_bit_for_bit(settings):
    plain, moved = after_each_step(settings), after_each_step(settings, states_on_host)
    assert all(map(torch.equal, plain, moved))


def test_gradient_scaling():
    def one(moved):
        model = mlps(4, dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        if moved:
            HostStates(optimizer, bucket_bytes=2**20)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
        for number in range(4):
            optimizer.zero_grad()
            rows = torch.full((8, 1024), float("inf") if number == 1 else 1.0, device=DEVICE)
            scaler.scale(loss_of(model, rows)).backward()
            scaler.step(optimizer)
            scaler.update()
        return [p.detach().clone() for p in model.parameters()]

    assert all(map(torch.equal, one(False), one(True)))


def test_the_device_has_no_states_between_steps_and_few_buckets_in_a_step():
    model = mlps(16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    states = HostStates(optimizer, bucket_bytes=8 * 2**20)
    rows = torch.randn(64, 1024, device=DEVICE, dtype=torch.bfloat16)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        assert torch.cuda.memory_allocated() - before < 2**20
        assert torch.cuda.max_memory_allocated() - before < 3.5 * 8 * 2**20
    assert states.host_bytes >= 2 * sum(p.nbytes for p in model.parameters())


def test_a_fit_plans_with_the_bytes_of_the_states_and_puts_them_back():
    model = mlps(16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    rows = torch.randn(2048, 1024, device=DEVICE, dtype=torch.bfloat16)
    loss_of(model, rows).backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    states = 2 * sum(p.nbytes for p in model.parameters())
    before = torch.cuda.memory_allocated()
    fitted = retape.fit(
        model,
        rows,
        budget=before - states // 2 + 160 * 2**20,  # the states of this model are one bucket
        step=loss_of,
        optimizer=optimizer,
        options=retape.EXACT | retape.OPTIMIZER_ON_HOST,
        progress=False,
    )
    assert torch.cuda.memory_allocated() < before - states // 2
    assert fitted.measured.peak_bytes <= fitted.budget_bytes
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        loss_of(model, rows).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.cuda.max_memory_allocated() <= fitted.budget_bytes
    fitted.remove()
    assert all(value.is_cuda for state in optimizer.state.values() for value in state.values() if value.dim())

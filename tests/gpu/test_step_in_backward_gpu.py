"""Updates inside backward on a GPU, with states there or on the host: the same bits, and few gradients at once."""

from functools import partial

import pytest
import torch

import retape
from gpu.test_optimizer_states_gpu import DEVICE, KERNELS, after_each_step, loss_of, mlps, states_on_host
from retape.torch.engine.optimizer.in_backward import StepInBackward


def updated_in_backward(way, model, optimizer):
    states = states_on_host(model, optimizer) if way == "host" else None
    StepInBackward(optimizer, list(model.parameters()), states=states, bucket_bytes=2**20)


@pytest.mark.parametrize("way", ["device", "host"])
@pytest.mark.parametrize("settings", KERNELS, ids=["fused", "foreach", "for-loop"])
def test_updates_are_the_same_bit_for_bit(settings, way):
    managed = after_each_step(settings, partial(updated_in_backward, way))
    assert all(map(torch.equal, after_each_step(settings), managed))


@pytest.mark.parametrize("more", [retape.EXACT, retape.OPTIMIZER_ON_HOST], ids=["device", "host"])
def test_a_fit_has_the_room_of_the_gradients(more):
    model = mlps(24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    rows = torch.randn(2048, 1024, device=DEVICE, dtype=torch.bfloat16)
    weights = sum(p.nbytes for p in model.parameters())
    states = 0 if more else 2 * weights
    # With states on the host a bucket of gradients waits for them; all gradients together take as much as the weights.
    gradients = weights // 2 if more else weights // 4
    fitted = retape.fit(
        model,
        rows,
        budget=torch.cuda.memory_allocated() + states + gradients + 208 * 2**20,
        step=loss_of,
        optimizer=optimizer,
        options=retape.OPTIMIZER_IN_BACKWARD | more,
        progress=False,
    )
    for _ in range(3):
        optimizer.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        loss_of(model, rows).backward()
        assert torch.cuda.max_memory_allocated() <= fitted.budget_bytes
        optimizer.step()
    fitted.remove()

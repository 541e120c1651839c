"""Out of memory as an event: injected at every op of regions, first runs and re-runs, one at a time; and elsewhere."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import retape
from retape.errors import BudgetTooSmall, StateChanged
from retape.torch.engine.context import THREAD
from support.comparing import assert_equal
from support.memory import step_peak_bytes
from support.ops import FailingOp


def in_rerun():
    return any(run.rerun for run in THREAD.runs)


def in_forward():
    return bool(THREAD.runs) and not in_rerun()


def outside():
    return not THREAD.runs


class DrawingBlock(nn.Module):
    """Draws, keeps statistics, and counts its calls in a list and in a buffer."""

    def __init__(self, width=6):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width)
        self.register_buffer("seen", torch.zeros(()))
        self.sizes = [torch.zeros(1)]

    def forward(self, x):
        self.seen += 1
        self.sizes.append(torch.ones(1) * len(self.sizes))
        y = nn.functional.dropout(torch.relu(self.norm(self.first(x))), 0.4)
        return x + self.second(y)


def drawing_blocks():
    torch.manual_seed(3)
    return nn.Sequential(*[DrawingBlock() for _ in range(3)])


def outcome(model, x, around=None):
    torch.manual_seed(5)
    with around if around is not None else nullcontext():
        loss = model(x).square().mean()
        loss.backward()
    return {
        "loss": loss.detach(),
        "gradients": [p.grad for p in model.parameters()],
        "buffers": [b.clone() for b in model.buffers()],
        "lists": [[float(t) for t in block.sizes] for block in model],
        "stream": torch.get_rng_state(),
    }


X = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))


class Managed:
    """A model under a live budget that has seen its kinds, and is put back to its start before every step."""

    def __init__(self, share):
        self.model = drawing_blocks()
        self.start = {name: value.clone() for name, value in self.model.state_dict().items()}
        above = whole_bytes()
        self.live = retape.adaptive(self.model, budget=retape.Budget.activations(int(share * above)))
        for _ in range(3):
            self.step(None)

    def step(self, around):
        with torch.no_grad():
            for name, value in self.model.state_dict().items():
                value.copy_(self.start[name])
        for block in self.model:
            block.sizes = [torch.zeros(1)]
        self.model.zero_grad()
        return outcome(self.model, X, around)

    def ops(self, where):
        counter = FailingOp(0, where)
        self.step(counter)
        return counter.count


def whole_bytes():
    return step_peak_bytes(lambda: outcome(drawing_blocks(), X))


@pytest.mark.parametrize(("where", "share"), [(in_forward, 4.0), (in_rerun, 0.75)])
def test_out_of_memory_at_every_op_of_regions(where, share):
    managed = Managed(share)
    wanted = outcome(drawing_blocks(), X)
    ops = managed.ops(where)
    assert ops > 15
    overcome = 0
    for at in range(1, ops + 1):
        failing, before = FailingOp(at, where), managed.live.stats()
        found = managed.step(failing)
        after = managed.live.stats()
        assert failing.raised
        assert after.out_of_memory_events == before.out_of_memory_events + 1
        assert_equal(found, wanted)
        overcome += after.evictions > before.evictions
    managed.live.remove()
    assert overcome > 0, "what was held went"


def test_a_region_that_changed_its_own_input_cannot_be_run_again():
    def grows(x):
        x.mul_(2.0)
        raise torch.OutOfMemoryError("CPU out of memory (injected).")

    weight = torch.randn(8, requires_grad=True)
    message = "ran out of memory after it had changed tensor 0 of its arguments"
    with retape.adaptive(budget="1GiB"):
        y = retape.checkpoint(torch.sin, weight * 1) * 3
        with pytest.raises(StateChanged, match=message):
            retape.checkpoint(grows, y)


def test_elsewhere_it_is_a_clear_error():
    block, head = DrawingBlock(), nn.Linear(6, 1)
    with retape.adaptive(budget="1GiB") as live, FailingOp(0, outside) as counter:
        head(retape.checkpoint(block, X)).sum().backward()
    ops = counter.count
    assert ops > 8
    for at in (ops - 1, ops // 2):
        for parameter in (*block.parameters(), *head.parameters()):
            parameter.grad = None
        with (
            pytest.raises(
                BudgetTooSmall, match=r"Out of memory outside any region's forward or re-run.*injected"
            ) as caught,
            live,
            FailingOp(at, outside),
        ):
            head(retape.checkpoint(block, X)).sum().backward()
        assert caught.value.binding == "outside regions"
        assert caught.value.budget_bytes == 1 << 30
        assert "call zero_grad()" in str(caught.value)


def test_nothing_left_says_the_numbers():
    managed = Managed(4.0)
    message = r"needs .* beside .* that cannot be dropped.*The allocator said: CPU out of memory"
    with pytest.raises(BudgetTooSmall, match=message) as caught:
        managed.step(FailingOp(1, in_forward, for_good=True))
    assert caught.value.floor_bytes > 0
    assert caught.value.binding == "The forward of DrawingBlock"

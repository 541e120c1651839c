"""A live budget holds for every way in which regions come to be dropped: in part, with their inputs, to the host, beside skips."""

import random

import pytest
import torch
from torch import nn

import retape
from adaptive.priced import PricedTimer
from retape.torch.adaptive.manager import Adaptive
from retape.torch.adaptive.needs import Needs, PhaseMark, RegionKind, Rerun, StepPhase
from retape.torch.adaptive.tuning import AdaptiveInstruments, AdaptiveTuning
from retape.torch.engine.host.copy_streams import STREAMS
from support.clocks import FakeClock
from support.comparing import assert_equal, parameter_gradients
from support.memory import CPU, step_peak_bytes

WIDTH = 32


class Wide(nn.Module):
    """What it saves in the middle is larger than what goes in."""

    def __init__(self, times):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, times * WIDTH)
        self.down = nn.Linear(times * WIDTH, WIDTH)

    def forward(self, x):
        y = nn.functional.dropout(nn.functional.gelu(self.up(self.norm(x))), 0.1)
        return x + self.down(y)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.all, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.all(self.norm(x.view(8, -1, WIDTH))).chunk(3, -1)
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)).view_as(x)


class Cheap(nn.Module):
    """Ops that are quick to run again, each of which saves something."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = torch.tanh(torch.sigmoid(torch.sin(self.first(x))))
        return x + self.second(nn.functional.dropout(y, 0.25))


class MixedNet(nn.Module):
    """Blocks of several kinds, and perhaps a skip past most of them, which the user holds all the while."""

    def __init__(self, draw):
        super().__init__()
        kinds = [Attention, Cheap, lambda: Wide(1), lambda: Wide(2), lambda: Wide(4)]
        self.blocks = nn.ModuleList([draw.choice(kinds)() for _ in range(draw.choice([4, 6, 9]))])
        self.skips = draw.random() < 0.5

    def forward(self, x):
        kept = None
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1:
                kept = x
        return x + kept if self.skips else x


def mean_square_step(model, x):
    model.zero_grad(set_to_none=False)
    torch.manual_seed(1)
    model(x).square().mean().backward()


def twice(model, x):
    """A graph that is retained and walked again."""
    model.zero_grad(set_to_none=False)
    torch.manual_seed(1)
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def drawn_instruments(model, draw):
    """No real clock: the seconds of each op and of each kind of block are drawn, so that any of them may be the one to drop."""
    prices, seconds, clock = {}, {}, FakeClock()

    class DrawnTimer(PricedTimer):
        def time(self, func, args, kwargs):
            self.seconds().append(prices.setdefault(str(func), draw.choice([1e-4, 1e-3, 1e-2, 1.0])))
            return func(*args, **kwargs)

    def take_time(block, args):
        kind = (type(block), sum(parameter.numel() for parameter in block.parameters()))
        clock.advance(seconds.setdefault(kind, draw.choice([0.1, 1.0, 3.0])))

    for block in model.blocks:
        block.register_forward_pre_hook(take_time)
    free = {"op_overhead_seconds": lambda device: 0.0, "host_tier": lambda device: None}
    return AdaptiveInstruments(clock=clock, op_timer=DrawnTimer, **free)


@pytest.fixture(scope="module", autouse=True)
def _host_memory_is_there():
    """On the CPU the host's memory counts too: it must not be allocated in a step whose peak is checked."""
    pool = STREAMS.of(CPU).pool
    for chunks in [pool.take(1 << size) for size in range(12, 20) for _ in range(24)]:
        pool.give(chunks)


def check(run, seed, share, host):
    """Inside the budget and with the bits of plain autograd, step after step; no case is so tight that it may be refused."""
    draw = random.Random(seed)
    torch.manual_seed(0)
    model, x = MixedNet(draw), torch.randn(256, WIDTH)
    run(model, x)
    run(model, x)
    wanted, whole = parameter_gradients(model), step_peak_bytes(lambda: run(model, x))
    budget = retape.Budget.activations(int(share * whole))
    live = Adaptive(model, budget, host=host, instruments=drawn_instruments(model, draw))
    try:
        for _ in range(6):
            run(model, x)
            assert_equal(parameter_gradients(model), wanted)
        assert step_peak_bytes(lambda: run(model, x)) <= share * whole
        assert_equal(parameter_gradients(model), wanted)
        assert live.stats().reruns
        assert bool(live.stats().moved_bytes) <= host
    finally:
        live.remove()


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize(
    ("seed", "share"), [(3, 0.6), *((seed, share) for seed in (7, 24, 25, 27, 35) for share in (0.6, 0.45, 0.35))]
)
def test_the_peak_stays_inside(seed, share, host):
    check(mean_square_step, seed, share, host)


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize(("seed", "share"), [(3, 0.7), (3, 0.5), (4, 0.7), (8, 0.7)])
def test_the_peak_stays_inside_when_a_graph_is_walked_twice(seed, share, host):
    check(twice, seed, share, host)


# --- what is known of a re-run ---------------------------------------------------------------------------------------


def learned(*seen):
    """Needs of one kind after a step with these phases: number, bytes counted and live when it began, and its peak."""
    needs, kind = Needs(AdaptiveTuning()), RegionKind(None, (), 8)
    for phase, number, counted, live, peak in seen:
        needs.learn(PhaseMark(phase=phase, kind=kind, number=number, held_bytes=counted, gradient_bytes=0), live, peak)
    return lambda phase, number: needs.of(phase, kind, number).bytes


FORWARD, BACKWARD = (StepPhase.FORWARD, 0, 0, 10, 110), (StepPhase.BACKWARD, 20, 50, 65, 90)


def test_a_rerun_beside_copies_says_nothing_of_one_that_refills_all():
    """What the host has is not refilled: such a re-run needs less."""
    need = learned(FORWARD, BACKWARD, (StepPhase.RERUN, Rerun.BESIDE_COPIES, 0, 15, 75))
    assert need(StepPhase.RERUN, Rerun.BESIDE_COPIES) == 75
    assert need(StepPhase.RERUN, Rerun.ALL_SLOTS) == 110 + 5


def test_a_rerun_to_the_end_needs_what_the_forward_does():
    """One that stops after the last slot has been seen; the outputs come on top."""
    need = learned(FORWARD, BACKWARD, (StepPhase.RERUN, Rerun.ALL_SLOTS, 0, 15, 80))
    assert need(StepPhase.RERUN, Rerun.ALL_SLOTS) == 80
    assert need(StepPhase.RERUN, Rerun.WITH_OUTPUTS) == 110 + 5


def test_a_rerun_is_expected_where_most_lives_beside_it():
    """It was seen late in backward; earlier on, the gradient of a skip waits beside it."""
    need = learned(
        FORWARD, BACKWARD, (StepPhase.BACKWARD, 8, 50, 90, 100), (StepPhase.RERUN, Rerun.ALL_SLOTS, 0, 15, 80)
    )
    assert need(StepPhase.RERUN, Rerun.ALL_SLOTS) == 80 - 15 + 40


def test_a_rerun_of_fewer_slots_says_nothing():
    """In a second pass, or one of a part, some slots are there or gone: less is refilled."""
    need = learned(FORWARD, BACKWARD, (StepPhase.RERUN, Rerun.IRREGULAR, 0, 15, 20))
    assert need(StepPhase.RERUN, Rerun.IRREGULAR) == need(StepPhase.RERUN, Rerun.ALL_SLOTS) == 110 + 5

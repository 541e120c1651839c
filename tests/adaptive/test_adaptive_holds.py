"""A live budget holds for every way in which regions come to be dropped: in part, with their inputs, to the host, beside skips."""

import random

import pytest
import torch
from torch import nn

import retape
from retape.torch.adaptive import adaptive_region
from retape.torch.adaptive import drop_levels as adaptive_menu
from retape.torch.adaptive import host as adaptive_host
from retape.torch.adaptive.accounting import BESIDE_COPIES, ODD, TO_THE_END, WHOLE, Kind, Mark, Needs, Phase
from retape.torch.engine.host.copy_streams import lanes_of
from retape.torch.measure.memory_meter import track_memory
from retape.torch.planning.chain.region_ways import Overheads
from retape.torch.planning.profile import OpTimer
from support.changing import gradients
from support.comparing import assert_equal

CPU = torch.device("cpu")
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


class Net(nn.Module):
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


def step(model, x):
    model.zero_grad(set_to_none=False)
    torch.manual_seed(1)
    model(x).square().mean().backward()


def peak_above(model, x, run=step):
    with track_memory(CPU) as scale:
        run(model, x)
    return max(reading.peak_bytes for reading in scale.readings)


@pytest.fixture
def drawn_prices(monkeypatch):
    """No clock: what each op and each kind of region takes is drawn, so that any of them may be the one to drop."""

    def draw_with(draw):
        prices, seconds = {}, {}

        class Timer(OpTimer):
            def seconds(self):
                return self._taken

            def time(self, func, args, kwargs):
                self._taken.append(prices.setdefault(str(func), draw.choice([1e-4, 1e-3, 1e-2, 1.0])))
                return func(*args, **kwargs)

        def ran(kind, taken):
            kind.runs += 1
            kind.seconds = seconds.setdefault(kind, draw.choice([0.1, 1.0, 3.0]))

        monkeypatch.setattr(adaptive_region, "OpTimer", Timer)
        monkeypatch.setattr(adaptive_menu, "engine_overheads", lambda device: Overheads())
        monkeypatch.setattr(adaptive_host, "host_tier", lambda device: None)
        monkeypatch.setattr(Kind, "ran", ran)

    return draw_with


@pytest.fixture(scope="module", autouse=True)
def _host_memory_is_there():
    """On the CPU the host's memory counts too: it must not be allocated in a step that stands on the scale."""
    pool = lanes_of(CPU).pool
    for chunks in [pool.take(1 << size) for size in range(12, 20) for _ in range(24)]:
        pool.give(chunks)


def twice(model, x):
    """A graph that is retained and walked again."""
    model.zero_grad(set_to_none=False)
    torch.manual_seed(1)
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def check(run, seed, share, host, drawn_prices):
    """Inside the budget and with the bits of plain autograd, step after step; no case is so tight that it may be refused."""
    draw = random.Random(seed)
    drawn_prices(draw)
    torch.manual_seed(0)
    model, x = Net(draw), torch.randn(256, WIDTH)
    run(model, x)
    run(model, x)
    wanted, whole = gradients(model), peak_above(model, x, run)
    live = retape.adaptive(model, budget=retape.Budget.activations(int(share * whole)), host=host)
    try:
        for _ in range(6):
            run(model, x)
            assert_equal(gradients(model), wanted)
        assert peak_above(model, x, run) <= share * whole
        assert_equal(gradients(model), wanted)
    finally:
        live.remove()


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize(
    ("seed", "share"), [(3, 0.6), *((seed, share) for seed in (7, 24, 25, 27, 35) for share in (0.6, 0.45, 0.35))]
)
def test_the_peak_stays_inside(seed, share, host, drawn_prices):
    check(step, seed, share, host, drawn_prices)


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize(("seed", "share"), [(3, 0.7), (3, 0.5), (4, 0.7), (8, 0.7)])
def test_the_peak_stays_inside_when_a_graph_is_walked_twice(seed, share, host, drawn_prices):
    check(twice, seed, share, host, drawn_prices)


# --- what is known of a re-run ---------------------------------------------------------------------------------------


def learnt(*seen):
    """Needs of one kind after a step with these phases: number, what was counted and live when it began, and its peak."""
    needs, kind = Needs(), Kind(None, (), 8)
    for phase, number, counted, live, peak in seen:
        needs.learn(Mark(phase=phase, kind=kind, number=number, held_bytes=counted, gradient_bytes=0), live, peak)
    return lambda phase, number: needs.of(phase, kind, number).bytes


FORWARD, BACKWARD = (Phase.FORWARD, 0, 0, 10, 110), (Phase.BACKWARD, 20, 50, 65, 90)


def test_a_rerun_beside_copies_says_nothing_of_one_that_refills_all():
    """What the host has is not refilled: such a re-run needs less."""
    need = learnt(FORWARD, BACKWARD, (Phase.RERUN, BESIDE_COPIES, 0, 15, 75))
    assert need(Phase.RERUN, BESIDE_COPIES) == 75
    assert need(Phase.RERUN, WHOLE) == 110 + 5


def test_a_rerun_to_the_end_needs_what_the_forward_does():
    """One that stops after the last slot has been seen; the outputs come on top."""
    need = learnt(FORWARD, BACKWARD, (Phase.RERUN, WHOLE, 0, 15, 80))
    assert need(Phase.RERUN, WHOLE) == 80
    assert need(Phase.RERUN, TO_THE_END) == 110 + 5


def test_a_rerun_is_expected_where_most_lives_beside_it():
    """It was seen late in backward; earlier on, the gradient of a skip waits beside it."""
    need = learnt(FORWARD, BACKWARD, (Phase.BACKWARD, 8, 50, 90, 100), (Phase.RERUN, WHOLE, 0, 15, 80))
    assert need(Phase.RERUN, WHOLE) == 80 - 15 + 40


def test_a_rerun_of_fewer_slots_says_nothing():
    """In a second pass, or one of a part, some slots are there or gone: less is refilled."""
    need = learnt(FORWARD, BACKWARD, (Phase.RERUN, ODD, 0, 15, 20))
    assert need(Phase.RERUN, ODD) == need(Phase.RERUN, WHOLE) == 110 + 5

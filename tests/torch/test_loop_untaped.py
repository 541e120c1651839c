"""Steps whose tape nobody wants run again without gradients where that comes to the same bits: counted, and compared with plain loops."""

import operator
from collections import Counter
from typing import ClassVar

import pytest
import torch
from loops import bare, counting, gradients, runs, same, unrolled, unrolled_while
from torch import nn

import retape
from retape import odeint, scan, while_loop
from retape.core.schedules import Schedule, count
from retape.torch import loop, loop_untaped
from retape.torch.loop_plan import LoopPlan
from retape.torch.loop_state import State, mark_of
from retape.torch.ode import PLAIN, integrate

DTYPE = torch.float64
STEPS = 30


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def random(*shape, grad=False):
    return torch.randn(*shape, dtype=DTYPE, requires_grad=grad)


def promised(steps=STEPS, snapshots=3):
    return count(Schedule(family="revolve", steps=steps, snapshots=snapshots)).forward_steps


def tanh_step(weight):
    def step(h, x):
        h = torch.tanh(h * weight + x)
        return h, h

    return step


def compared(step, tensors, *, start=None, xs=None, **options):
    """Run a loop with gradients equal to the plain one's; returns the step with its counts."""
    start = random(3) if start is None else start
    xs = random(STEPS, 3) if xs is None else xs
    counted = counting(step)
    wanted = gradients(lambda: unrolled(step, start, xs), tensors)
    assert same(
        wanted, gradients(lambda: scan(counted, start, xs, **({"snapshots": 3, "block": 1} | options)), tensors)
    )
    return counted


def test_untaped_steps_run_without_gradients_and_none_runs_more():
    weight, start, xs = random(3, grad=True), random(3, grad=True), random(STEPS, 3).requires_grad_()
    counted = compared(tanh_step(weight), [weight, start, xs], start=start, xs=xs)
    assert runs(counted) == promised()
    assert bare(counted) == promised() - STEPS - (STEPS - 1)  # all but the first run, and the tapes after the held one


@pytest.mark.parametrize("block", [2, 4, 7])
def test_blocks(block):
    weight = random(3, grad=True)
    counted = compared(tanh_step(weight), [weight], snapshots=2, block=block)
    assert bare(counted) > 0
    assert bare(counted) % block == 0


def test_the_default_tapes_every_step_again():
    weight = random(3, grad=True)
    assert bare(compared(tanh_step(weight), [weight], snapshots=None, block=None)) == 0


@pytest.mark.parametrize(("steps", "snapshots"), [(40, 2), (200, 5)])
def test_while_loop(steps, snapshots):
    weight = random(3, grad=True)

    def step(carry):
        return torch.sin(carry[0] * weight), carry[1] + 1

    def cond(carry):
        return carry[1] < steps

    counted, start = counting(step), (random(3), 0)
    wanted = gradients(lambda: unrolled_while(cond, step, start)[0][0], [weight])
    assert same(wanted, gradients(lambda: while_loop(cond, counted, start, snapshots=snapshots)[0][0], [weight]))
    assert runs(counted) == count(Schedule(family="online", steps=steps, snapshots=snapshots)).forward_steps
    assert bare(counted) > steps / 2


@pytest.fixture(params=[(2, 1), (5, 1), (3, 4)], ids=str)
def mixed(request, monkeypatch):
    """A plan whose slots hold states or tapes, by which every loop is run."""
    snapshots, block = request.param
    plan = LoopPlan(steps=60, snapshots=snapshots, block=block, mixed=True)
    monkeypatch.setattr(loop, "_plan", lambda *arguments, **keywords: plan)
    return plan


def test_slots_that_hold_tapes(mixed):
    weight = random(3, grad=True)
    counted = compared(tanh_step(weight), [weight], xs=random(60, 3))
    assert runs(counted) == mixed.forward_steps
    assert bare(counted) > 0


@pytest.mark.parametrize("begin", [0, 5, 11])
def test_leaves_that_need_gradients_from_a_step_on(begin):
    weight = random(3, grad=True)

    def step(carry, index):
        h, extra = carry
        extra = extra * weight if index == begin else extra + 1
        return (torch.tanh(h + extra / 50), extra), h + extra

    counted = compared(step, [weight], start=(random(3), random(3)), xs=torch.arange(STEPS))
    assert bare(counted) > STEPS


@pytest.mark.parametrize("steps", [30, 90])
def test_leaves_that_need_gradients_every_other_step(steps):
    weight = random(3, grad=True)

    def step(carry, index):
        h, extra = carry
        extra = (h * weight) if index % 2 else h.detach() * 0.5
        return (torch.tanh(h * weight + extra), extra), h + extra

    counted = compared(step, [weight], start=(random(3), random(3)), xs=torch.arange(steps))
    assert (bare(counted) > 0) == (steps < loop_untaped._MOST_KINDS)  # not all of it is remembered


def test_hidden_state_is_run_again_with_gradients():
    layer, norm = nn.Linear(3, 3, dtype=DTYPE), nn.BatchNorm1d(3, dtype=DTYPE)

    def step(h, x):
        h = torch.tanh(norm(layer(h) + x))
        return h, h

    found = compared(step, list(layer.parameters()), start=random(4, 3), xs=random(STEPS, 4, 3))
    assert bare(found) == 0


def test_dropout_draws_the_same():
    layer, drop = nn.Linear(3, 3, dtype=DTYPE), nn.Dropout(0.5)

    def step(h, x):
        h = torch.tanh(drop(layer(h)) + x)
        return h, h

    counted = compared(step, list(layer.parameters()), start=random(4, 3), xs=random(STEPS, 4, 3))
    assert runs(counted) == promised()
    assert bare(counted) > STEPS


def test_autocast_around_the_loop_and_inside_the_step():
    layer = nn.Linear(4, 4)
    xs, start = torch.randn(STEPS, 2, 4), torch.randn(2, 4)

    def step(h, x):
        h = torch.tanh(layer(h) + x).float()
        return h, h

    def own(h, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return step(h, x)

    def around(loop):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            return loop()

    counted = counting(step)
    wanted = gradients(lambda: around(lambda: unrolled(step, start, xs)), list(layer.parameters()))
    found = gradients(lambda: around(lambda: scan(counted, start, xs, snapshots=3, block=1)), list(layer.parameters()))
    assert same(wanted, found)
    assert bare(counted) > STEPS
    assert bare(compared(own, list(layer.parameters()), start=start, xs=xs)) > STEPS


@pytest.mark.parametrize("index", range(1, STEPS, 4))
def test_a_weight_that_is_cast_without_gradients_is_not_taken_from_the_cache(index):
    first, once = nn.Linear(4, 4), nn.Linear(4, 4)
    xs, start, tensors = torch.arange(STEPS), torch.randn(2, 4), [*once.parameters(), *first.parameters()]

    def step(h, x):
        with torch.autocast("cpu", enabled=bool(x == index), dtype=torch.bfloat16, cache_enabled=True):
            h = torch.tanh(once(h) if x == index else first(h)).float()
        return h, h

    def around(loop):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            return loop()

    wanted = gradients(lambda: around(lambda: unrolled(step, start, xs)), tensors)
    assert same(wanted, gradients(lambda: around(lambda: scan(step, start, xs, snapshots=3, block=1)), tensors))


@pytest.mark.parametrize("period", [1, 2, 7])
def test_states_that_have_no_checksum(period):
    """The carry is a view that conjugates on the fly, every few steps."""
    weight = torch.randn(3, dtype=torch.complex128, requires_grad=True)

    def step(h, index):
        h = torch.tanh(h * weight)
        return (h.conj() if index % period == 0 else h), h.real

    compared(step, [weight], start=torch.randn(3, dtype=torch.complex128), xs=torch.arange(STEPS))


def test_a_tape_that_no_other_was_seen_to_lead_to():
    untaped = loop_untaped.Untaped(None, State.of(random(3)), (), allowed=True)
    untaped.taping(4, State.of(random(3)))  # all steps ran with gradients so far
    untaped.finish()
    untaped.used = True
    untaped.taping(0, State.of(random(3)))
    untaped.finish()
    untaped.taping(5, State.of(random(3)))
    with pytest.raises(loop_untaped.Differed):
        untaped.finish()
    with pytest.raises(loop_untaped.Differed):  # what cannot be compared
        untaped.taping(6, State.of(torch.randn(3, dtype=torch.complex64).conj()))


def test_hooks_of_modules():
    layer, start = nn.Linear(3, 3, dtype=DTYPE), random(2, 3, grad=True)
    layer.register_forward_hook(lambda module, inputs, output: output * 1.25)
    layer.register_full_backward_hook(lambda module, wanted, given: (wanted[0] * 0.5,))

    def step(h, x):
        h = torch.tanh(layer(h) + x)
        return h, h

    assert bare(compared(step, [start, *layer.parameters()], start=start, xs=random(STEPS, 2, 3))) > STEPS


def test_decisions_that_are_kept():
    weight = random(3, grad=True)

    def step(h, x):
        factor = retape.keep(float(torch.rand(())))
        kept = retape.keep(h * 2)
        h = torch.tanh(h * weight * (1 + factor) + x + 0.1 * kept.detach())
        return h, h

    assert bare(compared(step, [weight])) > STEPS


def test_regions_and_loops_inside_a_step():
    layer = nn.Linear(3, 3, dtype=DTYPE)

    def region(h, x):
        h = retape.checkpoint(lambda a: torch.tanh(layer(a)), h + x)
        h = torch.utils.checkpoint.checkpoint(torch.sin, h, use_reentrant=False)
        return h, h

    counted = compared(region, list(layer.parameters()), start=random(2, 3), xs=random(STEPS, 2, 3))
    assert bare(counted) > STEPS
    weight, inner = random(3, grad=True), counting(tanh_step(random(3)))

    def nested(h, x):
        h, _ = scan(inner, h * weight, x, snapshots=1, block=1)
        return h, h

    counted = compared(nested, [weight], xs=random(STEPS, 4, 3))
    assert runs(counted) == promised()
    assert bare(inner) >= bare(counted) * 4 > 4 * STEPS / 2  # a loop without gradients runs each step once


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(h)
        return h.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()


def test_a_function_of_its_own_and_gradients_switched_on_inside():
    weight = random(3, grad=True)

    def step(h, x):
        with torch.enable_grad():
            inner = h.detach().requires_grad_()
            (slope,) = torch.autograd.grad((inner**3).sum(), inner)
            kept = Sine.apply(h * weight)
        return kept + x - 0.1 * slope * 0.01, h

    assert bare(compared(step, [weight])) > STEPS


class Field(nn.Module):
    COUNTS: ClassVar[Counter] = Counter()

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3, dtype=DTYPE)

    def forward(self, t, y):
        self.COUNTS[torch.is_grad_enabled()] += 1
        return torch.sin(self.layer(y)) * t


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at the carry's
@pytest.mark.parametrize("where", ["step", "closure", "module"])
def test_compiled_code_is_not_compiled_again(where):
    weight, layer, graphs = random(3, grad=True), Field(), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    step, tensors = tanh_step(weight), [weight]
    whole = torch.compile(step, backend=backend)
    if where == "closure":
        inner = whole
        whole = lambda h, x: inner(h, x + 0)  # noqa: E731
    elif where == "module":
        layer.compile(backend=backend)
        whole, tensors = (lambda h, x: (torch.tanh(layer(1.0, h) + x),) * 2), list(layer.parameters())
    start, xs = random(3), random(STEPS, 3)
    wanted = gradients(lambda: unrolled(whole, start, xs), tensors)
    assert same(wanted, gradients(lambda: scan(whole, start, xs, snapshots=30, block=1), tensors))
    before = len(graphs)
    assert same(wanted, gradients(lambda: scan(whole, start, xs, snapshots=3, block=1), tensors))
    assert before == len(graphs) > 0


def test_a_loop_that_can_be_resumed_keeps_gradients_on(tmp_path):
    weight = random(3, grad=True)
    assert bare(compared(tanh_step(weight), [weight], resume=tmp_path / "run")) == 0


def test_ranks_do_not_decide_each_for_itself(monkeypatch):
    monkeypatch.setattr(loop, "is_distributed", lambda: True)
    weight = random(3, grad=True)
    assert bare(compared(tanh_step(weight), [weight])) == 0


def test_reductions():
    weight, start, xs = random(3, grad=True), random(3), random(STEPS, 3)
    counted = counting(tanh_step(weight))
    looped = gradients(lambda: scan(counted, start, xs, snapshots=3, block=1, reduce=operator.add), [weight])

    def plain():
        h, total = start, None
        for x in xs:
            h, y = tanh_step(weight)(h, x)
            total = y if total is None else total + y
        return h, total

    assert same(gradients(plain, [weight]), looped)
    assert bare(counted) > STEPS


@pytest.mark.parametrize("method", ["dopri5", "rk4"])
def test_odeint(method):
    f, y0, t = Field(), random(3, grad=True), torch.linspace(0, 6, 60, dtype=DTYPE).requires_grad_()
    tensors = [y0, t, *f.parameters()]
    options = {"method": method, "rtol": 1e-9, "atol": 1e-11}
    wanted = gradients(lambda: integrate(f, y0, t, PLAIN, **options)[0], tensors)
    Field.COUNTS.clear()
    assert same(wanted, gradients(lambda: odeint(f, y0, t, snapshots=3, options={"block": 1}, **options), tensors))
    assert Field.COUNTS[False] > 100


# --- checksums of states -----------------------------------------------------------------------------------------


def test_marks():
    base = torch.randn(6, 4)
    assert mark_of([base.t()]) == mark_of([base.t().contiguous()]) != mark_of([base])
    assert mark_of([base[2:]]) == mark_of([base[2:].clone()]) != mark_of([base[:4]])
    assert mark_of([base, 3, None]) == mark_of([base])
    assert mark_of([torch.empty(0), base]) == mark_of([base])
    for dtype in (torch.bfloat16, torch.bool, torch.complex64, torch.int8):
        tensor = base.to(dtype)
        other = tensor.clone()
        other[5, 3] = 1 if dtype is not torch.bool else ~other[5, 3]
        assert mark_of([tensor]) == mark_of([tensor.clone()]) != mark_of([other])
    assert mark_of([nn.Parameter(base)]) == mark_of([base.clone().requires_grad_()]) == mark_of([base])
    assert mark_of([base.to_sparse()]) is None
    assert mark_of([torch.randn(2, dtype=torch.complex64).conj()]) is None
    assert mark_of([torch.zeros(2)]) != mark_of([-torch.zeros(2)])

"""Planned select: every subset of held slots gives the gradients of plain autograd, and ops are really skipped."""

from itertools import combinations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from retape.torch.capture.call import capture_call
from retape.torch.engine.checkpoint import run_region
from retape.torch.engine.policy import Check, Policy, Proof, ProofState
from retape.torch.engine.recipe_mode import Step
from retape.torch.engine.region import Region
from retape.torch.engine.select import plan_recipe
from support.comparing import seed


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan():
    """An op that is skipped leaves memory that nobody filled: make sure that reading it shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Ops(TorchDispatchMode):
    """Counts the ops that are really run below the engine's own modes."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def traced_region(function, *inputs):
    seed()
    region = Region(capture_call(function, inputs, {}))
    region.run(function, inputs, {})
    return region.trace()


def selected_gradients(function, sources, policy=None, check=Check.METADATA):
    """Every gradient and the end of the random stream, plainly or as a region."""
    seed()
    inputs = [source * 1 for source in sources if not isinstance(source, nn.Parameter)]
    for source in sources:
        source.grad = None
    out = function(*inputs) if policy is None else run_region(function, *inputs, policy=policy, check=check)
    torch.rand(2)
    (out * out.detach().cos()).sum().backward()
    return [source.grad for source in sources] + [torch.get_rng_state()]


def equal(one, other):
    return all((a is None and b is None) or torch.equal(a, b) for a, b in zip(one, other, strict=True))


def subsets(count):
    return [frozenset(held) for size in range(count + 1) for held in combinations(range(count), size)]


# --- small regions, all subsets ----------------------------------------------------------------------------------

W = nn.Parameter(torch.linspace(-1, 1, 64).view(8, 8))


def mlp(x):
    return x + F.relu(F.gelu(x @ W) @ W.t())


def with_dropout(x):
    h = F.dropout(F.gelu(x @ W), 0.3)
    return torch.relu(F.dropout(h @ W, 0.3)) + torch.rand(8)


def attention(x):
    q, k, v = (x @ W.repeat(1, 3)).chunk(3, -1)
    return F.scaled_dot_product_attention(q[None], k[None], v[None])[0].exp()


def in_place(x):
    h = x @ W
    h.add_(1).relu_()
    t = h * 2
    t[:, 1:].mul_(h[:, :-1])
    return t.sigmoid_()


def normed(x):
    return F.layer_norm(x @ W, (8,)).softmax(-1).cumsum(0) * x


def scaled_by_item(x):
    h = (x @ W).exp()
    return h.sin() * float(h.detach().mean()) + h.detach().sum().item()


def cast(x):
    return (x.double().exp().sin().to(torch.bfloat16).tanh().float() @ W).logsumexp(0) * x


def where(x):
    return torch.where(x > 0, x.exp(), (x @ W).tanh()).gather(1, x.detach().argsort(1)).cumprod(1)


REGIONS = [mlp, with_dropout, attention, in_place, normed, scaled_by_item, cast, where]


@pytest.mark.parametrize("function", REGIONS, ids=lambda f: f.__name__)
def test_all_subsets_of_held_slots_equal_plain(function):
    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    plain = selected_gradients(function, [x, W])
    trace = traced_region(function, x * 1)
    assert not trace.opaque
    assert len(trace.slots) <= 9, "all subsets would take too long"
    for held in subsets(len(trace.slots)):
        policy = Policy(held=held, proof=Proof(ProofState.TRIAL), recipe=plan_recipe(trace, held))
        assert equal(selected_gradients(function, [x, W], policy), plain), sorted(held)


def test_all_subsets_with_every_value_checked():
    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    plain = selected_gradients(with_dropout, [x, W])
    trace = traced_region(with_dropout, x * 1)
    for held in subsets(len(trace.slots)):
        policy = Policy(held=held, proof=Proof(ProofState.TRIAL), recipe=plan_recipe(trace, held))
        assert equal(selected_gradients(with_dropout, [x, W], policy, Check.VALUES), plain), sorted(held)


def complex_view(x):
    z = torch.view_as_complex((x * 2).view(4, 4, 2))
    return torch.view_as_real(z * z.exp()).view(4, 8)


def test_a_slot_that_is_a_view_of_another_dtype():
    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    plain = selected_gradients(complex_view, [x])
    trace = traced_region(complex_view, x * 1)
    for held in subsets(len(trace.slots)):
        policy = Policy(held=held, proof=Proof(ProofState.TRIAL), recipe=plan_recipe(trace, held))
        assert equal(selected_gradients(complex_view, [x], policy), plain), sorted(held)


# --- what is run ---------------------------------------------------------------------------------------------------


def rerun_ops(function, x, policy):
    """The ops that backward runs for the region's re-run: those of the function, without the backward's own."""
    seen = []

    class Rerun(Ops):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    out = run_region(function, x, policy=policy)
    with Rerun():
        out.sum().backward()
    return seen


def big_first(x):
    return ((x @ W).exp() @ W).sin().cos()


def test_a_held_matmul_is_not_run_again():
    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    trace = traced_region(big_first, x * 1)
    names = [op.op.overloadpacket.__name__ for op in trace.ops]
    second = [i for i, name in enumerate(names) if name == "mm"][1]
    held = frozenset(i for i, storage in enumerate(trace.slots) if storage in trace.ops[second].makes)
    assert held, "sin saves the result of the second matmul"
    recipe = plan_recipe(trace, held)
    assert recipe.steps[second] is Step.ANSWER
    full = rerun_ops(big_first, x * 1, Policy())
    less = rerun_ops(big_first, x * 1, Policy(held=held, proof=Proof(ProofState.TRIAL), recipe=recipe))
    assert full.count("mm") - less.count("mm") == 1


def test_what_only_feeds_held_slots_is_skipped():
    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    trace = traced_region(big_first, x * 1)
    last = [i for i, op in enumerate(trace.ops) if "sin" in str(op.op)][-1]
    missing = {i for i, storage in enumerate(trace.slots) if storage in trace.ops[last].makes}
    held = frozenset(range(len(trace.slots))) - missing
    recipe = plan_recipe(trace, held)
    ran = [op.op.overloadpacket.__name__ for op, step in zip(trace.ops, recipe.steps, strict=True) if step is Step.RUN]
    assert [name for name in ran if name not in ("t", "view", "transpose")] == ["sin", "cos"][: len(ran)]
    less = rerun_ops(big_first, x * 1, Policy(held=held, proof=Proof(ProofState.TRIAL), recipe=recipe))
    plain = rerun_ops(big_first, x * 1, Policy(hold_all=True))
    assert less.count("mm") == plain.count("mm")
    assert less.count("exp") == plain.count("exp") == 0


def test_nothing_held_needs_no_recipe():
    x = torch.ones(4, 8, requires_grad=True)
    assert plan_recipe(traced_region(mlp, x), frozenset()) is None


def test_a_recipe_has_a_step_for_each_op():
    x = torch.ones(4, 8, requires_grad=True)
    trace = traced_region(mlp, x)
    for held in subsets(len(trace.slots))[1:]:
        recipe = plan_recipe(trace, held)
        assert len(recipe.steps) == len(recipe.slots) == len(trace.ops)


# --- where a recipe must not be followed -----------------------------------------------------------------------------


def test_a_write_that_dispatch_cannot_see_makes_a_region_opaque():
    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = torch.empty_like(x)
            y.numpy()[...] = x.detach().numpy() * 2
            ctx.save_for_backward(y)
            return y.sin()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0]

    def function(x):
        return Hidden.apply(x.exp()).cos()

    x = torch.linspace(-1, 1, 8).requires_grad_()
    trace = traced_region(function, x * 1)
    assert trace.opaque
    plain = selected_gradients(function, [x])
    for held in subsets(len(trace.slots)):
        assert plan_recipe(trace, held) is None
        assert equal(selected_gradients(function, [x], Policy(held=held)), plain)


@pytest.mark.parametrize("read", ["item", "tolist", "numpy", "array"])
def test_a_value_that_python_reads_is_a_true_one(read):
    """Held slots let a recipe skip ops; one whose values Python reads must run, even if tensors use it too."""
    readers = {
        "item": lambda t: t.item(),
        "tolist": lambda t: t.tolist(),
        "numpy": lambda t: float(t.numpy()),
        "array": lambda t: float(np.asarray(t)),
    }

    def function(x):
        total = (x.detach() * 3).sum()
        scale = readers[read](total)
        return ((x.sin() + total).exp() * scale * 0.1).tanh()

    x = torch.linspace(-1, 2, 8).requires_grad_()
    plain = selected_gradients(function, [x])
    trace = traced_region(function, x * 1)
    for held in subsets(len(trace.slots)):
        policy = Policy(held=held, proof=Proof(ProofState.TRIAL), recipe=plan_recipe(trace, held), reuse_inputs=False)
        assert equal(selected_gradients(function, [x], policy), plain), sorted(held)


def test_another_branch_than_the_traced_one_falls_back_to_a_full_rerun():
    def function(x):
        h = x @ W
        return h.exp().sin() if float(h.detach().sum()) > 0 else h.tanh().cos().sigmoid()

    ones = torch.ones(4, 8, requires_grad=True)
    trace = traced_region(function, ones * 1)
    for start in (ones, (ones.detach() * -1).requires_grad_(), ones):
        plain = selected_gradients(function, [start, W])
        for held in subsets(len(trace.slots)):
            policy = Policy(held=held, proof=Proof(ProofState.TRIAL), recipe=plan_recipe(trace, held))
            assert equal(selected_gradients(function, [start, W], policy), plain), sorted(held)


def test_a_diverged_region_does_not_try_its_recipe_again():
    def function(x):
        return x.exp().sin().cos() if flag[0] else x.tanh().sigmoid().cos()

    flag = [True]
    x = torch.linspace(-1, 1, 8).requires_grad_()
    trace = traced_region(function, x * 1)
    flag[0] = False
    policy = Policy(held=frozenset({0}), proof=Proof(ProofState.TRIAL), recipe=plan_recipe(trace, frozenset({0})))
    region = Region(capture_call(function, (x,), {}), policy=policy)
    out = region.run(function, (x,), {})
    out.sum().backward(retain_graph=True)
    assert region.reruns == 2
    out.sum().backward()
    assert region.reruns == 3


# --- random ops ------------------------------------------------------------------------------------------------------


def test_streams_of_skipped_and_answered_random_ops():
    generator = torch.Generator()

    def function(x):
        h = x * torch.rand(8, generator=generator)
        h = F.dropout(h.exp(), 0.5)
        h = h * torch.rand(8)
        h = F.dropout(h.sin(), 0.5) * torch.randn(8, generator=generator)
        return h.tanh()

    def run(policy):
        generator.manual_seed(1)
        return [*selected_gradients(function, [x], policy), generator.get_state()]

    x = torch.linspace(-1, 1, 8).requires_grad_()
    plain = run(None)
    generator.manual_seed(1)
    trace = traced_region(function, x * 1)
    for held in subsets(len(trace.slots)):
        assert equal(run(Policy(held=held, proof=Proof(ProofState.TRIAL), recipe=plan_recipe(trace, held))), plain), (
            sorted(held)
        )


def test_buffers_of_a_region_under_a_recipe():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(8)
            self.register_buffer("peak", torch.ones(()))

        def forward(self, x):
            h = self.norm(x).exp()
            with torch.no_grad():
                self.peak.mul_(0.5).add_(h.amax())
            return (h / self.peak).sin().tanh()

    def run(policy):
        torch.manual_seed(0)
        block = Block()
        return [*selected_gradients(block, [x], policy), *block.buffers(), *(p.grad for p in block.parameters())]

    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    plain = run(None)
    trace = traced_region(Block(), x * 1)
    for held in subsets(len(trace.slots)):
        assert equal(run(Policy(held=held, proof=Proof(ProofState.TRIAL), recipe=plan_recipe(trace, held))), plain), (
            sorted(held)
        )


def test_a_recipe_around_nested_regions():
    def inner(x):
        return F.dropout((x @ W).exp(), 0.3).sin()

    def outer(x):
        return run_region(inner, x.tanh()).cos() * run_region(inner, x)

    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    plain = selected_gradients(lambda t: inner(t.tanh()).cos() * inner(t), [x, W])
    trace = traced_region(outer, x * 1)
    for held in subsets(len(trace.slots)):
        policy = Policy(held=held, proof=Proof(ProofState.TRIAL), recipe=plan_recipe(trace, held))
        assert equal(selected_gradients(outer, [x, W], policy), plain), sorted(held)

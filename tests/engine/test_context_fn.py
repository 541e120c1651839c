"""PyTorch's selective checkpoint through `context_fn`: honoured, with the right random streams."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import retape
from retape.core.errors import RecomputeMismatch, StateChanged
from support.comparing import Notes, assert_equal, seed

ATEN = torch.ops.aten
W = nn.Parameter(torch.linspace(-1, 1, 64).view(8, 8))
RECOMPUTE, SAVE = CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_SAVE


def contexts(policy, **options):
    return partial(create_selective_checkpoint_contexts, policy, **options)


def must_save(*ops):
    return lambda context, op, *args, **kwargs: SAVE if op in ops else RECOMPUTE


def context_gradients(function, checkpoint, **options):
    seed()
    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    W.grad = None
    out = function(x) if checkpoint is None else checkpoint(function, x, use_reentrant=False, **options)
    torch.rand(2)
    (out * out.detach().cos()).sum().backward()
    return [x.grad, W.grad, torch.get_rng_state()]


def gelu_block(x):
    return torch.relu(F.gelu(x @ W) @ W.t()).exp()


POLICIES = {
    "must save": must_save(ATEN.mm.default),
    "bool": lambda context, op, *args, **kwargs: op is ATEN.mm.default,
    "list of ops": [ATEN.mm.default, ATEN.exp.default],
    "prefer save": lambda context, op, *args, **kwargs: (
        CheckpointPolicy.PREFER_SAVE if op is ATEN.gelu.default else RECOMPUTE
    ),
    "nothing": lambda context, op, *args, **kwargs: CheckpointPolicy.MUST_RECOMPUTE,
    "everything": lambda context, op, *args, **kwargs: SAVE,
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_every_kind_of_policy_gives_the_gradients_of_plain(policy):
    got = context_gradients(gelu_block, retape.checkpoint, context_fn=contexts(policy))
    assert_equal(got, context_gradients(gelu_block, None))


class Ops(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def backward_ops(policy):
    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    out = retape.checkpoint(gelu_block, x, use_reentrant=False, context_fn=contexts(policy))
    with Ops() as ops:
        out.sum().backward()
    return ops.seen


def test_saved_matmuls_are_not_run_again():
    without = backward_ops(must_save()).count(ATEN.mm.default)
    saved = backward_ops(must_save(ATEN.mm.default)).count(ATEN.mm.default)
    assert without - saved == 2
    assert backward_ops(must_save(ATEN.gelu.default)).count(ATEN.gelu.default) == 0


# --- random ops --------------------------------------------------------------------------------------------------------


def two_dropouts(x):
    """The fused op that GPUs use; on the CPU F.dropout is made of several, the last of which writes in place."""
    return torch.native_dropout(torch.native_dropout(x @ W, 0.5, True)[0].exp(), 0.5, True)[0].sin()


def only_first_dropout():
    """Holds the first dropout alone; the second is recomputed."""
    calls = []

    def policy(context, op, *args, **kwargs):
        if op is not ATEN.native_dropout.default:
            return RECOMPUTE
        if not context.is_recompute:
            calls.append(op)
            return SAVE if len(calls) == 1 else RECOMPUTE
        return RECOMPUTE

    return policy


def held_draw_then_recomputed_draw(x):
    return ((x * torch.rand_like(x)).exp() * torch.randn_like(x)).tanh()


def test_a_held_draw_does_not_shift_a_recomputed_one():
    """Torch's own is wrong here: the held `rand` is answered without a draw, so the recomputed `randn` draws its numbers."""
    policy = must_save(ATEN.rand_like.default)
    plain = context_gradients(held_draw_then_recomputed_draw, None)
    theirs = context_gradients(held_draw_then_recomputed_draw, torch_checkpoint, context_fn=contexts(policy))
    ours = context_gradients(held_draw_then_recomputed_draw, retape.checkpoint, context_fn=contexts(policy))
    assert not torch.equal(theirs[0], plain[0]), "torch is right now: this test has lost its point"
    assert float((theirs[0] - plain[0]).norm() / plain[0].norm()) > 0.5
    assert_equal(ours, plain)


def test_a_held_dropout_before_a_recomputed_one():
    """The mask that is drawn again is the second one; PyTorch 2.13 draws the first again and is wrong by more than its size."""
    plain = context_gradients(two_dropouts, None)
    theirs = context_gradients(two_dropouts, torch_checkpoint, context_fn=contexts(only_first_dropout()))
    ours = context_gradients(two_dropouts, retape.checkpoint, context_fn=contexts(only_first_dropout()))
    if torch.__version__.startswith("2.13"):
        assert not torch.equal(theirs[0], plain[0]), "torch is right now: this test has lost its point"
    assert_equal(ours, plain)


def test_a_dropout_of_several_ops():
    def function(x):
        return F.dropout(F.dropout(x @ W, 0.5).exp(), 0.5).sin()

    policy = must_save(ATEN.div_.Scalar, ATEN.mul.Tensor)
    assert_equal(
        context_gradients(function, retape.checkpoint, context_fn=contexts(policy)), context_gradients(function, None)
    )


def test_explicit_generators_are_put_where_a_held_draw_left_them():
    generator = torch.Generator()

    def function(x):
        noise = torch.rand(8, generator=generator)
        return ((x * noise).exp() * torch.randn(8, generator=generator)).tanh()

    def run(checkpoint, **options):
        generator.manual_seed(3)
        return [*context_gradients(function, checkpoint, **options), generator.get_state()]

    policy = must_save(ATEN.rand.generator)
    assert_equal(run(retape.checkpoint, context_fn=contexts(policy)), run(None))


# --- in-place ops, values read by Python, buffers -----------------------------------------------------------------------


def with_in_place(x):
    h = x @ W
    h.add_(1)
    h.mul_(x)
    return h.exp().sin()


@pytest.mark.parametrize("op", [ATEN.mul_.Tensor, ATEN.exp.default])
def test_in_place_ops_held(op):
    got = context_gradients(with_in_place, retape.checkpoint, context_fn=contexts(must_save(op)))
    assert_equal(got, context_gradients(with_in_place, None))


def test_a_held_result_that_is_changed_later_is_refused():
    with pytest.raises(StateChanged, match="has been mutated"):
        context_gradients(with_in_place, retape.checkpoint, context_fn=contexts(must_save(ATEN.mm.default)))


def test_a_held_view_of_memory_that_is_written_later():
    """Torch's own is wrong here: the view it held has been changed, and the re-run changes it once more."""

    def function(x):
        h = (x @ W).view(-1)
        h.mul_(2).sigmoid_()
        return h * h.detach().sum()

    policy = must_save(ATEN.view.default)
    plain = context_gradients(function, None)
    theirs = context_gradients(function, torch_checkpoint, context_fn=contexts(policy))
    assert not torch.equal(theirs[0], plain[0]), "torch is right now: this test has lost its point"
    assert_equal(context_gradients(function, retape.checkpoint, context_fn=contexts(policy)), plain)


def test_a_held_factory_result_that_is_written_later():
    def function(x):
        out, positive = torch.zeros_like(x), x.detach() > 0
        out[positive] = x[positive].sin()
        return out.view(8, 4).tanh_()

    policy = must_save(ATEN.zeros_like.default, ATEN.tanh_.default)
    plain = context_gradients(function, None)
    try:
        ours = context_gradients(function, retape.checkpoint, context_fn=contexts(policy))
    except StateChanged:
        return
    assert_equal(ours, plain)


class Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        torch.sigmoid(x, out=y)
        ctx.save_for_backward(x, y)
        return y.sin()

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        return gradient * y.cos() * y * (1 - y) + 0 * x


def test_a_held_out_op():
    def function(x):
        return Sigmoid.apply(x @ W).exp()

    policy = must_save(ATEN.sigmoid.out)
    assert_equal(
        context_gradients(function, retape.checkpoint, context_fn=contexts(policy)), context_gradients(function, None)
    )


def test_item_is_replayed():
    """The value decides the branch; in the re-run it is the recorded one, whatever the tensor says then."""
    box = [torch.tensor(2.0)]
    calls = Notes()

    def function(x):
        calls(box[0].item())
        return (x @ W).exp() if calls.all[-1] > 1 else (x @ W).tanh().sin().cos()

    plain = context_gradients(function, None)
    seed()
    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    W.grad = None
    out = retape.checkpoint(function, x, use_reentrant=False, context_fn=contexts(must_save(ATEN.exp.default)))
    torch.rand(2)
    (out * out.detach().cos()).sum().backward()
    assert_equal([x.grad, W.grad, torch.get_rng_state()], plain)
    assert calls.all == [2.0, 2.0, 2.0]


def test_buffers_are_updated_once():
    def run(checkpoint, **options):
        norm = nn.BatchNorm1d(8)
        found = context_gradients(lambda x: norm(x @ W).exp(), checkpoint, **options)
        return [*found, *norm.buffers(), *[p.grad for p in norm.parameters()]]

    for op in (ATEN.mm.default, ATEN.native_batch_norm.default, ATEN._native_batch_norm_legit.default):
        assert_equal(run(retape.checkpoint, context_fn=contexts(must_save(op))), run(None))


@pytest.mark.parametrize("op", [ATEN.clone.default, ATEN.mm.default, ATEN.sin.default])
def test_a_region_nested_in_a_selective_one(op):
    def run(checkpoint, **options):
        norm = nn.BatchNorm1d(8)

        def inner(x):
            return norm(x).sin().clone()

        def outer(x):
            again = inner if checkpoint is None else partial(retape.checkpoint, inner, check="values")
            return (again((x @ W).clone()) @ W).exp()

        return [*context_gradients(outer, checkpoint, **options), *norm.buffers()]

    assert_equal(run(retape.checkpoint, context_fn=contexts(must_save(op))), run(None))


# --- errors ---------------------------------------------------------------------------------------------------------------


def test_a_second_backward_says_what_to_do():
    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    out = retape.checkpoint(gelu_block, x, use_reentrant=False, context_fn=contexts(must_save(ATEN.mm.default)))
    out.sum().backward(retain_graph=True)
    with pytest.raises(RecomputeMismatch, match="backward an extra time"):
        out.sum().backward()


def test_other_ops_in_the_rerun_are_named():
    calls = Notes()

    def function(x):
        return (x.sin() if calls() == 1 else x.cos()).exp().tanh()

    x = torch.linspace(-1, 1, 8).requires_grad_()
    out = retape.checkpoint(function, x, use_reentrant=False, context_fn=contexts(must_save(ATEN.mm.default)))
    with pytest.raises(RecomputeMismatch, match="cos"):
        out.sum().backward()

"""Regions on a GPU: random masks, autocast, statistics, side streams, held slots; each equal to plain autograd bit for bit."""

import torch
from torch import nn
from torch.nn import functional as F

import retape
from retape.torch.capture.call import capture_call
from retape.torch.engine.checkpoint import run_region
from retape.torch.engine.context import plain
from retape.torch.engine.policy import Policy, Proof, ProofState
from retape.torch.engine.region import Region
from retape.torch.engine.select import plan_recipe
from support.comparing import plainly


def step_on_gpu(model, x, call):
    """Gradients, buffers and the state of the GPU's generator after one step from the same start."""
    torch.manual_seed(3)
    torch.cuda.manual_seed(3)
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    call(model, leaf).float().square().sum().backward()
    return [
        leaf.grad,
        *[parameter.grad.clone() for parameter in model.parameters()],
        *[buffer.clone() for buffer in model.buffers()],
        torch.cuda.get_rng_state(),
    ]


def assert_same_on_gpu(make, shape, call, dtype=torch.float32):
    torch.manual_seed(0)
    one, other = make().cuda().to(dtype), make().cuda().to(dtype)
    other.load_state_dict(one.state_dict())
    x = torch.randn(shape, device="cuda", dtype=dtype)
    for _ in range(2):
        wanted, got = step_on_gpu(one, x, plainly), step_on_gpu(other, x, call)
        assert all(map(torch.equal, wanted, got))


def as_region(model, leaf):
    return retape.checkpoint(model, leaf, use_reentrant=False, check="values")


def test_masks_are_replayed():
    assert_same_on_gpu(
        lambda: nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3), nn.GELU(), nn.Linear(64, 64), nn.Dropout(0.1)),
        (32, 64),
        as_region,
    )


def test_statistics_are_updated_once():
    assert_same_on_gpu(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.2)),
        (4, 3, 16, 16),
        as_region,
    )


def test_attention_in_half_precision():
    assert_same_on_gpu(
        lambda: nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True),
        (4, 32, 64),
        as_region,
        dtype=torch.bfloat16,
    )


def test_autocast_outside_backward():
    def under_autocast(function):
        def call(model, leaf):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return function(model, leaf)

        return call

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).cuda()
    x = torch.randn(16, 64, device="cuda")
    twice = lambda model, leaf: as_region(model, as_region(model, leaf))  # noqa: E731 - the same weights in two regions
    wanted = step_on_gpu(model, x, under_autocast(lambda model, leaf: model(model(leaf))))
    assert all(map(torch.equal, wanted, step_on_gpu(model, x, under_autocast(twice))))


def test_a_side_stream():
    def on_a_stream(model, leaf):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            out = as_region(model, leaf)
        torch.cuda.current_stream().wait_stream(stream)
        return out

    assert_same_on_gpu(lambda: nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3), nn.GELU()), (32, 64), on_a_stream)


def test_planned_select_with_a_held_mask():
    torch.manual_seed(0)
    first, second = nn.Linear(32, 64).cuda(), nn.Linear(64, 32).cuda()

    def function(x):
        return F.dropout(second(F.dropout(F.gelu(first(x)), 0.3)), 0.2).relu()

    model = nn.ModuleList([first, second])
    x = torch.randn(16, 32, device="cuda")
    probe = x.clone().requires_grad_()
    region = Region(capture_call(function, (probe,), {}))
    kept = region.run(function, (probe,), {})
    trace = region.trace()
    wanted = step_on_gpu(model, x, lambda model, leaf: function(leaf))
    for slot in range(len(trace.slots)):
        held = frozenset({slot})
        policy = Policy(held=held, proof=Proof(ProofState.TRIAL), recipe=plan_recipe(trace, held))
        got = step_on_gpu(model, x, lambda model, leaf, policy=policy: run_region(function, leaf, policy=policy))
        assert all(map(torch.equal, wanted, got)), slot
    assert kept is not None


def test_a_region_frees_its_activations():
    blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(8)
    ).cuda()
    x = torch.randn(4096, 256, device="cuda", requires_grad=True)

    def peak(call):
        for _ in range(2):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            out = x
            for block in blocks:
                out = call(block, out)
            out.sum().backward()
            del out
        return torch.cuda.max_memory_allocated() - before

    with plain():
        store_all = peak(plainly)
    assert peak(lambda block, out: retape.checkpoint(block, out, use_reentrant=False)) < 0.5 * store_all

"""Tiles and the loss in chunks on a GPU: masks replayed, 16-bit sums in float32, peaks, and no wait for the device."""

import copy
import functools
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import retape
from retape.torch.slicing import linear_layers as products
from retape.torch.slicing.linear_cross_entropy import may_compile
from support.blocks import TiledMlpBlock
from support.comparing import plainly

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def in_a_loop(fn, rows, *, tiles):
    return torch.cat([fn(part) for part in rows.tensor_split(tiles)])


def gpu_mlp(dropout=0.0, width=64, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 256), nn.GELU(), nn.Dropout(dropout), nn.Linear(256, width)).cuda().to(dtype)


def tiled_step(call, model, x):
    torch.manual_seed(3)
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    out = call(model, leaf, tiles=4)
    out.float().square().sum().backward()
    return [out.detach(), leaf.grad, torch.cuda.get_rng_state()], [parameter.grad for parameter in model.parameters()]


def test_masks_are_replayed_slice_by_slice():
    model, x = gpu_mlp(0.3), torch.randn(130, 64, device="cuda")
    wanted, gradients = tiled_step(in_a_loop, model, x)
    for _ in range(2):
        found, ours = tiled_step(retape.tile, model, x)
        assert all(map(torch.equal, found, wanted))
        torch.testing.assert_close(ours, gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_16_bit_operands_are_summed_in_float32(dtype, fused, monkeypatch):
    if not fused:
        monkeypatch.setattr(products, "_adds_in_place", lambda dtype: False)
        monkeypatch.setattr(products, "_slabs", functools.partial(products._slabs, slab_bytes=4096))
    torch.manual_seed(0)
    left, right = torch.randn(96, 40, device="cuda").to(dtype), torch.randn(96, 24, device="cuda").to(dtype)
    total = torch.full((40, 24), 1000.0, device="cuda")
    products.add_product(total, left, right)
    torch.testing.assert_close(total - 1000.0, (left.double().T @ right.double()).float(), rtol=0, atol=5e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_err_no_more_than_plain(dtype):
    model, exact = gpu_mlp(dtype=dtype), gpu_mlp(dtype=torch.float64)
    exact.load_state_dict(model.state_dict())
    x, upstream = torch.randn(2, 1024, 64, device="cuda").to(dtype)

    def gradients(call, model, x, upstream):
        leaf = x.clone().requires_grad_()
        return [g.double() for g in torch.autograd.grad(call(model, leaf), [leaf, *model.parameters()], upstream)]

    truth = gradients(plainly, exact, x.double(), upstream.double())
    ours = gradients(functools.partial(retape.tile, tiles=8), model, x, upstream)
    others = gradients(plainly, model, x, upstream)
    for wanted, mine, other in zip(truth, ours, others, strict=True):
        assert float((mine - wanted).norm()) <= 1.1 * float((other - wanted).norm())


def test_autocast_outside_backward():
    model, x = gpu_mlp(), torch.randn(64, 64, device="cuda")

    def under_autocast(call):
        def run(model, leaf, tiles):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return call(model, leaf, tiles=tiles)

        return run

    wanted, gradients = tiled_step(under_autocast(in_a_loop), model, x)
    found, ours = tiled_step(under_autocast(retape.tile), model, x)
    assert all(map(torch.equal, found, wanted))
    torch.testing.assert_close(ours, gradients, rtol=2e-2, atol=2e-2)


def peak(run):
    for _ in range(2):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
    return torch.cuda.max_memory_allocated() - before


def test_the_peak_is_that_of_a_slice():
    model, x = gpu_mlp(width=16), torch.randn(65536, 16, device="cuda", requires_grad=True)
    whole = peak(lambda: torch.autograd.grad(model(x).sum(), [x, *model.parameters()]))
    tiled = peak(lambda: torch.autograd.grad(retape.tile(model, x, tiles=16).sum(), [x, *model.parameters()]))
    assert tiled < whole / 4


# --- the loss -------------------------------------------------------------------------------------------------------


def whole_loss(hidden, weight, labels, reduction="mean"):
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits if logits.dtype is torch.float64 else logits.float(), labels, reduction=reduction)


def head(dtype, rows=2048, features=128, classes=4000):
    torch.manual_seed(0)
    hidden = torch.randn(rows, features, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(classes, features, device="cuda") / 6).to(dtype).requires_grad_()
    labels = torch.randint(0, classes, (rows,), device="cuda")
    labels[::11] = -100
    return hidden, weight, labels


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_loss_errs_no_more_than_plain(dtype, reduction, compiled):
    hidden, weight, labels = head(dtype)

    def run(function, hidden, weight):
        loss = function(hidden, weight, labels, reduction=reduction)
        return [g.double() for g in torch.autograd.grad(loss.sum(), [hidden, weight])]

    truth = run(whole_loss, hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_())
    with may_compile(compiled):
        ours = run(functools.partial(retape.linear_cross_entropy, chunk_rows=256), hidden, weight)
    others = run(whole_loss, hidden, weight)
    for wanted, mine, other in zip(truth, ours, others, strict=True):
        assert float((mine - wanted).norm()) <= 1.1 * float((other - wanted).norm())


def test_the_logits_are_never_whole():
    rows, classes = 65536, 8000
    hidden, weight, labels = head(torch.bfloat16, rows=rows, classes=classes)
    run = lambda function: torch.autograd.grad(function(hidden, weight, labels), [hidden, weight])  # noqa: E731
    assert peak(lambda: run(retape.linear_cross_entropy)) < rows * classes * 2 < peak(lambda: run(whole_loss))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_nothing_waits_for_the_device(reduction):
    hidden, weight, labels = head(torch.bfloat16)
    model, x = gpu_mlp(0.1, dtype=torch.bfloat16), torch.randn(64, 64, device="cuda").bfloat16().requires_grad_()

    def run():
        loss = retape.linear_cross_entropy(
            hidden, weight, labels, reduction=reduction, label_smoothing=0.1, z_loss=1e-4
        )
        loss.sum().backward()
        retape.tile(model, x, tiles=4).sum().backward()

    run()  # the first call asks questions, whose answers it waits for
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.11 calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_fit_runs_the_mlp_of_a_block_in_tiles():
    """In a budget that one block by itself would pass; gradients as near to float64's as plain's are."""
    torch.manual_seed(0)
    model = nn.Sequential(*[TiledMlpBlock(512, 16) for _ in range(4)]).to("cuda", torch.bfloat16)
    batch = torch.randn(1, 16384, 512, device="cuda", dtype=torch.bfloat16)

    def step(model, batch):
        return model(batch).double().square().mean()

    def gradients(model, batch):
        return [g.double() for g in torch.autograd.grad(step(model, batch), list(model.parameters()))]

    others = gradients(model, batch)
    with pytest.raises(retape.errors.BudgetTooSmall) as caught:
        retape.fit(model, batch, budget=retape.Budget.activations("1MiB"), step=step, progress=False)
    budget = int(caught.value.floor_bytes * 0.7)
    fitted = retape.fit(model, batch, budget=budget, step=step, options=retape.ALL, progress=False)
    try:
        assert all(choice.tiles > 1 for choice in fitted.record.assignment.choices)
        assert fitted.measured.peak_bytes <= budget
        ours = gradients(model, batch)
    finally:
        fitted.remove()
    truth = gradients(copy.deepcopy(model).double(), batch.double())

    def error(found):
        return float(torch.stack([(a - b).norm() / b.norm() for a, b in zip(found, truth, strict=True)]).norm())

    assert error(ours) <= 1.1 * error(others)

"""Tiles: a row-wise function in slices gives the gradients of the same function in a loop over slices, and holds a slice at a time."""

import copy
import functools
import gc
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import retape
from retape.errors import InvalidInput, RegionError, StateChanged, UnsupportedTransform
from retape.torch.engine.context import plain
from retape.torch.measure.memory_meter import track_memory
from support.comparing import Notes, assert_equal, leaf, seed, streams
from support.ledger import Ledger

WIDTH = 6


def whole_numbers(*shape, requires_grad=True):
    """Doubles that are small whole numbers: sums of their products are exact in any order."""
    return torch.randint(-4, 5, shape).double().requires_grad_(requires_grad)


def mlp(dropout=0.0):
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, WIDTH)).double()


def in_a_loop(fn, *rows, tiles, dim=0):
    """The same slices in plain autograd."""
    parts = zip(*[row.tensor_split(min(tiles, row.shape[dim]), dim) for row in rows], strict=True)
    return torch.cat([fn(*part) for part in parts], dim)


def step(call, fn, rows, parameters, **options):
    """Output, gradients and random streams of one step from the same start."""
    seed(3)
    for tensor in (*rows, *parameters):
        tensor.grad = None
    out = call(fn, *rows, **options)
    (out.square().sum() + out.sum()).backward()
    return [out.detach().clone(), [row.grad for row in rows], [p.grad for p in parameters], streams()]


def close(got, wanted):
    """Random streams and outputs to the bit; gradients of weights are added in another order."""
    assert torch.equal(got[0], wanted[0])
    assert_equal(got[1], wanted[1])
    assert_equal(got[3], wanted[3])
    torch.testing.assert_close(got[2], wanted[2], rtol=1e-12, atol=1e-12)


# --- the same numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiles", [1, 2, 3, 7, 10, 99])
def test_gradients_are_those_of_the_whole(tiles):
    seed()
    x, w, b = whole_numbers(10, WIDTH), whole_numbers(WIDTH, 4), whole_numbers(4)
    fn = lambda r: (r @ w + b).relu()  # noqa: E731
    wanted = step(lambda fn, r: fn(r), fn, [x], [w, b])
    assert_equal(step(retape.tile, fn, [x], [w, b], tiles=tiles), wanted)


@pytest.mark.parametrize("tiles", [1, 3, 10])
@pytest.mark.parametrize("dim", [0, 1, -2])
def test_dropout_is_replayed_slice_by_slice(tiles, dim):
    seed()
    model, x = mlp(0.4), torch.randn(10, 10, WIDTH).double().requires_grad_()
    wanted = step(in_a_loop, model, [x], list(model.parameters()), tiles=tiles, dim=dim)
    for _ in range(2):
        close(step(retape.tile, model, [x], list(model.parameters()), tiles=tiles, dim=dim), wanted)


def test_gradients_of_weights_are_added_in_slice_order():
    seed()
    scale, x = torch.randn(WIDTH).double().requires_grad_(), torch.randn(9, WIDTH).double().requires_grad_()
    total = torch.zeros_like(scale)
    for part in x.detach().tensor_split(4):
        total += torch.autograd.grad((part * scale).sin().sum(), scale)[0]
    for _ in range(3):
        scale.grad = None
        retape.tile(lambda r: (r * scale).sin(), x, tiles=4).sum().backward()
        assert torch.equal(scale.grad, total)


def test_gradients_of_linear_layers_are_multiplied_onto_the_sum_in_slice_order():
    seed()
    model, x = mlp(), torch.randn(9, WIDTH).double().requires_grad_()
    sums = [torch.zeros_like(p) for p in model.parameters()]
    for part in x.detach().tensor_split(4):
        hidden = model[0](part)
        bent = F.gelu(hidden)
        upstream = torch.ones(len(part), WIDTH).double()
        (slope,) = torch.autograd.grad(bent, hidden, upstream @ model[3].weight)
        for total, left, right in ((sums[0], slope, part), (sums[2], upstream, bent.detach())):
            total.addmm_(left.T, right)
        sums[1] += slope.sum(0)
        sums[3] += upstream.sum(0)
    for _ in range(3):
        model.zero_grad()
        retape.tile(model, x, tiles=4).sum().backward()
        assert_equal([p.grad for p in model.parameters()], sums)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bit_weights_are_added_in_float32(dtype):
    w = torch.ones(1, 1, dtype=dtype, requires_grad=True)
    # 2048 + 1 + 1 + ...: each 1 is lost where the sum is 16-bit, and 16 of them are not lost together.
    x = torch.ones(17, 1, dtype=dtype)
    x[0] = 2048
    retape.tile(lambda r: r @ w, x, tiles=17).sum().backward()
    assert w.grad.dtype is dtype
    assert float(w.grad) == float(torch.tensor(2064.0, dtype=dtype)) > 2048


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("number", range(4))
def test_error_against_float64_is_no_larger_than_plain(dtype, number):
    torch.manual_seed(number)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).to(dtype)
    exact = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).double()
    exact.load_state_dict(model.state_dict())
    x, upstream = torch.randn(256, 32, dtype=dtype), torch.randn(256, 32, dtype=dtype)

    def gradients(call, model, x, upstream):
        x = x.clone().requires_grad_()
        found = torch.autograd.grad(call(model, x), [x, *model.parameters()], upstream)
        return [gradient.double() for gradient in found]

    wanted = gradients(lambda m, r: m(r), exact, x.double(), upstream.double())
    ours = gradients(lambda m, r: retape.tile(m, r, tiles=8), model, x, upstream)
    others = gradients(lambda m, r: m(r), model, x, upstream)
    for truth, mine, other in zip(wanted, ours, others, strict=True):
        assert float((mine - truth).norm()) <= 1.1 * float((other - truth).norm())


# --- what goes in and what comes out --------------------------------------------------------------------------------


def test_several_rows_and_values_that_are_none():
    seed()
    x, y, index = whole_numbers(7, 3), whole_numbers(7, 3), torch.arange(7)

    def fn(a, factor, b, positions, nothing):
        assert nothing is None
        return a * b * factor + positions.unsqueeze(1)

    wanted = step(lambda fn, a, b: fn(a, 2, b, index, None), fn, [x, y], [])
    got = step(lambda fn, a, b: retape.tile(fn, a, 2, b, index, None, tiles=3), fn, [x, y], [])
    assert_equal(got, wanted)


def test_one_tensor_given_twice_is_one_slice():
    seed()
    x = whole_numbers(6, 3)
    out = retape.tile(lambda q, k: q * k if q is k else q - k, x, x, tiles=2)
    out.sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())


def test_containers_come_back_with_whole_tensors():
    seed()
    x = whole_numbers(7, 3)

    def fn(r):
        return {"a": (r * 2, [r.argmax(1)]), "b": None, "c": r.detach(), "d": r}

    out = retape.tile(fn, x, tiles=3)
    wanted = fn(x)
    assert_equal({k: out[k] for k in "bc"}, {k: wanted[k] for k in "bc"})
    assert torch.equal(out["a"][1][0], wanted["a"][1][0])
    assert not out["a"][1][0].requires_grad
    assert not out["c"].requires_grad
    (out["a"][0] * 3 + out["d"]).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 7.0))


def test_an_output_that_nobody_uses():
    x = whole_numbers(5, 2)
    w = whole_numbers(2)
    used, _ = retape.tile(lambda r: (r * 2, r * w), x, tiles=2)
    used.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))
    assert w.grad is None or not w.grad.any()


def test_no_rows():
    w = whole_numbers(3)
    out = retape.tile(lambda r: r * w, torch.empty(0, 3, dtype=torch.double), tiles=4)
    assert out.shape == (0, 3)
    out.sum().backward()
    assert torch.equal(w.grad, torch.zeros(3).double())


ONE_NUMBER = {
    "a loss": lambda head, x, y: F.cross_entropy(head(x), y, reduction="none"),
    "a norm": lambda head, x, y: head(x).norm(dim=-1),
    "a product with a vector": lambda head, x, y: x @ head.weight[0] + head.bias[0],
    "with others": lambda head, x, y: (head(x), head(x).sum(-1)),
}


@pytest.mark.parametrize("count", [0, 1, 24])
@pytest.mark.parametrize("name", ONE_NUMBER)
def test_one_number_for_each_row(name, count):
    seed()
    head = nn.Linear(WIDTH, 5).double()
    x, y = torch.randn(count, WIDTH).double().requires_grad_(), torch.randint(0, 5, (count,))
    fn = functools.partial(ONE_NUMBER[name], head)

    def joined(call, *rows, **options):
        found = call(*rows, **options)
        return found if isinstance(found, torch.Tensor) else torch.cat([found[0], found[1][:, None]], 1)

    wanted = step(joined, fn, [x, y], list(head.parameters()))
    got = step(functools.partial(joined, retape.tile), fn, [x, y], list(head.parameters()), tiles=4)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fn", [lambda x: x.sum(1).cumsum(0), lambda x: x.sum(1) / len(x)])
def test_one_number_for_each_row_that_depends_on_others_is_refused(fn):
    with pytest.raises(RegionError, match="does not treat rows independently"):
        retape.tile(fn, torch.randn(24, WIDTH), tiles=4)


def test_rows_that_need_no_gradient():
    seed()
    x, w = whole_numbers(8, 3, requires_grad=False), whole_numbers(3)
    retape.tile(lambda r: r * w, x, tiles=3).sum().backward()
    assert torch.equal(w.grad, x.sum(0))


def test_nothing_needs_a_gradient():
    out = retape.tile(torch.relu, torch.ones(4, 2), tiles=2)
    assert not out.requires_grad


def test_gradients_for_some_tensors_alone():
    seed()
    x, w = whole_numbers(8, 3), whole_numbers(3)
    retape.tile(lambda r: r * w, x, tiles=3).sum().backward(inputs=[w])
    assert torch.equal(w.grad, x.detach().sum(0))
    assert x.grad is None


# --- which tensors get gradients ------------------------------------------------------------------------------------

HIDDEN = Notes()


def of_a_helper(r):
    """Reads a tensor that no walk of its caller finds."""
    return r * HIDDEN.all[-1]


def test_a_leaf_that_only_the_graph_shows():
    seed()
    x, weight = whole_numbers(6, 3), whole_numbers(3)
    HIDDEN(weight)
    retape.tile(lambda r: of_a_helper(r) + 1, x, tiles=3).sum().backward()
    assert torch.equal(weight.grad, x.detach().sum(0))


def test_a_computed_tensor_that_is_found_nowhere_is_refused():
    x, leaf = whole_numbers(6, 3), whole_numbers(3)
    HIDDEN(leaf * 2)
    with pytest.raises(RegionError, match=r"MulBackward0.*found neither among its rows nor in its closure"):
        retape.tile(lambda r: of_a_helper(r) + 1, x, tiles=3)


def test_a_computed_tensor_of_the_closure():
    seed()
    x, leaf = whole_numbers(6, 3), whole_numbers(3)
    w = leaf * 2
    retape.tile(lambda r: r * w, x, tiles=3).sum().backward()
    assert torch.equal(leaf.grad, 2 * x.detach().sum(0))


def test_a_row_that_the_closure_uses_too():
    seed()
    x = whole_numbers(6, 3)
    h = x * 1
    wanted = torch.autograd.grad((h * h.sum(0)).sum(), x)[0]
    h = x * 1
    assert torch.equal(torch.autograd.grad(retape.tile(lambda r: r * h.sum(0), h, tiles=2).sum(), x)[0], wanted)


def test_tensors_bound_by_a_partial():
    seed()
    x, w, b = whole_numbers(6, 3), whole_numbers(3, 2), whole_numbers(2)
    out = retape.tile(functools.partial(F.linear, weight=w.T, bias=b), x, tiles=3)
    out.sum().backward()
    wanted = torch.autograd.grad(F.linear(x, w.T, b).sum(), [x, w, b])
    assert_equal([x.grad, w.grad, b.grad], list(wanted))


def test_products_that_are_no_plain_layers():
    seed()
    x, w, v, z = whole_numbers(6, 3), whole_numbers(3, 4), whole_numbers(4, 3), whole_numbers(4, 2)
    spread, matrix, bias = whole_numbers(1), whole_numbers(1, 4), whole_numbers(2)

    def fn(r):
        first = torch.addmm(spread, r, w)  # a bias spread over the columns
        second = torch.addmm(matrix, r, w, beta=2, alpha=3)  # the same weight again, scaled
        turned = v.T
        third = r @ turned + (2 * r) @ turned  # one transpose, two products
        return torch.addmm(bias, (first + second + third).relu(), z)

    tensors = [x, w, v, z, spread, matrix, bias]
    wanted = torch.autograd.grad(fn(x).sum(), tensors)
    assert_equal(list(torch.autograd.grad(retape.tile(fn, x, tiles=3).sum(), tensors)), list(wanted))


def test_hooks_of_weights_run_once_on_the_whole_gradient():
    seed()
    x, leaf = whole_numbers(6, 3), whole_numbers(3)
    w = leaf * 1
    seen = []
    for tensor in (leaf, w):
        tensor.register_hook(lambda g: (seen.append(g.clone()), g * 2)[1])
    w.retain_grad()
    v = whole_numbers(3)
    v.register_hook(lambda g: seen.append(g.clone()))
    out = retape.tile(lambda r: r * w + v, x, tiles=3).sum()
    total = x.detach().sum(0)
    for times in (1, 2):
        out.backward(retain_graph=True)
        assert len(seen) == 3 * times
        assert torch.equal(w.grad, 2 * total * times)
        assert torch.equal(leaf.grad, 4 * total * times)
        assert torch.equal(v.grad, torch.full((3,), 6.0 * times).double())


# --- state ----------------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """A buffer that every forward moves and reads."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.double))
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x):
        self.calls += 1
        return self.linear(x).sin() * 1.0


def test_buffers_move_once_a_slice():
    model = Counting()
    x = torch.randn(8, WIDTH).double().requires_grad_()
    retape.tile(model, x, tiles=4).sum().backward()
    assert float(model.calls) == 4


@pytest.mark.parametrize("which", ["rows", "weight", "closure"])
def test_a_tensor_changed_before_backward_is_an_error(which):
    model, x, scale = mlp(), torch.randn(8, WIDTH).double(), torch.ones(WIDTH).double()
    leaf = x.requires_grad_()
    x = leaf * 1
    out = retape.tile(lambda r: model(r) * scale, x, tiles=2)
    with torch.no_grad():
        {"rows": x, "weight": model[0].weight, "closure": scale}[which].add_(1)
    with pytest.raises(StateChanged, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_function_that_changes_its_rows_is_refused():
    with pytest.raises(RegionError, match="changes its rows in place"):
        retape.tile(lambda r: r.add_(1), torch.ones(4, 2), tiles=2)


@pytest.mark.parametrize("cached", [False, True])
def test_autocast_is_seen_again(cached):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
    x = torch.randn(8, WIDTH, requires_grad=True)

    def run(call):
        model.zero_grad()
        x.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            before = model(x).sum() if cached else 0.0  # leaves its weights' casts in autocast's cache
            out = call(model, x)
            assert out.dtype is torch.bfloat16
        (out.float().square().sum() + before).backward()
        return [out.detach(), x.grad, *[p.grad for p in model.parameters()]]

    wanted = run(functools.partial(in_a_loop, tiles=1))
    got = run(functools.partial(retape.tile, tiles=1))
    assert_equal(got[:2], wanted[:2])
    torch.testing.assert_close(got[2:], wanted[2:], rtol=2e-2, atol=2e-2)
    assert torch.is_autocast_cache_enabled()


def test_keep_gives_each_slice_its_own_decision():
    numbers = iter(range(100))
    x = whole_numbers(6, 2)
    out = retape.tile(lambda r: (r * r) * retape.keep(next(numbers)), x, tiles=3)
    factor = (out.detach() / x.detach().square()).nan_to_num()
    out.sum().backward()
    assert torch.equal(x.grad, 2 * x.detach() * factor)


# --- row by row -----------------------------------------------------------------------------------------------------

MIXES = {
    "softmax": lambda r: r.softmax(0),
    "mean": lambda r: r - r.mean(0),
    "norm": lambda r: r / r.norm(),
    "cumsum": lambda r: r.cumsum(0),
    "backward cumsum": lambda r: r.flip(0).cumsum(0).flip(0),
    "shift": lambda r: r.roll(1, 0),
    "sort": lambda r: r.sort(0).values,
    "attention": lambda r: (r @ r.T).softmax(-1) @ r,
    "dropout and mean": lambda r: F.dropout(r, 0.3) - r.mean(0),
    "batch norm": nn.BatchNorm1d(WIDTH).double(),
    "position": lambda r: r + torch.arange(len(r)).unsqueeze(1),
    "number of rows": lambda r: r / len(r),
}


@pytest.mark.parametrize("tiles", [1, 3, 8])
@pytest.mark.parametrize("fn", MIXES.values(), ids=MIXES)
def test_a_function_that_mixes_rows_is_refused(fn, tiles):
    if tiles == 8 and isinstance(fn, nn.BatchNorm1d):
        pytest.skip("refuses a single row by itself")
    x = torch.randn(8, WIDTH).double().requires_grad_()
    for _ in range(2):  # a refusal is not remembered as an answer
        with pytest.raises(RegionError, match="does not treat rows independently"):
            retape.tile(fn, x, tiles=tiles)


def test_a_function_that_asks_for_more_rows_than_a_slice_has_is_refused():
    """One and a half slices are tried, and not more: they take as much memory as a slice with what it saves."""
    rows = torch.randn(32, 2)
    with pytest.raises(
        RegionError, match=r"of 12 rows along dim=0, the first 8 come out differently .* It looks at the number of rows"
    ):
        retape.tile(lambda r: r * (2.0 if len(r) > 10 else 1.0), rows, tiles=4)
    lengths = Notes()
    for _ in range(2):
        retape.tile(lambda r: (lengths(len(r)), r * 2)[1], rows, tiles=4)
    assert lengths.all == [8, 8, 8, 4, 12, 8, 8, 8] + [8] * 4, "once, and nothing in later calls"


def test_mixing_shows_where_all_rows_are_equal():
    with pytest.raises(RegionError, match="does not treat rows independently"):
        retape.tile(lambda r: r.softmax(0), torch.ones(8, 2), tiles=2)


def test_mixing_is_refused_without_gradients_too():
    with torch.no_grad(), pytest.raises(RegionError, match="does not treat rows independently"):
        retape.tile(lambda r: r - r.mean(0), torch.randn(8, 2), tiles=2)


def test_a_switch_asks_again():
    norm, x = nn.BatchNorm1d(WIDTH).double().eval(), torch.randn(8, WIDTH).double()
    retape.tile(norm, x, tiles=2)
    norm.train()
    with pytest.raises(RegionError, match="does not treat rows independently"):
        retape.tile(norm, x, tiles=2)


def test_what_a_function_closes_over_asks_again():
    def make(function, dim):
        return lambda r: function(r, dim)

    x = torch.randn(8, 4)
    for fn in (make(torch.softmax, 1), make(torch.cumsum, 1), functools.partial(torch.softmax, dim=1)):
        retape.tile(fn, x, tiles=2)
    for fn in (make(torch.softmax, 0), make(torch.cumsum, 0), functools.partial(torch.softmax, dim=0)):
        with pytest.raises(RegionError, match="does not treat rows independently"):
            retape.tile(fn, x, tiles=2)


@pytest.mark.parametrize("dim", [0, 1])
def test_the_dim_asks_again(dim):
    x = torch.randn(8, 8)

    def fn(r):
        return r.softmax(1)

    if dim == 1:
        retape.tile(fn, x, tiles=2)
        with pytest.raises(RegionError, match="does not treat rows independently"):
            retape.tile(fn, x, tiles=2, dim=1)
    else:
        assert torch.equal(retape.tile(fn, x, tiles=2), fn(x))


def test_a_kind_is_asked_once():
    notes, x = Notes(), torch.randn(6, WIDTH).double().requires_grad_()
    model = mlp(0.5)

    def fn(r):
        notes(retape.recomputing())
        return model(r)

    seed()
    out = retape.tile(fn, x, tiles=3)
    asked = streams()
    assert notes.all == [False, True, True, False, False]  # dropout draws, so other lengths are not asked about
    out.sum().backward()
    assert len(notes.all) == 8
    notes.all.clear()
    seed()
    out = retape.tile(fn, x, tiles=3)
    assert_equal(streams(), asked)
    assert notes.all == [False] * 3
    out.sum().backward()
    assert notes.all == [False] * 3 + [True] * 3


def test_questions_leave_no_trace():
    model, x = Counting(), torch.randn(8, WIDTH).double()
    retape.tile(model, x, tiles=2)
    assert float(model.calls) == 2


def test_a_function_that_refuses_copies_cannot_be_asked():
    def fn(r):
        assert len(set(r.flatten().tolist())) == r.numel()
        return r

    with pytest.raises(RegionError, match=r"could not be asked whether it treats rows independently.*AssertionError"):
        retape.tile(fn, torch.arange(8.0).reshape(4, 2), tiles=2)


def test_routing_by_row_is_row_wise():
    """Experts multiply as many rows as come to them, so that a row's numbers depend on the others by rounding."""
    torch.manual_seed(0)
    experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
    router = nn.Linear(64, 4)

    def fn(r):
        chosen = router(r).argmax(-1)
        out = torch.zeros_like(r)
        for number, expert in enumerate(experts):
            mine = (chosen == number).nonzero().squeeze(1)
            out = out.index_add(0, mine, expert(r[mine]))
        return out

    x = torch.randn(256, 64, requires_grad=True)
    out = retape.tile(fn, x, tiles=4)
    torch.testing.assert_close(out, fn(x))
    found = torch.autograd.grad(out.square().sum(), [x, *experts.parameters()])
    torch.testing.assert_close(
        found, torch.autograd.grad(fn(x).square().sum(), [x, *experts.parameters()]), rtol=1e-4, atol=1e-4
    )


def test_embeddings_are_row_wise():
    table = nn.Embedding(5, 3).double()
    index = torch.tensor([4, 0, 4, 2, 1, 3, 3])
    out = retape.tile(table, index, tiles=3)
    out.sum().backward()
    assert torch.equal(table.weight.grad, torch.bincount(index, minlength=5).double().unsqueeze(1).expand(5, 3))


# --- around and inside ----------------------------------------------------------------------------------------------


def nested(fn, *rows, tiles):
    return retape.checkpoint(lambda *r: retape.tile(fn, *r, tiles=tiles).tanh(), *rows, use_reentrant=False)


def containing(fn, *rows, tiles):
    return retape.tile(lambda *r: retape.checkpoint(fn, *r, use_reentrant=False), *rows, tiles=tiles).tanh()


def twice(fn, *rows, tiles):
    return retape.tile(lambda *r: retape.tile(fn, *r, tiles=1), *rows, tiles=tiles).tanh()


@pytest.mark.parametrize("call", [nested, containing, twice])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_regions_around_and_inside(call, dropout):
    seed()
    model, x = mlp(dropout), torch.randn(9, WIDTH).double().requires_grad_()
    wanted = step(
        lambda fn, r, tiles: in_a_loop(fn, r, tiles=tiles).tanh(), model, [x], list(model.parameters()), tiles=4
    )
    for _ in range(2):
        close(step(call, model, [x], list(model.parameters()), tiles=4), wanted)


def test_a_region_around_lets_go_of_the_rows():
    seed()
    model, x = mlp(), torch.randn(9, WIDTH).double().requires_grad_()
    made = []

    def block(r):
        inner = r.sin()
        made.append(weakref.ref(inner.untyped_storage()))
        return retape.tile(model, inner, tiles=3)

    out = retape.checkpoint(block, x, use_reentrant=False)
    gc.collect()
    assert made[0]() is None
    out.sum().backward()


def test_without_gradients_nothing_is_kept():
    model, x = mlp(), torch.randn(9, WIDTH).double()
    notes = Notes()

    def fn(r):
        notes(len(r))
        return model(r)

    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(retape.tile(fn, x, tiles=3), in_a_loop(model, x, tiles=3))
    with torch.no_grad():
        notes.all.clear()
        assert retape.tile(fn, x.requires_grad_(), tiles=3).grad_fn is None
    assert notes.all == [3, 3, 3]


def test_plain_mode_calls_the_function_itself():
    notes = Notes()
    with plain():
        retape.tile(lambda r: (notes(len(r)), r)[1], torch.ones(9, 2), tiles=3)
    assert notes.all == [9]


def test_two_backward_passes():
    model, x = mlp(0.3), torch.randn(9, WIDTH).double().requires_grad_()
    out = retape.tile(model, x, tiles=3).sum()
    first = torch.autograd.grad(out, [x, *model.parameters()], retain_graph=True)
    second = torch.autograd.grad(out, [x, *model.parameters()])
    assert_equal(list(second), list(first))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out, [x])


def test_second_derivatives_are_refused():
    x = torch.randn(4, 2, requires_grad=True)
    out = retape.tile(torch.sin, x, tiles=2).sum()
    with pytest.raises(UnsupportedTransform, match="create_graph=True"):
        torch.autograd.grad(out, x, create_graph=True)


def test_torch_func_is_refused():
    with pytest.raises(UnsupportedTransform, match="called under grad"):
        torch.func.grad(lambda r: retape.tile(torch.sin, r, tiles=2).sum())(torch.randn(4, 2))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo's own
def test_compiled_callers():
    model, x = mlp(), torch.randn(8, WIDTH).double().requires_grad_()
    compiled = torch.compile(lambda r: retape.tile(model, r * 2, tiles=2) + 1, backend="eager")
    compiled(x).sum().backward()
    wanted = torch.autograd.grad((in_a_loop(model, x * 2, tiles=2) + 1).sum(), x)[0]
    torch.testing.assert_close(x.grad, wanted)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo's own
def test_compiled_functions():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
    model, x = torch.compile(layers, backend="aot_eager"), torch.randn(8, WIDTH, requires_grad=True)
    wanted = torch.autograd.grad(layers(x).square().sum(), [x, *layers.parameters()])
    for _ in range(2):
        found = torch.autograd.grad(retape.tile(model, x, tiles=2).square().sum(), [x, *layers.parameters()])
        torch.testing.assert_close(found, wanted)


def test_tensors_without_values():
    with FakeTensorMode():
        model, x = nn.Linear(WIDTH, 3), torch.randn(8, WIDTH, requires_grad=True)
        retape.tile(model, x, tiles=2).sum().backward()
        assert model.weight.grad.shape == (3, WIDTH)
        assert x.grad.shape == x.shape


def test_lazy_modules_get_their_shape():
    lazy = nn.LazyLinear(3)
    x = torch.randn(4, 2)
    assert retape.tile(lazy, x, tiles=2).shape == (4, 3)
    assert torch.equal(retape.tile(lazy, x, tiles=2), in_a_loop(lazy, x, tiles=2))


# --- memory ---------------------------------------------------------------------------------------------------------


def peak_of(step):
    step()  # questions are asked once
    with Ledger() as ledger:
        step()
    return ledger.peak


def test_the_peak_is_that_of_a_slice():
    model = nn.Sequential(nn.Linear(8, 512), nn.GELU(), nn.Linear(512, 8))
    x = torch.randn(512, 8, requires_grad=True)
    hidden_bytes = 512 * 512 * 4

    def run(call):
        model.zero_grad()
        x.grad = None
        call(model, x).sum().backward()

    whole = peak_of(lambda: run(lambda fn, r: fn(r)))
    assert whole >= 3 * hidden_bytes
    peaks = [peak_of(lambda tiles=tiles: run(lambda fn, r: retape.tile(fn, r, tiles=tiles))) for tiles in (8, 32)]
    assert peaks[0] < whole / 4
    assert peaks[1] < whole / 10


def test_the_graph_is_freed_with_its_slices():
    model, x = mlp(), torch.randn(8, WIDTH).double()
    rows = x * 1
    storage = weakref.ref(rows.untyped_storage())
    out = retape.tile(model, rows, tiles=2).sum()
    del rows
    assert storage() is not None
    out.backward()
    gc.collect()
    assert storage() is None  # though `out` lives
    assert out.grad_fn is not None


# --- what cannot be meant -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        ((torch.ones(4),), {"tiles": 0}, "tiles=0; give a whole number"),
        ((torch.ones(4),), {"tiles": 2.0}, "tiles=2.0"),
        ((torch.ones(4),), {"tiles": True}, "tiles=True"),
        ((torch.ones(4),), {"tiles": 2, "dim": 1}, r"shape \(4,\), and no dim=1"),
        ((torch.tensor(1.0),), {"tiles": 2}, r"shape \(\), and no dim=0"),
        ((torch.ones(4), torch.ones(5)), {"tiles": 2}, "4 in argument 0, 5 in argument 1"),
        (([torch.ones(4)],), {"tiles": 2}, "Argument 0 of .* is a list"),
        ((3,), {"tiles": 2}, "no tensor to slice"),
        ((), {"tiles": 2}, "no tensor to slice"),
    ],
)
def test_bad_input(rows, options, words):
    with pytest.raises(InvalidInput, match=words):
        retape.tile(lambda *r: r[0], *rows, **options)


def test_a_function_after_its_rows_is_refused():
    with pytest.raises(InvalidInput, match="got a Tensor as its function; give the function first"):
        retape.tile(torch.ones(4), nn.Linear(4, 4), tiles=2)


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda r: r.sum(), r"shape \(\) out of 3 rows along dim=0.*linear_cross_entropy"),
        (lambda r: r.sum(0), r"shape \(2,\) out of 3 rows"),
        (lambda r: torch.cat([r, r]), r"shape \(6, 2\) out of 3 rows"),
        (lambda r: (r, len(r)), "returned 2 for one slice of rows and 3 for another"),
        (lambda r: (r,) * len(r), "must return the same containers"),
    ],
)
def test_outputs_that_are_no_rows(fn, words):
    with pytest.raises(RegionError, match=words):
        retape.tile(fn, torch.randn(5, 2), tiles=2)


def test_the_first_use_takes_no_more_memory_than_later_ones():
    """Questions about other rows have no backward pass."""
    seed()
    wide, rows = nn.Sequential(nn.Linear(16, 512), nn.Tanh(), nn.Linear(512, 16)), torch.randn(1024, 16)
    peaks = []
    for _ in range(2):
        with track_memory(torch.device("cpu")) as scale:
            retape.tile(wide, rows.clone().requires_grad_(), tiles=8).sum().backward()
        peaks.append(max(reading.peak_bytes for reading in scale.readings))
    assert peaks[0] <= 1.1 * peaks[1]


def test_a_function_that_takes_gradients_itself_is_asked_too():
    def score(x):
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            (found,) = torch.autograd.grad((inner**3).sum(), inner)
        return x * found

    def mixed(x):
        return score(x) + x.mean(0, keepdim=True)

    rows = torch.randn(8, 4)
    given = rows.clone().requires_grad_()
    retape.tile(score, given, tiles=4).sum().backward()
    assert torch.equal(given.grad, 3 * rows**2)
    with pytest.raises(RegionError, match="does not treat rows independently"):
        retape.tile(mixed, rows.clone().requires_grad_(), tiles=4)


def test_a_function_that_takes_gradients_itself_may_draw_and_catch():
    """It is asked twice, each time from the start."""

    def noisy(x):
        scale = torch.rand(())
        inner = x.detach().requires_grad_()
        try:
            (found,) = torch.autograd.grad((inner * scale).sin().sum(), inner)
        except Exception:
            found = torch.zeros_like(x)
        return found * x.exp()

    rows = torch.randn(8, 4)
    given = [rows.clone().requires_grad_() for _ in range(2)]
    for each, call in zip(given, (noisy, lambda x: retape.tile(noisy, x, tiles=1)), strict=True):
        torch.manual_seed(5)
        call(each).sum().backward()
    assert torch.equal(given[0].grad, given[1].grad)
    retape.tile(noisy, rows.clone().requires_grad_(), tiles=2)


@pytest.mark.parametrize("make", [lambda w: w + 1, lambda w: w * 2, lambda w: w.t()])
def test_a_tensor_and_what_it_was_computed_from_are_an_error(make):
    """The gradient of the one would go to the other twice: directly, and through the history."""
    weight, rows = leaf(4, 4), leaf(8, 4)
    made = make(weight)
    with pytest.raises(RegionError, match=r"also one that it was computed from \(a parameter of shape \(4, 4\)\)"):
        retape.tile(lambda r: torch.tanh(r @ made) + r * weight.sum(0), rows, tiles=2)
    inside = retape.tile(lambda r: torch.tanh(r @ make(weight)) + r * weight.sum(0), rows, tiles=2)
    plain = torch.tanh(rows @ make(weight)) + rows * weight.sum(0)
    found, wanted = torch.autograd.grad(inside.sum(), weight), torch.autograd.grad(plain.sum(), weight)
    assert torch.allclose(found[0], wanted[0], rtol=1e-5)


def test_a_tensor_that_was_computed_from_the_rows_weights_elsewhere_has_its_gradient_once():
    weight, rows = leaf(4, 4), leaf(8, 4)

    def case(call):
        made = weight * 2
        return torch.autograd.grad(call(lambda r: torch.tanh(r * made.sum(0)), rows @ weight).sum(), (weight, rows))

    found, wanted = case(lambda f, r: retape.tile(f, r, tiles=2)), case(lambda f, r: f(r))
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("make", [lambda w: w.norm(dim=1), lambda w: w.t(), lambda w: w[:, :2].sum() + w])
def test_a_weight_of_a_linear_layer_beside_what_was_computed_from_it(make):
    """Its gradient is not autograd's, so nothing goes to it twice."""
    layer, rows = nn.Linear(4, 4), leaf(8, 4)

    def case(call):
        made = make(layer.weight)
        return torch.autograd.grad(
            call(lambda r: torch.tanh(layer(r) @ made.expand(4, 4)), rows).sum(), (layer.weight, rows)
        )

    found, wanted = case(lambda f, r: retape.tile(f, r, tiles=2)), case(lambda f, r: f(r))
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tiles", [2, 4])
def test_the_weight_of_a_norm_in_16_bits_is_as_precise_as_in_one_piece(tiles):
    torch.manual_seed(0)
    norm = LlamaRMSNorm(64).bfloat16()
    rows, upstream = torch.randn(2, 1, 2048, 64).bfloat16()
    rows = rows.requires_grad_()

    def gradient(module, call, x, g):
        return torch.autograd.grad(call(x), module.weight, g)[0].double()

    exact = copy.deepcopy(norm).double()
    truth = gradient(
        exact,
        lambda x: exact.weight * (x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()),
        rows.double(),
        upstream.double(),
    )
    mine = gradient(norm, lambda x: retape.tile(norm, x, tiles=tiles, dim=1), rows, upstream)
    other = gradient(norm, norm, rows, upstream)
    assert float((mine - truth).norm()) <= 1.1 * float((other - truth).norm())
